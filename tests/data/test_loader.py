"""The loader: the same batches from any start, on any number of threads and ranks; memory, errors and endings."""

import copy
import dataclasses
import errno
import gc
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dssl import rng
from dssl.augment import BaseViewMaker, ViewMaker
from dssl.data import Quarantine, Source, UnreadableImage, check_sample, decode, jpeg, loader, open_source, pipeline
from dssl.data.loader import Batch, Batches, EvaluationBatches
from dssl.data.order import Order, order_of
from dssl.data.quarantine import Reader
from dssl.errors import DsslError
from dssl.graph import View


class Numbers(Source):
    """Images that show their own index, of two sizes, so that both ways through the kernels are used."""

    name, fingerprint = "numbers", "n"

    def __init__(self, count: int, bad: set[int] = frozenset(), side: int = 4) -> None:
        self.count, self.bad, self.side = count, bad, side

    def __len__(self) -> int:
        return self.count

    def image(self, index: int) -> np.ndarray:
        if index in self.bad:
            raise UnreadableImage(f"/data/{index}.jpg", "bad")
        side = self.side if index % 3 else 70
        return np.full((side, side, 3), index % 256, np.uint8)

    def label_of(self, index: int) -> str:
        return f"{index}.jpg"


class Maker(BaseViewMaker):
    """View "a" shows the image, "b" what was planned: a hash of index and epoch."""

    names = ("a", "b")

    def allocate(self, count, *, pinned=False):
        return {name: np.zeros((count, 2, 3, 3), np.float32) for name in self.names}

    def plan(self, indices, *, epoch):
        return rng.uniforms(rng.key(0, "test", epoch), indices, 1)[:, 0]

    def apply_many(self, plan, row, images, out, out_row):
        for number, image in enumerate(images):
            out["a"][out_row + number] = image[0, 0]
            out["b"][out_row + number] = plan[row + number]


def make(source=None, maker=None, **options) -> Batches:
    return Batches(source or Numbers(50), maker or Maker(), **{"batch_size": 8, "seed": 5, "steps": 18, **options})


def contents(batches: Batches) -> list[tuple]:
    with batches:
        return [
            (
                batch.step,
                batch.epoch,
                tuple(batch.indices.tolist()),
                *(batch.views[name].numpy().tobytes() for name in "ab"),
            )
            for batch in batches
        ]


@pytest.fixture(scope="module")
def expected() -> list[tuple]:
    return contents(make(threads=1))


def test_an_epoch_shows_every_image_at_most_once_in_a_new_order():
    with make() as batches:
        seen = [batch.indices for batch in batches]
    assert batches.steps_per_epoch == 6
    assert len(seen) == 18
    epochs = [np.concatenate(seen[begin : begin + 6]) for begin in (0, 6, 12)]
    for epoch in epochs:
        assert len(set(epoch.tolist())) == 48
    assert not np.array_equal(epochs[0], epochs[1])
    everything = np.concatenate([Order(50, batch_size=1, seed=5).at(step).indices for step in range(50)])
    assert sorted(everything.tolist()) == list(range(50))


def test_views_belong_to_their_images(expected):
    with make() as batches:
        for batch in batches:
            assert np.array_equal(batch.views["a"][:, 0, 0, 0].numpy(), batch.indices.astype(np.float32))
            planned = rng.uniforms(rng.key(0, "test", batch.epoch), batch.indices, 1)[:, 0].astype(np.float32)
            assert np.array_equal(batch.views["b"][:, 2, 1, 2].numpy(), planned)
            assert batch.views["a"].shape == (8, 3, 2, 3)


@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_threads_change_nothing(expected, threads, ahead):
    assert contents(make(threads=threads, ahead=ahead)) == expected


@pytest.mark.parametrize("start", [1, 5, 6, 11, 17, 18])
def test_any_start_step(expected, start):
    assert contents(make(start_step=start)) == expected[start:]


def test_steps_in_any_order(expected):
    with make() as batches:
        for step in (3, 4, 3, 17, 0, 1, 2):
            batch = batches.at(step)
            assert tuple(batch.indices.tolist()) == expected[step][2]
            assert batch.views["b"].numpy().tobytes() == expected[step][4]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_global_batch(expected, world):
    parts = [contents(make(rank=rank, world_size=world)) for rank in range(world)]
    for step, whole in enumerate(expected):
        assert sum((part[step][2] for part in parts), ()) == whole[2]
        assert b"".join(part[step][4] for part in parts) == whole[4]


