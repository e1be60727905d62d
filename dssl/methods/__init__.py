"""The three methods of the paper."""

from dssl.methods.byol import BYOL
from dssl.methods.method import Method, Prediction
from dssl.methods.simclr import SimCLR
from dssl.methods.simsiam import SimSiam

METHODS: dict[str, type[SimSiam] | type[BYOL] | type[SimCLR]] = {"simsiam": SimSiam, "byol": BYOL, "simclr": SimCLR}

__all__ = ["BYOL", "METHODS", "Method", "Prediction", "SimCLR", "SimSiam"]
