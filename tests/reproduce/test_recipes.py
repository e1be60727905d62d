"""Recipes: every cell is built at every scale, and one of each method x graph x data set takes a real step."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

from dssl.config import RunConfig
from dssl.evaluate.classifier import SUPERVISED
from dssl.graph import ViewGraph
from dssl.methods import declaration_of
from dssl.models import build_encoder, feature_dim
from dssl.objective import Objective
from dssl.optim import build_optimizer, set_learning_rate
from dssl.presets import named_graph
from dssl.recipes import PAPER_HEAVY
from dssl.reproduce.paper import Experiment, chosen_targets, targets
from dssl.reproduce.plan import job, plan
from dssl.reproduce.scales import SCALES, recipe
from dssl.train.prepare import build_method, normalization_of, view_maker

EXPERIMENTS = list(
    dict.fromkeys(cell.experiment for target in targets().values() for cell in target.cells if cell.experiment)
)
KINDS = {(one.method, one.graph, one.data): one for one in EXPERIMENTS if one.method != "supervised"}


@pytest.mark.parametrize("scale", SCALES)
def test_every_cell_has_a_recipe(scale: str) -> None:
    jobs = plan(chosen_targets("all"), SCALES[scale], seeds=(0, 1))
    assert len(jobs) == len({one.name for one in jobs}) == 2 * 61
    for one in jobs:
        assert isinstance(named_graph(one.config.graph), ViewGraph)
        assert one.work > 0
        assert one.protocols[-1] in ("probe", "linear-sgd", "linear-lars", "supervised")
    # what is the same run is one job: the main table's DSSL serves the table of COCO, too
    for first, second in (("table2", "table5"), ("table1", "table2")):
        shared = {one.name for one in plan([targets()[first]], SCALES[scale], seeds=(0,))}
        assert shared & {one.name for one in plan([targets()[second]], SCALES[scale], seeds=(0,))}


def test_there_is_one_setting_for_all_cells_of_a_small_scale() -> None:
    for scale in ("cpu", "day"):
        for data in ("cifar10", "imagenet"):
            found = [recipe(one, SCALES[scale], seed=0) for one in EXPERIMENTS if one.data == data]
            for name in ("encoder", "limit", "epochs", "batch_size", "optimizer", "image_size", "normalization"):
                assert len({getattr(one, name) for one in found}) == 1, name
    assert recipe(EXPERIMENTS[0], SCALES["cpu"], seed=0).limit == 10_000


@pytest.mark.parametrize(
    ("method", "data", "expected"),
    [
        ("simsiam", "cifar10", ("resnet18-cifar", 32, 800, 512, "sgd", 0.03, 5e-4, 10)),
        ("byol", "cifar10", ("resnet18-cifar", 32, 800, 512, "sgd", 0.03, 5e-4, 10)),
        ("simclr", "cifar10", ("resnet18-cifar", 32, 800, 512, "lars", 1.0, 1e-6, 10)),
        ("simsiam", "imagenet", ("resnet50", 224, 100, 512, "sgd", 0.05, 1e-4, 0)),
        ("simclr", "imagenet", ("resnet50", 224, 100, 512, "lars", 0.3, 1e-6, 10)),
    ],
)
def test_the_paper_scale_is_the_paper(method: str, data: str, expected: tuple[object, ...]) -> None:
    experiment = Experiment(data=data, method=method, graph="dssl", heavy=PAPER_HEAVY)
    config = recipe(experiment, SCALES["paper"], seed=3)
    optimizer = config.optimizer
    assert (
        config.encoder, config.image_size, config.epochs, config.batch_size, optimizer.name, optimizer.rate,
        optimizer.weight_decay, optimizer.warmup_epochs,
    ) == expected  # fmt: skip
    assert (config.heavy, config.seed, config.limit) == (PAPER_HEAVY, 3, None)
    assert declaration_of(config.method).name == method
    linear = job(experiment, SCALES["paper"], seed=0).protocols[1]
    assert linear == ("linear-lars" if data == "imagenet" and method != "simclr" else "linear-sgd")


def test_the_ablation_has_its_own_standard_views_and_the_main_table_the_mixed_heavy_ones() -> None:
    for cell in targets()["figure5"].cells:
        if cell.experiment is not None:
            config = recipe(cell.experiment, SCALES["cpu"], seed=0)
            assert (config.standard, config.heavy) == ("standard-ablation", "ra(2,5)")
    heavy = [cell.experiment for cell in targets()["table2"].cells if cell.row in ("w/ T^", "w/ DSSL")]
    assert {recipe(one, SCALES["cpu"], seed=0).heavy for one in heavy if one} == {PAPER_HEAVY}


def test_a_name_is_of_the_settings_and_of_nothing_else() -> None:
    base = Experiment(data="cifar10", method="simsiam", graph="dssl", heavy="ra(2,5)")
    name = job(base, SCALES["cpu"], seed=0).name
    assert name == job(base, SCALES["cpu"], seed=0).name
    others = [
        job(dataclasses.replace(base, heavy="ra(2,1)"), SCALES["cpu"], seed=0),
        job(dataclasses.replace(base, graph="heavy2"), SCALES["cpu"], seed=0),
        job(base, SCALES["cpu"], seed=1),
        job(base, SCALES["day"], seed=0),
    ]
    assert len({name, *(one.name for one in others)}) == 5
    # a graph without heavy views has no heavy policy to differ by
    plain = dataclasses.replace(base, graph="standard2")
    assert job(plain, SCALES["cpu"], seed=0) == job(dataclasses.replace(plain, heavy="ua"), SCALES["cpu"], seed=0)


def _half(config: RunConfig) -> RunConfig:
    """The paper's encoder and heads on smaller images, which two cores bear."""
    return dataclasses.replace(config, image_size=64 if config.image_size == 224 else 16, batch_size=4)


