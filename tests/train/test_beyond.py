"""What goes beyond the paper, as whole runs: methods that cannot collapse and every addition to the graph, resumed exactly."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dssl.cli import main
from dssl.config import CheckpointConfig, HealthConfig, OptimizerConfig, RunConfig
from dssl.errors import DsslError
from dssl.graph import named_graph
from dssl.methods import METHODS, RelationConfig
from dssl.methods.lejepa import LeJEPA
from dssl.models import register_encoder
from dssl.objective import Objective
from dssl.report.pictures import draw_gallery
from dssl.training.prepare import build_method, check_sizes
from dssl.training.pretrain import train
from dssl.weights import checkpoint
from dssl.weights.load import load_encoder
from tests.rejecting import rejects, states
from tests.test_plugins import forgetting
from tests.train.running import cut, end_of
from tests.train.test_resume import metrics_of

HEADS: dict[str, dict[str, Any]] = {"simsiam": {"hidden": 16, "output": 16, "bottleneck": 8}, "simclr": {"output": 8}}
HEADS |= {name: {"hidden": 16, "output": 8} for name in ("byol", "vicreg", "barlowtwins", "moco", "lejepa")}
HEADS |= {name: {"hidden": 16, "output": 8, "prototypes": 8} for name in ("swav", "dino")}
STEPS = 8


def tiny(method: str, *, graph: str = "dssl", settings: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    """Eight steps on 64 images, each of them saved."""
    small: dict[str, Any] = {"encoder": "whitened", "image_size": 16}
    return RunConfig(
        data="shapes:64", method=METHODS[method](**HEADS[method], **(settings or {})), graph=graph, epochs=2, batch_size=16,
        precision="fp32", knn_every=0, optimizer=OptimizerConfig(warmup_epochs=0), health=HealthConfig(every=2),
        checkpoint=CheckpointConfig(every_minutes=1e-9, keep=STEPS), **small | changes,
    )  # fmt: skip


def end(out: Path) -> checkpoint.Checkpoint:
    return checkpoint.read(checkpoint.path_at(out / "checkpoints", STEPS))


def assert_resumed_exactly(config: RunConfig, folder: Path) -> Path:
    """A run that lost all it did after step 3 ends with the bytes of the run that lost nothing."""
    whole, broken = folder / "whole", folder / "broken"
    train(config, whole)
    cut(whole, broken, step=3)
    train(config, broken)
    assert end_of(broken) == end_of(whole)
    assert metrics_of(broken) == metrics_of(whole)
    return whole


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("vicreg", {}), ("vicreg", {"regularize": "all"}), ("barlowtwins", {}), ("simsiam", {"guard": 1.0}),
        ("byol", {"guard": 1.0}),
    ],
)  # fmt: skip
def test_a_regularised_run_resumes_and_logs_its_terms(method: str, settings: dict[str, Any], tmp_path: Path) -> None:
    out = assert_resumed_exactly(tiny(method, settings=settings), tmp_path)
    last = metrics_of(out)[-1]
    every = "guard" in settings or settings.get("regularize") == "all"
    expected = {"s1", "s2", "h1", "h2"} if every else {"s1", "s2"} if method == "vicreg" else set()
    assert set(last["regularisers"]) == expected
    assert set(last["spread"]) == {"s1", "s2", "h1", "h2"}


@pytest.mark.parametrize(
    ("method", "changes", "kept"),
    [
        ("lejepa", {}, "clock._extra_state"),
        ("swav", {"settings": {"final_target_temperature": 0.1}}, "prototypes.weight"),
        ("dino", {}, "center"),
        (
            "moco",
            {"graph": "s1<->s2, h1->s1[relation]", "relation": RelationConfig(queue=24)},  # two batches do not fill it
            "relation.queue",
        ),
    ],
)
def test_what_a_method_has_besides_weights_resumes(
    method: str, changes: dict[str, Any], kept: str, tmp_path: Path
) -> None:
    out = assert_resumed_exactly(tiny(method, **changes), tmp_path)
    assert end(out).tensors[f"method.{kept}"].any()


def test_the_slices_of_lejepa_are_of_the_seed_and_the_step() -> None:
    z = torch.zeros(2, 8)
    first, other = (build_method(tiny("lejepa", seed=seed)) for seed in (0, 1))
    assert isinstance(first, LeJEPA)
    assert isinstance(other, LeJEPA)
    before = first.slices(z)
    assert torch.equal(before, first.slices(z))
    assert not torch.equal(before, other.slices(z))
    first.after_step(0, 8)
    assert not torch.equal(before, first.slices(z))


def test_relation_settings_need_a_relation() -> None:
    with pytest.raises(DsslError, match=r"h1->s1\[relation\]"):
        tiny("simclr", relation=RelationConfig(queue=24))


def test_guard_is_a_flag_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    assert main(["train", "shapes", "--method", "byol", "--guard", "0.5", "--write-config", str(file)]) == 0
    assert json.loads(file.read_text())["method"]["guard"] == 0.5
    assert main(["train", "shapes", "--method", "vicreg", "--guard", "1"]) == 2
    states(capsys.readouterr().err, "--guard", "vicreg", "simsiam", "byol")


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--method", "simclr", "--method.predictor", "per-kind"], ["--method.predictor", "simclr", "byol", "moco"]),
        (["--method", "byol", "--method.projector-layers=3"], ["byol", "projector_layers", "simsiam", "swav", "dino"]),
        (["--method", "byol", "--method.guards", "1"], ["--method.guards"]),
    ],
)
def test_a_setting_of_another_method_is_refused_with_the_methods_that_have_it(
    words: list[str], facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "shapes", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    states(line, *facts)


def test_a_guard_below_zero_is_refused() -> None:
    for method in ("simsiam", "byol"):
        with pytest.raises(DsslError, match=r"method\.guard is -1"):
            METHODS[method](guard=-1.0)


@pytest.mark.parametrize(
    ("method", "graph"), [("simsiam", "s1<->s2, h1->mean(s1,s2):0..1, h2->mean(s1,s2):0..1"), ("byol", "fastsiam")]
)
def test_means_and_moving_weights_resume(method: str, graph: str, tmp_path: Path) -> None:
    out = assert_resumed_exactly(tiny(method, graph=graph), tmp_path)
    assert set(metrics_of(out)[-1]["edges"]) == {edge.name for edge in named_graph(graph).edges}


def test_a_weight_moves_from_the_first_step_to_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = Objective.backward

    def backward(self: Objective, views: Any, **options: Any) -> Any:
        seen.append(options["progress"])
        return original(self, views, **options)

    monkeypatch.setattr(Objective, "backward", backward)
    train(tiny("simclr", graph="s1<->s2, h1->s1:0..1"), tmp_path)
    assert seen == [step / (STEPS - 1) for step in range(STEPS)]


CROPS = "s1<->s2, l1->mean(s1,s2), l1 = crop(0.05,0.3)@16(image)"


def test_views_of_another_size_resume_and_are_drawn(tmp_path: Path) -> None:
    out = assert_resumed_exactly(tiny("simsiam", graph=CROPS, image_size=20), tmp_path)
    assert set(metrics_of(out)[-1]["spread"]) == {"s1", "s2", "l1"}
    train(tiny("simclr", graph=CROPS, image_size=20), tmp_path / "drawn", gallery=draw_gallery)
    assert (tmp_path / "drawn" / "views.png").is_file()


@pytest.mark.parametrize(
    ("encoder", "size"),
    [("vit_b_16", 16), ("alexnet", 31)],
)
def test_an_encoder_that_cannot_take_a_size_is_refused_before_anything_is_written(
    encoder: str, size: int, tmp_path: Path
) -> None:
    graph = CROPS.replace("@16", f"@{size}")
    with rejects("view l1", f"{size} px", encoder, "pooling"):
        train(tiny("simclr", graph=graph, encoder=encoder, image_size=64), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_encoder_whose_features_depend_on_the_size_is_refused() -> None:
    flat = nn.Sequential(nn.Conv2d(3, 2, 3, stride=2), nn.Flatten())
    with rejects("view l1", "16 px", 98, 450, "32 px", "pooling"):
        check_sizes(tiny("simclr", graph=CROPS, encoder="small", image_size=32), flat, 450)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of another encoder, which knows other pixels."""
    out = tmp_path_factory.mktemp("teacher") / "run"
    train(tiny("simclr", encoder="small", normalization="imagenet"), out)
    return out


