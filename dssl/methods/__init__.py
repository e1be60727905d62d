"""The methods, by name. A new one is a file of its own with a ``METHOD`` and a place in this list (docs/add-a-method.md)."""

from dssl.methods import barlowtwins, byol, simclr, simsiam, vicreg
from dssl.methods.barlowtwins import BarlowTwins, BarlowTwinsConfig
from dssl.methods.byol import BYOL, BYOLConfig
from dssl.methods.method import Cost, Declaration, Defaults, Method, Prediction
from dssl.methods.simclr import SimCLR, SimCLRConfig
from dssl.methods.simsiam import SimSiam, SimSiamConfig
from dssl.methods.teacher import Teacher
from dssl.methods.vicreg import VICReg, VICRegConfig
from dssl.settings import MethodSettings

METHODS: dict[str, Declaration] = {
    one.name: one for one in (simsiam.METHOD, byol.METHOD, simclr.METHOD, vicreg.METHOD, barlowtwins.METHOD)
}


def declaration_of(settings: MethodSettings) -> Declaration:
    """The method whose settings these are."""
    return next(one for one in METHODS.values() if isinstance(settings, one.settings))


__all__ = [
    "BYOL", "METHODS", "BYOLConfig", "BarlowTwins", "BarlowTwinsConfig", "Cost", "Declaration", "Defaults", "Method",
    "MethodSettings", "Prediction", "SimCLR", "SimCLRConfig", "SimSiam", "SimSiamConfig", "Teacher", "VICReg", "VICRegConfig",
    "declaration_of",
]  # fmt: skip
