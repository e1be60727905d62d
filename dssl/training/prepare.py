"""From a configuration to what a run is made of: data, views and method."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dssl import rng
from dssl.augment import CIFAR10, IMAGENET, BaseViewMaker, Normalization, SizedViewMaker, ViewMaker
from dssl.config import AdaptConfig, RunConfig
from dssl.data import NoSplitError, Quarantine, Source, Subset, measure, open_source
from dssl.data.loader import EvaluationBatches
from dssl.data.order import require_shards
from dssl.data.scale import Range, as_range, parse_range
from dssl.distributed import ALONE, World
from dssl.errors import DsslError
from dssl.graph import View, ViewGraph
from dssl.log import phase
from dssl.methods.method import Method
from dssl.methods.relation import Relation
from dssl.methods.teacher import Teacher
from dssl.models import build_encoder, evaluating, feature_dim, size_arguments
from dssl.models.blocks import blocks
from dssl.models.for_cpus import WhitenedEncoder, whiten
from dssl.objective import Objective
from dssl.weights import load
from dssl.weights.encoder import Encoder

logger = logging.getLogger("dssl")


def open_data(config: RunConfig, *, value_range: Range | None = None) -> Source:
    """The training images, or the part of them that the configuration asks for; with a range that was measured before."""
    source = open_source(config.data, channels=config.channels, value_range=value_range or config.range)
    if config.shuffle == "shards":
        require_shards(source)
    if config.limit is None or config.limit >= len(source):
        return source
    return Subset(source, rng.sample(rng.key(config.seed, "limit"), len(source), config.limit))


def open_test_data(config: RunConfig, *, value_range: Range | None = None) -> Source | None:
    """The test split, where there is one with labels: what kNN is measured on."""
    try:
        source = open_source(
            config.data, split="test", channels=config.channels, value_range=value_range or config.range
        )
    except NoSplitError:
        return None
    return source if source.labels is not None else None


def images_to_measure(config: RunConfig, source: Source) -> Source:
    """What is measured without labels: the test split, or the training images if there is none that fits them."""
    with suppress(DsslError):
        return open_source(config.data, split="test", channels=config.channels, value_range=source.value_range)
    return source


def normalization_of(config: RunConfig, source: Source | None) -> Normalization:
    """Known constants, those of the weights that the run starts from, or mean and standard deviation of the data itself."""
    if config.normalization == "measure":
        assert source is not None
        # what may be unreadable is for the configuration to say; the run's own quarantine names the files
        allowed = Quarantine(source, max_share=config.bad_share)
        return measure(source, seed=config.seed, threads=config.threads, quarantine=allowed)[0]
    if config.normalization == "imagenet" and config.init is not None:
        stated = None
        if not config.starts_as_given and not load.is_imagenet(config.init):
            stated = load.stated_normalization(config.init, channels=config.channels)
        return stated or load.imagenet_normalization(config.encoder, channels=config.channels)
    constants = {"cifar10": CIFAR10, "imagenet": IMAGENET}[config.normalization]
    return constants.gray() if config.channels == 1 else constants


def evaluation_size(config: RunConfig) -> int:
    """The size of whole images where the encoder is measured; a transformer, built for one size, keeps that of its views."""
    if config.adapt is None or size_arguments(config.encoder, config.image_size):
        return config.image_size
    return config.adapt.evaluation_size


def view_maker(config: RunConfig, graph: ViewGraph, normalization: Normalization | None) -> BaseViewMaker:
    """What makes the views of the graph; without a normalisation, as uint8 to look at."""
    sizes: dict[int, list[View]] = {}
    for view in graph.made:
        sizes.setdefault(graph.size(view.name) or config.image_size, []).append(view)
    makers = [
        ViewMaker(
            views,
            size=size,
            seed=config.seed,
            channels=config.channels,
            policies={"standard": config.standard, "heavy": config.heavy},
            normalization=normalization,
        )
        for size, views in sizes.items()
    ]
    return makers[0] if len(makers) == 1 else SizedViewMaker(makers, [view.name for view in graph.made])


def images_to_whiten(config: RunConfig, source: Source, normalization: Normalization) -> Tensor:
    """Up to 2,000 training images, chosen by the seed, as the encoder sees them."""
    chosen = rng.sample(rng.key(config.seed, "whiten"), len(source), 2000)
    quarantine = Quarantine(source, max_share=config.bad_share)
    with EvaluationBatches(
        source, size=config.image_size, channels=config.channels, normalization=normalization, indices=chosen,
        threads=config.threads, quarantine=quarantine,
    ) as batches:  # fmt: skip
        return torch.cat([batch.images for batch in batches])


def starting_encoder(config: RunConfig, *, init: Path | None = None) -> nn.Module:
    """The encoder before its first step: its weights depend on the seed, or come from the file ``init``."""
    torch.manual_seed(rng.key(config.seed, "weights") % 2**63)
    encoder = build_encoder(config.encoder, image_size=config.image_size, channels=config.channels)
    if init is not None and not config.starts_as_given:
        if load.is_imagenet(init):
            line = load.load_imagenet(encoder, config.encoder, image_size=config.image_size, channels=config.channels)
        else:
            line = load.load_weights_into(encoder, init).text()
        logger.info(line)
    return encoder


def build_method(config: RunConfig, *, init: Path | None = None) -> Method:
    """Encoder and heads; their first weights depend on the seed, or the encoder's come from the file ``init``."""
    encoder = starting_encoder(config, init=init)  # before the method copies the encoder, as BYOL does
    dim = feature_dim(encoder, image_size=config.image_size, channels=config.channels)
    check_sizes(config, encoder, dim)
    method = Method.of(config.method, encoder, feature_dim=dim)
    method.seed = config.seed
    method.relation = Relation(config.relation, width=_prediction_width(config, method) if config.relation.queue else 0)
    if config.adapt is not None:
        keep_most(method, config.adapt)
    if config.teacher is not None:
        method.teacher = _teacher(config, config.teacher, method)
    Objective(method, config.view_graph)  # rejects what the method cannot do, before anything is written
    return method


