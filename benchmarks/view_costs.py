"""Where the time of a view goes: each operation, each image size, and how far the memory would let it go.

    python -m benchmarks.view_costs [--photos FOLDER] [--seconds 0.05] [--rounds 5]

An operation's cost is that of a view with it several times over, less that of a view without it, in CPU seconds of one core;
Pillow's is that of the same call on a Pillow image, which most corruptions do not have. The physical limit is ``memcpy``: a view
has to read a source image of its own size (uint8) once and write a float32 view once; what a plain copy moves in that time is
what the memory would allow.
"""

import functools
import random
import time
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torchvision import transforms

from benchmarks import charts, images, our_views, pillow_views, record, view_peers
from dssl.augment import KINDS, TABLES

_REPEATS = 6
_MAGNITUDE, _SEVERITY = 9, 3
SIZES = (32, 64, 96, 128, 224, 320, 512)


def cpu_seconds(job: Callable[[], int], *, seconds: float) -> float:
    """CPU seconds of one thing that the job makes."""
    made, cpu = 0, time.process_time()
    while time.process_time() - cpu < seconds:
        made += job()
    return (time.process_time() - cpu) / made


def alternating(jobs: dict[str, Callable[[], int]], *, seconds: float, rounds: int) -> dict[str, list[float]]:
    for job in jobs.values():
        job()
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            found[name].append(cpu_seconds(job, seconds=seconds))
    return found


def operations() -> dict[str, tuple[str, Callable[[Image.Image], Image.Image] | None]]:
    """Every step of a view: its name, our text for it, and Pillow's or torchvision's call, if there is one."""
    jitter = transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)
    found: dict[str, tuple[str, Callable[[Image.Image], Image.Image] | None]] = {
        "flip": ("flip(1)", transforms.functional.hflip),
        "colour jitter": ("jitter", jitter),
        "hue alone": ("jitter(0,0,0,0.1)", transforms.ColorJitter(hue=0.1)),
        "gray": ("gray", lambda image: transforms.functional.to_grayscale(image, 3)),
        "blur": ("blur", pillow_views.blur),
        "noise": ("noise(0.1)", pillow_views.noise),
        "JPEG": ("jpeg(30)", pillow_views.jpeg),
    }
    for row in TABLES["dssl16"]:
        value = pillow_views.value_at(row, _MAGNITUDE)
        found[row.operation] = (
            f"op({row.operation},{_MAGNITUDE})",
            functools.partial(pillow_views.operation, row.operation, value=value),
        )
    for kind in KINDS.values():
        if kind.operation is None:  # the others are operations above
            found[f"corruption {kind.name}"] = (f"corruption({kind.name},{_SEVERITY})", None)
    return found


def by_operation(size: int, arrays: np.ndarray, *, seconds: float, rounds: int) -> list[record.Record]:
    pictures = [Image.fromarray(array) for array in arrays]
    plain = our_views.many(size, arrays, policy="center", views=1)
    rows = []
    for name, (text, call) in operations().items():
        ours = our_views.many(size, arrays, policy=" > ".join(["center", *[text] * _REPEATS]), views=1)
        jobs = {"without": plain, "with": ours}
        if call is not None:
            jobs["pillow"] = view_peers.per_image(call, pictures, views=1)
        found = alternating(jobs, seconds=seconds, rounds=rounds)
        pairs = zip(found["with"], found["without"], strict=True)
        # below the noise of the subtraction a cost means nothing: a hundredth of a plain view is the floor
        floor = 0.01 * min(found["without"])
        cost = record.summary([max((one - none) / _REPEATS, floor) * 1e6 for one, none in pairs])
        row: record.Record = {"size": size, "operation": name, "microseconds": cost}
        if call is not None:
            theirs = record.summary([value * 1e6 for value in found["pillow"]])
            row |= {"pillow_microseconds": theirs, "ratio": theirs["median"] / cost["median"]}
        rows.append(row)
        print(f"  {size} px {name:26} {cost['median']:8.2f} us, {row.get('ratio', 0):6.1f} times Pillow", flush=True)
    crop = our_views.many(size, arrays, policy="crop", views=1)
    pillow = view_peers.per_image(transforms.RandomResizedCrop(size, scale=(0.2, 1.0)), pictures, views=1)
    found = alternating({"dssl": crop, "pillow": pillow}, seconds=seconds, rounds=rounds)
    cost, theirs = (record.summary([value * 1e6 for value in found[name]]) for name in ("dssl", "pillow"))
    rows.insert(0, {"size": size, "operation": "crop, resize, normalise", "microseconds": cost,
                    "pillow_microseconds": theirs, "ratio": theirs["median"] / cost["median"],
                    "note": "ours with normalisation to float32, Pillow's without"})  # fmt: skip
    return rows


