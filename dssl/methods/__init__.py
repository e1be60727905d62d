"""The methods by name, and their settings; the module of a method, which needs torch, is the file of its name."""

from dssl.methods.settings import (
    BarlowTwinsConfig,
    BYOLConfig,
    Defaults,
    DINOConfig,
    LeJEPAConfig,
    MatchConfig,
    MethodSettings,
    MoCoConfig,
    RelationConfig,
    SimCLRConfig,
    SimSiamConfig,
    SwAVConfig,
    VICRegConfig,
)  # fmt: skip

METHODS: dict[str, type[MethodSettings]] = {
    settings.name: settings
    for settings in (
        SimSiamConfig,
        BYOLConfig,
        MoCoConfig,
        SimCLRConfig,
        VICRegConfig,
        BarlowTwinsConfig,
        LeJEPAConfig,
        SwAVConfig,
        DINOConfig,
        MatchConfig,
    )
}

__all__ = [
    "METHODS", "BYOLConfig", "BarlowTwinsConfig", "DINOConfig", "Defaults", "LeJEPAConfig", "MatchConfig", "MethodSettings",
    "MoCoConfig", "RelationConfig", "SimCLRConfig", "SimSiamConfig", "SwAVConfig", "VICRegConfig",
]  # fmt: skip
