"""The whole command on the built-in images: protocols, hashes, JSON, and every clear sentence."""

import dataclasses
import json
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from torch import nn

from dssl.cli import main
from dssl.commands.evaluate import Arguments, run
from dssl.data import open_source, split_off
from dssl.errors import DsslError
from dssl.evaluation import Result, classifier, protocols
from dssl.evaluation.comparison import open_other
from dssl.evaluation.protocols import PROTOCOLS, Benchmark, aligned_labels, chosen_protocols, evaluate
from dssl.report import evaluation as page
from dssl.weights.load import open_weights
from tests.rejecting import rejects


def test_the_command_writes_numbers_with_their_protocol(
    run_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str], few_test_images: int
) -> None:
    folder = run_folder()
    assert run(Arguments(weights=folder, threads=1)) == 0
    output = capsys.readouterr().out
    assert "72 of 72 tensors loaded" in output
    assert "700 features computed" in output
    written = json.loads((folder / "evaluation" / "evaluation.json").read_text())
    names = [one["name"] for one in written["results"]]
    assert names == [
        "knn k=20", "knn k=200", "linear probe", "linear probe, 1% of the labels", "linear probe, 10% of the labels",
    ]  # fmt: skip
    for one in written["results"]:
        assert one["name"] in output
        about = one["protocol"]
        assert one["total"] == about["test_images"] == few_test_images
        assert about["backbone"] == "frozen: verified"
        assert about["checkpoint"]["epoch"] == 10.0
        assert len(about["checkpoint"]["sha256"]) == len(about["backbone_sha256"]) == 64
        assert about["seed"] == 0
        low, high = one["interval_95"]
        assert low < one["accuracy"] < high
    assert [one["protocol"]["train_images"] for one in written["results"]] == [300, 300, 300, 10, 30]
    assert (written["results"][0]["protocol"]["k"], written["results"][0]["protocol"]["temperature"]) == (20, 0.1)
    text = (folder / "evaluation" / "evaluation.html").read_text()
    assert "The map of the embedding" in text
    assert "Nearest neighbours" in text
    assert "http" not in text.replace("http-equiv", "")

    # features are kept: the second time nothing goes through the encoder, and every number is the same
    assert run(Arguments(weights=folder, threads=1, page=False, protocols=("knn", "probe"))) == 0
    assert "\n0 features computed" in capsys.readouterr().out
    again = json.loads((folder / "evaluation" / "evaluation.json").read_text())
    assert again["results"] == written["results"]  # what was not asked for is still known
    assert again["notes"] == ["measured earlier: linear probe, 1% of the labels, linear probe, 10% of the labels"]

    # numbers of another seed do not mix with these, and replace nothing
    assert run(Arguments(weights=folder, threads=1, page=False, protocols=("knn",), seed=1)) == 0
    aside = folder / "evaluation" / "evaluation-1.json"
    assert f"{aside}: " in capsys.readouterr().out
    assert json.loads(aside.read_text()) == again
    other = json.loads((folder / "evaluation" / "evaluation.json").read_text())
    assert [one["protocol"]["seed"] for one in other["results"]] == [1, 1]
    (folder / "evaluation" / "evaluation.json").write_text("{")
    assert run(Arguments(weights=folder, threads=1, page=False, protocols=("knn",), seed=1)) == 0
    assert (folder / "evaluation" / "evaluation-2.json").read_text() == "{"


def test_trained_protocols_all_run_and_leave_the_encoder_alone(new_benchmark: Callable[..., Benchmark]) -> None:
    benchmark = new_benchmark()
    names = ("linear-sgd", "linear-lars", "finetune-10", "finetune", "supervised")
    found = evaluate(benchmark, names)
    assert [result.total for result in found.results] == [101] * 5
    backbones = [result.protocol["backbone"] for result in found.results]
    assert backbones == ["frozen: verified"] * 2 + ["trained"] * 3
    assert [result.protocol["train_images"] for result in found.results] == [200, 200, 20, 200, 200]
    for result in found.results:
        assert result.protocol["training"]["epochs"] == 1
    assert found.results[0].protocol["training"]["batch_size"] == 200  # as many as there are


