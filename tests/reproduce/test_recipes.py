"""Recipes: every cell is built at every scale, and one of each method x graph x data set takes a real step."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

from dssl.config import RunConfig
from dssl.errors import DsslError
from dssl.evaluation.classifier import SUPERVISED
from dssl.graph import ViewGraph, named_graph
from dssl.methods import SimSiamConfig
from dssl.models import build_encoder, feature_dim
from dssl.objective import Objective
from dssl.optim import build_optimizer, set_learning_rate
from dssl.recipes import PAPER_HEAVY
from dssl.training.prepare import build_method, normalization_of, view_maker
from dssl_reproduce import BEYOND, EQUAL_COMPUTE, STEPS, Experiment, chosen_targets, targets
from dssl_reproduce.scales import (
    HEAVY_WEIGHT,
    SCALES,
    WEIGHTED,
    config_of,
    job_of,
    jobs_of,
    with_our_rows,
)

EXPERIMENTS = list(
    dict.fromkeys(cell.experiment for target in targets().values() for cell in target.cells if cell.experiment)
)
KINDS = {(one.method, one.graph, one.data): one for one in EXPERIMENTS if one.method != "supervised"}


@pytest.mark.parametrize("scale", SCALES)
def test_every_cell_has_settings(scale: str) -> None:
    jobs = jobs_of(chosen_targets("all"), SCALES[scale], seeds=(0, 1))
    assert len(jobs) == len({one.name for one in jobs})
    # ours adds: pixels and untrained for two data sets, DSSL with another weight for three methods and two data sets,
    # SimCLR with two pairs for two data sets, two pairs with the ablation's standard views; supervised is there already
    assert len(jobs) == 2 * (61 if scale == "paper" else 61 + 4 + 6 + 2 + 1)
    for one in jobs:
        assert isinstance(named_graph(one.config.graph), ViewGraph)
        assert one.protocols[-1] in ("probe", "linear-sgd", "linear-lars", "supervised")
    # what is the same run is one job: the main table's DSSL serves the table of COCO, too
    for first, second in (("table2", "table5"), ("table1", "table2")):
        shared = {one.name for one in jobs_of([targets()[first]], SCALES[scale], seeds=(0,))}
        assert shared & {one.name for one in jobs_of([targets()[second]], SCALES[scale], seeds=(0,))}


@pytest.mark.parametrize("scale", ["cpu", "cpu-few", "cpu-1000", "hour", "hour-few"])
def test_all_cells_of_a_method_share_their_settings_and_all_methods_their_work(scale: str) -> None:
    for data in ("cifar10", "imagenet"):
        shared = set()
        for method in ("simsiam", "byol", "simclr"):
            found = [
                config_of(one, SCALES[scale], seed=0) for one in EXPERIMENTS if (one.data, one.method) == (data, method)
            ]
            for name in ("batch_size", "optimizer", "method"):
                assert len({getattr(one, name) for one in found}) == 1, name
            names = ("encoder", "limit", "epochs", "image_size", "normalization", "knn_every")
            shared |= {tuple(getattr(one, name) for name in names) for one in found}
        assert len(shared) == 1


def test_the_small_scales() -> None:
    configs = {
        name: config_of(Experiment(data="cifar10", method="simclr", graph="standard2"), SCALES[name], seed=0)
        for name in SCALES
    }
    cpu, few = configs["cpu"], configs["cpu-few"]
    assert (cpu.encoder, cpu.batch_size, cpu.optimizer.name) == ("whitened", 128, "sgd")
    assert cpu.optimizer.rate * cpu.batch_size / 256 == pytest.approx(0.1)
    assert (cpu.limit, few.limit) == (50_000, 5_000)
    for first, second in (("cpu", "cpu-few"), ("hour", "hour-few")):
        steps = [one.limit // one.batch_size * one.epochs for one in (configs[first], configs[second]) if one.limit]
        assert steps[0] == steps[1]
    # the probe has all 50,000 labels in every regime; the supervised row sees as many images as four views make
    for name in ("cpu", "cpu-few"):
        job = job_of(Experiment(data="cifar10", method="supervised"), SCALES[name], seed=0)
        assert job.labels == 50_000
        assert job.training is not None
        assert job.training.epochs == 4 * configs[name].epochs


def test_our_tables_have_baselines_and_equal_work() -> None:
    main = with_our_rows(targets()["table2"], SCALES["cpu"])
    weighted = f"w/ DSSL, heavy edges {HEAVY_WEIGHT:g}"
    assert main.rows == (
        "raw pixels", "untrained encoder", EQUAL_COMPUTE, "repro.", "w/ T^", "w/ DSSL", weighted, "reported",
        "supervised, equal compute",
    )  # fmt: skip
    cells = {(cell.row, cell.column): cell.experiment for cell in main.cells}
    for method, column in (("simclr", "CIFAR-10, SimCLR"), ("byol", "CIFAR-10, BYOL")):
        equal, dssl, chosen = (cells[row, column] for row in (EQUAL_COMPUTE, "w/ DSSL", weighted))
        assert equal == Experiment(data="cifar10", method=method, graph="standard2")
        assert dssl is not None and chosen == dataclasses.replace(dssl, graph=WEIGHTED)  # noqa: PT018
        # as many views in as many steps
        configs = [config_of(one, SCALES["cpu"], seed=0) for one in (equal, dssl, chosen) if one]
        works = {config.method.cost(named_graph(config.graph)).passes for config in configs}
        assert len(works) == (1 if method == "simclr" else 2)  # BYOL's teacher sees the standard views only
    assert [edge.weight for edge in named_graph(WEIGHTED).edges] == [1, 1, HEAVY_WEIGHT, HEAVY_WEIGHT]
    assert {(weighted, EQUAL_COMPUTE), ("w/ DSSL", EQUAL_COMPUTE)} < set(main.compare_rows)
    # every row of the first figure has DSSL, and the ablation keeps its own standard views
    assert EQUAL_COMPUTE in with_our_rows(targets()["figure1"], SCALES["cpu"]).rows
    ablation = with_our_rows(targets()["figure5"], SCALES["cpu"])
    (equal,) = [cell.experiment for cell in ablation.cells if cell.row == EQUAL_COMPUTE]
    assert equal is not None
    assert equal.standard == "standard-ablation"
    for target, scale in (("table2", "paper"), ("table4", "cpu")):
        assert with_our_rows(targets()[target], SCALES[scale]) == targets()[target]


def test_cells_of_earlier_settings_are_not_those_of_today() -> None:
    """Names of committed cells of the scale cpu as it was: the small encoder on 10,000 images."""
    names = {one.name for scale in SCALES.values() for one in jobs_of(chosen_targets("all"), scale, seeds=(0,))}
    earlier = {
        "cifar10-simsiam-dssl-heavy-seed0-d6cbdb",
        "cifar10-simclr-standard-seed0-c159e0",
        "cifar10-supervised-seed0-dcfdcd",
    }
    assert not names & earlier
    assert {name.rpartition("-")[0] for name in earlier} <= {name.rpartition("-")[0] for name in names}


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
    config = config_of(experiment, SCALES["paper"], seed=3)
    optimizer = config.optimizer
    assert (
        config.encoder, config.image_size, config.epochs, config.batch_size, optimizer.name, optimizer.rate,
        optimizer.weight_decay, optimizer.warmup_epochs,
    ) == expected  # fmt: skip
    assert (config.heavy, config.seed, config.limit) == (PAPER_HEAVY, 3, None)
    assert config.method.name == method
    linear = job_of(experiment, SCALES["paper"], seed=0).protocols[1]
    assert linear == ("linear-lars" if data == "imagenet" and method != "simclr" else "linear-sgd")


def test_the_ablation_has_its_own_standard_views_and_the_main_table_the_mixed_heavy_ones() -> None:
    for cell in targets()["figure5"].cells:
        if cell.experiment is not None:
            config = config_of(cell.experiment, SCALES["cpu"], seed=0)
            assert (config.standard, config.heavy) == ("standard-ablation", "ra(2,5)")
    heavy = [cell.experiment for cell in targets()["table2"].cells if cell.row in ("w/ T^", "w/ DSSL")]
    assert {config_of(one, SCALES["cpu"], seed=0).heavy for one in heavy if one} == {PAPER_HEAVY}


def test_a_name_is_of_the_settings_and_of_nothing_else() -> None:
    base = Experiment(data="cifar10", method="simsiam", graph="dssl", heavy="ra(2,5)")
    name = job_of(base, SCALES["cpu"], seed=0).name
    assert name == job_of(base, SCALES["cpu"], seed=0).name
    others = [
        job_of(dataclasses.replace(base, heavy="ra(2,1)"), SCALES["cpu"], seed=0),
        job_of(dataclasses.replace(base, graph="heavy2"), SCALES["cpu"], seed=0),
        job_of(base, SCALES["cpu"], seed=1),
        *(job_of(base, SCALES[other], seed=0) for other in ("cpu-few", "hour", "hour-few", "paper")),
    ]
    assert len({name, *(one.name for one in others)}) == 8
    # a graph without heavy views has no heavy policy to differ by
    plain = dataclasses.replace(base, graph="standard2")
    assert job_of(plain, SCALES["cpu"], seed=0) == job_of(dataclasses.replace(plain, heavy="ua"), SCALES["cpu"], seed=0)


def _half(config: RunConfig) -> RunConfig:
    """The paper's encoder and heads on smaller images, which two cores bear."""
    return dataclasses.replace(config, image_size=64 if config.image_size == 224 else 16, batch_size=4)


