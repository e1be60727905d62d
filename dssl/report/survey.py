"""Look at a sample of a source: its views under several policies, and what the policies do to it."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from dssl import rng
from dssl.augment import ViewMaker
from dssl.data import Source, UnreadableImage
from dssl.data.sources import default_threads
from dssl.errors import DsslError
from dssl.graph import View
from dssl.report import strength
from dssl.report.pictures import to_pillow
from dssl.types import Image

_BLOCK = 64
"""Images whose views are held at one time, so that memory does not grow with the sample."""

_PROBES = 32
_SPEED_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One image, its standard view and its heavy views, one for each policy."""

    name: str
    original: Image
    standard: Image
    heavy: tuple[Image, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStrength:
    """What one policy did to the sample; ``speed`` in views per second, None where it was not measured."""

    policy: str
    change: NDArray[np.float64]
    farther: float
    flat: float
    speed: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All that the page shows, apart from the operations."""

    name: str
    total: int
    measured: int
    size: int
    channels: int
    seed: int
    standard: str
    standard_flat: float
    threads: int
    examples: tuple[Example, ...]
    probes: tuple[Image, ...]
    """The first originals at the views' size, on which single operations are tried."""
    policies: tuple[PolicyStrength, ...]
    encoder: str | None
    """Whose features say what is farther; None: pixels do."""
    unreadable: tuple[str, ...]


def survey(
    source: Source,
    *,
    policies: Sequence[str],
    standard: str,
    size: int,
    channels: int,
    seed: int,
    examples: int,
    sample: int,
    measure_speed: bool = True,
    embedding: strength.Embedding | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Survey:
    """Make every policy's view of ``sample`` images, keep the first ``examples``, and measure them all.

    Images are drawn without replacement by the seed; those that cannot be read are left out and named. With an
    ``embedding`` the distances from the original are those of its features instead of pixels.
    """
    heavy = tuple(f"h{number}" for number in range(1, len(policies) + 1))
    views = [View(name="s1", policy="standard")]
    views += [View(name=name, policy=policy, source="s1") for name, policy in zip(heavy, policies, strict=True)]
    maker = _maker(views, standard=standard, size=size, channels=channels, seed=seed)
    order = rng.permutation(rng.key(seed, "survey"), len(source))[:sample]
    unreadable: list[str] = []
    kept: list[Example] = []
    pool: list[Image] = []
    changes: dict[str, list[NDArray[np.float64]]] = {name: [] for name in heavy}
    farther: dict[str, list[NDArray[np.bool_]]] = {name: [] for name in heavy}
    flat: dict[str, list[NDArray[np.bool_]]] = {name: [] for name in ("s1", *heavy)}
    for start, indices, images in _blocks(source, order, channels, unreadable):
        if progress is not None:
            progress(start + _BLOCK, len(order))
        made = _make(maker, indices, images)
        originals = np.stack([resized(image, size) for image in images])
        for name in heavy:
            changes[name].append(strength.change(made[name], made["s1"]))
        if embedding is None:
            for name in heavy:
                farther[name].append(strength.farther(originals, made["s1"], made[name]))
        else:
            near = embedding.features(originals), embedding.features(made["s1"])
            for name in heavy:
                farther[name].append(strength.farther_in_features(*near, embedding.features(made[name])))
        for name in flat:
            flat[name].append(strength.nearly_flat(made[name]))
        for row in range(min(len(images), examples - len(kept))):
            kept.append(
                Example(
                    name=source.label_of(int(indices[row])),
                    original=images[row],
                    standard=made["s1"][row],
                    heavy=tuple(made[name][row] for name in heavy),
                )
            )
        pool.extend(images[: _BLOCK - len(pool)])
    if not kept:
        raise DsslError(f"none of the {len(order)} images chosen from {source.name} could be read: {unreadable[0]}")
    threads = default_threads()
    return Survey(
        name=source.name,
        total=len(source),
        measured=len(order) - len(unreadable),
        size=size,
        channels=channels,
        seed=seed,
        standard=standard,
        standard_flat=float(np.concatenate(flat["s1"]).mean()),
        threads=threads,
        examples=tuple(kept),
        probes=tuple(resized(image, size) for image in pool[:_PROBES]),
        policies=tuple(
            PolicyStrength(
                policy=policy,
                change=np.concatenate(changes[name]),
                farther=float(np.concatenate(farther[name]).mean()),
                flat=float(np.concatenate(flat[name]).mean()),
                speed=speed(
                    _maker([views[0], view], standard=standard, size=size, channels=channels, seed=seed),
                    pool,
                    threads=threads,
                )
                if measure_speed
                else None,
            )
            for name, policy, view in zip(heavy, policies, views[1:], strict=True)
        ),
        encoder=None if embedding is None else embedding.name,
        unreadable=tuple(unreadable),
    )


def resized(image: Image, size: int) -> Image:
    """The whole image squeezed to size x size, bilinear and antialiased, to stand beside its views."""
    smaller = np.asarray(to_pillow(image).resize((size, size), Pillow.Resampling.BILINEAR))
    return smaller.reshape(size, size, image.shape[2])


def with_channels(image: Image, channels: int) -> Image:
    """The image with one or three channels: gray by ITU-R 601 luma as Pillow does it, colour by repetition."""
    if image.shape[2] == channels:
        return image
    converted = np.asarray(to_pillow(image).convert("L" if channels == 1 else "RGB"))
    return np.ascontiguousarray(converted.reshape(*image.shape[:2], channels))


def speed(maker: ViewMaker, images: Sequence[Image], *, threads: int) -> float:
    """Views made per second, planning included and decoding not, after one pass that warms up."""
    indices = np.arange(len(images), dtype=np.int64)
    out = maker.allocate(len(images))
    with ThreadPoolExecutor(threads) as workers:

        def one_pass(epoch: int) -> None:
            plan = maker.plan(indices, epoch=epoch)

            def part(first: int) -> None:
                for row in range(first, len(images), threads):
                    maker.apply(plan, row, images[row], out, row)

            list(workers.map(part, range(threads)))

        one_pass(0)
        passes, begun = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begun) < _SPEED_SECONDS:
            passes += 1
            one_pass(passes)
    return passes * len(images) * len(maker.names) / elapsed


def _maker(views: Sequence[View], *, standard: str, size: int, channels: int, seed: int) -> ViewMaker:
    return ViewMaker(views, size=size, seed=seed, channels=channels, policies={"standard": standard})


def _make(maker: ViewMaker, indices: NDArray[np.int64], images: Sequence[Image]) -> dict[str, strength.Batch]:
    out = maker.allocate(len(images))
    plan = maker.plan(indices, epoch=0)
    for row, image in enumerate(images):
        maker.apply(plan, row, image, out, row)
    return out


def _blocks(
    source: Source, order: NDArray[np.int64], channels: int, unreadable: list[str]
) -> Iterator[tuple[int, NDArray[np.int64], list[Image]]]:
    """The readable images with their indices, after how many chosen; ``unreadable`` gets the reasons of the others."""
    for start in range(0, len(order), _BLOCK):
        indices: list[int] = []
        images: list[Image] = []
        for index in order[start : start + _BLOCK]:
            try:
                images.append(with_channels(source.image(int(index)), channels))
            except UnreadableImage as problem:
                unreadable.append(str(problem))
            else:
                indices.append(int(index))
        if images:
            yield start, np.asarray(indices, dtype=np.int64), images


def first_size(source: Source) -> int:
    """The side of views where none is asked for: the shorter side of the first readable image, at most 224."""
    problem: UnreadableImage | None = None
    for index in range(min(len(source), _BLOCK)):
        try:
            height, width, _ = source.image(index).shape
            return min(224, int(height), int(width))
        except UnreadableImage as error:
            problem = error
    raise DsslError(f"none of the first images of {source.name} can be read: {problem}")