def copy_rate(*, rounds: int) -> record.Record:
    """Bytes a second that a plain copy reads and writes, on one core, in memory that no cache holds."""
    source = np.ones(1 << 27, np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)
    found = []
    for _ in range(max(5, rounds)):
        cpu = time.process_time()
        np.copyto(target, source)
        found.append(time.process_time() - cpu)
    return record.rates(2 * source.nbytes, found)


def by_size(photos: list[np.ndarray], sizes: list[int], *, seconds: float, rounds: int) -> list[record.Record]:
    memory = copy_rate(rounds=rounds)
    rows = []
    for size in sizes:
        count = int(np.clip(256 * 1024 // size**2, 8, 64))
        arrays = images.resized(photos[:count], size)
        jobs = {"dssl": our_views.many(size, arrays), "pillow": view_peers.pillow(size, list(arrays))}
        found = alternating(jobs, seconds=seconds, rounds=rounds)
        ours, pillow = (record.summary([1 / value for value in found[name]]) for name in ("dssl", "pillow"))
        moved = 3 * size**2 + 12 * size**2
        rows.append({
            "size": size, "rate": ours, "pillow_rate": pillow, "ratio": ours["median"] / pillow["median"],
            "bytes_per_view": moved, "memcpy_bytes_per_second": memory["median"],
            "share_of_memcpy": ours["median"] * moved / memory["median"],
        })  # fmt: skip
        print(
            f"  {size:4} px {ours['median']:10,.0f} views/s, Pillow {pillow['median']:8,.0f}, "
            f"{rows[-1]['share_of_memcpy']:.1%} of memcpy",
            flush=True,
        )
    return rows


def main() -> int:
    parser = record.parser(__doc__)
    record.add_photos(parser)
    parser.add_argument("--seconds", type=float, default=0.05, help="length of one measurement, in CPU seconds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--operation-sizes", type=int, nargs="+", default=[32, 224])
    options = parser.parse_args()
    clock = record.Clock()
    record.set_threads(1)
    random.seed(0)
    torch.manual_seed(0)
    photos = images.decoded(images.photo_files(options.photos, count=64))
    timing = {"seconds": options.seconds, "rounds": options.rounds}
    sized = by_size(photos, options.sizes, **timing)
    costs = []
    for size in options.operation_sizes:
        costs += by_operation(size, images.resized(photos[: 64 if size < 100 else 8], size), **timing)
    record.check_threads(1)
    content = {"images": "drawn" if options.photos is None else "photos", "sizes": sized, "operations": costs}
    record.write("view_costs", clock, content, folder=options.out)
    pixels = [row["size"] for row in sized]
    panels = {
        "views of one core": {"x": "side of a view, pixels", "y": "views per second", "curves": {
            "dssl": (pixels, [row["rate"]["median"] for row in sized]),
            "Pillow": (pixels, [row["pillow_rate"]["median"] for row in sized]),
            "memcpy": (pixels, [row["memcpy_bytes_per_second"] / row["bytes_per_view"] for row in sized])}},
    }  # fmt: skip
    charts.growth(panels, options.out / "view_sizes.png")
    groups = {
        f"{size} px, one operation on one view": [
            {"name": f"dssl {row['operation']}", "rate": row["microseconds"], "ratio": row["ratio"]}
            for row in costs if row["size"] == size and "ratio" in row
        ]
        for size in options.operation_sizes
    }  # fmt: skip
    charts.bars(
        groups, options.out / "view_operations.png", columns=2, digits=1,
        label="microseconds (times faster than Pillow's call)",
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