def test_a_held_batch_is_never_overwritten():
    with make(steps=60) as batches:
        held = [(batch.indices, batch.views["a"][3:].flatten(1)) for batch in batches]  # a part of one view is enough
    for indices, view in held:
        assert np.array_equal(view[:, 0].numpy(), indices[3:].astype(np.float32))


def test_tensors_are_channels_last_without_a_copy():
    with make() as batches:
        batch = batches.at(0)
        assert batch.views["a"].is_contiguous(memory_format=torch.channels_last)
        assert batch.views["a"].dtype == torch.float32


def test_bad_files_are_replaced_the_same_way_everywhere(tmp_path):
    def with_bad(**options):
        source = Numbers(50, {4, 17})
        return contents(make(source, quarantine=Quarantine(source, path=tmp_path / "q.txt"), **options))

    whole = with_bad(threads=1)
    assert whole == with_bad(threads=5)
    assert whole[7:] == with_bad(start_step=7)
    lines = (tmp_path / "q.txt").read_text().splitlines()
    assert sorted(lines) == ["/data/17.jpg\tbad", "/data/4.jpg\tbad"]


def test_too_many_bad_files_stop_the_run():
    with make(Numbers(50, set(range(10)))) as batches, pytest.raises(DsslError, match="of 50 images"):
        list(batches)


@pytest.mark.parametrize("index", [9, 10])
def test_an_error_in_a_thread_reaches_the_consumer_with_the_image_named(index):
    class Broken(Maker):
        def apply_many(self, plan, row, images, out, out_row):
            if any(image[0, 0, 0] == index for image in images):
                raise ZeroDivisionError("a bug")
            super().apply_many(plan, row, images, out, out_row)

    with make(maker=Broken(), steps=12) as batches:
        with pytest.raises(ZeroDivisionError) as caught:
            list(batches)
        (note,) = caught.value.__notes__
        assert f"{index}.jpg" in note
        failed = batches.steps - len(batches)
        with pytest.raises(ZeroDivisionError):
            batches.at(failed)


def test_a_thread_decodes_and_makes_its_images_in_two_calls(tmp_path, monkeypatch):
    """What needs the interpreter's lock is done once per group: the views are those of images made one by one."""
    for number in range(24):
        noise = np.random.default_rng(number).integers(0, 256, (40 + number, 60 - number, 3), np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{number:02}.jpg")
    (tmp_path / "05.jpg").write_bytes((tmp_path / "05.jpg").read_bytes()[:300])
    source = open_source(str(tmp_path))
    decoded, made, decoder = [], [], jpeg._decoder()

    class Counting(ViewMaker):
        def apply_many(self, plan, row, images, out, out_row):
            made.append(len(images))
            super().apply_many(plan, row, images, out, out_row)

    maker = Counting([View(name="a", policy="standard"), View(name="b", policy="ra(2,9)")], size=16, seed=1)
    monkeypatch.setattr(jpeg, "_decoder", lambda: lambda files: decoded.append(len(files)) or decoder(files))

    def batch(threads: int) -> Batch:
        decoded.clear(), made.clear()
        with make(source, maker, batch_size=24, steps=1, threads=threads, ahead=0) as batches:
            found = batches.at(0)
        assert batches.quarantine.reasons.keys() == {str(tmp_path / "05.jpg")}
        return found

    first = batch(2)
    assert made == [12, 12]
    assert sorted(decoded) == [1, 11, 12]  # all but the damaged one, and what takes its place
    reader = Reader(source, seed=5, quarantine=Quarantine(source))
    plan, alone = maker.plan(first.indices, epoch=0), maker.allocate(24)
    for row, index in enumerate(first.indices.tolist()):
        maker.apply_many(plan, row, [next(reader.images([index]))], alone, row)
    for name in "ab":
        assert np.array_equal(first.views[name].permute(0, 2, 3, 1).numpy(), alone[name])
    monkeypatch.setattr(loader, "GROUP", 1)
    monkeypatch.setattr(decode, "GROUP", 1)
    again = batch(3)
    assert set(made) == {1}
    assert all(torch.equal(first.views[name], again.views[name]) for name in "ab")


def test_an_error_wakes_a_consumer_that_waits():
    gate = threading.Event()

    class Failing(Numbers):
        def image(self, index):
            gate.wait(10)
            raise ZeroDivisionError

    caught = []

    def consume():
        try:
            batches.at(0)
        except ZeroDivisionError as error:
            caught.append(error)

    with make(Failing(50), threads=1) as batches:
        consumer = threading.Thread(target=consume, daemon=True)
        consumer.start()
        time.sleep(0.2)  # long enough for it to wait; where it is not, the test passes all the same
        gate.set()
        consumer.join(10)
    assert len(caught) == 1


def test_files_that_vanish_or_change_during_an_epoch(tmp_path):
    for number in range(40):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number:02}.png")
    source = open_source(str(tmp_path))
    quarantine = Quarantine(source, path=tmp_path / "quarantine.txt", max_share=0.2)
    with make(source, steps=10, ahead=0, quarantine=quarantine) as batches:
        batches.at(0)
        (tmp_path / "07.png").unlink()
        (tmp_path / "08.png").write_bytes(b"")
        (tmp_path / "09.png").write_bytes((tmp_path / "09.png").read_bytes()[:40])
        Image.new("RGB", (80, 90), (200, 0, 0)).save(tmp_path / "10.png")
        shown = {}
        for batch in (batches.at(step) for step in range(5, 10)):
            shown |= dict(zip(batch.indices.tolist(), batch.views["a"][:, 0, 0, 0].tolist(), strict=True))
    assert set(shown) == set(range(40))
    assert [index for index in range(40) if shown[index] != index] == [7, 8, 9, 10]
    assert shown[10] == 200
    listed = dict(line.split("\t") for line in (tmp_path / "quarantine.txt").read_text().splitlines())
    assert {name.rpartition("/")[2] for name in listed} == {"07.png", "08.png", "09.png"}
    assert listed[str(tmp_path / "07.png")] == os.strerror(errno.ENOENT)


