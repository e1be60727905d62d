"""What torchvision and timm say about their ImageNet weights."""

from typing import Any

import torchvision

from dssl.augment import IMAGENET, Normalization
from dssl.models import FOR_CPUS, split_name


def imagenet_normalization(name: str, *, channels: int = 3) -> Normalization:
    """How images were normalised for the published weights of this encoder: not by ImageNet's own constants for all of them."""
    known = _known(name)
    return known.gray() if channels == 1 else known


def torchvision_version(name: str) -> Any:
    """The ImageNet weights of a torchvision model that stand for it.

    The first version where there are several: the later ones score higher on ImageNet by label smoothing and long training,
    which makes their features transfer less well (Kornblith et al., NeurIPS 2021).
    """
    versions = torchvision.models.get_model_weights(name)
    return versions["IMAGENET1K_V1"] if "IMAGENET1K_V1" in versions.__members__ else next(iter(versions))


def _known(name: str) -> Normalization:
    if name in FOR_CPUS or split_name(name)[1] is not None:
        return IMAGENET  # nobody has published any
    if name.startswith("timm:"):
        import timm

        about = timm.get_pretrained_cfg(name.removeprefix("timm:"))
        return IMAGENET if about is None else Normalization(tuple(about.mean), tuple(about.std))
    made = torchvision_version(name).transforms()
    return Normalization(tuple(made.mean), tuple(made.std))