@pytest.mark.parametrize("kind", KINDS.values(), ids=["-".join(kind) for kind in KINDS])
def test_each_method_graph_and_data_set_takes_a_step(kind: Experiment) -> None:
    # ResNet-50 for every graph would take a minute: on ImageNet the small scale takes its place, but for DSSL
    scale = "paper" if kind.data == "imagenet" and kind.graph == "dssl" and kind.method == "simsiam" else "cpu"
    config = _half(recipe(kind, SCALES[scale], seed=0))
    graph = named_graph(config.graph)
    maker = view_maker(config, graph, normalization_of(config, None))
    buffers = maker.allocate(4)
    plan_ = maker.plan(np.arange(4), epoch=0)
    images = np.random.Generator(np.random.Philox(1)).integers(0, 256, (4, 40, 48, 3), dtype=np.uint8)
    for row in range(4):
        maker.apply(plan_, row, images[row], buffers, row)
    method = build_method(config)
    assert isinstance(method, nn.Module)
    before = [value.detach().clone() for value in method.parameters() if value.requires_grad]
    optimizer = build_optimizer(method, config.optimizer)
    set_learning_rate(optimizer, 0.1, fixed=0.1)
    loss = Objective(method, graph)({name: torch.from_numpy(one).permute(0, 3, 1, 2) for name, one in buffers.items()})
    loss.total.backward()
    optimizer.step()
    assert math.isfinite(float(loss.total.detach()))
    after = [value for value in method.parameters() if value.requires_grad]
    moved = sum(not torch.equal(one, two) for one, two in zip(before, after, strict=True))
    assert moved > len(after) / 2


@pytest.mark.parametrize("data", ["cifar10", "imagenet"])
def test_the_supervised_rows_take_a_step(data: str) -> None:
    one = job(Experiment(data=data, method="supervised"), SCALES["paper"], seed=0)
    assert one.training is not None
    assert one.protocols == ("supervised",)
    assert (one.config.encoder, one.training.optimizer) == (
        ("resnet18-cifar", "sgd") if data == "cifar10" else ("resnet50", "sgd")
    )
    config = _half(job(Experiment(data=data, method="supervised"), SCALES["cpu"], seed=0).config)
    encoder = build_encoder(config.encoder, image_size=config.image_size)
    head = nn.Linear(feature_dim(encoder, image_size=config.image_size), 10)
    images = torch.zeros(4, 3, config.image_size, config.image_size)
    loss = nn.functional.cross_entropy(head(encoder(images)), torch.arange(4))
    loss.backward()
    assert math.isfinite(float(loss.detach()))
    assert job(Experiment(data="cifar10", method="supervised"), SCALES["paper"], seed=0).training == SUPERVISED