def loader_threads() -> int:
    return sum(thread.name.startswith("dssl-loader") for thread in threading.enumerate())


def test_a_system_that_allows_no_more_threads_is_one_line(tmp_path):
    (tmp_path / "1.jpg").write_bytes(b"x")
    for name in ("a.tar", "b.tar"):
        with tarfile.open(tmp_path / name, "w") as shard:
            shard.add(tmp_path / "1.jpg", "1.jpg")
    shards = open_source(str(tmp_path / "a.tar"))
    running, size = threading.active_count(), threading.stack_size(1 << 46)  # more than there are addresses
    try:
        for start in (
            make,
            lambda: open_source(str(tmp_path)),
            lambda: open_source(str(tmp_path / "b.tar")),
            lambda: order_of(shards, batch_size=1, seed=0, shuffle="shards").at(0),
            lambda: check_sample(Numbers(50), seed=0, quarantine=Quarantine(Numbers(50))),
        ):
            with pytest.raises(DsslError, match="--threads"):
                start()
    finally:
        threading.stack_size(size)
    assert threading.active_count() == running
    with make() as batches:
        assert len(list(batches)) == batches.steps


def test_closing_and_forgetting_stop_the_threads():
    before = loader_threads()
    batches = make(threads=4)
    batches.at(0)
    assert before < loader_threads() <= before + 4
    batches.close()
    batches.close()
    assert loader_threads() == before
    with pytest.raises(RuntimeError, match="closed"):
        batches.at(1)
    forgotten = make(threads=4)
    forgotten.at(0)
    del forgotten
    gc.collect()
    assert loader_threads() == before


def test_closing_does_not_wait_for_the_batch():
    class Slow(Numbers):
        def image(self, index):
            time.sleep(0.2)
            return super().image(index)

    batches = make(Slow(5000), batch_size=2000, threads=2)
    batches.close()  # gives up on its threads after 5 s; even a thread's share of a batch would take longer
    assert loader_threads() == 0


def test_closing_waits_only_for_what_has_begun(monkeypatch):
    # without an end to its patience, closing would hang if it waited for batches that no thread had begun
    monkeypatch.setattr(pipeline, "_PATIENCE", None)
    begun, go = threading.Event(), threading.Event()

    class Held(Numbers):
        def image(self, index):
            begun.set()
            go.wait()
            return super().image(index)

    batches = make(Held(5000), batch_size=50, threads=1)
    begun.wait()
    closing = threading.Thread(target=batches.close, daemon=True)
    closing.start()
    go.set()
    closing.join(timeout=60)
    assert not closing.is_alive()
    assert loader_threads() == 0