DISTILLED = "s1<->s2, s1->teacher(s1), h1->teacher(s1)"


def test_the_operations_of_a_step_follow_sizes_moving_weights_and_teachers(teacher: Path) -> None:
    def operations(graph: str, **changes: Any) -> int:
        config = tiny("simsiam", graph=graph, image_size=32, **changes)
        objective, made = Objective(build_method(config), config.view_graph), config.view_graph
        sizes = {view.name: made.size(view.name) or 32 for view in made.views}
        with FlopCounterMode(display=False) as counter:
            objective.backward({name: torch.rand(4, 3, size, size) for name, size in sizes.items()}, progress=0.5)
        return counter.get_total_flops()

    pair, four = operations("s1<->s2"), operations("s1<->s2, h1->s1, h2->s2")
    assert operations("s1<->s2, h1->s1:0..1, h2->s2:0..1") == four
    small = operations("s1<->s2, l1->s1, l2->s2, l1 = crop(0.05,0.3)@16(image), l2 = crop(0.05,0.3)@16(image)")
    assert pair < small < pair + 0.4 * (four - pair)  # a quarter of the pixels, and the heads
    assert pair < operations("s1<->s2, s1->teacher(s1)", teacher=teacher) < four


def test_distillation_resumes_and_refuses_another_teacher(teacher: Path, tmp_path: Path) -> None:
    config = tiny("simsiam", graph=DISTILLED, teacher=teacher)
    out = assert_resumed_exactly(config, tmp_path)
    tensors = end(out).tensors
    assert tensors["method.teacher.map.weight"].shape[1] == 16
    assert not any(name.startswith("method.teacher.") and "map" not in name for name in tensors)
    assert load_encoder(out) is not None  # and the student is read as any other
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    checkpoint.path_at(other / "checkpoints", STEPS).unlink()
    shutil.rmtree(tmp_path / "whole")
    moved = tmp_path / "teacher"
    shutil.copytree(teacher, moved)
    train(tiny("simclr", graph="s1->teacher(s1)", teacher=moved), tmp_path / "pure")
    shutil.rmtree(moved)
    other.rename(moved)
    with pytest.raises(DsslError, match="SHA-256"):
        train(tiny("simclr", graph="s1->teacher(s1)", teacher=moved), tmp_path / "pure")


