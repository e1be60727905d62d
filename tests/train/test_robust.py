"""Robust training end to end: stability before and after, the classifier that came with the weights, resuming, the result."""

import json
import shlex
from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch import nn

from dssl import cli, config_io
from dssl.augment import KINDS, kinds_seen
from dssl.config import RunConfig
from dssl.errors import DsslError
from dssl.models import build_encoder
from dssl.recipes import recipe
from dssl.report.run_report import read_run
from dssl.run import RunFolder
from dssl.training.pretrain import train
from dssl.training.stability import head_agreement
from dssl.weights import checkpoint
from dssl.weights.load import linear_head, open_weights
from tests.train.running import cut

WIDTH, CLASSES = 256, 7
SEEN = kinds_seen([recipe("robust").standard, recipe("robust").heavy])
NOT_SEEN = [kind for kind, about in KINDS.items() if about.group != "geometry" and SEEN[kind] != "seen"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with a classifier beside it, as torchvision's files have one."""
    torch.manual_seed(0)
    tensors = build_encoder("small", image_size=16).state_dict()
    head = {"fc.weight": torch.randn(CLASSES, WIDTH), "fc.bias": torch.zeros(CLASSES)}
    path = tmp_path_factory.mktemp("weights") / "start.pth"
    torch.save({**tensors, **head}, path)
    return path


def config(weights: Path, **changes: object) -> RunConfig:
    settings = {"data": "shapes:96", "encoder": "small", "image_size": 16, "epochs": 2, "threads": 1, "knn_every": 0}
    return recipe("robust", init=str(weights), adapt={"evaluation_size": 16}, **{**settings, **changes})


def test_a_robust_run_measures_stability_and_the_old_classifier_and_resumes_exactly(
    weights: Path, tmp_path: Path
) -> None:
    end = train(config(weights), tmp_path / "run")
    records = RunFolder(tmp_path / "run").metrics()
    stabilities = [record for record in records if "stability" in record]
    assert [record["step"] for record in stabilities] == [0, end.total]
    (head,) = [record["head"] for record in records if "head" in record]
    assert set(head) == {"clean", "corrupted", "corrupted_before"}
    assert all(0 <= value <= 1 for value in head.values())

    cut(tmp_path / "run", tmp_path / "cut", step=end.total // 2)
    train(config(weights), tmp_path / "cut")
    first, second = (checkpoint.newest_good(tmp_path / name / "checkpoints") for name in ("run", "cut"))
    assert first is not None
    assert second is not None
    assert all(torch.equal(value, second[1].tensors[name]) for name, value in first[1].tensors.items())
    assert [record["head"] for record in RunFolder(tmp_path / "cut").metrics() if "head" in record] == [head]
    before, after = (fmean(record["stability"][kind] for kind in NOT_SEEN) for record in stabilities)
    assert end.progress.startswith(f"features {before:.0%} -> {after:.0%} stable")
    assert "on clean images (kNN" in end.progress
    assert read_run(tmp_path / "run").progress == read_run(tmp_path / "cut").progress == end.progress
    assert open_weights(tmp_path / "run").image_size == 16


def test_a_robust_run_that_did_not_help_says_so_in_its_end_and_in_its_report(weights: Path, tmp_path: Path) -> None:
    """At a rate at which no weight moves."""
    end = train(config(weights, optimizer={"rate": 1e-30}), tmp_path / "run")
    assert end.verdict.status == "below where it started"
    assert end.exit_code == 5
    shown = read_run(tmp_path / "run")
    assert shown.verdict.status == end.verdict.status
    assert shown.verdict.reason == end.verdict.reason


def test_a_robust_run_with_a_test_split_points_to_its_accuracy_under_corruptions(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = config_io.to_dict(config(weights, epochs=1, knn_every=1))
    (tmp_path / "robust.json").write_text(json.dumps(plain))
    cli.main(["train", "--config", str(tmp_path / "robust.json"), "--out", str(tmp_path / "run")])
    command = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("next: "))
    assert command == ["dssl", "evaluate", str(tmp_path / "run"), "--corruptions", "--against", "start"]


def test_a_head_is_the_only_linear_layer_on_the_features(weights: Path, tmp_path: Path) -> None:
    head = linear_head(weights, "small", width=WIDTH)
    assert head is not None
    tensors = torch.load(weights)
    assert torch.equal(head.weight, tensors["fc.weight"])
    assert linear_head(weights, "small", width=WIDTH + 1) is None
    torch.save({**tensors, "more.weight": tensors["fc.weight"], "more.bias": tensors["fc.bias"]}, tmp_path / "two.pth")
    assert linear_head(tmp_path / "two.pth", "small", width=WIDTH) is None


def test_agreement_is_counted_against_the_class_of_the_clean_image_before() -> None:
    head = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.eye(2))
    one, two = [1.0, 0.0], [0.0, 1.0]
    before = {"clean": torch.tensor([one, one, two, two]), "fog": torch.tensor([one, two, two, one])}
    after = {"clean": torch.tensor([one, one, one, two]), "fog": torch.tensor([one, one, two, one])}
    shares = head_agreement(head, after, before)
    assert shares == pytest.approx({"clean": 0.75, "corrupted": 0.75, "corrupted_before": 0.5})


def test_keep_head_is_a_gentler_robust_and_of_no_other_recipe(weights: Path, tmp_path: Path) -> None:
    usual, gentle = recipe("robust"), recipe("robust", keep_head=True)
    assert gentle.optimizer.rate < usual.optimizer.rate
    assert gentle.adapt is not None
    assert gentle.adapt.max_drift is not None
    target = tmp_path / "config.json"
    assert cli.main(["train", "robust", "--keep-head", "--data", "shapes:8", "--write-config", str(target)]) == 0
    assert config_io.load(target) == recipe("robust", keep_head=True, data="shapes:8")
    with pytest.raises(DsslError, match="adapt"):
        recipe("adapt", keep_head=True)
