"""Views per second: ours against a Pillow composition of the paper's pipeline and against other libraries, in one run.

    python -m benchmarks.views --photos FOLDER [--seconds 2] [--rounds 3]

A view is the whole chain: crop, flip, colour jitter, gray, blur, two RandAugment operations at magnitude 9 (table
``dssl16``), and normalised float32. Four views are made of every image. "One core" is measured in CPU seconds of the
process, so that other programs on the machine do not count; the rows with two threads are measured by the wall clock.
Libraries that lack RandAugment do less work, which the table says.
"""

import argparse
import io
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps
from torchvision import io as torchvision_io
from torchvision import transforms
from torchvision.transforms import v2

from dssl.augment import IMAGENET, TABLES, ViewMaker
from dssl.data import open_source
from dssl.graph import View

VIEWS = 4
_AHEAD = 8
BASELINE = "Pillow composition"
Job = Callable[[], int]
"""Makes views of a fixed set of images and says how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One bar of the chart."""

    setting: str
    name: str
    views_per_second: float
    ratio: float
    note: str


def pillow_operation(name: str, image: Image.Image, value: float) -> Image.Image:
    """One operation of ``dssl16`` as the paper's code writes it."""
    moves = {"shear-x": (1, value, 0, 0, 1, 0), "shear-y": (1, 0, 0, value, 1, 0),
             "translate-x-pixels": (1, 0, value, 0, 1, 0), "translate-y-pixels": (1, 0, 0, 0, 1, value)}  # fmt: skip
    if name in moves:
        return image.transform(image.size, Image.Transform.AFFINE, moves[name])
    if name in ("color", "contrast", "brightness", "sharpness"):
        return getattr(ImageEnhance, name.capitalize())(image).enhance(value)
    if name in ("autocontrast", "equalize", "invert"):
        return getattr(ImageOps, name)(image)
    if name == "rotate":
        return image.rotate(value)
    if name == "posterize":
        return ImageOps.posterize(image, max(1, int(value)))
    if name == "solarize":
        return ImageOps.solarize(image, value)
    if name == "solarize-add":
        added = np.clip(np.asarray(image).astype(int) + int(value), 0, 255).astype(np.uint8)
        return ImageOps.solarize(Image.fromarray(added), 128)
    left, top = (int(max(0, random.random() * side - value / 2)) for side in image.size)
    image = image.copy()
    ImageDraw.Draw(image).rectangle(
        (left, top, min(image.width, left + value), min(image.height, top + value)), (125, 123, 114)
    )
    return image


def pillow_randaugment(image: Image.Image) -> Image.Image:
    for _ in range(2):
        row = random.choice(TABLES["dssl16"])
        value = row.value(9)
        image = pillow_operation(
            row.operation, image, -value if row.sign == "negate" and random.random() < 0.5 else value
        )
    return image


def pillow_blur(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))


def pillow_chain(size: int) -> transforms.Compose:
    return transforms.Compose([
        transforms.RandomResizedCrop(size, scale=(0.2, 1.0)),
        transforms.RandomHorizontalFlip(),
        transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
        transforms.RandomGrayscale(p=0.2),
        transforms.RandomApply([transforms.Lambda(pillow_blur)], p=0.5),
        transforms.Lambda(pillow_randaugment),
        transforms.ToTensor(),
        transforms.Normalize(IMAGENET.mean, IMAGENET.std),
    ])  # fmt: skip


def per_image(chain: Callable[[object], object], images: list[object], *, views: int = VIEWS) -> Job:
    def job() -> int:
        for image in images:
            for _ in range(views):
                chain(image)
        return views * len(images)

    return job


def decoded_pillow(chain: transforms.Compose, files: list[bytes]) -> Job:
    def job() -> int:
        for data in files:
            image = Image.open(io.BytesIO(data)).convert("RGB")
            for _ in range(VIEWS):
                chain(image)
        return VIEWS * len(files)

    return job


