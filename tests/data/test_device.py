"""The way to a GPU, with events and copies that the test controls: nothing is freed while a device may still read it."""

import contextlib
import weakref

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

    happened = False

    def query(self) -> bool:
        return self.happened


class Late:
    """Copies that read the originals only when the test lets them, as a busy GPU does."""

    def __init__(self) -> None:
        self.events: list[Happening] = []

    def copy(self, views):
        self.events.append(Happening())
        return {name: view.clone() for name, view in views.items()}, self.events[-1]


class Pinned(ViewMaker):
    """Is asked for pinned memory, which there is not without CUDA."""

    def allocate(self, count, *, pinned=False):
        assert pinned
        return super().allocate(count)


def batches(maker, **options):
    return Batches(open_source("shapes:64"), maker, batch_size=16, seed=1, steps=40, **options)


def test_bytes_normalised_on_the_device_are_the_floats_of_the_kernels():
    feed = DeviceTransfer(CPU, normalization=IMAGENET, copies=Late())
    assert feed.as_bytes
    plain = DeviceTransfer(CPU, normalization=IMAGENET)
    assert not plain.as_bytes
    floats = ViewMaker(VIEWS, size=32, seed=1, normalization=IMAGENET)
    with batches(Pinned(VIEWS, size=32, seed=1), pinned=True) as as_bytes, batches(floats) as as_floats:
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


def test_the_memory_of_a_batch_is_held_until_its_copy_has_ended():
    late = Late()
    feed = DeviceTransfer(CPU, normalization=IMAGENET, copies=late)
    with batches(Pinned(VIEWS, size=32, seed=1), pinned=True) as made:
        gone = []
        for step in range(3):
            batch = made.at(step)
            feed.to_device(batch)
            gone.append(weakref.ref(batch.views["s1"]))
            del batch
        assert all(view() is not None for view in gone)  # nobody else holds them, but the copies are still under way
        late.events[1].happened = True
        feed.to_device(made.at(3))
        assert [view() is None for view in gone] == [False, True, False]


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
