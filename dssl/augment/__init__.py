"""Views of images: policies as data, plans drawn as arrays, kernels bit-identical to Pillow."""

from dssl.augment.channels import check_channels, without_colour
from dssl.augment.custom import add_function, add_kernel
from dssl.augment.maker import (
    CIFAR10,
    DEFAULT_POLICIES,
    IMAGENET,
    BaseViewMaker,
    Buffers,
    Normalization,
    RawImages,
    SizedViewMaker,
    ViewMaker,
)
from dssl.augment.operations import OPERATIONS
from dssl.augment.plan import Plan
from dssl.augment.policy import Policy
from dssl.augment.tables import TABLES
from dssl.augment.text import NAMED, meanings_of, parse, show

__all__ = [
    "CIFAR10",
    "DEFAULT_POLICIES",
    "IMAGENET",
    "NAMED",
    "OPERATIONS",
    "TABLES",
    "BaseViewMaker",
    "Buffers",
    "Normalization",
    "Plan",
    "Policy",
    "RawImages",
    "SizedViewMaker",
    "ViewMaker",
    "add_function",
    "add_kernel",
    "check_channels",
    "meanings_of",
    "parse",
    "show",
    "without_colour",
]  # fmt: skip
