"""Plugins: the example of docs/add-a-method.md from the first step to the report, and what is said when one is wrong."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from dssl import data, models, plugins
from dssl.augment import CIFAR10, IMAGENET, OPERATIONS
from dssl.cli import main
from dssl.data import open_source
from dssl.data.loader import Batches
from dssl.errors import DsslError
from dssl.methods import METHODS
from dssl.objective import Objective
from dssl.optim import build_optimizer, peak_rate
from dssl.recipes import recipe
from dssl.training.prepare import build_method, view_maker
from dssl.weights.load import imagenet_normalization, load_imagenet

PAGE = Path(__file__).parents[1] / "docs" / "add-a-method.md"
METHOD, MORE = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@contextmanager
def forgetting() -> Iterator[None]:
    """As in a process of its own: what plugins register is gone afterwards."""
    tables = (METHODS, OPERATIONS, models._registered, data._registered, plugins._loaded)
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, content in zip(tables, before, strict=True):
            table.clear()
            table.update(content)


@pytest.fixture
def own() -> Iterator[None]:
    with forgetting():
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a method, an encoder, an operation and a source that dssl does not have."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "uniformity.py").write_text(METHOD)
    (folder / "more.py").write_text(MORE)
    with forgetting():
        assert main(_train(folder)) == 0
    return folder


def _train(folder: Path, *, more: str = "more.py") -> list[str]:
    return [
        "train", "--plugin", str(folder / "uniformity.py"), "shapes", f"--plugin={folder / more}", "--method", "uniformity",
        "--encoder", "tiny", "--data", "ramps:48", "--heavy", "ra(2,5) > upside-down", "--epochs", "2", "--batch-size", "16",
        "--method.output", "24", "--precision", "fp32", "--threads", "1", "--out", str(folder / "run"),
    ]  # fmt: skip


def test_a_run_records_its_plugins(trained: Path) -> None:
    about = json.loads((trained / "run" / "config.json").read_text())
    expected = [
        {"path": str(trained / name), "sha256": hashlib.sha256((trained / name).read_bytes()).hexdigest()}
        for name in ("uniformity.py", "more.py")
    ]
    assert about["plugins"] == expected
    assert about["images"] == 48
    assert (about["config"]["encoder"], about["config"]["method"]) == (
        "tiny", {"name": "uniformity", "output": 24, "weight": 1.0},
    )  # fmt: skip


def test_a_plugin_of_other_content_does_not_resume_and_one_that_moved_does(
    trained: Path, own: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (trained / "moved.py").write_text(MORE)
    assert main(_train(trained, more="moved.py")) == 0
    plugins._loaded.clear()
    text = MORE.replace('"upside-down"', '"upside-up"')  # a name can be given once in a process
    (trained / "changed.py").write_text(text)
    assert main(_train(trained, more="changed.py")) == 2
    said = capsys.readouterr().err
    for content in (MORE, text):
        assert hashlib.sha256(content.encode()).hexdigest()[:12] in said
    assert said.splitlines()[-1].startswith("dssl: ")


def test_what_a_plugin_registered_is_there_for_other_commands(
    trained: Path, own: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--plugin", str(trained / "more.py")]
    assert main(["embed", str(trained / "run"), "ramps:5", *more, "--out", str(tmp_path / "e.npz")]) == 0
    assert np.load(tmp_path / "e.npz")["embeddings"].shape == (5, 32)
    out = tmp_path / "views.html"
    words = ["views", "ramps:4", "--policies", "upside-down", "--size", "16", "--show", "2"]
    assert main([*words, *more, "--out", str(out)]) == 0
    assert f"--plugin {trained / 'more.py'}" in out.read_text()  # of the command that makes the page again


def test_a_report_names_the_plugins_that_it_needs(
    trained: Path, own: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, files = tmp_path / "report.html", [trained / "uniformity.py", trained / "more.py"]
    words = ["report", str(trained / "run"), "--out", str(out)]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert all(f"--plugin {file}" in said for file in files)
    assert main([*words, *(f"--plugin={file}" for file in files)]) == 0
    assert "uniformity" in out.read_text()


def test_an_error_of_a_plugin_is_one_line_with_its_place(
    own: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    for content, line, problem in (
        ("import math\n\nmath.sqroot(2)\n", 3, "sqroot"),
        ("x = 1\ndef f(:\n", 2, "SyntaxError"),
        ("from dssl.augment import add_function\nadd_function('ra', len)\n", 2, "'ra'"),
    ):
        file.write_text(content)
        assert main(["views", "shapes:8", "--plugin", str(file)]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert f"{file}, line {line}: " in said
        assert problem in said
    assert main(["views", "shapes:8", "--plugin", str(tmp_path / "none.py")]) == 2
    assert str(tmp_path / "none.py") in capsys.readouterr().err
    assert main(["views", "shapes:8", "--plugin"]) == 2
    assert "--plugin" in capsys.readouterr().err
    assert main(["graph", "dssl", "--plugin", str(file)]) == 2  # a graph has no use for one
    assert "--plugin" in capsys.readouterr().err


def test_an_error_while_training_names_the_line_of_the_plugin(
    own: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(METHOD.replace("2 - 2 * F.cosine", "2 - 2 * prediction.nothing + F.cosine"))
    number = next(n for n, line in enumerate(file.read_text().splitlines(), 1) if "prediction.nothing" in line)
    words = ["train", "shapes", "--plugin", str(file), "--method", "uniformity", "--data", "shapes:32"]
    assert main([*words, "--batch-size", "16", "--precision", "fp32", "--out", str(tmp_path / "run")]) == 2
    assert f"dssl: {file}, line {number}: AttributeError" in capsys.readouterr().err


def test_an_encoder_of_a_plugin_has_no_published_weights(own: None, tmp_path: Path) -> None:
    models.register_encoder("flat", lambda image_size, channels: torch.nn.Flatten())
    assert imagenet_normalization("flat") == IMAGENET
    with pytest.raises(DsslError, match="flat"):
        load_imagenet(torch.nn.Flatten(), "flat", image_size=8, channels=3)


def test_names_that_are_taken_cannot_be_registered(own: None) -> None:
    for name in ("resnet18", "small", "mine:small"):
        with pytest.raises(DsslError, match=name):
            models.register_encoder(name, lambda image_size, channels: torch.nn.Flatten())
    for prefix in ("shapes", "packed", "a/b"):
        with pytest.raises(DsslError, match=prefix):
            data.register_source(prefix, lambda place, split, channels: open_source("shapes:8"))


def test_the_method_of_the_page_learns(own: None, tmp_path: Path) -> None:
    """Its vectors stay apart, and two views of an image agree better than at the start."""
    file = tmp_path / "uniformity.py"
    file.write_text(METHOD)
    plugins.load(file)
    steps = 100
    config = recipe("shapes", method="uniformity", image_size=16, batch_size=32, graph="dssl")
    method, rate = build_method(config), peak_rate(config.optimizer.rate, config.batch_size)
    objective, optimizer = Objective(method, config.view_graph), build_optimizer(method, config.optimizer)
    for group in optimizer.param_groups:
        group["lr"] = rate
    reports = []
    maker = view_maker(config, config.view_graph, CIFAR10)
    with Batches(open_source("shapes:400"), maker, batch_size=32, seed=0, steps=steps, threads=1) as batches:
        for batch in batches:
            optimizer.zero_grad()
            reports.append(objective.backward(batch.views))
            optimizer.step()
    assert all(float(value) > 0.8 for value in reports[-1].spread.values())
    early, late = (
        np.mean([float(report.edges["s1->s2"]) for report in part]) for part in (reports[20:40], reports[-20:])
    )
    assert late < early - 0.1
