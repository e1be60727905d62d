"""What the commands that read an encoder's weights have in common."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from dssl.weights.load import LoadedEncoder


class NamesWeights(Protocol):
    """The arguments by which an encoder is found, and told what its file does not say."""

    @property
    def weights(self) -> Path: ...
    @property
    def encoder(self) -> str | None: ...
    @property
    def stem(self) -> Literal["cifar", "padding2", "norelu"] | None: ...
    @property
    def image_size(self) -> int | None: ...
    @property
    def normalization(self) -> Literal["cifar10", "imagenet"] | None: ...


def load(arguments: NamesWeights) -> "LoadedEncoder":
    """The encoder; what was loaded and what was not is printed."""
    from dssl.augment import CIFAR10, IMAGENET
    from dssl.weights.load import open_weights

    loaded = open_weights(
        arguments.weights,
        encoder=arguments.encoder,
        stem=arguments.stem,
        image_size=arguments.image_size,
        normalization={"cifar10": CIFAR10, "imagenet": IMAGENET, None: None}[arguments.normalization],
    )
    print(loaded.report.text())
    return loaded


def default_folder(weights: Path) -> Path:
    """The run's folder for a run or a checkpoint in it; the current folder for any other file."""
    if weights.is_dir():
        return weights.parent if weights.name == "checkpoints" else weights
    return weights.parent.parent if weights.parent.name == "checkpoints" else Path()
