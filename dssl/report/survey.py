"""Look at a sample of a source: its views under several policies, and what the policies do to it."""

import time
from collections.abc import Callable, Sequence
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
from dssl.report.pictures import SIDE, shrunk, to_pillow
from dssl.types import Image

_BLOCK = 64
"""Images whose views are held at one time, so that memory does not grow with the sample."""

_PROBES = 32
_TIMED_BYTES = 128_000_000
"""Decoded images that are kept to measure the speed on, at most; one is always kept."""
_SPEED_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One image, its standard view and its heavy views, one for each policy."""

    name: str
    original: Image
    """At most twice as long as it is shown: a photo as it was decoded has 36 MB."""
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
    probes: list[Image] = []
    timed: list[Image] = []
    changes: dict[str, list[NDArray[np.float64]]] = {name: [] for name in heavy}
    farther: dict[str, list[NDArray[np.bool_]]] = {name: [] for name in heavy}
    flat: dict[str, list[NDArray[np.bool_]]] = {name: [] for name in ("s1", *heavy)}
    for start in range(0, len(order), _BLOCK):
        if progress is not None:
            progress(start + _BLOCK, len(order))
        block = order[start : start + _BLOCK]
        plan, out = maker.plan(block, epoch=0), maker.allocate(len(block))
        small: list[Image] = []
        shown: list[tuple[str, Image]] = []
        for row, index in enumerate(block.tolist()):
            try:
                image = with_channels(source.image(index), channels)
            except UnreadableImage as problem:
                unreadable.append(str(problem))
                continue
            maker.apply(plan, row, image, out, len(small))
            small.append(resized(image, size))
            # of a decoded image nothing else is kept, except the few that the speed is measured on
            if len(kept) + len(shown) < examples:
                shown.append((source.label_of(index), shrunk(image, side=2 * SIDE)))
            if measure_speed and (not timed or _fits(timed, image)):
                timed.append(image)
        if not small:
            continue
        made = {name: batch[: len(small)] for name, batch in out.items()}
        originals = np.stack(small)
        probes += small[: _PROBES - len(probes)]
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
        for row, (title, original) in enumerate(shown):
            heavy_views = tuple(made[name][row] for name in heavy)
            kept.append(Example(name=title, original=original, standard=made["s1"][row], heavy=heavy_views))
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
        probes=tuple(probes),
        policies=tuple(
            PolicyStrength(
                policy=policy,
                change=np.concatenate(changes[name]),
                farther=float(np.concatenate(farther[name]).mean()),
                flat=float(np.concatenate(flat[name]).mean()),
                speed=speed(
                    _maker([views[0], view], standard=standard, size=size, channels=channels, seed=seed),
                    timed,
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


def _fits(timed: Sequence[Image], image: Image) -> bool:
    return len(timed) < _BLOCK and sum(one.nbytes for one in timed) + image.nbytes <= _TIMED_BYTES


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
    """Views made per second of a block of images, planning included and decoding not, after one pass that warms up.

    Where there are fewer images than a block has, they take turns.
    """
    indices = np.arange(_BLOCK, dtype=np.int64)
    out = maker.allocate(_BLOCK)
    with ThreadPoolExecutor(threads) as workers:

        def one_pass(epoch: int) -> None:
            plan = maker.plan(indices, epoch=epoch)

            def part(first: int) -> None:
                for row in range(first, _BLOCK, threads):
                    maker.apply(plan, row, images[row % len(images)], out, row)

            list(workers.map(part, range(threads)))

        one_pass(0)
        passes, begun = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begun) < _SPEED_SECONDS:
            passes += 1
            one_pass(passes)
    return passes * _BLOCK * len(maker.names) / elapsed


def _maker(views: Sequence[View], *, standard: str, size: int, channels: int, seed: int) -> ViewMaker:
    return ViewMaker(views, size=size, seed=seed, channels=channels, policies={"standard": standard})


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