def our_maker(size: int) -> ViewMaker:
    views = [View(name=f"v{number}", policy="standard > ra(2,9)") for number in range(VIEWS)]
    return ViewMaker(views, size=size, seed=0, normalization=IMAGENET)


def ours(size: int, load: Callable[[int], np.ndarray], count: int, *, threads: int = 1) -> Job:
    """Image by image, as the loader works: a plan for the batch, then all views of each image into its row."""
    maker = our_maker(size)
    buffers = maker.allocate(count)
    epoch = 0
    pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def part(plan: object, rows: range) -> None:
        for row in rows:
            maker.apply(plan, row, load(row), buffers, row)  # type: ignore[arg-type]

    def job() -> int:
        nonlocal epoch
        epoch += 1
        plan = maker.plan(np.arange(count), epoch=epoch)
        if pool is None:
            part(plan, range(count))
        else:
            step = -(-count // (4 * threads))
            list(pool.map(lambda first: part(plan, range(first, min(first + step, count))), range(0, count, step)))
        return VIEWS * count

    return job


def ours_many(size: int, images: np.ndarray, *, threads: int = 1) -> Job:
    """Images of one size, each thread on batches of its own.

    This is kinder than the loader, whose threads share the pieces of one batch and meet at its end.
    """
    maker = our_maker(size)
    pool = ThreadPoolExecutor(threads)
    buffers = [maker.allocate(len(images)) for _ in range(threads)]
    epoch = 0

    def batches(number: int) -> None:
        for ahead in range(_AHEAD):
            plan = maker.plan(np.arange(len(images)), epoch=epoch + number * _AHEAD + ahead)
            maker.apply_many(plan, 0, images, buffers[number], 0)

    def job() -> int:
        nonlocal epoch
        epoch += threads * _AHEAD
        list(pool.map(batches, range(threads)))
        return VIEWS * len(images) * threads * _AHEAD

    return job


def torchvision_v2(size: int, images: list[np.ndarray]) -> Job:
    chain = v2.Compose([
        v2.RandomResizedCrop(size, scale=(0.2, 1.0), antialias=True),
        v2.RandomHorizontalFlip(),
        v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
        v2.RandomGrayscale(p=0.2),
        v2.RandomApply([v2.GaussianBlur(max(3, size // 20 * 2 + 1), (0.1, 2.0))], p=0.5),
        v2.RandAugment(2, 9),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(IMAGENET.mean, IMAGENET.std),
    ])  # fmt: skip
    return per_image(chain, [torch.from_numpy(image.copy()).permute(2, 0, 1).contiguous() for image in images])


def kornia(size: int, images: list[np.ndarray]) -> Job:
    import kornia.augmentation as K

    height, width = (32, 32) if size == 32 else (400, 500)
    batch = torch.stack([
        torch.from_numpy(np.array(Image.fromarray(image).resize((width, height)))).permute(2, 0, 1).float() / 255
        for image in images
    ])  # fmt: skip
    chain = K.AugmentationSequential(
        K.RandomResizedCrop((size, size), scale=(0.2, 1.0)),
        K.RandomHorizontalFlip(),
        K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
        K.RandomGrayscale(p=0.2),
        K.RandomGaussianBlur((max(3, size // 20 * 2 + 1),) * 2, (0.1, 2.0), p=0.5),
        K.auto.RandAugment(n=2, m=9),
        K.Normalize(torch.tensor(IMAGENET.mean), torch.tensor(IMAGENET.std)),
        data_keys=["input"],
    )

    def job() -> int:
        with torch.no_grad():
            for _ in range(VIEWS):
                chain(batch)
        return VIEWS * len(batch)

    return job


def albumentations(size: int, images: list[np.ndarray]) -> Job:
    import albumentations as A
    import cv2

    cv2.setNumThreads(1)
    chain = A.Compose([
        A.RandomResizedCrop((size, size), scale=(0.2, 1.0)),
        A.HorizontalFlip(),
        A.ColorJitter((0.6, 1.4), (0.6, 1.4), (0.6, 1.4), (-0.1, 0.1), p=0.8),
        A.ToGray(p=0.2),
        A.GaussianBlur((0, 0), (0.1, 2.0), p=0.5),
        A.Normalize(IMAGENET.mean, IMAGENET.std),
    ])  # fmt: skip
    return per_image(lambda image: chain(image=image), list(images))


def lightly(size: int, images: list[np.ndarray]) -> Job:
    from lightly.transforms.simsiam_transform import SimSiamTransform

    chain = SimSiamTransform(input_size=size, gaussian_blur=0.5)  # makes two views a call
    job = per_image(chain, [Image.fromarray(image) for image in images], views=VIEWS // 2)
    return lambda: 2 * job()


PEERS: tuple[tuple[str, str, Callable[[int, list[np.ndarray]], Job], str], ...] = (
    ("torchvision v2, tensors", "torchvision", torchvision_v2, "its own RandAugment table"),
    ("kornia, batched", "kornia", kornia, "draws RandAugment once a batch"),
    ("albumentations", "albumentations", albumentations, "standard views only: has no RandAugment"),
    ("lightly SimSiamTransform", "lightly", lightly, "standard views only"),
)


def measure(job: Job, *, seconds: float, wall: bool) -> float:
    """Views per second of this process; asserts that a job meant for one core used no more than one."""
    torch.set_num_threads(1)
    made, start, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds:
        made += job()
    elapsed, used = time.perf_counter() - start, time.process_time() - cpu
    assert torch.get_num_threads() == 1, "something raised the number of torch's threads"
    if wall:
        return made / elapsed
    assert used <= 1.1 * elapsed, f"used {used / elapsed:.2f} cores where one was allowed"
    return made / used


def compare(setting: str, jobs: dict[str, tuple[Job, str]], *, seconds: float, rounds: int) -> list[Result]:
    """Every job in turn, several times over; the best round counts."""
    for job, _ in jobs.values():
        job()  # compiles and warms up
    best = dict.fromkeys(jobs, 0.0)
    for _ in range(rounds):
        for name, (job, _) in jobs.items():
            best[name] = max(best[name], measure(job, seconds=seconds, wall="threads" in setting))
    results = []
    for name, (_, note) in jobs.items():
        result = Result(
            setting=setting, name=name, views_per_second=best[name], ratio=best[name] / best[BASELINE], note=note
        )
        results.append(result)
        print(f"  {name:28} {result.views_per_second:12,.0f} views/s {result.ratio:8.1f}x  {note}", flush=True)
    return results


def with_peers(size: int, arrays: list[np.ndarray], jobs: dict[str, tuple[Job, str]]) -> dict[str, tuple[Job, str]]:
    for name, package, build, note in PEERS:
        try:
            job = build(size, arrays)
            job()
        except Exception as problem:  # any reason at all: the table says which
            print(f"  {name:28} left out: {type(problem).__name__}: {str(problem).splitlines()[0][:90]}")
            continue
        jobs[name] = (job, f"{version(package)}; {note}")
    return jobs


def chart(results: list[Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = list(dict.fromkeys(result.setting for result in results))
    heights = [sum(result.setting == setting for result in results) for setting in settings]
    size = (8, 1.1 + 0.36 * len(results) + 0.5 * len(settings))
    figure, axes = plt.subplots(len(settings), 1, figsize=size, height_ratios=heights, layout="constrained")
    for axis, setting in zip(np.atleast_1d(axes), settings, strict=True):
        shown = [result for result in results if result.setting == setting][::-1]
        colours = ["#1a7f5a" if result.name.startswith("dssl") else "#9aa5b1" for result in shown]
        bars = axis.barh(
            [result.name for result in shown], [result.views_per_second for result in shown], color=colours
        )
        axis.bar_label(bars, [f" {r.views_per_second:,.0f}  ({r.ratio:.1f}x)" for r in shown], fontsize=8)
        axis.set_title(setting, loc="left", fontsize=10)
        axis.margins(x=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("views per second", fontsize=8)
        axis.tick_params(labelsize=8)
    figure.savefig(path, dpi=130)


def environment() -> dict[str, object]:
    packages = ("numba", "numpy", "pillow", "torch", "torchvision", "kornia", "albumentations", "lightly")
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "python": sys.version.split()[0],
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load average at the end": os.getloadavg()[0],
        "packages": versions,
    }


def jpeg_files(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.rglob("*")) if path.suffix.lower() in (".jpg", ".jpeg")]


def drawn_photos(count: int) -> list[bytes]:
    """JPEG files of 400 x 500 pixels where there are no photos: shapes, enlarged, with the noise of a camera."""
    source = open_source("shapes:64")
    generator = np.random.Generator(np.random.Philox(0))
    files = []
    for index in range(count):
        picture = Image.fromarray(source.image(index)).resize((400, 500), Image.Resampling.BICUBIC)
        noisy = np.clip(np.asarray(picture) + generator.normal(0, 8, (500, 400, 3)), 0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(noisy).save(buffer, "JPEG", quality=90)
        files.append(buffer.getvalue())
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, help="a folder with JPEG files, in any depth; without it, drawn images")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each; the best counts")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    torch.manual_seed(0)

    files = drawn_photos(64) if arguments.photos is None else jpeg_files(arguments.photos)[:64]
    if not files:
        parser.error(f"no JPEG files in {arguments.photos}")
    photos = [np.array(Image.open(io.BytesIO(data)).convert("RGB")) for data in files]
    small = np.stack([np.array(Image.fromarray(photo).resize((32, 32))) for photo in photos] * 4)
    tensors = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in files]

    def decode(row: int) -> np.ndarray:
        rgb = torchvision_io.decode_jpeg(tensors[row], mode=torchvision_io.ImageReadMode.RGB)
        return np.ascontiguousarray(rgb.permute(1, 2, 0).numpy())

    def pillow_job(size: int, arrays: list[np.ndarray]) -> tuple[Job, str]:
        return per_image(pillow_chain(size), [Image.fromarray(array) for array in arrays]), ""

    timing = {"seconds": arguments.seconds, "rounds": arguments.rounds}
    results: list[Result] = []
    little = list(small)
    for setting, build in (
        ("32 px, one core", lambda: with_peers(32, little, {
            BASELINE: pillow_job(32, little), "dssl, image by image": (ours(32, little.__getitem__, len(little)), ""),
            "dssl, array of images": (ours_many(32, small), "")})),
        ("224 px without decoding, one core", lambda: with_peers(224, photos, {
            BASELINE: pillow_job(224, photos), "dssl": (ours(224, photos.__getitem__, len(photos)), "")})),
        ("224 px with decoding, one core", lambda: {
            BASELINE: (decoded_pillow(pillow_chain(224), files), "decodes with Pillow, once for four views"),
            "dssl": (ours(224, decode, len(files)), "decodes with torchvision, once for four views")}),
        ("32 px, one and two threads, wall clock", lambda: {
            BASELINE: pillow_job(32, little), "dssl, one": (ours_many(32, small), ""),
            "dssl, two": (ours_many(32, small, threads=2), "")}),
        ("224 px, one and two threads, wall clock", lambda: {
            BASELINE: pillow_job(224, photos), "dssl, one": (ours(224, photos.__getitem__, len(photos)), ""),
            "dssl, two": (ours(224, photos.__getitem__, len(photos), threads=2), "")}),
    ):  # fmt: skip
        print(setting)
        results += compare(setting, build(), **timing)

    arguments.out.mkdir(parents=True, exist_ok=True)
    images = "drawn" if arguments.photos is None else "photos"
    record = {"environment": environment() | {"images": images}, "results": [asdict(result) for result in results]}
    (arguments.out / "views.json").write_text(json.dumps(record, indent=1) + "\n")
    chart(results, arguments.out / "views.png")
    print(
        f"wrote {arguments.out / 'views.json'} and views.png; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