def test_what_one_protocol_trained_outlives_the_failure_of_the_next(
    new_benchmark: Callable[..., Benchmark], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark, steps = new_benchmark(folder=tmp_path / "trained"), []
    after_step = classifier._Fitting.after_step

    def counted(fitting: Any, step: int) -> None:
        steps.append((fitting.objective.freeze, step))
        after_step(fitting, step)

    monkeypatch.setattr(classifier._Fitting, "after_step", counted)

    def failing(_: Benchmark) -> None:
        raise DsslError("ENOSPC")

    with monkeypatch.context() as patch:
        patch.setitem(PROTOCOLS, "finetune", failing)
        with pytest.raises(DsslError, match="ENOSPC"):
            evaluate(benchmark, ("linear-sgd", "finetune"))
    found = evaluate(benchmark, ("linear-sgd", "finetune"))
    assert steps == [(True, 0), (False, 0)]  # the first protocol was not trained again
    assert list((tmp_path / "trained").iterdir()) == []
    assert [result.correct for result in found.results] == [
        result.correct
        for result in evaluate(dataclasses.replace(benchmark, folder=None), ("linear-sgd", "finetune")).results
    ]


def test_a_protocol_that_moves_the_backbone_is_refused(
    new_benchmark: Callable[..., Benchmark], monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(benchmark: Benchmark) -> list[Result]:
        benchmark.encoder.network.train()
        with torch.no_grad():
            benchmark.encoder.network(torch.randn(8, 3, 32, 32))  # running statistics move
        return [benchmark.result("x", torch.zeros(101), used=1, protocol={"kind": "knn", "backbone": "frozen"})]

    monkeypatch.setitem(PROTOCOLS, "knn", careless)
    with pytest.raises(DsslError, match="hash"):
        evaluate(new_benchmark(), ["knn"])


def test_of_large_images_only_thumbnails_are_kept(
    new_benchmark: Callable[..., Benchmark], memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Photos(memory):  # type: ignore[misc]
        """Knows how many of the images that it gave away are still in memory."""

        most = 0
        given: tuple[weakref.ref[Any], ...] = ()

        def image(self, index: int) -> Any:
            image = super().image(index).copy()
            self.given = (*(one for one in self.given if one() is not None), weakref.ref(image))
            self.most = max(self.most, len(self.given))
            return image

    images = np.random.default_rng(0).integers(0, 256, (40, 90, 120, 3), np.uint8)
    monkeypatch.setattr("dssl.data.loader.GROUP", images[0].nbytes)  # each fills a group, as a photo of 8 MiB does
    photos = Photos(images, [number % 2 for number in range(40)], ("a", "b"))
    benchmark = new_benchmark(train=photos, test=photos)
    found = evaluate(benchmark, ["knn"])
    html = page.html(found, benchmark, command="")
    assert photos.most <= 4  # one in use and one in the making in each of two loaders
    assert html.count("data:image/png") == 1 + page.QUERIES * (1 + page.NEAREST)


# --- clear sentences ---------------------------------------------------------------------------------------------------


IMAGES = np.zeros((6, 32, 32, 3), np.uint8)


def test_labels_missing_or_of_one_class(memory: Any) -> None:
    good = memory(IMAGES, [0, 0, 0, 1, 1, 1], ("cat", "dog"))
    with pytest.raises(DsslError, match="no labels"):
        aligned_labels(memory(IMAGES, None, None), good)
    with pytest.raises(DsslError, match="no labels"):
        aligned_labels(good, memory(IMAGES, None, None))
    with pytest.raises(DsslError, match="'cat'"):
        aligned_labels(memory(IMAGES, [0] * 6, ("cat",)), good)


def test_classes_that_differ_between_the_splits(memory: Any) -> None:
    train = memory(IMAGES, [0, 0, 1, 1, 2, 2], ("ant", "cat", "dog"))
    other = memory(IMAGES, [0, 0, 0, 1, 1, 1], ("cat", "zebra"))
    with pytest.raises(DsslError, match=r"1 of 2 classes.*'zebra'"):
        aligned_labels(train, other)
    # the same classes under other numbers are the same classes
    fewer = memory(IMAGES[:2], [0, 1], ("cat", "dog"))
    assert aligned_labels(train, fewer)[1].tolist() == [1, 2]
    empty = memory(IMAGES, [0, 0, 1, 1, 0, 0], ("ant", "cat", "dog"))
    with pytest.raises(DsslError, match="'dog'"):
        aligned_labels(empty, train)


def test_a_test_set_of_one_image_says_so(new_benchmark: Callable[..., Benchmark], memory: Any) -> None:
    benchmark = new_benchmark(test=memory(np.full((1, 32, 32, 3), 99, np.uint8), [1], ("disk", "star")), train=memory(
        np.arange(40 * 32 * 32 * 3, dtype=np.int64).reshape(40, 32, 32, 3).astype(np.uint8), [0, 1] * 20, ("disk", "star")
    ))  # fmt: skip
    found = evaluate(benchmark, ["knn", "probe"])
    assert found.quality.alignment is None
    assert "alignment not measured" in page.summary(found)
    assert any("only 1 image" in note for note in found.notes)
    assert any("class 'star'" in note for note in found.notes)
    low, high = found.results[0].interval
    assert high - low > 79
    assert found.results[0].protocol["k"] == 20
    assert found.results[1].name == "knn k=40"  # as many as there are


def folder_of_images(root: Path, layout: dict[str, int]) -> Path:
    for place, count in layout.items():
        (root / place).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            Pillow.fromarray(np.full((40, 40, 3), 20 * number, np.uint8)).save(root / place / f"{number}.png")
    return root


def test_mistakes_are_one_line(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = run_folder()

    def refused(*facts: object, **settings: Any) -> None:
        with rejects(*facts):
            run(Arguments(weights=folder, threads=1, **settings))

    refused(tmp_path / "loose", "no labels", data=str(folder_of_images(tmp_path / "loose", {"": 6})))
    refused(tmp_path / "one", "one class", data=str(folder_of_images(tmp_path / "one", {"cat": 6})))
    differing = folder_of_images(tmp_path / "differing", {"train/cat": 3, "train/dog": 3, "val/cat": 1, "val/zebra": 1})
    refused(differing, "'zebra'", data=str(differing))
    plain = folder_of_images(tmp_path / "plain", {"train": 3, "val": 3})
    refused(plain, "no labels", data=str(plain))
    single = folder_of_images(tmp_path / "single", {"train/cat": 3, "val/cat": 3})
    refused(single, "one class", "'cat'", data=str(single))
    refused("'prob'", "'probe'", protocols=("prob",))
    refused("epochs", 0, 1, epochs=0)
    refused("--protocols", "empty", protocols=())
    foreign = tmp_path / "w.pt"
    torch.save(nn.Linear(2, 2).state_dict(), foreign)
    with rejects(foreign, "--encoder"):
        run(Arguments(weights=foreign))


def test_another_folder_can_be_the_test_set(
    run_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = folder_of_images(tmp_path / "a", {"cat": 4, "dog": 4})
    test = folder_of_images(tmp_path / "b", {"dog": 3})
    folder = run_folder()
    assert (
        run(Arguments(weights=folder, data=str(train), test=str(test), protocols=("knn",), page=False, threads=1)) == 0
    )
    assert "3 images" in capsys.readouterr().out


def test_protocols_by_name() -> None:
    assert chosen_protocols(["probe", "knn"]) == ("knn", "probe")
    assert set(chosen_protocols(["all"])) == set(PROTOCOLS)
    assert chosen_protocols(["quick"])[:2] == ("knn", "probe")


@pytest.mark.parametrize("size", [0, -1, 5_000, 100_000])
def test_a_size_that_no_image_has_is_refused(size: int, run_folder: Callable[..., Path]) -> None:
    with rejects("image_size", size, 8, "4,096"):
        run(Arguments(weights=run_folder(), image_size=size))


def test_too_little_memory_is_one_line(
    run_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        torch.empty(2**60, dtype=torch.uint8)  # the real error of the real allocator

    monkeypatch.setattr("dssl.weights.encoder.forward", refuse)
    assert main(["evaluate", str(run_folder()), "--threads", "1"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.endswith(" ...")]
    assert line.startswith("dssl: out of memory")
    assert "image_size 32" in line


def test_the_snippet_of_the_docs_runs(
    run_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str], few_test_images: int
) -> None:
    docs = Path(__file__).parents[2] / "docs" / "reference" / "evaluation.md"
    found = re.search(r"```python\n(.*?)```", docs.read_text(), re.DOTALL)
    assert found is not None
    snippet = found[1].replace("runs/shapes", str(run_folder())).replace('("shapes")', '("shapes:200")')
    exec(compile(snippet, str(docs), "exec"), {})
    assert re.search(r"^linear probe [\d.]+ \([\d., ]+\) frozen: verified$", capsys.readouterr().out, re.MULTILINE)


def test_what_the_same_images_give_without_learning(
    run_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str], few_test_images: int
) -> None:
    folder = run_folder()
    settings: dict[str, Any] = {"weights": folder, "threads": 1, "page": False}
    assert run(Arguments(protocols=("knn", "probe", "probe-10"), **settings)) == 0
    output = capsys.readouterr().out
    written = json.loads((folder / "evaluation" / "evaluation.json").read_text())
    rows = {row["name"]: row for row in written["reference_rows"]}
    kinds = ("knn k=20", "knn k=200", "linear probe")
    assert list(rows) == [
        "largest class",
        *(f"{kind}, {label}" for label in ("raw pixels", "untrained") for kind in kinds),
    ]
    assert all(name in output for name in rows)
    train, test = open_source("shapes:300"), open_source("shapes", split="test")
    assert rows["largest class"]["correct"] == (test.labels == np.bincount(train.labels).argmax()).sum()

    # kNN of raw pixels, by hand
    encoder = open_weights(folder)
    mean, std = (np.array(values) for values in (encoder.normalization.mean, encoder.normalization.std))

    def pixels(source: Any) -> Any:
        images = (np.stack([source.image(index) for index in range(len(source))]) / 255 - mean) / std
        flat = images.reshape(-1, 16, 2, 16, 2, 3).mean(axis=(2, 4)).reshape(len(source), -1)
        return flat / np.linalg.norm(flat, axis=1, keepdims=True)

    similar = pixels(test) @ pixels(train).T
    nearest = np.argsort(-similar, axis=1)[:, :20]
    votes = np.zeros((len(test), 10))
    np.add.at(
        votes,
        (np.arange(len(test))[:, None], train.labels[nearest]),
        np.exp(np.take_along_axis(similar, nearest, 1) / 0.1),
    )
    assert abs(rows["knn k=20, raw pixels"]["correct"] - (votes.argmax(1) == test.labels).sum()) <= 1  # ties
    other = open_other("untrained", encoder, seed=0)
    benchmark = Benchmark.of(protocols.FeatureStore(other), train, test, seed=0)
    alone = {result.name: result.correct for result in evaluate(benchmark, ["knn", "probe"]).results}
    for name, correct in alone.items():
        assert abs(rows[f"{name}, untrained"]["correct"] - correct) <= 1

    # they are kept, and can be left out
    kept = {path: path.stat().st_mtime_ns for path in (folder / "evaluation" / "features").iterdir()}
    assert run(Arguments(protocols=("knn",), **settings)) == 0
    assert {path: path.stat().st_mtime_ns for path in (folder / "evaluation" / "features").iterdir()} == kept
    again = json.loads((folder / "evaluation" / "evaluation.json").read_text())
    assert {row["name"]: row["correct"] for row in again["reference_rows"]} == {
        name: row["correct"] for name, row in rows.items()
    }
    capsys.readouterr()
    assert run(Arguments(protocols=("knn",), references=False, out=folder / "bare", **settings)) == 0
    assert "largest class" not in capsys.readouterr().out
    assert json.loads((folder / "bare" / "evaluation.json").read_text())["reference_rows"] == []
    assert len(list((folder / "bare" / "features").iterdir())) == len(kept) - 4


def test_class_folders_without_a_test_split_get_one(
    run_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flat, folder = folder_of_images(tmp_path / "flat", {"cat": 10, "dog": 5, "fox": 2, "owl": 1}), run_folder()

    def parts(seed: int) -> tuple[set[str], set[str]]:
        splits = split_off(open_source(str(flat)), share=0.2, seed=seed)
        train, test = ({split.label_of(row) for row in range(len(split))} for split in splits)
        return train, test

    train, test = parts(0)
    assert train | test == {str(path.relative_to(flat)) for path in flat.rglob("*.png")}
    assert not train & test
    assert {name: sum(path.startswith(name) for path in test) for name in ("cat", "dog", "fox", "owl")} == {
        "cat": 2, "dog": 1, "fox": 1, "owl": 0,
    }  # fmt: skip
    assert parts(0) == (train, test)
    assert parts(1)[1] != test
    (flat / "ant").mkdir()
    Pillow.new("RGB", (40, 40)).save(flat / "ant" / "0.png")
    assert parts(0)[1] == test  # another class moves nothing

    settings: dict[str, Any] = {"weights": folder, "data": str(flat), "threads": 1, "page": False}
    assert run(Arguments(protocols=("knn",), **settings)) == 0
    output = capsys.readouterr().out
    written = json.loads((folder / "evaluation" / "evaluation.json").read_text())
    about = written["results"][0]["protocol"]
    assert (about["train_images"], about["test_images"]) == (15, 4)
    for text in (output, " ".join(written["notes"])):
        assert re.search(r"20% .* seed 0: 4 test images", text)
    # every encoder of a comparison gets the same images
    assert run(Arguments(protocols=("knn",), against=("untrained",), **settings)) == 0
    (row,) = json.loads((folder / "evaluation" / "comparison.json").read_text())["against"][0]["protocols"]
    assert {row[side]["test_fingerprint"] for side in ("protocol", "other_protocol")} == {about["test_fingerprint"]}
    assert {row[side]["train_images"] for side in ("protocol", "other_protocol")} == {15}
    # with test images given, nothing is set aside
    capsys.readouterr()
    assert run(Arguments(protocols=("knn",), test=str(flat), references=False, **settings)) == 0
    assert "set aside" not in capsys.readouterr().out
