"""Reading: a folder, a packed copy, tar and Parquet shards, against WebDataset and Hugging Face's datasets, cold and warm.

    python -m benchmarks.shards [--photos FOLDER] [--images 2000] [--members 1000000] [--rounds 5]

Everybody reads the same files and decodes them with the same function, in as many threads (ours) or worker processes (peers) as
there are cores; no views are made. Cold: the pages of all files are dropped from the page cache before (``posix_fadvise``).
Also measured: the index of ``--members`` empty members in ten synthetic shards, and the memory of a process that maps it.
"""

import os
import resource
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import images, record
from dssl.augment import BaseViewMaker
from dssl.data.packed import Format
from dssl.data.source import Shuffle

_SHARDS = 10
_BATCH = 64


class Nothing(BaseViewMaker):
    """A maker of no views: what is measured is reading and decoding."""

    names: tuple[str, ...] = ("a",)

    def allocate(self, count: int, *, pinned: bool = False) -> dict[str, Any]:
        return {"a": np.zeros((count, 1, 1, 3), np.float32)}

    def plan(self, indices: Any, *, epoch: int) -> None: ...

    def apply_many(self, plan: None, row: int, images: Any, out: Any, out_row: int) -> None: ...


def ours(text: str, shuffle: Shuffle | None) -> Iterator[int]:
    """The number of images in each batch."""
    from dssl.data import open_source
    from dssl.data.loader import Batches

    source = open_source(text)
    with Batches(
        source, Nothing(), batch_size=_BATCH, seed=0, steps=len(source) // _BATCH, threads=record.CORES, shuffle=shuffle
    ) as batches:
        for batch in batches:
            yield len(batch.indices)


def _decoded(sample: dict[str, Any]) -> int:
    """For the peers' workers: decode, and hand over no more than our threads do."""
    from dssl.data.decode import UnreadableImage, decode_contents

    content = (
        sample["image"]["bytes"] if "image" in sample else next(sample[one] for one in ("jpg", "png") if one in sample)
    )
    (image,) = decode_contents([("a sample", lambda: bytearray(content))])
    return int(not isinstance(image, UnreadableImage))


def _loader(dataset: Any, workers: int) -> Iterator[int]:
    from torch.utils.data import DataLoader

    for batch in DataLoader(dataset, batch_size=_BATCH, num_workers=workers, drop_last=True):
        yield len(batch["done"] if isinstance(batch, dict) else batch)


def webdataset(folder: Path) -> Iterator[int]:
    import webdataset as peer

    urls = sorted(map(str, folder.glob("*.tar")))
    dataset = peer.WebDataset(urls, shardshuffle=len(urls), seed=0).shuffle(1000).map(_decoded)
    return _loader(dataset, min(record.CORES, len(urls)))


def huggingface(folder: Path) -> Iterator[int]:
    import datasets as peer

    files = sorted(map(str, folder.glob("*.parquet")))
    rows = peer.load_dataset("parquet", data_files=files, split="train", streaming=True)
    workers = min(record.CORES, len(files))
    # a buffer that is filled from all files at once, as it is by default for ten of them, would leave it one worker
    each = len(files) // workers
    rows = rows.cast_column("image", peer.Image(decode=False)).shuffle(
        seed=0, buffer_size=1000, max_buffer_input_shards=each
    )
    return _loader(rows.map(lambda row: {"done": _decoded(row)}, remove_columns=["image", "label"]), workers)


def drop(place: Path) -> None:
    """Forget the pages of all files below a folder."""
    for path in place.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


Start = Callable[[], Iterator[int]]


def measure(start: Start, place: Path, *, cold: bool) -> tuple[float, float]:
    """Images a second over an epoch, and seconds to the first batch."""
    if cold:
        drop(place)
    begun = time.perf_counter()
    batches = start()
    count = next(batches)
    first = time.perf_counter() - begun
    count += sum(batches)
    return count / (time.perf_counter() - begun), first


def in_turn(contenders: dict[str, tuple[Start, Path]], rounds: int) -> list[record.Record]:
    """Everybody once in each round, cold and then warm, so that what else the machine does hits all of them."""
    found: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    missing: set[str] = set()
    for _ in range(rounds):
        for name, (start, place) in contenders.items():
            for cold in (True, False):
                if name in missing:
                    continue
                try:
                    found.setdefault((name, cold), []).append(measure(start, place, cold=cold))
                except ImportError as error:
                    print(f"{name}: {error}")
                    missing.add(name)
    return [
        {
            "reader": name, "cold": cold, "images_per_second": record.summary([rate for rate, _ in values]),
            "first_batch_seconds": record.summary([first for _, first in values]),
        }
        for (name, cold), values in found.items()
        if name not in missing
    ]  # fmt: skip


