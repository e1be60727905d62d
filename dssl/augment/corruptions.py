"""Corrupted test images, the same for every encoder, and which kinds of corruption a policy has shown in training."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dssl.augment.maker import ViewMaker
from dssl.augment.policy import Chain, Policy, parse, parts, show
from dssl.augment.primitives import (
    KINDS,
    AtMagnitude,
    Blur,
    Corruption,
    Jitter,
    RandAugment,
    Resize,
    Single,
    TrivialAugment,
    UniformAugment,
    named_table,
)
from dssl.errors import DsslError

Familiarity: TypeAlias = Literal["seen", "similar", "unseen"]

_CHUNK = 64  # images of one call

_KIND_OF = {
    "noise": "gaussian-noise", "soften": "gaussian-blur", "jpeg": "jpeg", "contrast": "contrast", "color": "saturate",
    "brightness": "brightness", "add": "brightness", "rotate": "rotation", "cutout": "occlusion",
    "cutout-pixels": "occlusion", "translate": "shift", "translate-x": "shift", "translate-y": "shift",
    "translate-x-pixels": "shift", "translate-y-pixels": "shift",
}  # fmt: skip
"""The kind of corruption that an operation is; the others are none."""


def corrupt_images(
    images: NDArray[np.uint8],
    kind: str,
    severity: int,
    *,
    seed: int,
    indices: NDArray[np.int64],
    threads: int,
) -> NDArray[np.uint8]:
    """Square uint8 images (N x H x W x C) under one kind of corruption: a function of the seed and each image's own index.

    The random numbers of an image do not depend on the severity, so that its curve over severities is smooth.
    """
    from dssl.graph import View

    if images.ndim != 4 or images.shape[1] != images.shape[2]:
        raise DsslError(
            f"images to corrupt have the shape {images.shape}: expected N x side x side x channels; crop or resize them first"
        )
    policy = show(Chain((Resize(), Corruption(kind, severity))))
    name = kind.replace("-", "_")
    maker = ViewMaker([View(name=name, policy=policy)], size=images.shape[1], seed=seed, channels=images.shape[3])
    out = maker.allocate(len(images))

    def fill(first: int) -> None:
        chunk = slice(first, first + _CHUNK)
        maker.apply_many(maker.plan(indices[chunk], epoch=0), 0, images[chunk], out, first)

    with ThreadPoolExecutor(threads, thread_name_prefix="dssl-corrupt") as pool:
        list(pool.map(fill, range(0, len(images), _CHUNK)))
    return out[name]


def kinds_seen(policies: Sequence[str] | str) -> dict[str, Familiarity]:
    """For each kind of corruption: is the same operation in one of the policies, another of its family, or neither?"""
    texts = [policies] if isinstance(policies, str) else policies
    kinds = {kind for text in texts for part in parts(parse(text)) for kind in _kinds_of(part)}
    families = {KINDS[kind].family for kind in kinds}
    return {
        name: "seen" if name in kinds else "similar" if kind.family in families else "unseen"
        for name, kind in KINDS.items()
    }


def _kinds_of(policy: Policy) -> set[str]:
    """The kinds of corruption that one part of a policy makes."""
    match policy:
        case Corruption():
            return {policy.kind}
        case Blur():
            return {"gaussian-blur"} if policy.high > 0 else set()
        case Jitter():
            reaches = {"brightness": policy.brightness, "contrast": policy.contrast, "saturate": policy.saturation}
            return {kind for kind, reach in reaches.items() if reach > 0}
        case Single() | AtMagnitude():
            operations = {policy.operation}
        case RandAugment() | UniformAugment() | TrivialAugment():
            operations = {row.operation for row in named_table(policy.table)}
        case _:
            return set()
    return {_KIND_OF[operation] for operation in operations if operation in _KIND_OF}
