"""The whole way with five 12-bit channels: train, stop, resume, evaluate, embed, export, look; one line for what cannot be."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dssl.cli import main
from dssl.data import Source, open_source
from dssl.data.loader import EvaluationBatches
from dssl.models import evaluating, forward
from dssl.weights import checkpoint
from dssl.weights.load import open_weights
from tests.rejecting import states
from tests.train.running import command, end_of, kill_at, run


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two kinds of stripes in five channels of different brightness."""
    folder = tmp_path_factory.mktemp("cells")
    generator = np.random.default_rng(4)
    for split, count in (("train", 48), ("val", 16)):
        for number in range(count):
            lines = np.sin(np.arange(40) * (0.3 + 0.5 * (number % 2)) + generator.uniform(0, 6))[:, None, None]
            bright = np.array([3000, 1500, 800, 2500, 400])
            values = (lines * 0.4 + 0.5 + generator.normal(0, 0.05, (40, 36, 5))) * bright
            place = folder / split / ("wide", "narrow")[number % 2]
            place.mkdir(parents=True, exist_ok=True)
            np.save(place / f"{number:02d}.npy", values.clip(0, 4095).astype(np.uint16))
    return folder


def words(cells: Path, out: Path, *extra: str) -> list[str]:
    return command("simclr", out, "--data", str(cells), "--channels", "5", "--knn-every", "1", *extra)


@pytest.fixture(scope="module")
def trained(cells: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    done = run(words(cells, out))
    assert done.returncode in (0, 3), done.stderr
    return out


def test_a_killed_run_resumes_to_the_bit_with_the_range_it_measured(cells: Path, trained: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    assert kill_at(words(cells, broken), broken, 2) < 12
    last = run(words(cells, broken))
    assert last.returncode in (0, 3), last.stderr
    assert end_of(broken) == end_of(trained)


def test_the_range_is_measured_once_and_kept(cells: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checkpoint.newest_good(trained / "checkpoints")
    assert found is not None
    header = found[1].header
    measured = open_source(str(cells), channels=5, value_range="1%,99%").value_range
    assert header["range"] == measured.plain()
    assert header["config"]["range"] is None
    assert 2000 < header["range"][0][1] < 3200
    assert 300 < header["range"][4][1] < 450
    assert len(header["normalization"]["mean"]) == 5
    monkeypatch.setattr("dssl.data.quarantine.measure_range", None)  # a finished run is opened again without measuring
    assert main(words(cells, trained)[3:]) in (0, 3)


def test_embeddings_are_those_of_the_scaled_images(cells: Path, trained: Path, tmp_path: Path) -> None:
    loaded = open_weights(trained)
    assert main(["embed", str(trained), str(cells), "--out", str(tmp_path / "e.npz")]) == 0
    assert main(["export", str(trained), "--out", str(tmp_path / "export")]) == 0
    exported = tmp_path / "export" / "encoder.safetensors"
    assert main(["embed", str(exported), str(cells), "--out", str(tmp_path / "f.npz")]) == 0
    written, again = (np.load(tmp_path / f"{name}.npz") for name in "ef")
    low, high = np.array(loaded.value_range.bounds).T  # type: ignore[union-attr]
    images = []
    for path in sorted((cells / "train").rglob("*.npy")):
        pixels = np.floor(np.clip((np.load(path) - low) * 255 / (high - low), 0, 255) + 0.5).astype(np.uint8)
        images.append(pixels)

    class Plain(Source):
        name, fingerprint = "plain", ""

        def __len__(self) -> int:
            return len(images)

        def image(self, index: int) -> np.ndarray:
            return images[index]

    with EvaluationBatches(
        Plain(), size=loaded.image_size, channels=5, batch_size=48, normalization=loaded.normalization
    ) as batches:
        (batch,) = batches
    with evaluating(loaded.network):
        expected = forward(loaded.network, batch.images).numpy()
    assert np.allclose(written["embeddings"], expected, atol=1e-5)
    assert np.array_equal(written["embeddings"], again["embeddings"])
    assert loaded.value_range.text() in (tmp_path / "export" / "README.md").read_text()  # type: ignore[union-attr]


def test_both_sides_of_a_comparison_scale_as_their_training_did(cells: Path, trained: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert main([*words(cells, other, "--range", "0,65535")[3:]]) in (0, 3)
    asked = ["--protocols", "knn", "probe", "--no-page"]
    assert main(["evaluate", str(other), *asked, "--out", str(tmp_path / "alone")]) == 0
    assert main(["evaluate", str(trained), *asked, "--against", str(other), "--out", str(tmp_path / "both")]) == 0
    alone = {one["name"]: one for one in json.loads((tmp_path / "alone" / "evaluation.json").read_text())["results"]}
    (both,) = json.loads((tmp_path / "both" / "comparison.json").read_text())["against"]
    for row in both["protocols"]:
        assert row["other_protocol"]["checkpoint"]["range"] == open_weights(other).protocol()["range"]
        assert row["before"] == alone[row["name"]]["accuracy"]


def test_evaluation_scales_as_training_did(trained: Path, tmp_path: Path) -> None:
    assert main(["evaluate", str(trained), "--protocols", "knn", "--out", str(tmp_path), "--no-page"]) == 0
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["checkpoint"]["range"] == open_weights(trained).value_range.plain()  # type: ignore[union-attr]


def test_the_page_of_views_says_what_it_shows(cells: Path, tmp_path: Path) -> None:
    shared = ["--channels", "5", "--show", "2", "--sample", "20", "--out", str(tmp_path / "v.html")]
    assert main(["views", str(cells), *shared, "--range", "0,4095"]) == 0
    page = (tmp_path / "v.html").read_text()
    assert "channels 1 to 3 of 5" in page
    assert "0 to 4095" in page
    assert "ra(2,5,dssl15)" in page


@pytest.mark.parametrize(
    ("extra", "facts"),
    [
        (["--heavy", "ra(2,5)"], ["'ra(2,5)'", "5 channels", "'ra(2,5,dssl15)'"]),
        (["--normalization", "imagenet"], ["normalization", "imagenet", "measure", "5 channels"]),
        (["--range", "4095,0"], ["range", "4095,0", "smaller"]),
        (["--channels", "4", "--range", "0,4095"], ["1.0%", "5 channels", "--channels"]),
        (["--data", "shapes:96"], ["shapes:96", "3 channels", 5]),
    ],
)  # fmt: skip
def test_one_line_before_anything_is_trained(
    cells: Path, tmp_path: Path, extra: list[str], facts: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words(cells, tmp_path / "run")[3:], *extra]) == 2
    said = capsys.readouterr().err
    states(said, *facts)
    assert "Traceback" not in said
    assert not checkpoint.steps_in(tmp_path / "run" / "checkpoints")


def test_data_show_and_pack_know_channels_and_range(
    cells: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*words: str, code: int = 0, out: Callable[..., str] = lambda read: read.out) -> str:
        assert main(["data", *words]) == code
        return out(capsys.readouterr())

    shown = said("show", str(cells), "--channels", "5", "--measure")
    assert "range " in shown
    assert len(next(line for line in shown.splitlines() if "mean" in line).split(",")) == 5
    said("pack", str(cells), "--channels", "5", "--out", str(tmp_path / "packed"), "--side", "32")
    packed = [open_source(f"packed:{tmp_path / 'packed'}", split=split, channels=5) for split in ("train", "test")]
    assert packed[0].value_range == packed[1].value_range
    refused = said("cifar10", str(tmp_path / "c"), "--channels", "5", code=2, out=lambda read: read.err)
    states(refused, "--channels", "dssl data show", "dssl data pack")
