"""The speedrun: its random patches against a reference written by hand, and its page from its lines."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import speedrun


def test_random_patches_equal_a_loop_over_patches() -> None:
    torch.manual_seed(0)
    images = torch.randn(6, 3, 12, 12)
    size, threshold = 6, 0.25
    network = speedrun.RandomPatches(images, count=5, size=size, threshold=threshold)
    filters = network.filters.double().numpy().reshape(5, -1)
    offset = network.offset.double().numpy().ravel()
    responses = np.empty((6, 5, 7, 7))
    for image, y, x in np.ndindex(6, 7, 7):
        patch = images[image, :, y : y + size, x : x + size].double().numpy().ravel()
        patch = (patch - patch.mean()) / np.sqrt(patch.var() + network.floor)
        responses[image, :, y, x] = filters @ patch - offset
    halves = []
    for sign in (1, -1):
        beyond = np.maximum(sign * responses - threshold, 0)
        parts = [
            beyond[:, :, rows, columns].mean(axis=(2, 3))
            for rows in (slice(4), slice(3, 7))
            for columns in (slice(4), slice(3, 7))
        ]
        halves.append(np.stack(parts, axis=2).reshape(6, -1))
    np.testing.assert_allclose(network(images).numpy(), np.concatenate(halves, axis=1), atol=1e-5)


def test_the_page_has_the_mean_of_the_seeds_and_the_slowest_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = {
        "epochs": 3,
        "dimensions": 4096,
        "date": "2026-01-01",
        "commit": "abc",
        "cores": 2,
        "processor": "P",
        "row": "one",
    }
    rows = [about | {"minutes": minutes, "accuracy": accuracy} for minutes, accuracy in ((4.0, 70.0), (4.5, 71.0))]
    monkeypatch.setattr(speedrun, "ROWS", tmp_path / "rows.jsonl")
    monkeypatch.setattr(speedrun, "PAGE", tmp_path / "page.md")
    speedrun.ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    speedrun.write_page()
    (line,) = [line for line in speedrun.PAGE.read_text().splitlines() if line.startswith("| one")]
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "one",
        "3",
        "4.5",
        "A",
        "4,096",
        "70.5 ± 0.7",
        "2",
        "2026-01-01",
        "abc",
    ]
