"""The verbs for Python: the same run folders, numbers and errors as the commands."""

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import dssl
from dssl import cli
from dssl.api import TrainSettings
from dssl.config import OptimizerConfig, RunConfig
from dssl.weights import checkpoint
from tests.rejecting import rejects
from tests.train.running import cut, end_of

TINY = {
    "encoder": "small", "image_size": 16, "batch_size": 16, "threads": 1, "knn_every": 0, "precision": "fp32",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dssl.Run:
    out = tmp_path_factory.mktemp("api") / "run"
    return dssl.train("shapes", data="shapes:64", out=out, epochs=2, method={"name": "simsiam", "hidden": 32}, **TINY)


def test_the_settings_of_train_are_those_of_a_run() -> None:
    given = {"data", "schedule_from"}  # an argument of its own; what a run writes down when it is given more epochs
    assert set(TrainSettings.__annotations__) == {field.name for field in fields(RunConfig)} - given


def test_public_names_exist_and_say_what_they_are_for() -> None:
    for name in dssl.__all__:
        assert getattr(dssl, name).__doc__ or name == "__version__", name
    assert set(dssl.__all__) <= set(dir(dssl))


def arguments_in(text: str | None) -> list[str]:
    """The names that the section Args of a docstring lists, in its order."""
    _, _, section = inspect.cleandoc(text or "").partition("\nArgs:\n")
    return re.findall(r"^    \*{0,2}(\w+): ", section.partition("\n\n")[0], re.MULTILINE)


def described_fields(kind: type) -> set[str]:
    """The fields of a class, and of those that it derives from, with a docstring below them or of a class with its own."""
    described = set()
    for owner in kind.__mro__[:-1]:
        if not owner.__module__.startswith("dssl"):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                described.add(ast.unparse(field.target))
    return described | {field.name for field in fields(kind) if is_dataclass(field.type)}


def undocumented(kind: type) -> list[str]:
    """Parameters of a class and of its public methods that no docstring describes; a method may leave that to a base class."""
    if is_dataclass(kind):
        missing = [field.name for field in fields(kind) if field.init and field.name not in described_fields(kind)]
    elif issubclass(kind, Exception):
        missing = []
    else:
        missing = [
            name for name in inspect.signature(kind).parameters if name not in arguments_in(kind.__init__.__doc__)
        ]
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_") and method.__module__.startswith("dssl"):
            texts = [vars(owner)[name].__doc__ for owner in kind.__mro__ if name in vars(owner)]
            listed = [parameter for text in texts for parameter in arguments_in(text)]
            given = [parameter for parameter in inspect.signature(method).parameters if parameter != "self"]
            missing += [f"{name}({parameter})" for parameter in given if parameter not in listed]
    return missing


def test_every_parameter_of_a_public_name_is_described() -> None:
    missing = {}
    for name in dssl.__all__:
        if inspect.isclass(value := getattr(dssl, name)):
            missing[name] = undocumented(value)
        elif inspect.isfunction(value):
            assert arguments_in(value.__doc__) == list(inspect.signature(value).parameters), name
    assert not {name: names for name, names in missing.items() if names}


def test_a_run_of_python_is_a_run_of_the_command_and_the_reverse(run: dssl.Run, tmp_path: Path) -> None:
    assert run.finished
    assert run.config.method.name == "simsiam"
    assert (run.config.epochs, run.config.seed) == (2, 0)
    assert cli.main(["train", "--resume", str(run.path)]) == 0  # nothing left to do
    words = ["--encoder", "small", "--image-size", "16", "--batch-size", "16", "--threads", "1", "--knn-every", "0"]
    words += ["--precision", "fp32"]
    assert cli.main(["train", "shapes", "--data", "shapes:64", "--epochs", "2", "--out", str(tmp_path / "cli"), *words,
                     "--method.hidden", "32"]) == 0  # fmt: skip
    first, second = (checkpoint.newest_good(path / "checkpoints") for path in (run.path, tmp_path / "cli"))
    assert first is not None
    assert second is not None
    assert first[1].header == second[1].header
    assert first[1].tensors.keys() == second[1].tensors.keys()
    assert all(torch.equal(value, second[1].tensors[name]) for name, value in first[1].tensors.items())
    assert dssl.open_run(tmp_path / "cli").verdict.status == run.verdict.status
    with rejects(tmp_path / "nowhere", "config.json", "dssl train"):
        dssl.open_run(tmp_path / "nowhere")

    # what either of them began, the other ends
    steps = checkpoint.steps_in(run.path / "checkpoints")
    cut(run.path, tmp_path / "begun by python", step=steps[0])
    assert cli.main(["train", "--resume", str(tmp_path / "begun by python")]) == 0
    cut(tmp_path / "cli", tmp_path / "begun by the command", step=steps[0])
    assert dssl.train("shapes", out=tmp_path / "begun by the command").finished
    ends = {end_of(tmp_path / f"begun by {side}") for side in ("python", "the command")}
    assert ends == {first[1].header["sha256"]} == {second[1].header["sha256"]}


def test_settings_may_be_tables_or_configurations_and_a_misspelled_one_is_named(tmp_path: Path) -> None:
    out = tmp_path / "run"
    made = dssl.train(
        "shapes", data="shapes:32", out=out, epochs=1, optimizer=OptimizerConfig(rate=0.1, warmup_epochs=0.0),
        health={"stop": True}, **TINY,
    )  # fmt: skip
    assert made.config.optimizer == OptimizerConfig(rate=0.1, warmup_epochs=0.0)
    assert made.config.health.stop
    with rejects("'batchsize'", "'batch_size'"):
        dssl.train("shapes", batchsize=3)
    with rejects("optimizer.ratte", "optimizer.rate"):
        dssl.train("shapes", optimizer={"ratte": 3})
    with rejects("method.hiden", "method.hidden"):
        dssl.train("shapes", method={"name": "simsiam", "hiden": 3})
    with rejects("'shape'", "'shapes'"):
        dssl.train("shape")


def test_a_run_shows_itself_in_a_notebook(run: dssl.Run, tmp_path: Path) -> None:
    assert run.verdict.status in repr(run)
    page = run._repr_html_()
    assert page.startswith("<iframe")
    assert "&lt;html" in page
    assert run.verdict.status in page
    assert "dssl.evaluate(" in page
    assert page.count("data:image/png") + page.count("&lt;svg") >= 2  # curves and views
    stopped = dssl.Run(shutil.copytree(run.path, tmp_path / "stopped"))
    (stopped.path / "metrics.jsonl").write_text("")
    assert f"dssl train --resume {stopped.path}" in stopped.next_steps()[0]
    assert run.metrics()[-1]["step"] > 0
    assert run.encoder().training is False


def test_evaluation_is_what_the_command_writes(run: dssl.Run, tmp_path: Path) -> None:
    plain = dssl.evaluate(run, data="shapes:64", protocols=["knn"], out=tmp_path / "evaluation", threads=1)
    assert plain == json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    compared = dssl.evaluate(
        run, data="shapes:64", against="untrained", protocols=["knn"], out=tmp_path / "c", threads=1
    )
    assert compared == json.loads((tmp_path / "c" / "comparison.json").read_text())


def test_embeddings_are_those_that_the_command_writes(run: dssl.Run, tmp_path: Path) -> None:
    vectors = dssl.embed(run, "shapes:20", threads=1)
    assert cli.main(["embed", str(run.path), "shapes:20", "--out", str(tmp_path / "e.npz"), "--threads", "1"]) == 0
    written = np.load(tmp_path / "e.npz")
    assert np.array_equal(vectors.vectors, written["embeddings"])
    assert list(vectors.names) == written["names"].tolist()
    assert vectors.labels is not None
    assert len(vectors.labels) == 20


def test_export_and_views_return_where_they_wrote(run: dssl.Run, tmp_path: Path) -> None:
    folder = dssl.export(run, out=tmp_path / "export")
    (file,) = folder.glob("*.safetensors")
    assert dssl.load_encoder(file).training is False
    page = dssl.views("shapes:8", policies=["ra(2,5)"], out=tmp_path / "views.html", size=16)
    assert page.is_file()


def test_a_graph_is_parsed_from_its_name_too() -> None:
    assert dssl.ViewGraph.parse("dssl") == dssl.named_graph("dssl")


def test_the_traceback_of_a_mistake_can_be_asked_for(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "dssl", "graph", "no graph"]
    plain, traced = (
        subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
        for environment in (_environment(), {**_environment(), "DSSL_TRACEBACK": "1"})
    )
    assert plain.returncode == 2
    assert len(plain.stderr.splitlines()) == 1
    assert "Traceback" in traced.stderr


def _environment() -> dict[str, str]:

    return {name: value for name, value in os.environ.items() if name != "DSSL_TRACEBACK"}
