"""How long the loader holds the interpreter's lock, and what that costs the thread that trains.

    python -m benchmarks.lock [--photos FOLDER] [--images 64] [--rounds 7] [--threads 8]

Three measurements of JPEG files that become four views of 224 pixels, with the loader's own code:

- Lock per image: the CPU time of the loader's work less that inside the calls that run without the lock (decoding, drawing the
  plan, making views). CPU time does not count what other programs do. What such a call costs before and after its work, with the
  lock, is measured on next to no work and counts as held, as does reading the file.
- A small operation: what ``tensor.add_(1)`` costs in the main thread beside the loader's threads, and beside as many threads in
  another process. Both share the same cores; only the lock makes a difference. On Linux also the share of the time that the main
  thread sleeps, which it does only for the lock: other programs hardly change it.
- From one thread to two: how much faster the loader gets, against the same work in plain threads without a loader.
"""

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import bars, images, our_views, record
from dssl.augment.kernels import program
from dssl.cli import keep_freed_memory
from dssl.data import Quarantine, jpeg, loader, open_source
from dssl.data.quarantine import Reader

SIZE = 224


class Stopwatch:
    """CPU seconds inside calls that run without the lock, of this thread."""

    def __init__(self) -> None:
        self.inside, self.calls, self.images = 0.0, 0, 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin = time.thread_time()
            result = function(*arguments)
            self.inside += time.thread_time() - begin
            self.calls += 1
            self.images += len(arguments[0])
            return result

        return timed


@contextmanager
def watched(watch: dict[str, Stopwatch]) -> Iterator[None]:
    """Times every call without the lock for as long as this lasts."""
    kernels, original = program.load_kernels(), jpeg._decoder
    decode = original()
    assert decode is not None, "torchvision has no JPEG decoder here"
    decoder = watch["decode"].around(decode)
    program._compiled = program.Kernels(watch["draw"].around(kernels.draw), watch["run"].around(kernels.run))
    jpeg._decoder = lambda: decoder  # type: ignore[assignment]  # a plain function for a cached one
    try:
        yield
    finally:
        program._compiled, jpeg._decoder = kernels, original


def thread_seconds(job: Callable[[], object], *, repeat: int = 300) -> float:
    """The least CPU time of a call, of three tries."""
    tries = []
    for _ in range(3):
        begin = time.thread_time()
        for _ in range(repeat):
            job()
        tries.append((time.thread_time() - begin) / repeat)
    return min(tries)


def lock_per_image(folder: Path, *, rounds: int) -> dict[str, Any]:
    """Milliseconds of lock per image, and of them those that the calls without the lock cost before and after their work."""
    source, maker = open_source(str(folder)), our_views.maker(SIZE)
    reader = Reader(source, seed=0, quarantine=Quarantine(source))
    indices, buffers = np.arange(len(source)), maker.allocate(len(source))
    calls: list[tuple[Any, ...]] = []

    def fill(epoch: int) -> None:
        content = loader._Content(0, epoch, indices, buffers)
        loader._fill(reader, maker, content, range(len(source)), lambda: False)

    fill(0)
    kernels = program.load_kernels()

    def noted(*arguments: Any) -> Any:
        calls.append(arguments)
        return kernels.run(*arguments)

    program._compiled = kernels._replace(run=noted)
    fill(0)
    program._compiled = kernels
    no_images = (calls[0][0][:0], *calls[0][1:])
    no_plan = (np.empty(0, np.int64), *plan_arguments(maker))
    dots, decoder = [bytearray(images.tiny_photo()) for _ in range(8)], jpeg._decoder()
    assert decoder is not None, "torchvision has no JPEG decoder here"
    entry = {
        "run": thread_seconds(lambda: kernels.run(*no_images)),
        "draw": thread_seconds(lambda: kernels.draw(*no_plan)),
        "decode": thread_seconds(lambda: decoder(dots)) / len(dots),  # per image
    }
    held, share = [], []
    for round_ in range(rounds):
        watch = {name: Stopwatch() for name in entry}
        with watched(watch):
            begin = time.thread_time()
            fill(round_)
            used = time.thread_time() - begin
        assert watch["decode"].images == watch["run"].images == len(source), "some files were decoded with the lock"
        around = entry["decode"] * len(source) + sum(entry[name] * watch[name].calls for name in ("run", "draw"))
        outside = used - sum(one.inside for one in watch.values())
        held.append(1e3 * (outside + around) / len(source))
        share.append((outside + around) / used)
    return {"milliseconds": record.summary(held), "share": record.summary(share),
            "entry_microseconds": {name: 1e6 * seconds for name, seconds in entry.items()}}  # fmt: skip


def plan_arguments(maker: Any) -> tuple[Any, ...]:
    """What the drawing kernel gets, for no images."""
    program_ = maker._program
    return (np.zeros(len(program_.names), np.uint64), program_.script, program_.numbers, program_.operations,
            program_.bounds, program_.offsets, program_.size, np.zeros((0, len(program_.offsets) - 1), np.int32),
            np.zeros((0, 1)))  # fmt: skip


def batches(folder: Path, *, threads: int) -> loader.Batches:
    source = open_source(str(folder))
    return loader.Batches(source, our_views.maker(SIZE), batch_size=len(source), seed=0, steps=10**9, threads=threads)


