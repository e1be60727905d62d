"""Names for the arrays that pass between modules."""

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor  # takes seconds to import, and a look at data does not need it

Image: TypeAlias = NDArray[np.uint8]
"""One image: height x width x channels, uint8, C-contiguous; one channel or three, or as many as a sensor has."""

Images: TypeAlias = "Tensor"
"""A batch: N x C x H x W, float, normalised."""

Embedding: TypeAlias = "Tensor"
"""N x D."""

Scalar: TypeAlias = "Tensor"
"""A tensor without dimensions."""