@pytest.mark.parametrize("kind", KINDS.values(), ids=["-".join(kind) for kind in KINDS])
def test_each_method_graph_and_data_set_takes_a_step(kind: Experiment) -> None:
    # ResNet-50 for every graph would take a minute: on ImageNet the small scale takes its place, but for DSSL
    scale = "paper" if kind.data == "imagenet" and kind.graph == "dssl" and kind.method == "simsiam" else "cpu"
    config = _half(config_of(kind, SCALES[scale], seed=0))
    graph = named_graph(config.graph)
    maker = view_maker(config, graph, normalization_of(config, None))
    buffers = maker.allocate(4)
    plan_ = maker.plan(np.arange(4), epoch=0)
    images = np.random.Generator(np.random.Philox(1)).integers(0, 256, (4, 40, 48, 3), dtype=np.uint8)
    for row in range(4):
        maker.apply_many(plan_, row, [images[row]], buffers, row)
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
    one = job_of(Experiment(data=data, method="supervised"), SCALES["paper"], seed=0)
    assert one.training is not None
    assert one.protocols == ("supervised",)
    assert (one.config.encoder, one.training.optimizer) == (
        ("resnet18-cifar", "sgd") if data == "cifar10" else ("resnet50", "sgd")
    )
    config = _half(job_of(Experiment(data=data, method="supervised"), SCALES["cpu"], seed=0).config)
    encoder = build_encoder(config.encoder, image_size=config.image_size)
    head = nn.Linear(feature_dim(encoder, image_size=config.image_size), 10)
    images = torch.zeros(4, 3, config.image_size, config.image_size)
    loss = nn.functional.cross_entropy(head(encoder(images)), torch.arange(4))
    loss.backward()
    assert math.isfinite(float(loss.detach()))
    assert job_of(Experiment(data="cifar10", method="supervised"), SCALES["paper"], seed=0).training == SUPERVISED


