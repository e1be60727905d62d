"""The order shard by shard: against a plain computation of a whole epoch, from any step, on any ranks, and how well it mixes."""

import io
import math
import os
import tarfile
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dssl import rng
from dssl.data import Subset, open_source
from dssl.data.loader import Batches
from dssl.data.order import Order, ShardOrder, order_of, require_shards
from dssl.errors import DsslError
from dssl.training.prepare import open_data
from tests.data.first_pixel import Maker

SIZES = [7, 1, 30, 12, 5, 9, 21, 3, 16, 4, 11]
BOUNDS = np.concatenate([[0], np.cumsum(SIZES)])


def order(bounds=BOUNDS, **options) -> ShardOrder:
    return ShardOrder(bounds, **{"batch_size": 8, "seed": 3, "window": 4, **options})


def whole_epoch(epoch: int, *, seed: int = 3, window: int = 4) -> list[int]:
    """All images of an epoch, computed without any cache or arithmetic on positions."""
    shards = rng.permutation(rng.key(seed, "shards", epoch), len(SIZES)).tolist()
    windows = math.ceil(len(shards) / window)
    everything = []
    for number in range(windows):
        chosen = shards[number * len(shards) // windows : (number + 1) * len(shards) // windows]
        images = [image for shard in chosen for image in range(BOUNDS[shard], BOUNDS[shard + 1])]
        mixed = rng.permutation(rng.key(seed, "window", epoch, number), len(images)).tolist()
        everything += [images[place] for place in mixed]
    return everything


@pytest.mark.parametrize("window", [1, 2, 4, 11, 50])
def test_the_order_is_that_of_the_plain_computation(window):
    shuffled = order(window=window)
    steps = shuffled.steps_per_epoch
    for epoch in range(3):
        plain = whole_epoch(epoch, window=window)
        assert sorted(plain) == list(range(BOUNDS[-1]))
        for place in range(steps):
            position = shuffled.at(epoch * steps + place)
            assert position.epoch == epoch
            assert position.indices.tolist() == plain[place * 8 : place * 8 + 8]
    assert whole_epoch(0) != whole_epoch(1)


def test_from_any_step_it_is_the_same():
    first = order()
    uninterrupted = [first.at(step).indices.tolist() for step in range(3 * first.steps_per_epoch)]
    for step in range(len(uninterrupted)):
        resumed = order()
        assert [resumed.at(later).indices.tolist() for later in range(step, len(uninterrupted))] == uninterrupted[step:]
    generator = np.random.default_rng(0)
    for step in generator.integers(0, len(uninterrupted), 200).tolist():  # forwards and backwards
        assert first.at(step).indices.tolist() == uninterrupted[step]


def test_no_more_than_two_windows_are_kept():
    bounds = np.arange(0, 100_001, 100)
    shuffled = order(bounds, batch_size=64, window=10)
    for step in range(shuffled.steps_per_epoch * 2):
        shuffled.at(step)
        assert sum(map(len, shuffled._mixed.values())) <= 2 * 10 * 100
    assert len(shuffled._epochs) <= 3


def entropies(shuffled: Order, shard_of: np.ndarray) -> np.ndarray:
    """Of the shards in each batch of an epoch, in bits."""
    found = []
    for step in range(shuffled.steps_per_epoch):
        share = np.bincount(shard_of[shuffled.at(step).indices]) / shuffled.batch_size
        share = share[share > 0]
        found.append(-(share * np.log2(share)).sum())
    return np.array(found)


@pytest.mark.parametrize("window", [4, 16, 64])
def test_the_entropy_of_a_batch_is_the_stated_one(window):
    """docs/reference/data.md: log2(W) - (W - 1) / (2 B ln 2) bits for a batch of B images and a window of W shards."""
    shards, size, batch = 128, 500, 256
    shard_of = np.repeat(np.arange(shards), size)
    mixed = entropies(order(np.arange(shards + 1) * size, batch_size=batch, window=window), shard_of)
    stated = math.log2(window) - (window - 1) / (2 * batch * math.log(2))
    assert abs(np.median(mixed) - stated) < 0.03
    random = entropies(Order(shards * size, batch_size=batch, seed=3), shard_of)
    assert (
        abs(np.mean(random) - (math.log2(shards) - (shards - 1) / (2 * batch * math.log(2)))) < 0.1
    )  # rougher: B is only 2 S


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    number = 0
    for shard, size in enumerate(SIZES):
        with tarfile.open(tmp_path / f"{shard:03d}.tar", "w") as archive:
            for _ in range(size):
                file = io.BytesIO()
                Image.new("RGB", (5, 5), (number, 0, 0)).save(file, "PNG")
                about = tarfile.TarInfo(f"{number}.png")
                about.size = file.tell()
                file.seek(0)
                archive.addfile(about, file)
                number += 1
        os.utime(tmp_path / f"{shard:03d}.tar", ns=(10**18, 10**18))
    return tmp_path


def seen(tars: Path, **options) -> list[tuple[int, list[int]]]:
    with Batches(
        open_source(str(tars)),
        Maker(),
        **{"batch_size": 8, "seed": 3, "steps": 2 * (sum(SIZES) // 8), "shuffle": "shards", "window": 4, **options},
    ) as batches:
        return [(batch.step, batch.views["a"][:, 0, 0, 0].int().tolist()) for batch in batches]


def test_batches_of_shards_from_any_step_on_any_threads_and_ranks(tars):
    uninterrupted = seen(tars, threads=1)
    steps = len(uninterrupted) // 2
    for epoch in range(2):
        images = [image for _, batch in uninterrupted[epoch * steps : (epoch + 1) * steps] for image in batch]
        assert images == whole_epoch(epoch)[: 8 * steps]
    for start in (1, 7, steps - 1, steps, steps + 5):
        assert seen(tars, start_step=start, threads=3) == uninterrupted[start:]
    halves = [seen(tars, rank=rank, world_size=2) for rank in range(2)]
    assert [(step, a + b) for (step, a), (_, b) in zip(*halves, strict=True)] == uninterrupted
    assert seen(tars, shuffle=None, window=None) != uninterrupted


def test_part_of_the_shards(tars):
    source = open_source(str(tars))
    chosen = np.array([0, 3, 8, 9, 40, 41, 42, 100, 118])
    part = Subset(source, chosen)
    shard_of = np.repeat(np.arange(len(SIZES)), SIZES)[chosen]
    assert np.diff(require_shards(part)).tolist() == np.bincount(shard_of, minlength=len(SIZES)).tolist()
    shuffled = order_of(part, batch_size=1, seed=0, shuffle="shards", window=1)
    shards = [int(shard_of[shuffled.at(step).indices[0]]) for step in range(len(chosen))]
    assert sorted(shards) == shard_of.tolist()
    assert len([1 for a, b in pairwise(shards) if a != b]) == len(set(shards)) - 1
    with pytest.raises(DsslError, match="--shuffle shards"):
        require_shards(Subset(source, chosen[::-1]))


def test_shards_are_read_ahead_of_their_window(tars, monkeypatch):
    told: list[int] = []
    source = open_source(str(tars))
    monkeypatch.setattr(source, "read_ahead", lambda shards: told.append(shards.tolist()))
    monkeypatch.setattr(threading.Thread, "start", lambda thread: thread.run())
    shuffled = order_of(source, batch_size=8, seed=3, shuffle="shards", window=4)
    for step in range(2 * shuffled.steps_per_epoch):
        shuffled.at(step)
    expected = [shuffled.shards_of(epoch, number).tolist() for epoch in range(3) for number in range(3)]
    assert told[0] == expected[0] + expected[1]  # the first has no predecessor
    assert told[1:] == expected[2:7]
    monkeypatch.undo()
    advised: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, *_: advised.append(os.fstat(descriptor).st_ino))
    source.read_ahead(np.array([2, 5]))
    assert advised == [(tars / name).stat().st_ino for name in ("002.tar", "005.tar")]
    (tars / "007.tar").unlink()
    source.read_ahead(np.array([7]))  # whoever needs an image of it will say so


def test_refusals(tmp_path):
    shapes = open_source("shapes:40")
    with pytest.raises(DsslError, match="--shuffle shards: shapes"):
        order_of(shapes, batch_size=4, seed=0, shuffle="shards")
    with pytest.raises(DsslError, match=r"window 3.*--shuffle shards"):
        order_of(shapes, batch_size=4, seed=0, window=3)
    with pytest.raises(DsslError, match="window 0"):
        order(window=0)
    from dssl.config import RunConfig

    with pytest.raises(DsslError, match="--shuffle shards"):
        RunConfig(window=4)
    with pytest.raises(DsslError, match="--shuffle shards"):
        open_data(RunConfig(data="shapes:40", shuffle="shards"))