def test_the_interpreter_ends_while_the_loader_works():
    code = (
        "import numpy as np\nfrom dssl.augment import BaseViewMaker\n"
        "from dssl.data import open_source\nfrom dssl.data.loader import Batches\n"
        "class Maker(BaseViewMaker):\n"
        "    names = ('s1',)\n"
        "    def allocate(self, count, *, pinned=False): return {'s1': np.zeros((count, 32, 32, 3), np.float32)}\n"
        "    def plan(self, indices, *, epoch): return None\n"
        "    def apply_many(self, plan, row, images, out, out_row): out['s1'][out_row : out_row + len(images)] = images\n"
        "batches = Batches(open_source('shapes:500'), Maker(), batch_size=100, seed=0, steps=100_000, threads=3, ahead=100)\n"
        "print(batches.at(0).views['s1'].shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "torch.Size([100, 3, 32, 32])\n"
    assert done.stderr == ""


def test_the_real_view_maker_is_the_same_on_threads_ranks_and_starts():
    from dssl.augment import CIFAR10, ViewMaker
    from dssl.graph import View

    source = open_source("shapes:64")
    views = [View(name="s1", policy="standard"), View(name="h1", policy="heavy", source="s1")]

    def run(**options):
        maker = ViewMaker(views, size=32, seed=1, normalization=CIFAR10)
        with Batches(source, maker, batch_size=32, seed=1, steps=4, **options) as batches:
            return [torch.stack([batch.views["s1"], batch.views["h1"]]) for batch in batches]

    whole = run(threads=1)
    assert all(torch.equal(a, b) for a, b in zip(whole, run(threads=3), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(whole[3:], run(start_step=3), strict=True))
    halves = zip(run(rank=0, world_size=2), run(rank=1, world_size=2), strict=True)
    assert all(torch.equal(a, torch.cat(half, 1)) for a, half in zip(whole, halves, strict=True))
    assert not torch.equal(whole[0][0], whole[0][1])


@pytest.mark.parametrize(
    ("count", "options", "expected"),
    [
        (1, {"batch_size": 1}, "one image"),
        (7, {}, "7 images.* 8"),
        (50, {"batch_size": 0}, "batch size 0"),
        (50, {"threads": 0}, "threads"),
    ],
)
def test_mistakes(count, options, expected):
    with pytest.raises(DsslError, match=expected):
        make(Numbers(count), **options)


def _moved(content: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """As Lightning brings a batch to a device: a copy of a dataclass, whose fields are set one by one."""
    if isinstance(content, torch.Tensor):
        return move(content)
    if isinstance(content, Mapping):
        return type(content)({name: _moved(value, move) for name, value in content.items()})
    if isinstance(content, list):
        return [_moved(value, move) for value in content]
    if dataclasses.is_dataclass(content) and not isinstance(content, type):
        values = {field.name: getattr(content, field.name) for field in dataclasses.fields(content)}
        result = copy.deepcopy(content, memo={id(value): value for value in values.values()})
        for name, value in values.items():
            setattr(result, name, _moved(value, move))
        return result
    return content


def test_a_trainer_can_count_batches_and_move_them() -> None:
    source = open_source("shapes:12")
    maker = ViewMaker([View(name="s1", policy="standard-cifar")], size=8, seed=0)
    with Batches(source, maker, batch_size=4, seed=0, steps=3, threads=1) as batches:
        assert len(batches) == 3
        batch = next(iter(batches))
        assert len(batches) == 2
        moved = _moved(batch, lambda tensor: tensor.double())
        assert moved.views["s1"].dtype == torch.float64
        assert torch.equal(moved.views["s1"], batch.views["s1"].double())
        assert (moved.step, moved.epoch, moved.indices.tolist()) == (batch.step, batch.epoch, batch.indices.tolist())
        assert batch.views["s1"].dtype == torch.uint8
    with EvaluationBatches(source, size=8, batch_size=4, threads=1) as plain:
        first = next(iter(plain))
        assert _moved(first, lambda tensor: tensor.double()).images.dtype == torch.float64