def test_our_tables_change_one_thing_at_a_time() -> None:
    scale = SCALES["cpu-few"]
    beyond = with_our_rows(BEYOND, scale)
    found = {
        (cell.row, cell.column): config_of(cell.experiment, scale, seed=0) for cell in beyond.cells if cell.experiment
    }
    equal, dssl = found[EQUAL_COMPUTE, "SimSiam"], found["DSSL", "SimSiam"]
    assert (equal.graph, equal.epochs) == ("standard2", 20)  # not the longer epochs of another row
    assert isinstance(dssl.method, SimSiamConfig)
    guarded = dataclasses.replace(dssl.method, guard=1.0)
    assert found["DSSL, guard 1", "SimSiam"] == dataclasses.replace(dssl, method=guarded)
    # the lighter weight is no addition to an addition
    assert {row for row, _ in found if "heavy edges" in row} == {f"DSSL, heavy edges {HEAVY_WEIGHT:g}"}
    longer = found["small crops, equal time", "SimCLR"]
    short = found["small crops", "SimCLR"]
    assert (longer.epochs, longer.optimizer.warmup_epochs) == (30, 1.5 * short.optimizer.warmup_epochs)
    assert len({job.name for job in jobs_of([BEYOND], scale, seeds=(0,))}) == len(jobs_of([BEYOND], scale, seeds=(0,)))
    # every cell of "all steps" is a run of the main table
    main = {job.name for job in jobs_of([targets()["table2"]], scale, seeds=(0,))}
    steps = {
        (cell.row, cell.column): job_of(cell.experiment, scale, seed=0).name for cell in STEPS.cells if cell.experiment
    }
    assert all((name in main) == (row == "all steps") for (row, _), name in steps.items())
    assert with_our_rows(STEPS, scale) == STEPS
    with pytest.raises(DsslError, match=r"0\.25 .*2 epochs.*cpu"):
        jobs_of([STEPS], SCALES["cpu"], seeds=(0,))
