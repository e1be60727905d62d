"""The methods, by name. A new one is a file of its own with a ``METHOD`` and a place in this list (docs/add-a-method.md)."""

from dssl.methods import byol, simclr, simsiam
from dssl.methods.byol import BYOL, BYOLConfig
from dssl.methods.method import Cost, Declaration, Defaults, Method, Prediction
from dssl.methods.simclr import SimCLR, SimCLRConfig
from dssl.methods.simsiam import SimSiam, SimSiamConfig
from dssl.settings import MethodSettings

METHODS: dict[str, Declaration] = {one.name: one for one in (simsiam.METHOD, byol.METHOD, simclr.METHOD)}


def declaration_of(settings: MethodSettings) -> Declaration:
    """The method whose settings these are."""
    return next(one for one in METHODS.values() if isinstance(settings, one.settings))


__all__ = [
    "BYOL", "METHODS", "BYOLConfig", "Cost", "Declaration", "Defaults", "Method", "MethodSettings", "Prediction", "SimCLR",
    "SimCLRConfig", "SimSiam", "SimSiamConfig", "declaration_of",
]  # fmt: skip
