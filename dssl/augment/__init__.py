"""Views of images: policies as data, plans drawn as arrays, kernels bit-identical to Pillow."""

from dssl.augment.corruptions import corrupt_images, kinds_seen
from dssl.augment.maker import (
    CIFAR10,
    DEFAULT_POLICIES,
    IMAGENET,
    BaseViewMaker,
    Buffers,
    Normalization,
    Plan,
    RawImages,
    SizedViewMaker,
    ViewMaker,
)
from dssl.augment.operations import OPERATIONS, TABLES
from dssl.augment.policy import (
    NAMED,
    Policy,
    add_function,
    add_kernel,
    check_channels,
    meanings_of,
    parse,
    show,
    without_colour,
)
from dssl.augment.primitives import KINDS, SEVERITIES, Kind

__all__ = [
    "CIFAR10", "DEFAULT_POLICIES", "IMAGENET", "KINDS", "NAMED", "OPERATIONS", "SEVERITIES", "TABLES", "BaseViewMaker", "Buffers",
    "Kind", "Normalization", "Plan", "Policy", "RawImages", "SizedViewMaker", "ViewMaker", "add_function", "add_kernel",
    "check_channels", "corrupt_images", "kinds_seen", "meanings_of", "parse", "show", "without_colour",
]  # fmt: skip