def index_cost(members: int) -> record.Record:
    """Of synthetic shards whose members have headers and no content."""
    from dssl.data import open_source

    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_CACHE_HOME"] = f"{place}/cache"
        root = Path(place) / "shards"
        root.mkdir()
        template = bytearray(tarfile.TarInfo("00000000.jpg").tobuf(tarfile.USTAR_FORMAT))
        template[148:156] = b" " * 8
        base = sum(template) - 8 * ord("0")
        for shard in range(_SHARDS):
            with (root / f"{shard:05d}.tar").open("wb") as file:
                for number in range(shard * members // _SHARDS, (shard + 1) * members // _SHARDS):
                    name = b"%08d" % number
                    template[:8], template[148:156] = name, b"%06o\0 " % (base + sum(name))
                    file.write(template)
                file.write(bytes(1024))
            os.utime(root / f"{shard:05d}.tar", ns=(10**18, 10**18))
        cpu = time.process_time()
        scan = record.seconds(lambda: open_source(str(root)))
        cpu = time.process_time() - cpu
        again = time.process_time()
        reopen = [record.seconds(lambda: open_source(str(root))) for _ in range(3)]
        again = (time.process_time() - again) / 3
        (kept,) = (Path(place) / "cache" / "dssl" / "index").iterdir()
        child = os.fork()
        if child == 0:  # what opening adds to the private memory of a process
            before = _private()
            source = open_source(str(root))
            os._exit(min(250, round((_private() - before) / 2**20 * 1e6 / len(source))))
        private = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return {
            "members": members, "scan_seconds": scan, "scan_cpu_seconds": cpu,
            "reopen_seconds": statistics.median(reopen), "reopen_cpu_seconds": again,
            "index_bytes_per_image": kept.stat().st_size / members, "private_mb_per_million": private,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }  # fmt: skip


def _private() -> int:
    """Bytes of this process that no file holds; pages of the mapped index belong to the page cache and are shared."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Anonymous:"))


def main() -> int:
    parser = record.parser(__doc__)
    record.add_photos(parser)
    parser.add_argument("--images", type=int, default=2000, help="images that everybody reads")
    parser.add_argument("--members", type=int, default=1_000_000, help="members of the synthetic shards")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    clock = record.Clock()
    from dssl.commands.data import Arguments, run

    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        os.environ["XDG_CACHE_HOME"] = f"{place}/cache"
        folder = base / "folder"
        photos = images.photo_files(options.photos, count=min(options.images, 500))
        for number in range(options.images):
            target = folder / f"class{number % 10}" / f"{number:06d}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(photos[number % len(photos)])
        each = max(_BATCH, options.images // _SHARDS)
        run(Arguments(action="pack", data=str(folder), out=base / "pixels"))
        forms: tuple[Format, ...] = ("tar", "parquet")
        for form in forms:
            run(Arguments(action="pack", data=str(folder), out=base / form, format=form, shard=each))
        contenders: dict[str, tuple[Start, Path]] = {
            "folder": (lambda: ours(str(folder), None), folder),
            "packed": (lambda: ours(f"packed:{base / 'pixels'}", None), base / "pixels"),
            "tar, --shuffle images": (lambda: ours(str(base / "tar"), None), base / "tar"),
            "tar, --shuffle shards": (lambda: ours(str(base / "tar"), "shards"), base / "tar"),
            "parquet": (lambda: ours(str(base / "parquet"), None), base / "parquet"),
            "webdataset": (lambda: webdataset(base / "tar"), base / "tar"),
            "datasets": (lambda: huggingface(base / "parquet"), base / "parquet"),
        }
        sum(ours("shapes:64", None))  # imports are not reading
        rows = in_turn(contenders, options.rounds)
    for row in rows:
        rate, first = (row[key]["median"] for key in ("images_per_second", "first_batch_seconds"))
        kind = "cold" if row["cold"] else "warm"
        print(f"{row['reader']:24} {kind}  {rate:8.0f} images/s, first batch after {first:.2f} s")
    index = index_cost(options.members)
    print(index)
    record.write("shards", clock, {"readers": rows, "index": index}, folder=options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