def test_a_teacher_is_refused_where_it_cannot_teach(teacher: Path, tmp_path: Path) -> None:
    problem = r"s1->teacher\(s1\): .*--teacher"
    with pytest.raises(DsslError, match=problem):
        tiny("simsiam", graph="s1->teacher(s1)")
    with pytest.raises(DsslError, match="teacher"):
        tiny("simsiam", teacher=teacher)
    unknown = tmp_path / "unknown.safetensors"
    save_file({"weight": torch.zeros(2, 2)}, unknown)
    problem = "--teacher-encoder resnet50"
    with pytest.raises(DsslError, match=problem):
        train(tiny("simsiam", graph=DISTILLED, teacher=unknown), tmp_path / "run")
    with pytest.raises(DsslError, match=r"3 channels.* 1"):
        train(tiny("simsiam", graph=DISTILLED, teacher=teacher, channels=1), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("layers", "facts"),
    [
        ([nn.Flatten(), nn.Linear(3 * 20 * 20, 8)], ["teacher", "3 x 16 x 16"]),
        ([nn.Conv2d(3, 2, 2, stride=2), nn.Flatten()], ["teacher", 128, "16 px", 200, "20 px", "pooling"]),
    ],
)
def test_a_teacher_that_cannot_take_a_size_is_refused_before_anything_is_written(
    layers: list[nn.Module], facts: list[object], tmp_path: Path
) -> None:
    torch.save(nn.Sequential(*layers).state_dict(), tmp_path / "teacher.pth")
    graph = "s1->teacher(s1), l1->teacher(l1), l1 = crop(0.05,0.3)@16(image)"
    config = tiny("simsiam", graph=graph, image_size=20, teacher=tmp_path / "teacher.pth", teacher_encoder="held")
    with forgetting():
        register_encoder("held", lambda image_size, channels: nn.Sequential(*layers))
        with rejects(*facts):
            train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["simsiam", "byol"])
def test_a_predictor_for_each_kind_resumes_and_is_refused_for_one_kind(method: str, tmp_path: Path) -> None:
    settings = {"predictor": "per-kind"}
    tensors = end(assert_resumed_exactly(tiny(method, settings=settings), tmp_path)).tensors
    assert tensors["method.heavy_predictor.0.weight"].shape == tensors["method.predictor.0.weight"].shape
    with pytest.raises(DsslError, match="predictor=per-kind"):
        train(tiny(method, graph="standard", settings=settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()