class Consumer:
    """Takes batches as fast as the loader makes them, in a thread, so that its threads never rest once this is there."""

    def __init__(self, folder: Path, *, threads: int) -> None:
        self.made, self.over, started = batches(folder, threads=threads), False, threading.Event()
        self.pool = ThreadPoolExecutor(1)
        self.taken = self.pool.submit(self.take, started)
        started.wait()

    def take(self, started: threading.Event) -> None:
        for _ in self.made:
            started.set()  # the kernels are loaded and every thread has work
            if self.over:
                return

    def close(self) -> None:
        self.over = True
        self.taken.result()
        self.made.close()
        self.pool.shutdown()


def small_operation(*, seconds: float = 1.0) -> float:
    """Microseconds of the wall clock that an operation on one number takes."""
    number, count = torch.zeros(()), 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for _ in range(100):
            number.add_(1)
        count += 100
    return 1e6 * (time.perf_counter() - begin) / count


_OTHER = """
import sys; from pathlib import Path; from benchmarks import lock; from dssl.cli import keep_freed_memory
keep_freed_memory()
consumer = lock.Consumer(Path(sys.argv[1]), threads=int(sys.argv[2]))
print("ready", flush=True); sys.stdin.read(); consumer.close()
"""


def awake() -> float:
    """Seconds for which this thread has run or waited for a core so far; NaN where the system does not count them."""
    try:
        ran, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except OSError:
        return float("nan")
    return 1e-9 * (int(ran) + int(queued))


def beside(folder: Path, *, threads: int, rounds: int) -> dict[str, Any]:
    """The small operation alone, beside the loader's threads, and beside those of another process; taking turns."""
    found: dict[str, list[float]] = {"alone": [], "same process": [], "another process": []}
    asleep = []
    for _ in range(rounds):
        found["alone"].append(small_operation())
        consumer = Consumer(folder, threads=threads)
        begin, awake_before = time.perf_counter(), awake()
        found["same process"].append(small_operation())
        asleep.append(1 - (awake() - awake_before) / (time.perf_counter() - begin))
        consumer.close()
        other = subprocess.Popen([sys.executable, "-c", _OTHER, str(folder), str(threads)], stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent)  # fmt: skip
        assert other.stdout is not None
        other.stdout.readline()
        found["another process"].append(small_operation())
        other.communicate()
    ratios = [a / b for a, b in zip(found["same process"], found["another process"], strict=True)]
    return {"microseconds": {name: record.summary(values) for name, values in found.items()},
            "ratio": record.summary(ratios), "asleep": record.summary(asleep)}  # fmt: skip


def gains(folder: Path, *, rounds: int) -> dict[str, Any]:
    """How much two threads gain over one: the loader, and plain threads with batches of their own."""
    source, maker = open_source(str(folder)), our_views.maker(SIZE)

    def plain(threads: int) -> float:
        own = [maker.allocate(1) for _ in range(threads)]

        def work(number: int) -> None:
            for index in range(len(source)):
                plan = maker.plan(np.array([index]), epoch=number)
                maker.apply_many(plan, 0, [source.image(index)], own[number], 0)

        with ThreadPoolExecutor(threads) as pool:
            return threads / record.seconds(lambda: list(pool.map(work, range(threads))))

    def loaded(threads: int) -> float:
        with batches(folder, threads=threads) as made:
            made.at(0)
            return 4 / record.seconds(lambda: [made.at(step) for step in range(1, 5)])

    found: dict[str, list[float]] = {"kernels": [], "loader": []}
    for _ in range(rounds):
        found["kernels"].append(plain(2) / plain(1))
        found["loader"].append(loaded(2) / loaded(1))
    ratios = [a / b for a, b in zip(found["loader"], found["kernels"], strict=True)]
    return {**{name: record.summary(values) for name, values in found.items()}, "ratio": record.summary(ratios)}


def main() -> int:
    parser = record.parser(__doc__)
    record.add_photos(parser)
    parser.add_argument("--images", type=int, default=64, help="photos")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each")
    parser.add_argument("--threads", type=int, default=8, help="of the loader, beside a small operation")
    options = parser.parse_args()
    clock = record.Clock()
    keep_freed_memory()  # as the command does
    record.set_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for number, file in enumerate(images.photo_files(options.photos, count=options.images)):
            (folder / f"{number:05}.jpg").write_bytes(file)
        held = lock_per_image(folder, rounds=options.rounds)
        operation = beside(folder, threads=options.threads, rounds=options.rounds)
        gain = gains(folder, rounds=options.rounds)
    content = {"images": "drawn" if options.photos is None else "photos", "threads": options.threads,
               "lock": held, "operation": operation, "gain": gain}  # fmt: skip
    for bar in bars.bars({"lock": content}):
        print(f"{bar.claim}: {bar.measured}, {'holds' if bar.holds else 'DOES NOT HOLD'}")
    print(f"share of the loader's CPU time: {held['share']['median']:.1%}")
    print(f"main thread asleep beside the loader: {operation['asleep']['median']:.1%}")
    for name, value in operation["microseconds"].items():
        print(f"small operation, {name}: {value['median']:.1f} us")
    print(
        f"second thread: loader {gain['loader']['median']:.2f} times, plain threads {gain['kernels']['median']:.2f} times"
    )
    record.write("lock", clock, content, folder=options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
