"""Accuracy under corruption: against a loop written by hand, official files, paired intervals, and the whole command."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from dssl.augment import KINDS, SEVERITIES, Normalization, corrupt_images, kinds_seen
from dssl.commands.evaluate import Arguments, run
from dssl.data.shapes import Shapes
from dssl.errors import DsslError
from dssl.evaluation.probe import fit
from dssl.evaluation.protocols import Benchmark, evaluate
from dssl.evaluation.robustness import CorruptedImages, Robustness, familiarity_of, resampled, robustness
from dssl.weights import checkpoint
from dssl.weights.encoder import Encoder, FeatureStore
from dssl.weights.load import open_weights

FEW = 24


@pytest.fixture
def small(new_benchmark: Callable[..., Benchmark]) -> Benchmark:
    return new_benchmark(Shapes(120), Shapes(FEW, split="test"))


def drawn(seed: int, *, shift: float = 0.0, images: int = 300) -> Robustness:
    """Answers that are right by chance, more often for easy images."""
    generator = np.random.default_rng(seed)
    easy = np.random.default_rng(9).random(images)
    rows = 1 + len(SEVERITIES) * len(KINDS)
    right = generator.random((rows, images)) < easy + shift
    return Robustness(right={"p": right}, images=np.arange(images), classes=4, familiarity=kinds_seen("corrupt"))


def test_it_agrees_with_a_loop_over_conditions(small: Benchmark) -> None:
    measured = robustness(small)
    encoder, labels = small.encoder, small.test_labels
    images = np.stack([small.test.image(index) for index in range(FEW)])
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in dataclasses.astuple(encoder.normalization))
    train = encoder.features(small.train).values
    near = nn.functional.normalize(train)
    probe, _ = fit(train, torch.from_numpy(small.train_labels), classes=len(small.classes), seed=0)

    def features(pixels: NDArray[np.uint8]) -> torch.Tensor:
        with torch.no_grad():
            return encoder.network((torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - mean) / std)

    conditions = [("", 0), *((kind, severity) for kind in KINDS for severity in SEVERITIES)]
    differing = 0
    for row, (kind, severity) in enumerate(conditions):
        pixels = images
        if kind:
            pixels = corrupt_images(images, kind, severity, seed=0, indices=np.arange(FEW), threads=1)
            assert measured.row(kind, severity) == row
        values = features(pixels)
        similarity, nearest = (nn.functional.normalize(values) @ near.T).topk(20)
        votes = torch.zeros(FEW, len(small.classes))
        for place in range(20):
            label = torch.from_numpy(small.train_labels)[nearest[:, place]]
            votes[torch.arange(FEW), label] += (similarity[:, place] / 0.1).exp()
        answers = {"knn k=20": votes.argmax(1), "linear probe": probe.predict(values)}
        differing += sum(
            int((measured.right[name][row] != (said.numpy() == labels)).sum()) for name, said in answers.items()
        )
    assert differing <= 2  # of 4,368: a tie that rounding decides

    # clean images are what the protocols measure, and so is the probe
    for result in evaluate(small, ["knn", "probe"]).results:
        if result.name in measured.right:
            assert int(measured.right[result.name][0].sum()) == result.correct
    assert measured.protocol["backbone"] == "frozen: verified"
    table = measured.measures("linear probe")
    right = measured.right["linear probe"]
    assert table["corrupted"].accuracy == pytest.approx(100 * right[1:76].mean())
    assert table["geometry"].accuracy == pytest.approx(100 * right[76:].mean())
    assert table["severity 2"].accuracy == pytest.approx(100 * right[2:76:5].mean())
    assert table["shot"].accuracy == pytest.approx(100 * right[6:11].mean())


def test_clean_and_corrupted_accuracy_share_one_probe_and_another_seed_has_its_own(small: Benchmark) -> None:
    evaluate(small, ("probe",))
    probe = small.fitted_probe()
    robustness(small)
    assert small.fitted_probe() is probe
    other = dataclasses.replace(small, seed=1)
    assert other.fitted_probe() is not probe
    half = small.fitted_probe(0.5)
    assert half[2] == len(small.train) // 2
    assert half is not probe


def test_images_are_the_same_for_every_encoder_and_batch_size(small: Benchmark) -> None:
    ours = robustness(small, images=7)
    torch.manual_seed(1)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5)).eval()
    store = type(small.store)(dataclasses.replace(small.encoder, network=network, origin=None, batch_size=3, threads=2))
    theirs = robustness(dataclasses.replace(small, store=store), images=7)
    assert len(ours.images) == len(set(ours.images.tolist())) == 7
    assert ours.images.tolist() == theirs.images.tolist()
    assert ours.protocol["pixels_sha256"] == theirs.protocol["pixels_sha256"]
    assert ours.protocol["backbone_sha256"] != theirs.protocol["backbone_sha256"]


def test_neighbours_are_searched_among_ten_thousand_images(memory: Any) -> None:
    images = np.random.default_rng(0).integers(0, 256, (10_030, 8, 8, 1), np.uint8)
    train = memory(images, [0, 1] * 5_015, ("a", "b"))
    test = memory(images[:40], [0, 1] * 20, ("a", "b"))
    encoder = Encoder(
        network=nn.Flatten(),
        name="raw",
        image_size=8,
        channels=1,
        normalization=Normalization((0.5,), (0.2,)),
        threads=1,
    )
    measured, again = (robustness(Benchmark.of(FeatureStore(encoder), train, test, seed=seed)) for seed in (0, 1))
    assert (measured.protocol["train_images"], measured.protocol["knn_images"]) == (10_030, 10_000)
    np.testing.assert_array_equal(measured.right["knn k=20"], again.right["knn k=20"])  # whatever the seed
    other = dataclasses.replace(again, protocol=again.protocol | {"knn_images": 10_030})
    with pytest.raises(DsslError):
        measured.against(other, "knn k=20")


def test_sets_of_conditions() -> None:
    sets = drawn(0).sets()
    assert {name: len(sets[name]) for name in ("clean", "corrupted", "noise", "blur", "weather", "digital")} == {
        "clean": 1, "corrupted": 75, "noise": 20, "blur": 20, "weather": 10, "digital": 25,
    }  # fmt: skip
    assert {name: len(sets[name]) for name in ("geometry", "seen", "similar", "unseen", "not seen", "jpeg")} == {
        "geometry": 15, "seen": 25, "similar": 40, "unseen": 10, "not seen": 50, "jpeg": 5,
    }  # fmt: skip
    assert sorted(sets["seen"] + sets["not seen"]) == sets["corrupted"]
    without = dataclasses.replace(drawn(0), familiarity=kinds_seen([]))
    assert "seen" not in without.sets()
    assert without.sets()["unseen"] == without.sets()["corrupted"]


def test_intervals_and_retention() -> None:
    measured = drawn(0)
    right, table = measured.right["p"], measured.measures("p")
    score = 100 * right[1:76].mean(axis=0)
    error = score.std() / len(score) ** 0.5  # the textbook's: conditions of an image are one draw
    low, high = table["corrupted"].interval
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.1)
    assert (high + low) / 2 == pytest.approx(score.mean(), abs=0.3 * error)
    clean, random = 100 * right[0].mean(), 25.0
    kept = table["corrupted"].retention
    assert kept == pytest.approx((score.mean() - random) / (clean - random))
    # the delta method for a ratio of paired means
    residual = (score - random) - kept * (100 * right[0] - random)
    spread = residual.std() / len(score) ** 0.5 / (clean - random)
    low, high = table["corrupted"].retention_interval
    assert (high - low) / 2 == pytest.approx(1.96 * spread, rel=0.15)
    assert (table["clean"].retention, table["clean"].retention_interval) == (1.0, (1.0, 1.0))


def test_an_encoder_that_guesses_keeps_nothing() -> None:
    guess = dataclasses.replace(drawn(0, shift=-2.0), classes=4)
    measure = guess.measures("p")["corrupted"]
    assert (measure.accuracy, measure.retention, measure.retention_interval) == (0.0, None, None)


def test_differences_are_paired_by_image() -> None:
    ours, theirs = drawn(1, shift=0.03), drawn(2)
    row = ours.against(theirs, "p")["corrupted"]
    change = 100 * (ours.right["p"][1:76].mean(axis=0) - theirs.right["p"][1:76].mean(axis=0))
    half = (row.interval[1] - row.interval[0]) / 2
    assert row.difference == pytest.approx(change.mean())
    assert half == pytest.approx(1.96 * change.std() / len(change) ** 0.5, rel=0.1)
    alone = ours.measures("p")["corrupted"].interval
    assert half < (alone[1] - alone[0]) / 4
    assert row.verdict == "better"
    assert theirs.against(ours, "p")["corrupted"].verdict == "worse"
    same = ours.against(ours, "p")["noise"]
    assert (same.difference, same.interval, same.verdict) == (0, (0, 0), "no difference shown")
    for other in (drawn(2, images=10), dataclasses.replace(theirs, protocol={"test_fingerprint": "another"})):
        with pytest.raises(DsslError):
            ours.against(other, "p")


def test_a_few_images_show_no_difference() -> None:
    ours = drawn(1)
    fewer = {count: ours.right["p"].copy() for count in (5, 6)}
    for count, right in fewer.items():
        ours.right["p"][:, :count], right[:, :count] = True, False
        row = ours.against(dataclasses.replace(ours, right={"p": right}), "p")["corrupted"]
        assert row.interval[0] > 0
        assert row.changed == count
        assert row.verdict == ("better" if count == 6 else "no difference shown")


def test_resampling_is_repeatable_and_of_whole_images() -> None:
    column = np.arange(50.0)[:, None]
    means = resampled(np.concatenate([column, 2 * column], axis=1))
    np.testing.assert_allclose(means[:, 1], 2 * means[:, 0])
    np.testing.assert_array_equal(means, resampled(np.concatenate([column, 2 * column], axis=1)))


def test_the_file_holds_every_answer() -> None:
    measured = drawn(3, images=13)
    plain = json.loads(json.dumps(measured.plain()))
    again = Robustness.of(plain)
    np.testing.assert_array_equal(again.right["p"], measured.right["p"])
    assert again.measures("p") == measured.measures("p")
    assert json.loads(json.dumps(again.plain())) == plain
    assert plain["results"]["p"]["accuracies"]["fog"][2] == pytest.approx(
        100 * measured.right["p"][1 + 8 * 5 + 2].mean()
    )


def test_what_a_run_has_seen(small: Benchmark) -> None:
    encoder = small.encoder
    config = encoder.header["config"]

    def seen(**changes: str) -> set[str]:
        header = {"config": config | {"standard": "crop", "heavy": "ra(2,5)"} | changes}
        origin = dataclasses.replace(encoder.origin, header=header)
        found = familiarity_of(dataclasses.replace(encoder, origin=origin))
        return {kind for kind, state in found.items() if state == "seen"}

    assert "rotation" in seen(graph="dssl")
    assert seen(graph="standard2") == set()  # no view of it is heavy
    assert seen(graph="standard2", standard="crop > corruption(fog,1)") == {"fog"}
    assert seen(graph="s1->n1, n1->s1; n1 = standard > noise(0.1)(image)") == {"gaussian-noise"}
    weights = dataclasses.replace(encoder, origin=dataclasses.replace(encoder.origin, header={}))
    assert set(familiarity_of(weights).values()) == {"unseen"}


def write_official(folder: Path, benchmark: Benchmark, kinds: tuple[str, ...]) -> dict[str, NDArray[np.uint8]]:
    """Files as CIFAR-10-C has them: five severities of the whole test set, one after the other."""
    folder.mkdir()
    np.save(folder / "labels.npy", np.tile(benchmark.test_labels, 5).astype(np.uint8))
    files = {}
    for number, kind in enumerate(kinds):
        images = np.random.default_rng(number).integers(0, 256, (5 * len(benchmark.test), 32, 32, 3), np.uint8)
        files[kind] = images
        np.save(folder / f"{KINDS[kind].official}.npy", images)
    return files


def test_official_files_take_the_place_of_our_own(small: Benchmark, tmp_path: Path) -> None:
    files = write_official(tmp_path / "c", small, ("gaussian-noise", "jpeg"))
    corrupted = CorruptedImages.open(f"cifar10c:{tmp_path / 'c'}", small)
    clean = np.stack([small.test.image(index) for index in (5, 2)])
    indices = np.array([5, 2])
    np.testing.assert_array_equal(corrupted.of(clean, indices, "jpeg", 4), files["jpeg"][[3 * FEW + 5, 3 * FEW + 2]])
    own = corrupt_images(clean, "fog", 4, seed=0, indices=indices, threads=1)
    np.testing.assert_array_equal(corrupted.of(clean, indices, "fog", 4), own)
    assert corrupted.of(np.zeros((2, 48, 48, 3), np.uint8), indices, "jpeg", 1).shape == (2, 48, 48, 3)
    measured, plain = robustness(small, corrupted=corrupted), robustness(small)
    assert measured.official == ("gaussian-noise", "jpeg")
    assert measured.plain()["kinds"]["jpeg"]["pixels"] == "CIFAR-10-C"
    fog = measured.row("fog", 1)
    np.testing.assert_array_equal(measured.right["linear probe"][fog], plain.right["linear probe"][fog])
    assert measured.protocol["pixels_sha256"] != plain.protocol["pixels_sha256"]


def test_files_of_other_images_are_an_error(small: Benchmark, tmp_path: Path) -> None:
    def error(text: str) -> str:
        with pytest.raises(DsslError) as caught:
            CorruptedImages.open(text, small)
        return str(caught.value)

    folder = tmp_path / "c"
    assert "cifar10c:FOLDER" in error("imagenet-c")
    assert str(folder) in error(f"cifar10c:{folder}")
    write_official(folder, small, ("jpeg",))
    np.save(folder / "jpeg_compression.npy", np.zeros((3, 32, 32, 3), np.uint8))
    assert "jpeg_compression.npy" in error(f"cifar10c:{folder}")
    (folder / "jpeg_compression.npy").write_bytes(b"nothing")
    assert "jpeg_compression.npy" in error(f"cifar10c:{folder}")
    np.save(folder / "labels.npy", np.zeros(5 * FEW, np.uint8))
    assert "labels.npy" in error(f"cifar10c:{folder}")


def test_channels_that_are_not_colours_have_fewer_kinds(memory: Any, new_benchmark: Callable[..., Benchmark]) -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 2), np.uint8)
    source = memory(images, [0, 1] * 20, ("a", "b"))
    base = new_benchmark()
    normalization = type(base.encoder.normalization)((0.5, 0.5), (0.2, 0.2))
    encoder = Encoder(
        network=nn.Flatten(), name="raw", image_size=8, channels=2, normalization=normalization, threads=1
    )
    measured = robustness(Benchmark.of(type(base.store)(encoder), source, source, seed=0))
    assert set(KINDS) - set(measured.kinds) == {kind for kind, about in KINDS.items() if about.needs_colour}
    assert len(measured.right["linear probe"]) == 1 + 5 * len(measured.kinds)


def test_the_command(
    run_folder: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    few_test_images: int,
    encoder: nn.Module,
) -> None:
    folder = run_folder(standard="standard > corrupt")
    tensors = {f"method.encoder.{name}": torch.zeros_like(value) for name, value in encoder.state_dict().items()}
    checkpoint.write(folder / "start.safetensors", open_weights(folder).header, tensors)
    settings: dict[str, Any] = {"threads": 1, "data": "shapes:120", "corruption_images": 30}
    assert run(Arguments(weights=folder, corruptions=True, against=("start",), **settings)) == 0
    output = capsys.readouterr().out
    written = json.loads((folder / "evaluation" / "robustness.json").read_text())
    measured = Robustness.of(written)
    assert len(written["images"]) == 30
    assert written["kinds"]["shot"] == {"group": "noise", "familiarity": "similar", "pixels": "dssl"}
    (other,) = written["against"]
    assert other["against"] == "start"
    assert other["protocol"]["pixels_sha256"] == written["protocol"]["pixels_sha256"]
    for name, result in written["results"].items():
        assert name in output
        row = other["differences"][name]["not seen"]
        assert row["after"] == pytest.approx(result["measures"]["not seen"]["accuracy"])
        assert row["before"] == pytest.approx(other["results"][name]["measures"]["not seen"]["accuracy"])
        assert row["interval"] == pytest.approx(measured.against(Robustness.of(other), name)["not seen"].interval)
    page = (folder / "evaluation" / "robustness.html").read_text()
    assert page.count('<figure class="picture') == 6 * 8
    assert all(kind in page for kind in KINDS)
    assert "http" not in page.replace("http-equiv", "")

    # with the official files, and without a page
    out = tmp_path / "official"
    labels = Shapes(few_test_images, split="test").labels
    (tmp_path / "c").mkdir()
    np.save(tmp_path / "c" / "labels.npy", np.tile(labels, 5))
    np.save(tmp_path / "c" / "fog.npy", np.zeros((5 * few_test_images, 32, 32, 3), np.uint8))
    run(Arguments(weights=folder, corrupted=f"cifar10c:{tmp_path / 'c'}", out=out, page=False, **settings))
    again = json.loads((out / "robustness.json").read_text())
    assert [kind for kind, about in again["kinds"].items() if about["pixels"] == "CIFAR-10-C"] == ["fog"]
    assert len(set(again["results"]["knn k=20"]["accuracies"]["fog"])) == 1  # all of them black
    assert sorted(path.name for path in out.iterdir()) == ["features", "robustness.json"]

    with pytest.raises(DsslError, match="supervised"):
        run(Arguments(weights=folder, corruptions=True, against=("supervised",), **settings))
