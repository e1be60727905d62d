"""Features that are kept: taken again where they are those of the same images, encoder and crop, and else computed."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from dssl.cli import main
from dssl.data.shapes import Shapes
from dssl.evaluation.protocols import PROTOCOLS, Benchmark
from dssl.weights.encoder import FeatureStore


@pytest.mark.parametrize(("side", "ratio", "cropped"), [(32, 1.0, 0), (40, 0.875, 101), (None, 0.875, 50)])
def test_the_protocol_records_the_crop_that_was_made(
    new_benchmark: Callable[..., Benchmark], memory: Any, side: int | None, ratio: float, cropped: int
) -> None:
    """Images of the encoder's size are taken whole; None: every second image is larger."""
    shapes = Shapes(101, split="test")
    images = [np.array(Pillow.fromarray(shapes.image(i)).resize(((side or 32 + 8 * (i % 2)),) * 2)) for i in range(101)]
    test = memory(np.zeros((101, 1), np.uint8), list(shapes.labels), shapes.classes)
    test.images, test.fingerprint = images, f"shapes of {side}"
    benchmark = new_benchmark(test=test)
    result = PROTOCOLS["knn"](benchmark)[0]
    assert (result.protocol["crop_ratio"], result.protocol["cropped_test_images"]) == (ratio, cropped)
    # features that are kept say the same
    store = FeatureStore(benchmark.encoder, folder=benchmark.store.folder)
    assert store.of(test, allow_unreadable=False).cropped == cropped
    assert store.computed == 0


def test_damaged_or_foreign_features_are_computed_again(new_benchmark: Callable[..., Benchmark]) -> None:
    benchmark = new_benchmark()
    first = benchmark.store.of(benchmark.test, allow_unreadable=False)
    (path,) = benchmark.store.folder.glob("*.safetensors")  # type: ignore[union-attr]
    fresh = FeatureStore(benchmark.encoder, folder=benchmark.store.folder)
    assert torch.equal(fresh.of(benchmark.test, allow_unreadable=False).values, first.values)
    assert fresh.computed == 0
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    repaired = FeatureStore(benchmark.encoder, folder=benchmark.store.folder)
    assert torch.equal(repaired.of(benchmark.test, allow_unreadable=False).values, first.values)
    assert repaired.computed == 101
    other = FeatureStore(dataclasses.replace(benchmark.encoder, image_size=16), folder=benchmark.store.folder)
    other.of(benchmark.test, allow_unreadable=False)
    assert other.computed == 101  # another size is another feature


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize(
    ("layout", "against"),
    [
        ("lists", ("--against", "untrained")),
        ("folders", ("--against", "untrained")),
        ("folders without a cache", ()),
    ],
)
def test_with_kept_features_no_image_is_opened_and_each_is_looked_at_once(
    run_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    against: tuple[str, ...],
) -> None:
    """What the kernel was asked, of a second evaluation."""
    if layout == "folders without a cache":
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for split, count in (("train", 40), ("test", 20)):
        shapes, lines = Shapes(count, split="train" if split == "train" else "test"), []
        for index in range(count):
            path = tmp_path / "data" / split / "ab"[index % 2] / f"{split}-{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Pillow.fromarray(shapes.image(index)).save(path)
            lines.append(f"{path}\t{'ab'[index % 2]}\n")
        (tmp_path / f"{split}.txt").write_text("".join(lines))
    for folder in (tmp_path / "data").rglob("**/"):
        os.utime(folder, (0, 0))  # long ago, so that an index may be kept
    words = ["evaluate", str(run_folder()), "--data"]
    lists = [str(tmp_path / "train.txt"), "--test", str(tmp_path / "test.txt")]
    words += lists if layout == "lists" else [str(tmp_path / "data")]
    words += ["--no-page", "--threads", "1", "--device", "cpu", *against]
    assert main(words) == 0
    trace = tmp_path / "calls"
    strace = ["strace", "-f", "--seccomp-bpf", "-qq", "-e", "trace=%file", "-o", trace]
    subprocess.run([*strace, sys.executable, "-m", "dssl", *words], check=True, capture_output=True)
    calls = re.findall(r"(\w+)\([^\n]*?([\w-]+\.png)\"", trace.read_text())
    assert len({name for _, name in calls}) == 60
    assert {call for call, _ in calls} <= {"stat", "newfstatat", "statx"}
    assert max(Counter(name for _, name in calls).values()) == 1
