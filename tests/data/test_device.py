"""The way to a GPU, with events and copies that the test controls: nothing is overwritten while a device may still read it."""

import contextlib
import gc

import numpy as np
import pytest
import torch

from dssl.augment import IMAGENET, ViewMaker
from dssl.data import open_source
from dssl.data.loader import Batches, CudaCopies, DeviceTransfer
from dssl.data.pipeline import default_threads
from dssl.graph import View

VIEWS = [View(name="s1", policy="standard"), View(name="h1", policy="heavy", source="s1")]
CPU = torch.device("cpu")


class Happening:
    """An event that happens when the test says so."""

    def __init__(self) -> None:
        self.happened, self.waited = False, 0

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.waited += 1
        self.happened = True


class Late:
    """Copies that read the originals only when the test lets them, as a busy GPU does."""

    def __init__(self) -> None:
        self.events: list[Happening] = []

    def copy(self, views):
        self.events.append(Happening())
        return {name: view.clone() for name, view in views.items()}, self.events[-1]


class Counting(ViewMaker):
    """Remembers its buffers, and was never asked for floats."""

    def __init__(self, **options) -> None:
        super().__init__(VIEWS, size=32, seed=1, **options)
        self.blocks: list[np.ndarray] = []

    def allocate(self, count, *, pinned=False):
        assert pinned
        made = super().allocate(count)  # without CUDA there is no pinned memory
        self.blocks.append(made.block)
        return made


def batches(maker, **options):
    return Batches(open_source("shapes:64"), maker, batch_size=16, seed=1, steps=40, **options)


def test_bytes_normalised_on_the_device_are_the_floats_of_the_kernels():
    feed = DeviceTransfer(CPU, normalization=IMAGENET, copies=Late())
    assert feed.as_bytes
    plain = DeviceTransfer(CPU, normalization=IMAGENET)
    assert not plain.as_bytes
    floats = ViewMaker(VIEWS, size=32, seed=1, normalization=IMAGENET)
    with batches(Counting(), pinned=True) as as_bytes, batches(floats) as as_floats:
        one, other = as_bytes.at(3), as_floats.at(3)
        assert one.views["h1"].dtype == torch.uint8
        placed, expected = feed.to_device(one), plain.to_device(other)
        for name in ("s1", "h1"):
            assert torch.equal(placed[name], expected[name])
            assert placed[name].is_contiguous(memory_format=torch.channels_last)
            assert expected[name].data_ptr() == other.views[name].data_ptr()  # on the CPU nothing is copied
        double = DeviceTransfer(CPU, normalization=IMAGENET, dtype=torch.float64, copies=Late()).to_device(one)
        assert torch.equal(double["s1"], expected["s1"].double())
        assert torch.equal(
            DeviceTransfer(CPU, normalization=IMAGENET, dtype=torch.float64).to_device(other)["s1"], double["s1"]
        )


def test_a_buffer_is_not_used_again_before_its_copy_has_ended():
    late, maker = Late(), Counting()
    feed = DeviceTransfer(CPU, normalization=IMAGENET, copies=late)
    with batches(maker, pinned=True, ahead=1, threads=2) as made:
        batch = made.at(0)
        read = [block for block in maker.blocks if np.shares_memory(block, batch.views["s1"].numpy())]
        assert len(read) == 1
        before = read[0].copy()
        feed.to_device(batch)
        del batch  # nobody holds it, but the copy is still under way
        for step in range(1, 20):
            batch = made.at(step)
            feed.to_device(batch)
            late.events[-1].happened = True
            assert not np.shares_memory(read[0], batch.views["s1"].numpy())
            del batch
        assert np.array_equal(read[0], before)
        allocated = len(maker.blocks)
        assert allocated <= 6
        late.events[0].happened = True
        used = False
        for step in range(20, 40):
            batch = made.at(step)
            used = used or np.shares_memory(read[0], batch.views["s1"].numpy())
            feed.to_device(batch)
            late.events[-1].happened = True
            del batch
        assert used
        assert len(maker.blocks) == allocated
        assert not any(event.waited for event in late.events)  # neither the threads nor the consumer ever waited


@pytest.mark.parametrize("way", ["close", "forget"])
def test_memory_is_not_given_back_before_the_copies_have_ended(way):
    late = Late()
    feed = DeviceTransfer(CPU, normalization=IMAGENET, copies=late)
    made = batches(Counting(), pinned=True)
    for step in range(3):
        feed.to_device(made.at(step))
    held = made.at(3)
    feed.to_device(held)
    if way == "close":
        made.close()
    else:
        del made
        gc.collect()
    assert [event.waited for event in late.events] == [1, 1, 1, 0]
    del held
    assert late.events[3].waited == 1


def test_copies_run_on_a_stream_of_their_own(monkeypatch):
    calls = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def record_event(self):
            calls.append((self.name, "records"))
            return "event"

        def wait_event(self, event):
            calls.append((self.name, "waits for", event))

    side, main = Stream("side"), Stream("main")

    @contextlib.contextmanager
    def on(stream):
        calls.append(("on", stream.name))
        yield
        calls.append(("off", stream.name))

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: calls.append(("kept for", stream.name)))
    asked = []
    original = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *a, **k: asked.append((a, k)) or original(tensor, *a, **k))
    copies, event = CudaCopies(CPU).copy({"a": torch.zeros(2, dtype=torch.uint8)})
    assert event == "event"
    assert list(copies) == ["a"]
    assert asked == [((CPU,), {"non_blocking": True})]
    order = ["on side", "side records", "off side", "main waits for event", "kept for main"]
    assert [" ".join(call) for call in calls] == order


def test_threads_are_divided_among_the_processes_of_a_node(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(64)), raising=False)
    for processes, threads in ((None, 64), ("1", 64), ("8", 8), ("7", 9), ("100", 1), ("0", 64), ("many", 64)):
        if processes is None:
            monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        else:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert default_threads() == threads
