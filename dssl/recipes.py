"""A recipe is a function that returns the settings of a run, named for what it trains on; flags change single ones of them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dssl import config_io
from dssl.config import AdaptConfig, OptimizerConfig, RunConfig
from dssl.errors import InvalidSetting, choices
from dssl.methods import METHODS, Defaults, MethodSettings

PAPER_HEAVY = "0.9*ra(2,5) | 0.1*jigsaw(4)"
"""The paper's heavy augmentation (appendix), with the operation ranges of its code."""
Settings = dict[str, Any]


def _settings(recipe: str, method: str) -> MethodSettings:
    """The method's own defaults, with what it declares for this recipe."""
    settings = METHODS[method]
    return settings(**settings.recipes.get(recipe, Defaults()).settings)


def _optimizer(recipe: str, method: str, usual: OptimizerConfig) -> OptimizerConfig:
    """The recipe's optimiser, with what the method declares for this recipe."""
    return dataclasses.replace(usual, **METHODS[method].recipes.get(recipe, Defaults()).optimizer)


def shapes(method: str = "simsiam") -> Settings:
    """The built-in images: minutes on two CPU cores, with heads that suit the small encoder.

    A batch of 64: in runs this short the number of steps matters more than the number of images.
    """
    return {
        "data": "shapes",
        "encoder": "small",
        "method": _settings("shapes", method),
        "epochs": 10,
        "batch_size": 64,
        "knn_every": 2,
        "optimizer": _optimizer("shapes", method, OptimizerConfig(rate=0.24, warmup_epochs=1)),
    }


def cifar10(method: str = "simsiam") -> Settings:
    """The paper's CIFAR-10 settings; give --data cifar10:FOLDER."""
    return {
        "data": "cifar10",
        "encoder": "resnet18-cifar",
        "method": _settings("cifar10", method),
        "heavy": PAPER_HEAVY,
        "epochs": 800,
        "batch_size": 512,
        "knn_every": 10,
        "optimizer": _optimizer("cifar10", method, OptimizerConfig(rate=0.03, weight_decay=5e-4, warmup_epochs=10)),
    }


def imagenet(method: str = "simsiam") -> Settings:
    """The paper's ImageNet settings; give --data FOLDER, the one that holds train and val."""
    return {
        "data": "imagenet",
        "image_size": 224,
        "normalization": "imagenet",
        "encoder": "resnet50",
        "method": _settings("imagenet", method),
        "standard": "standard",
        "heavy": PAPER_HEAVY,
        "epochs": 100,
        "batch_size": 512,
        "optimizer": _optimizer("imagenet", method, OptimizerConfig(rate=0.05, weight_decay=1e-4, warmup_epochs=0)),
    }


def folder(method: str = "simclr") -> Settings:
    """Your own images, in any folder; give --data FOLDER.

    SimCLR, because it gains within minutes, where SimSiam may end below the untrained encoder, and four standard views, each
    pulled to the mean of the others. The size is for a GPU and hours: with --minutes it fits the machine, on a CPU with a smaller
    encoder and smaller views. docs/howto/training.md has the measurements behind these settings.
    """
    base = imagenet(method)
    settings, optimizer = base["method"], dataclasses.replace(base["optimizer"], warmup_epochs=10)
    if "folder" in METHODS[method].recipes:
        settings = _settings("folder", method)
        optimizer = _optimizer("folder", method, OptimizerConfig(warmup_epochs=10))
    return base | {
        "data": "folder",
        "image_size": 128,
        "normalization": "measure",
        "encoder": "resnet18",
        "method": settings,
        "graph": "fastsiam",
        "heavy": "ra(2,9,monotone14)",
        "epochs": 200,
        "batch_size": 128,
        "optimizer": optimizer,
    }


def adapt(method: str = "simclr") -> Settings:
    """A few thousand images of your own, from weights that are good already; give --data FOLDER and --encoder.

    The heads learn first, then the last two blocks of the encoder for a few epochs; BatchNorm keeps the statistics that it came
    with, because small batches of crops give worse ones. docs/howto/adapt.md has the measurements behind these settings.
    """
    return {
        "data": "folder",
        "image_size": 96,
        "normalization": "imagenet",
        "encoder": "mobilenet_v2",
        "init": Path("imagenet"),
        "method": _settings("adapt", method),
        "graph": "standard",
        "standard": "crop(0.3,1) > flip > jitter(0.4,0.4,0.4,0.1)?0.8 > gray?0.2",
        "heavy": "ra(2,5,monotone14)",
        "epochs": 9,
        "batch_size": 64,
        "precision": "fp32",  # minutes, and the result is compared with weights of full precision
        "knn_every": 1,
        "optimizer": OptimizerConfig(name="adamw", rate=4e-3, weight_decay=0.0, warmup_epochs=0.4),
        "adapt": AdaptConfig(),
    }


