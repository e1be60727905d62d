"""Views per second: ours against a Pillow composition of the paper's pipeline and against other libraries, in one run.

    python -m benchmarks.views [--photos FOLDER] [--seconds 0.5] [--rounds 5]

A view is the whole chain: crop, flip, colour jitter, gray, blur, two RandAugment operations at magnitude 9 (table
``dssl16``), and normalised float32. Four views are made of every image. "One core" is measured in CPU seconds of the
process, so that other programs on the machine do not count; the rows with several threads are measured by the wall clock.
Libraries that lack RandAugment do less work, which the table says. Only views that are made inside a window are counted.
"""

import io
import random
import time
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

from benchmarks import charts, images, our_views, pillow_views, record, view_peers
from benchmarks.view_peers import VIEWS, Contender
from dssl.cli import keep_freed_memory
from dssl.data.decode import decode

BASELINE = "Pillow composition"
Contenders = dict[str, Contender]


def measure(contender: Contender, *, seconds: float, wall: bool) -> float:
    """Views per second of this process; asserts that a contender meant for one core used no more than one."""
    record.set_threads(1)
    contender.resume()
    made, start, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds:
        made += contender.job()
    elapsed, used = time.perf_counter() - start, time.process_time() - cpu
    contender.pause()
    record.check_threads(1)
    if wall:
        return made / elapsed
    assert used <= 1.1 * elapsed, f"used {used / elapsed:.2f} cores where one was allowed"
    return made / used


def compare(setting: str, contenders: Contenders, *, seconds: float, rounds: int, wall: bool) -> list[record.Record]:
    """Every contender in turn, several times over: medians and quartiles."""
    for contender in contenders.values():
        contender.resume()
        contender.job()  # compiles and warms up
        contender.pause()
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            found[name].append(measure(contender, seconds=seconds, wall=wall))
    rows = []
    for name, contender in contenders.items():
        contender.close()
        rate = record.summary(found[name])
        ratio = rate["median"] / record.summary(found[BASELINE])["median"]
        rows.append({"setting": setting, "name": name, "rate": rate, "ratio": ratio, "note": contender.note})
        print(f"  {name:28} {rate['median']:12,.0f} views/s {ratio:8.1f}x  {contender.note}", flush=True)
    return rows


def decoding(files: list[bytes]) -> Contenders:
    """From the bytes of a file to four views; ours through the decoder that every folder is read with."""
    chain = pillow_views.chain(224)

    def pillow() -> int:
        for data in files:
            image = Image.open(io.BytesIO(data)).convert("RGB")
            for _ in range(VIEWS):
                chain(image)
        return VIEWS * len(files)

    ours = our_views.one_by_one(224, lambda row: decode(io.BytesIO(files[row])), len(files))
    return {
        BASELINE: Contender(pillow, "decodes once for four views"),
        "dssl": Contender(ours, "decodes once for four views, as a folder of images is read"),
    }


def threads_used() -> list[int]:
    return sorted({1, 2, record.CORES} - {0}) if record.CORES > 1 else [1]


def main() -> int:
    parser = record.parser(__doc__)
    record.add_photos(parser)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each")
    parser.add_argument("--images", type=int, default=64, help="photos; four times as many images of 32 pixels")
    options = parser.parse_args()
    clock = record.Clock()
    keep_freed_memory()  # as the command does
    record.set_threads(1)
    random.seed(0)
    torch.manual_seed(0)
    files = images.photo_files(options.photos, count=options.images)
    photos = images.decoded(files)
    small = np.concatenate([images.resized(photos, 32)] * 4)
    little = list(small)
    missing: dict[str, str] = {}

    def with_peers(size: int, arrays: list[np.ndarray], ours: Contenders) -> Contenders:
        found, absent = view_peers.peers(size, arrays)
        missing.update(absent)
        return {BASELINE: Contender(view_peers.pillow(size, arrays)), **ours, **found}

    def in_threads(size: int, arrays: list[np.ndarray], batch: int) -> Contenders:
        found = {BASELINE: Contender(view_peers.pillow(size, arrays), "one thread")}
        for count in threads_used():
            kernels = (
                our_views.many(32, small, threads=count)
                if size == 32
                else our_views.one_by_one(size, arrays.__getitem__, len(arrays), threads=count)
            )
            threads = f"{count} thread{'s' if count > 1 else ''}"
            found[f"dssl kernels, {threads}"] = Contender(kernels)
            found[f"dssl loader, {threads}"] = our_views.loader(size, arrays, threads=count, batch=batch)
        return found

    rows: list[record.Record] = []
    settings: tuple[tuple[str, bool, Callable[[], Contenders]], ...] = (
        ("32 px, one core", False, lambda: with_peers(32, little, {
            "dssl, image by image": Contender(our_views.one_by_one(32, little.__getitem__, len(little))),
            "dssl, array of images": Contender(our_views.many(32, small))})),
        ("224 px without decoding, one core", False, lambda: with_peers(224, photos, {
            "dssl": Contender(our_views.one_by_one(224, photos.__getitem__, len(photos)))})),
        ("224 px with decoding, one core", False, lambda: decoding(files)),
        ("32 px, threads, wall clock", True, lambda: in_threads(32, little, len(little))),
        ("224 px, threads, wall clock", True, lambda: in_threads(224, photos, len(photos) // 2)),
    )  # fmt: skip
    for setting, wall, build in settings:
        print(setting)
        rows += compare(setting, build(), seconds=options.seconds, rounds=options.rounds, wall=wall)
    content = {"images": "drawn" if options.photos is None else "photos", "missing": missing, "results": rows}
    record.write("views", clock, content, folder=options.out)
    groups = {row["setting"]: [other for other in rows if other["setting"] == row["setting"]] for row in rows}
    charts.bars(groups, options.out / "views.png", label="views per second")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
