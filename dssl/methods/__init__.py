"""The methods by name, and their settings; the module of a method, which needs torch, is the file of its name."""

from dssl.methods.settings import (
    BarlowTwinsConfig,
    BYOLConfig,
    Defaults,
    MatchConfig,
    MethodSettings,
    SimCLRConfig,
    SimSiamConfig,
    VICRegConfig,
)  # fmt: skip

METHODS: dict[str, type[MethodSettings]] = {
    settings.name: settings
    for settings in (SimSiamConfig, BYOLConfig, SimCLRConfig, VICRegConfig, BarlowTwinsConfig, MatchConfig)
}

__all__ = [
    "METHODS", "BYOLConfig", "BarlowTwinsConfig", "Defaults", "MatchConfig", "MethodSettings", "SimCLRConfig", "SimSiamConfig",
    "VICRegConfig",
]  # fmt: skip
