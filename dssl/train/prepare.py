"""From a configuration to the parts of a run: data, views, method and objective."""

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dssl import rng
from dssl.augment import CIFAR10, IMAGENET, Normalization, ViewMaker
from dssl.config import RunConfig
from dssl.data import NoSplitError, Quarantine, Source, Subset, measure, open_source
from dssl.data.loader import EvaluationBatches
from dssl.data.order import require_shards
from dssl.distributed import World
from dssl.graph import ViewGraph
from dssl.methods import Method, declaration_of
from dssl.models import build_encoder, feature_dim
from dssl.models.for_cpus import WhitenedEncoder, whiten
from dssl.presets import named_graph

logger = logging.getLogger("dssl")


def open_data(config: RunConfig) -> Source:
    """The training images, or the part of them that the configuration asks for."""
    source = open_source(config.data, channels=config.channels)
    if config.shuffle == "shards":
        require_shards(source)
    if config.limit is None or config.limit >= len(source):
        return source
    chosen = rng.permutation(rng.key(config.seed, "limit"), len(source))[: config.limit]
    return Subset(source, np.sort(chosen))


def open_test_data(config: RunConfig) -> Source | None:
    """The test split, where there is one with labels: what kNN is measured on."""
    try:
        source = open_source(config.data, split="test", channels=config.channels)
    except NoSplitError:
        return None
    return source if source.labels is not None else None


def normalization_of(config: RunConfig, source: Source | None) -> Normalization:
    """Known constants, or mean and deviation of the data itself."""
    if config.normalization == "measure":
        assert source is not None
        # what may be unreadable is for the configuration to say; the run's own quarantine names the files
        allowed = Quarantine(source, max_share=config.bad_share)
        return measure(source, seed=config.seed, threads=config.threads, quarantine=allowed)[0]
    known = {"cifar10": CIFAR10, "imagenet": IMAGENET}[config.normalization]
    if config.channels == 1:
        # the gray value is a weighted sum of the channels; their plain mean is near enough to normalise by
        return Normalization((float(np.mean(known.mean)),), (float(np.mean(known.std)),))
    return known


def view_maker(config: RunConfig, graph: ViewGraph, normalization: Normalization | None) -> ViewMaker:
    """What makes the views of the graph; without a normalisation, as uint8 to look at."""
    return ViewMaker(
        graph.made,
        size=config.image_size,
        seed=config.seed,
        channels=config.channels,
        policies={"standard": config.standard, "heavy": config.heavy},
        normalization=normalization,
    )


def images_to_whiten(config: RunConfig, source: Source, normalization: Normalization) -> Tensor:
    """Up to 2,000 training images, chosen by the seed, as the encoder sees them."""
    chosen = np.sort(rng.permutation(rng.key(config.seed, "whiten"), len(source))[:2000])
    quarantine = Quarantine(source, max_share=config.bad_share)
    with EvaluationBatches(
        source, size=config.image_size, channels=config.channels, normalization=normalization, indices=chosen,
        threads=config.threads, quarantine=quarantine,
    ) as batches:  # fmt: skip
        return torch.cat([batch.images for batch in batches])


def build_method(config: RunConfig, *, init: Path | None = None) -> Method:
    """Encoder and heads; their first weights depend on the seed, or the encoder's come from the file ``init``."""
    torch.manual_seed(rng.key(config.seed, "weights") % 2**63)
    encoder = build_encoder(config.encoder, image_size=config.image_size, channels=config.channels)
    dim = feature_dim(encoder, image_size=config.image_size, channels=config.channels)
    if init is not None:  # before the method copies the encoder, as BYOL does
        from dssl.weights.load import load_weights_into

        logger.info(load_weights_into(encoder, init).text())
    method = declaration_of(config.method).build(encoder, feature_dim=dim, **dataclasses.asdict(config.method))
    assert isinstance(method, nn.Module)
    return method


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that a run needs and that does not change while it runs."""

    graph: ViewGraph
    source: Source
    normalization: Normalization
    method: Method


def prepare(
    config: RunConfig, method: Method, *, normalization: Normalization | None, new: bool, world: World | None = None
) -> Parts:
    """Open the data and put the parts together; a resumed run hands in the normalisation that it started with.

    In a ``new`` run, one without weights from elsewhere, an encoder that whitens measures its filters on the images. Of
    several processes one scans and measures, and the others take what it found.
    """
    world = world or World(0, 1, torch.device("cpu"))
    source = world.in_turn(lambda: open_data(config))
    normalization = normalization or world.told(lambda: normalization_of(config, source))
    assert isinstance(method, nn.Module)
    whitened = [module for module in method.modules() if isinstance(module, WhitenedEncoder)]  # BYOL has two
    if new and whitened:
        images = world.together(lambda: images_to_whiten(config, source, normalization))
        for encoder in whitened:
            whiten(encoder, images)
    return Parts(graph=named_graph(config.graph), source=source, normalization=normalization, method=method)
