"""Names for the arrays that pass between modules."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Image: TypeAlias = NDArray[np.uint8]
"""One image: height x width x channels, uint8, one or three channels, C-contiguous."""

Images: TypeAlias = Tensor
"""A batch: N x C x H x W, float, normalised."""

Embedding: TypeAlias = Tensor
"""N x D."""

Scalar: TypeAlias = Tensor
"""A tensor without dimensions."""
