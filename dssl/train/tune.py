"""Which heavy policy suits these images, without labels: short runs from one shared start, each with another policy."""

import dataclasses

from torch import nn

from dssl import loop, rng
from dssl.config import Precision, RunConfig
from dssl.data import Quarantine
from dssl.distributed import World
from dssl.presets import named_graph
from dssl.run import Resumed, RunFolder
from dssl.state import Pace
from dssl.train.prepare import Parts, build_method
from dssl.train.pretrain import Pretraining
from dssl.weights.checkpoint import Checkpoint


def short_run(
    config: RunConfig,
    parts: Parts,
    *,
    steps: int,
    precision: Precision,
    world: World,
    folder: RunFolder,
    header: dict[str, object],
    resumed: Resumed | None = None,
    kept: bool = False,
) -> loop.Ending:
    """Train the method of the parts for so many steps; only a run that is ``kept`` writes anything."""
    settings = loop.LoopSettings(
        pace=Pace(total=steps, steps_per_epoch=len(parts.source) / config.batch_size, round=steps, counted="step"),
        batch_size=config.batch_size,
        data=config.data,
        precision=precision,
        seed=config.seed,
        checkpoint=config.checkpoint,
        look_every=config.health.every,
        clip=config.optimizer.clip,
    )
    task = Pretraining(
        config, parts, settings, folder=folder, world=world, header=header, gallery=None, first_step=0,
        quarantine=Quarantine(parts.source, max_share=config.bad_share),
    )  # fmt: skip
    task.warmup = steps // 20
    task.watch.patience = steps // 2
    return loop.run(task, settings, world=world, folder=folder if kept else None, resumed=resumed)


def continued(config: RunConfig, parts: Parts, start: Checkpoint) -> tuple[RunConfig, Parts]:
    """A trial's configuration, and its parts with the method as the shared start left it.

    The seed is another than the start's, so that no image comes with the same views again, and the same for all trials: they
    differ in nothing but their policy.
    """
    config = dataclasses.replace(config, seed=rng.key(config.seed, "trial") % 2**31)
    method = build_method(config)
    assert isinstance(method, nn.Module)
    method.load_state_dict(start.part("method"), strict=True)
    return config, dataclasses.replace(parts, graph=named_graph(config.graph), method=method)