def robust(method: str = "match") -> Settings:
    """Your own images, from weights that are good already to an encoder that survives noise, blur and bad light.

    The student sees a clean view through one of five corruptions, or as it is (one in four); its features are pulled to those
    that the start has for the clean view. All blocks learn. docs/robust.md has the measurements behind these settings.
    """
    return {
        "data": "folder",
        "image_size": 112,
        "normalization": "imagenet",
        "encoder": "mobilenet_v2",
        "init": Path("imagenet"),
        "method": _settings("robust", method),
        "graph": "h1->s1, h1 = heavy(s1)",
        "standard": "crop(0.6,1) > flip",
        "heavy": "corrupt?0.75",
        "epochs": 6,
        "batch_size": 32,
        "precision": "fp32",  # minutes, and the result is compared with weights of full precision
        "knn_every": 1,
        "optimizer": OptimizerConfig(name="adamw", rate=8e-3, weight_decay=0.0, warmup_epochs=0.4),
        "adapt": AdaptConfig(head_epochs=0, trained_blocks=None, average=0.0, max_drift=None),
    }


_KEEP_HEAD: Settings = {
    # clean images weigh five times as much, the rate is a tenth, and the result stays close to the start
    "graph": "h1->s1, c1->s1:5, h1 = heavy(s1), c1 = identity(s1)",
    "heavy": "corrupt",
    "epochs": 3,
    "optimizer": OptimizerConfig(name="adamw", rate=8e-4, weight_decay=0.0, warmup_epochs=0.4),
    "adapt": AdaptConfig(head_epochs=0, trained_blocks=None, average=0.5, max_drift=0.0008),
}
"""How ``robust`` differs if a classifier on the old features is to stay."""
RECIPES: dict[str, Callable[..., Settings]] = {
    "shapes": shapes,
    "cifar10": cifar10,
    "imagenet": imagenet,
    "folder": folder,
    "adapt": adapt,
    "robust": robust,
}
HEAVY_POLICIES = frozenset(settings().get("heavy", RunConfig.heavy) for settings in RECIPES.values())
"""The heavy policies of recipes, which nobody asked for."""


def shortened(settings: Settings, epochs: object) -> Settings:
    """The warm-up and the head epochs of a recipe as the same shares of a run with fewer epochs than the recipe's."""
    if not isinstance(epochs, int) or not 0 < epochs < settings["epochs"]:
        return settings
    share, optimizer, adapt = epochs / settings["epochs"], settings["optimizer"], settings.get("adapt")
    settings = settings | {
        "optimizer": dataclasses.replace(optimizer, warmup_epochs=round(optimizer.warmup_epochs * share, 3))
    }
    if adapt is not None:
        heads = min(epochs - 1, round(adapt.head_epochs * share))
        settings["adapt"] = dataclasses.replace(adapt, head_epochs=heads)
    return settings


def recipe(
    name: str, *, method: str | MethodSettings | None = None, keep_head: bool = False, **changes: Any
) -> RunConfig:
    """The configuration of a recipe, with some fields changed: ``recipe("shapes", epochs=3, optimizer={"rate": 0.1})``.

    For images whose channels are not colours, its policies are those of the recipe without operations on colour.

    Args:
        name: ``shapes``, ``cifar10``, ``imagenet``, ``folder``, ``adapt`` or ``robust``.
        method: A name, whose settings are those that the recipe has for it, or settings; by default the recipe's own.
        keep_head: With ``robust``: so gently that a classifier on the old features stays in use.
        **changes: Fields of ``RunConfig``.
    """
    if name not in RECIPES:
        raise choices("recipe", name, RECIPES)
    if isinstance(method, MethodSettings):
        settings = RECIPES[name](method.name) | {"method": method}
    elif method is not None and method not in METHODS:
        raise choices("method", method, METHODS)
    else:
        settings = RECIPES[name]() if method is None else RECIPES[name](method)
    if keep_head:
        if name != "robust":
            raise InvalidSetting("keep_head", f"is for the recipe robust, not for {name}: leave it out")
        settings |= _KEEP_HEAD
    settings = shortened(settings, changes.get("epochs"))
    if changes.get("channels", 3) not in (1, 3):
        from dssl.augment import parse, show, without_colour

        usual = {"standard": RunConfig.standard, "heavy": RunConfig.heavy} | settings
        policies = {kind: show(without_colour(parse(usual[kind]))) for kind in ("standard", "heavy")}
        changes = {**policies, "normalization": "measure", **changes}
    return config_io.build(RunConfig, changes, base=settings, where=f"recipe {name}")