def _teacher(config: RunConfig, path: Path, method: Method) -> Teacher:
    """The teacher of the graph, with a map from the method's predictions to its features where their widths differ."""
    graph = config.view_graph
    try:
        loaded = load.open_weights(path, encoder=config.teacher_encoder, image_size=config.image_size)
        widths = {}  # by the size of a view; refuses one that it cannot see
        for name in graph.taught:
            size = graph.size(name) or config.image_size
            widths[size] = feature_dim(loaded.network, image_size=size, channels=loaded.channels)
    except DsslError as error:
        raise DsslError(f"the teacher: {error}".replace("--encoder", "--teacher-encoder")) from None
    features, *more = set(widths.values())
    if more:
        both = " and ".join(f"{width} features of {size} px" for size, width in widths.items())
        raise DsslError(
            f"the teacher {path} makes {both}: give it views of one size, or choose one that ends in pooling"
        )
    if loaded.channels != config.channels:
        raise DsslError(f"the teacher {path} sees {loaded.channels} channels, and the run has {config.channels}")
    logger.info(f"teacher: {loaded.report}")
    return Teacher(
        loaded.network, width=_prediction_width(config, method), features=features, normalization=loaded.normalization,
        sha256=loaded.sha256,
    )  # fmt: skip


def _prediction_width(config: RunConfig, method: Method) -> int:
    with evaluating(method):
        images = torch.zeros(2, config.channels, config.image_size, config.image_size)
        return method.predict(images).prediction.shape[1]


