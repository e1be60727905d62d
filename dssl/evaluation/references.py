"""Published results for the same tasks, each with what is known of its protocol, for comparison."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Published numbers from one source under one protocol."""

    data: str
    kind: str
    """The family of protocols with which it may be compared: linear, knn or supervised."""
    encoder: str
    where: str
    protocol: str
    accuracies: tuple[tuple[str, float], ...]
    """Method and top-1 accuracy in percent."""


_PAPER = "Bai et al., CVPR 2022 (DSSL)"
_SIMSIAM = "Chen and He, CVPR 2021 (SimSiam)"
_MAXIMUM = "maximum of kNN over the epochs, so not comparable with a last-epoch number"

REFERENCES: tuple[Reference, ...] = (
    Reference(
        data="cifar10", kind="linear", encoder="resnet18-cifar", where=_PAPER,
        protocol="800 epochs, batch 512; its code picks the epoch on the test set and drops the last test batch",
        accuracies=(
            ("simclr", 91.5), ("byol", 92.2), ("simsiam", 92.1),
            ("simclr dssl", 93.2), ("byol dssl", 94.7), ("simsiam dssl", 94.5),
        ),
    ),
    Reference(
        data="imagenet", kind="linear", encoder="resnet50", where=_PAPER,
        protocol="100 epochs, batch 512; linear classifier of 90 epochs, centre crop 224",
        accuracies=(
            ("simclr", 59.5), ("byol", 67.8), ("simsiam", 67.4),
            ("simclr dssl", 60.3), ("byol dssl", 68.3), ("simsiam dssl", 68.6),
        ),
    ),
    Reference(
        data="cifar10", kind="supervised", encoder="resnet18-cifar", where=_PAPER, protocol="settings not given",
        accuracies=(("supervised", 93.02),),
    ),
    Reference(
        data="cifar10", kind="linear", encoder="resnet18-cifar", where=_SIMSIAM, protocol="800 epochs",
        accuracies=(("simclr", 91.1), ("simsiam", 91.8)),
    ),
    Reference(
        data="cifar10", kind="knn", encoder="resnet18-cifar", where="lightly's documentation",
        protocol=f"200 epochs, batch 128; {_MAXIMUM}",
        accuracies=(("simclr", 84.7), ("byol", 86.9), ("simsiam", 81.9)),
    ),
    Reference(
        data="cifar10", kind="knn", encoder="resnet18-cifar", where="lightly's documentation",
        protocol=f"800 epochs, batch 512; {_MAXIMUM}",
        accuracies=(("simclr", 87.9), ("byol", 91.0), ("simsiam", 90.4)),
    ),
    Reference(
        data="cifar10", kind="linear", encoder="resnet18-cifar", where="solo-learn's documentation",
        protocol="1000 epochs; online linear classifier, trained along with the encoder",
        accuracies=(("simclr", 90.7), ("byol", 92.6), ("simsiam", 90.5)),
    ),
)  # fmt: skip


def references_for(*, data: str, kinds: set[str]) -> list[Reference]:
    """The published numbers for a data set (cifar10, imagenet) and kinds of protocols; none for other data."""
    return [one for one in REFERENCES if one.data == data and one.kind in kinds]
