"""Views per second: ours against a Pillow composition of the paper's pipeline and against other libraries, in one run.

    python -m benchmarks.views [--photos FOLDER] [--seconds 0.5] [--rounds 5]

A view is the whole chain: crop, flip, colour jitter, gray, blur, two RandAugment operations at magnitude 9 (table
``dssl16``), and normalised float32. Four views are made of every image. "One core" is measured in CPU seconds of the
process, so that other programs on the machine do not count; the rows with several threads are measured by the wall clock.
Libraries that lack RandAugment do less work, which the table says.
"""

import io
import random
import time
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torchvision import io as torchvision_io

from benchmarks import charts, images, our_views, pillow_views, record, view_peers
from benchmarks.view_peers import VIEWS, Job

BASELINE = "Pillow composition"
Jobs = dict[str, tuple[Job, str]]


def measure(job: Job, *, seconds: float, wall: bool) -> float:
    """Views per second of this process; asserts that a job meant for one core used no more than one."""
    record.set_threads(1)
    made, start, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds:
        made += job()
    elapsed, used = time.perf_counter() - start, time.process_time() - cpu
    record.check_threads(1)
    if wall:
        return made / elapsed
    assert used <= 1.1 * elapsed, f"used {used / elapsed:.2f} cores where one was allowed"
    return made / used


def compare(setting: str, jobs: Jobs, *, seconds: float, rounds: int, wall: bool) -> list[record.Record]:
    """Every job in turn, several times over: medians and quartiles."""
    for job, _ in jobs.values():
        job()  # compiles and warms up
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, (job, _) in jobs.items():
            found[name].append(measure(job, seconds=seconds, wall=wall))
    rows = []
    for name, (_, note) in jobs.items():
        rate = record.summary(found[name])
        ratio = rate["median"] / record.summary(found[BASELINE])["median"]
        rows.append({"setting": setting, "name": name, "rate": rate, "ratio": ratio, "note": note})
        print(f"  {name:28} {rate['median']:12,.0f} views/s {ratio:8.1f}x  {note}", flush=True)
    return rows


def decoding(files: list[bytes]) -> Jobs:
    """From the bytes of a file to four views."""
    chain = pillow_views.chain(224)
    tensors = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in files]

    def pillow() -> int:
        for data in files:
            image = Image.open(io.BytesIO(data)).convert("RGB")
            for _ in range(VIEWS):
                chain(image)
        return VIEWS * len(files)

    def decode(row: int) -> np.ndarray:
        rgb = torchvision_io.decode_jpeg(tensors[row], mode=torchvision_io.ImageReadMode.RGB)
        return np.ascontiguousarray(rgb.permute(1, 2, 0).numpy())

    return {
        BASELINE: (pillow, "decodes with Pillow, once for four views"),
        "dssl": (our_views.one_by_one(224, decode, len(files)), "decodes with torchvision, once for four views"),
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
    record.set_threads(1)
    random.seed(0)
    torch.manual_seed(0)
    files = images.photo_files(options.photos, count=options.images)
    photos = images.decoded(files)
    small = np.concatenate([images.resized(photos, 32)] * 4)
    little = list(small)
    missing: dict[str, str] = {}

    def with_peers(size: int, arrays: list[np.ndarray], ours: Jobs) -> Jobs:
        found, absent = view_peers.peers(size, arrays)
        missing.update(absent)
        return {BASELINE: (view_peers.pillow(size, arrays), ""), **ours, **found}

    def in_threads(size: int, arrays: list[np.ndarray], batch: int) -> Jobs:
        jobs: Jobs = {BASELINE: (view_peers.pillow(size, arrays), "one thread")}
        for count in threads_used():
            kernels = (
                our_views.many(32, small, threads=count)
                if size == 32
                else our_views.one_by_one(size, arrays.__getitem__, len(arrays), threads=count)
            )
            jobs[f"dssl kernels, {count} thread{'s' if count > 1 else ''}"] = (kernels, "")
            loader = our_views.loader(size, arrays, threads=count, batch=batch)
            jobs[f"dssl loader, {count} thread{'s' if count > 1 else ''}"] = (
                loader,
                "whole batches from the real loader",
            )
        return jobs

    rows: list[record.Record] = []
    settings: tuple[tuple[str, bool, Callable[[], Jobs]], ...] = (
        ("32 px, one core", False, lambda: with_peers(32, little, {
            "dssl, image by image": (our_views.one_by_one(32, little.__getitem__, len(little)), ""),
            "dssl, array of images": (our_views.many(32, small), "")})),
        ("224 px without decoding, one core", False, lambda: with_peers(224, photos, {
            "dssl": (our_views.one_by_one(224, photos.__getitem__, len(photos)), "")})),
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