def check_sizes(config: RunConfig, encoder: nn.Module, dim: int) -> None:
    """Refuse an encoder that cannot see one of the graph's views, or sees it with another number of features.

    Also one that cannot see whole images at the size at which it is measured.
    """
    graph, base = config.view_graph, config.image_size
    sizes = {f"view {name}": size for name in graph.encoded if (size := graph.size(name)) is not None}
    remedy = "choose an encoder that ends in pooling, or give all views one size"
    if (whole := evaluation_size(config)) != base:
        sizes["a whole image"] = whole
        remedy += f" and add --adapt.evaluation-size {base}"
    for what, size in sizes.items():
        try:
            width = feature_dim(encoder, image_size=size, channels=config.channels)
        except DsslError as error:
            raise DsslError(
                f"{what} has {size} px, which the encoder {config.encoder} cannot process: {error}; {remedy}"
            ) from None
        if width != dim:
            raise DsslError(
                f"{what} has {size} px, where the encoder {config.encoder} gives {width} features instead of the {dim} at "
                f"{base} px: {remedy}"
            )


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The images that a run trains on, and how their pixels are normalised."""

    source: Source
    normalization: Normalization


def training_data(config: RunConfig, *, kept: Mapping[str, Any] | None = None, world: World = ALONE) -> TrainingData:
    """Open the images; a resumed run keeps the normalisation and the range that it started with.

    Of several processes one scans and measures, and the others use its result.
    """
    value_range = as_range((kept or {}).get("range"))
    wanted = parse_range(config.range, channels=config.channels)
    if value_range is None and wanted is not None and wanted.percent:
        value_range = world.from_first(lambda: open_data(config).value_range)
    with phase(f"reading the list of images in {config.data}"):
        source = world.in_turn(lambda: open_data(config, value_range=value_range))
    if kept is not None:
        return TrainingData(source, Normalization.of(kept["normalization"]))
    with phase("measuring mean and standard deviation of the images"):
        return TrainingData(source, world.from_first(lambda: normalization_of(config, source)))


def fit_to_data(config: RunConfig, method: Method, data: TrainingData, *, new: bool, world: World = ALONE) -> None:
    """Tell the method about the images: encoders that whiten measure their filters in a ``new`` run, and a teacher converts.

    A run is new that has neither a checkpoint nor weights from elsewhere.
    """
    whitened = [module for module in method.modules() if isinstance(module, WhitenedEncoder)]  # BYOL has two
    if new and whitened:
        images = world.all_or_error(lambda: images_to_whiten(config, data.source, data.normalization))
        for encoder in whitened:
            whiten(encoder, images)
    if method.taught_by is not None:
        method.taught_by.expect(data.normalization)


def encoder_of(config: RunConfig, network: nn.Module, data: TrainingData) -> Encoder:
    """The encoder of a run as it is now, to be measured on whole images."""
    return Encoder(
        network=network, name=config.encoder, image_size=evaluation_size(config), channels=config.channels,
        normalization=data.normalization, threads=config.threads,
    )  # fmt: skip


def untrained_encoder(config: RunConfig) -> Encoder:
    """The encoder of a run before its first step."""
    method, data = build_method(config), training_data(config)
    fit_to_data(config, method, data, new=True)
    return encoder_of(config, method.encoder, data)


def keep_most(method: Method, config: AdaptConfig) -> None:
    """Freeze all but the last blocks of the encoder, and keep it in evaluation mode, without dropout.

    BatchNorm then normalises by the statistics that came with the weights. Those of a small batch of crops would be worse, and
    the frozen layers behind would see other inputs than those that they were trained on.
    """
    encoder = method.encoder
    trained = {name for names in trained_blocks(encoder, config) for name in names}
    for name, parameter in encoder.named_parameters():
        parameter.requires_grad_(name in trained)
    for part in method.children():
        if type(part) is type(encoder):  # BYOL's second one, too
            part.eval()


def trained_blocks(encoder: nn.Module, config: AdaptConfig) -> tuple[tuple[str, ...], ...]:
    """The names of the parameters that learn, by block."""
    names = blocks(encoder)
    return names if config.trained_blocks is None else names[-config.trained_blocks :]
