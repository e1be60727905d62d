"""Imported once by the process that tests fork their runs from: the kernels are read before, not in every child."""

from dssl.augment.kernels import program
from dssl.data import shapes

program.load_kernels()
shapes.load_painter()
