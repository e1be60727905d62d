"""Measure what policies do to a sample of a source: on the views themselves, not read from the policies' parameters."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from dssl import rng
from dssl.augment import ViewMaker
from dssl.data import Source, UnreadableImage
from dssl.data.decode import resize
from dssl.data.pipeline import default_threads
from dssl.data.scale import Range
from dssl.errors import DsslError
from dssl.graph import View
from dssl.report.pictures import PICTURE_SIDE, shrunk
from dssl.types import Image

Pixels: TypeAlias = NDArray[np.uint8]
"""N x H x W x C."""

FeatureRows: TypeAlias = NDArray[np.floating]
"""N x D."""

FLAT_BELOW = 3.0
"""An image whose ``contrast_of_pixels`` is below this many of 255 levels is called nearly flat, or blank.

No CIFAR-10 image is below 8, and the shares of heavy views below 2 and below 4 are nearly the same: see docs/views.md.
"""

_BLOCK = 64
"""Images whose views are held at one time, so that memory does not grow with the sample."""

_PROBES = 32
_TIMED_BYTES = 128_000_000
"""Decoded images that are kept to measure the speed on, at most; one is always kept."""
_SPEED_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class FeatureSpace:
    """An encoder's name, and the function that maps N images to their N x D features."""

    name: str
    features: Callable[[Pixels], FeatureRows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One image, its standard view and its heavy views, one for each policy."""

    name: str
    original: Image
    """At most twice as large as it is shown: a decoded photo takes 36 MB."""
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

    @property
    def quartiles(self) -> list[float]:
        """Of the change."""
        return [float(value) for value in np.quantile(self.change, (0.25, 0.5, 0.75))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Everything that the page shows, apart from the operations."""

    name: str
    total: int
    measured: int
    size: int
    channels: int
    value_range: Range | None
    """Of images that are not photographs: the values that became 0 and 255."""
    seed: int
    standard: str
    standard_flat: float
    threads: int
    examples: tuple[Example, ...]
    probes: tuple[Image, ...]
    """The first originals at the views' size, on which single operations are tried."""
    policies: tuple[PolicyStrength, ...]
    encoder: str | None
    """The encoder whose features decide what is farther; None: pixels decide."""
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
    space: FeatureSpace | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Survey:
    """Make every policy's view of ``sample`` images, keep the first ``examples``, and measure them all.

    The images of the source have ``channels`` channels. The seed draws them without replacement; unreadable ones are skipped
    and named. With a ``space``, distances from the original are measured in it instead of in pixels.
    """

    def maker_of(made: Sequence[View]) -> ViewMaker:
        return ViewMaker(made, size=size, seed=seed, channels=channels, policies={"standard": standard})

    heavy = tuple(f"h{number}" for number in range(1, len(policies) + 1))
    views = [View(name="s1", policy="standard")]
    views += [View(name=name, policy=policy, source="s1") for name, policy in zip(heavy, policies, strict=True)]
    maker = maker_of(views)
    order = rng.permutation(rng.key(seed, "survey"), len(source))[:sample]
    unreadable: list[str] = []
    kept: list[Example] = []
    probes: list[Image] = []
    timed: list[Image] = []
    changes: dict[str, list[NDArray[np.float64]]] = {name: [] for name in heavy}
    far: dict[str, list[NDArray[np.bool_]]] = {name: [] for name in heavy}
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
                image = source.image(index)
            except UnreadableImage as problem:
                unreadable.append(str(problem))
                continue
            maker.apply_many(plan, row, [image], out, len(small))
            small.append(resized(image, size))
            # nothing else of a decoded image is kept, except for the few on which the speed is measured
            if len(kept) + len(shown) < examples:
                shown.append((source.label_of(index), shrunk(image, side=2 * PICTURE_SIDE)))
            if measure_speed and (not timed or _fits(timed, image)):
                timed.append(image)
        if not small:
            continue
        made = {name: batch[: len(small)] for name, batch in out.items()}
        originals = np.stack(small)
        probes += small[: _PROBES - len(probes)]
        near = None if space is None else (space.features(originals), space.features(made["s1"]))
        for name in heavy:
            changes[name].append(change(made[name], made["s1"]))
            if space is None or near is None:
                far[name].append(farther(originals, made["s1"], made[name]))
            else:
                far[name].append(farther_in_features(*near, space.features(made[name])))
        for name in flat:
            flat[name].append(nearly_flat(made[name]))
        for row, (title, original) in enumerate(shown):
            heavy_views = tuple(made[name][row] for name in heavy)
            kept.append(Example(name=title, original=original, standard=made["s1"][row], heavy=heavy_views))
    if not kept:
        raise DsslError(f"none of the {len(order)} images chosen from {source.name} can be read: {unreadable[0]}")
    threads = default_threads()
    return Survey(
        name=source.name,
        total=len(source),
        measured=len(order) - len(unreadable),
        size=size,
        channels=channels,
        value_range=source.value_range,
        seed=seed,
        standard=standard,
        standard_flat=float(np.concatenate(flat["s1"]).mean()),
        threads=threads,
        examples=tuple(kept),
        probes=tuple(probes),
        policies=tuple(
            PolicyStrength(
                policy=view.policy,
                change=np.concatenate(changes[view.name]),
                farther=float(np.concatenate(far[view.name]).mean()),
                flat=float(np.concatenate(flat[view.name]).mean()),
                speed=speed(maker_of([views[0], view]), timed, threads=threads) if measure_speed else None,
            )
            for view in views[1:]
        ),
        encoder=None if space is None else space.name,
        unreadable=tuple(unreadable),
    )


def contrast_of_pixels(images: Pixels) -> NDArray[np.float64]:
    """For each image the standard deviation of its pixels around the mean of their channel, pooled over the channels.

    Around each channel's own mean, because a picture of a single red is as blank as one of a single gray.
    """
    planes = np.ascontiguousarray(images.reshape(len(images), -1, images.shape[-1]).transpose(0, 2, 1)).astype(
        np.uint16
    )
    # whole numbers until the end: exact, and ten times as fast as the variance of floats at 224 px
    pixels, total = planes.shape[2], planes.sum(axis=2, dtype=np.int64)
    squares = (planes**2).sum(axis=2, dtype=np.int64)
    variance = (pixels * squares - total**2) / pixels**2
    return np.asarray(np.sqrt(variance.mean(axis=1)))


def nearly_flat(images: Pixels) -> NDArray[np.bool_]:
    """Which images carry almost nothing to learn from."""
    return contrast_of_pixels(images) < FLAT_BELOW


def change(first: Pixels, second: Pixels) -> NDArray[np.float64]:
    """For each pair of images the mean absolute difference of their pixels, 0 to 255."""
    difference = np.abs(first.astype(np.int16) - second.astype(np.int16))
    return np.asarray(difference.reshape(len(first), -1).mean(axis=1))


def farther(originals: Pixels, standard: Pixels, heavy: Pixels) -> NDArray[np.bool_]:
    """For which images the heavy view is farther from the original than the standard view: the paper's premise, in pixels.

    The distance is ``change``, pixel by pixel: a shift of an otherwise equal image counts as far, and the standard view's
    crop is itself a shift.
    """
    return change(originals, heavy) > change(originals, standard)


def farther_in_features(originals: FeatureRows, standard: FeatureRows, heavy: FeatureRows) -> NDArray[np.bool_]:
    """The same for the features of the images: the distance is one minus the cosine."""
    original, near, far = (_unit(features) for features in (originals, standard, heavy))
    return np.asarray((original * far).sum(axis=1) < (original * near).sum(axis=1))


def resized(image: Image, size: int) -> Image:
    """The whole image squeezed to size x size, bilinear and antialiased, for comparison with its views."""
    return resize(image, (size, size), Pillow.Resampling.BILINEAR)


def speed(maker: ViewMaker, images: Sequence[Image], *, threads: int) -> float:
    """Views made per second, planning included and decoding not, after one warm-up pass over a block of images.

    Fewer images than a block are used in turn.
    """
    indices = np.arange(_BLOCK, dtype=np.int64)
    out = maker.allocate(_BLOCK)
    with ThreadPoolExecutor(threads) as workers:

        def one_pass(epoch: int) -> None:
            plan = maker.plan(indices, epoch=epoch)

            def part(first: int) -> None:
                for row in range(first, _BLOCK, threads):
                    maker.apply_many(plan, row, [images[row % len(images)]], out, row)

            list(workers.map(part, range(threads)))

        one_pass(0)
        passes, begun = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begun) < _SPEED_SECONDS:
            passes += 1
            one_pass(passes)
    return passes * _BLOCK * len(maker.names) / elapsed


def default_size(source: Source) -> int:
    """The default side of a view: the shorter side of the first readable image, at most 224."""
    problem: UnreadableImage | None = None
    for index in range(min(len(source), _BLOCK)):
        try:
            return min(224, *map(int, source.image(index).shape[:2]))
        except UnreadableImage as error:
            problem = error
    raise DsslError(f"none of the first images of {source.name} can be read: {problem}")


def _fits(timed: Sequence[Image], image: Image) -> bool:
    return len(timed) < _BLOCK and sum(one.nbytes for one in timed) + image.nbytes <= _TIMED_BYTES


def _unit(features: FeatureRows) -> NDArray[np.float64]:
    """Rows of length one; a row of zeros stays, and is at right angles to everything."""
    rows = np.asarray(features, dtype=np.float64)
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(length > 0, length, 1.0)
