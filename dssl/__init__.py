"""Self-supervised visual pretraining and adaptation: views of an image as a directed graph, and a verdict when a run collapses.

The public API: ``dssl.train``, ``evaluate``, ``embed``, ``export``, ``views`` and ``open_run`` do what the commands do.
A view graph, a method and their objective are for your own loop. Everything is imported when it is first used.
"""

import importlib
import os
from typing import TYPE_CHECKING

from dssl.version import VERSION as __version__

if TYPE_CHECKING:
    from dssl.api import Embeddings, Run, embed, evaluate, export, open_run, train, views
    from dssl.config import RunConfig
    from dssl.data import register_source
    from dssl.data.objects import as_source
    from dssl.errors import DsslError
    from dssl.graph import Edge, Vertex, View, ViewGraph, equation6, named_graph, soft
    from dssl.methods import (
        BarlowTwinsConfig,
        BYOLConfig,
        DINOConfig,
        LeJEPAConfig,
        MethodSettings,
        MoCoConfig,
        RelationConfig,
        SimCLRConfig,
        SimSiamConfig,
        SwAVConfig,
        VICRegConfig,
    )  # fmt: skip
    from dssl.methods.barlowtwins import BarlowTwins
    from dssl.methods.byol import BYOL
    from dssl.methods.dino import DINO
    from dssl.methods.lejepa import LeJEPA
    from dssl.methods.method import Method, Prediction
    from dssl.methods.moco import MoCo
    from dssl.methods.relation import Relation
    from dssl.methods.simclr import SimCLR
    from dssl.methods.simsiam import SimSiam
    from dssl.methods.swav import SwAV
    from dssl.methods.teacher import Teacher
    from dssl.methods.vicreg import VICReg
    from dssl.models import build_encoder, encoder_names, feature_dim, register_encoder
    from dssl.objective import LossReport, Objective
    from dssl.recipes import recipe
    from dssl.trackers import Tracker, register_tracker
    from dssl.training.health import HealthMonitor
    from dssl.weights.load import load_encoder

# Of torch 2.15's AMX kernels some run without having configured the tiles: a small bf16 matrix product then ends the process with
# "illegal instruction" (docs/project/decisions.md). oneDNN reads this at its first use; whoever sets it decides.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# torch takes seconds to import: graphs, recipes and the settings of methods do without it
_HOME = {
    name: module
    for module, names in {
        "api": ("Embeddings", "Run", "embed", "evaluate", "export", "open_run", "train", "views"),
        "config": ("RunConfig",),
        "data": ("register_source",),
        "data.objects": ("as_source",),
        "errors": ("DsslError",),
        "graph": ("Edge", "Vertex", "View", "ViewGraph", "equation6", "named_graph", "soft"),
        "methods": (
            "BYOLConfig",
            "BarlowTwinsConfig",
            "DINOConfig",
            "LeJEPAConfig",
            "MethodSettings",
            "MoCoConfig",
            "RelationConfig",
            "SimCLRConfig",
            "SimSiamConfig",
            "SwAVConfig",
            "VICRegConfig",
        ),
        "methods.barlowtwins": ("BarlowTwins",),
        "methods.byol": ("BYOL",),
        "methods.dino": ("DINO",),
        "methods.lejepa": ("LeJEPA",),
        "methods.method": ("Method", "Prediction"),
        "methods.moco": ("MoCo",),
        "methods.relation": ("Relation",),
        "methods.simclr": ("SimCLR",),
        "methods.simsiam": ("SimSiam",),
        "methods.swav": ("SwAV",),
        "methods.teacher": ("Teacher",),
        "methods.vicreg": ("VICReg",),
        "models": ("build_encoder", "encoder_names", "feature_dim", "register_encoder"),
        "objective": ("LossReport", "Objective"),
        "recipes": ("recipe",),
        "trackers": ("Tracker", "register_tracker"),
        "training.health": ("HealthMonitor",),
        "weights.load": ("load_encoder",),
    }.items()
    for name in names
}

__all__ = [
    "BYOL", "DINO", "BYOLConfig", "BarlowTwins", "BarlowTwinsConfig", "DINOConfig", "DsslError", "Edge", "Embeddings",
    "HealthMonitor", "LeJEPA", "LeJEPAConfig", "LossReport", "Method", "MethodSettings", "MoCo", "MoCoConfig", "Objective",
    "Prediction", "Relation", "RelationConfig", "Run", "RunConfig", "SimCLR", "SimCLRConfig", "SimSiam", "SimSiamConfig",
    "SwAV", "SwAVConfig", "Teacher", "Tracker", "VICReg", "VICRegConfig", "Vertex", "View", "ViewGraph", "__version__",
    "as_source", "build_encoder", "embed", "encoder_names", "equation6", "evaluate", "export", "feature_dim",
    "load_encoder", "named_graph", "open_run", "recipe", "register_encoder", "register_source", "register_tracker", "soft",
    "train", "views",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(f"dssl.{_HOME[name]}"), name)
    raise AttributeError(f"module 'dssl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
