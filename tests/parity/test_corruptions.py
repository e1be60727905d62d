"""Every kind of corruption against a reference in NumPy, SciPy or Pillow, from the same random numbers."""

import io
import math

import numpy as np
import pytest
from PIL import Image, ImageDraw
from scipy import ndimage, stats

from dssl import rng
from dssl.augment import KINDS, SEVERITIES, corrupt_images
from tests.parity.test_augment import ours, pillow, pixels, textured

CASES = [(32, 3), (32, 1), (33, 3), (96, 3), (224, 1)]


def corrupted(kind: str, severity: int, image: np.ndarray, *, index: int = 7) -> np.ndarray:
    return corrupt_images(image[None], kind, severity, seed=3, indices=np.array([index]), threads=1)[0]


def draws(kind: str, index: int = 7) -> np.ndarray:
    return rng.uniforms(rng.key(3, "view", 0, kind.replace("-", "_")), np.array([index]), 3)[0]


def words(kind: str, count: int) -> np.ndarray:
    """The 64-bit numbers that follow from the first draw of the step."""
    with np.errstate(over="ignore"):
        start = rng._mix(np.array([draws(kind)[1] * 2.0**53]).astype(np.uint64))
        return rng._mix(start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def shares(kind: str, count: int) -> np.ndarray:
    """Middles of 65,536 equal shares of 0 .. 1."""
    return (words(kind, (count + 3) // 4).view(np.uint16)[:count] + 0.5) / 65536


def channels_first(kind: str, image: np.ndarray) -> np.ndarray:
    """The random shares of an image's values, which are drawn channel by channel."""
    height, width, channels = image.shape
    return shares(kind, image.size).reshape(channels, height, width).transpose(1, 2, 0)


def to_bytes(values: np.ndarray) -> np.ndarray:
    """From 0 .. 1, truncated as the official code does; 1/512 of a level is for sums of weights a little below 1."""
    return (np.clip(values * 255, 0, 255) + 1 / 512).astype(np.uint8)


def each(image: np.ndarray, change) -> np.ndarray:
    return np.stack([change(image[:, :, c]) for c in range(image.shape[2])], axis=2)


def gaussian_noise(x, image, level):
    return x + level * stats.norm.ppf(channels_first("gaussian-noise", image))


def shot(x, image, photons):
    return stats.poisson.ppf(channels_first("shot", image), x * photons) / photons


def impulse(x, image, amount):
    share = channels_first("impulse", image)
    return np.where(share < amount / 2, 0, np.where(share < amount, 1, x))


def speckle(x, image, level):
    return x + x * level * stats.norm.ppf(channels_first("speckle", image))


def gaussian_blur(x, image, sigma):
    return each(x, lambda plane: ndimage.gaussian_filter(plane, sigma, mode="nearest"))


def defocus(x, image, radius, softness):
    rim = 1 if radius <= 8 else 2
    y, z = np.mgrid[-14:15, -14:15]
    disk = (y**2 + z**2 <= radius**2) / np.sum(y**2 + z**2 <= radius**2)
    line = np.exp(-0.5 * (np.arange(-rim, rim + 1) / softness) ** 2)
    kernel = ndimage.convolve(disk, np.outer(line, line) / line.sum() ** 2, mode="constant")
    return each(x, lambda plane: ndimage.correlate(plane, kernel, mode="mirror"))


def motion(x, image, radius, sigma):
    """The mean of the image at places along a line, interpolated; beyond its border the border repeats."""
    angle = math.radians(draws("motion")[1] * 90 - 45)
    places = np.arange(round(min(2 * radius, 4 * sigma)) + 1)
    weights = np.exp(-0.5 * (places / sigma) ** 2)
    y, z = np.mgrid[0 : x.shape[0], 0 : x.shape[1]]
    total = np.zeros_like(x)
    for place, weight in zip(places, weights / weights.sum(), strict=True):
        where = [y + place * math.sin(angle), z + place * math.cos(angle)]
        total += weight * each(
            x, lambda plane, where=where: ndimage.map_coordinates(plane, where, order=1, mode="nearest")
        )
    return total


def zoom(x, image, step, count):
    side, total = x.shape[0], x.copy()
    for factor in 1 + step * np.arange(int(count)):
        middle = math.ceil(side / factor)
        top = (side - middle) // 2
        cut = x[top : top + middle, top : top + middle]
        larger = ndimage.zoom(cut, (factor, factor, 1), order=1)
        trim = (larger.shape[0] - side) // 2
        total += larger[trim : trim + side, trim : trim + side]
    return total / (count + 1)


def plasma(side, decay):
    """Diamonds and squares, written with whole arrays."""
    random = (words("fog", side * side) >> np.uint64(11)).astype(float) * 2.0**-53 * 2 - 1
    random = random.reshape(side, side)
    plane, step, wobble = np.zeros((side, side)), side, 100.0
    while step >= 2:
        half = step // 2
        around = [np.roll(plane, (a * half, b * half), (0, 1)) for a in (-1, 1) for b in (-1, 1)]
        centre = (slice(half, None, step), slice(half, None, step))
        plane[centre] = (sum(around) / 4)[centre] + wobble**2 * random[centre]
        around = [np.roll(plane, half * sign, axis) for sign in (-1, 1) for axis in (0, 1)]
        for edge in ((slice(0, None, step), centre[1]), (centre[0], slice(0, None, step))):
            plane[edge] = (sum(around) / 4)[edge] + wobble**2 * random[edge]
        step, wobble = half, wobble / decay
    plane -= plane.min()
    return plane / plane.max()


def fog(x, image, strength, decay):
    side = 2 ** math.ceil(math.log2(x.shape[0]))
    clouds = plasma(side, decay)[: x.shape[0], : x.shape[1], None]
    return (x + strength * clouds) * x.max() / (x.max() + strength)


def hsv(x):
    """Hue in sixths, saturation, value; gray has hue 0."""
    top, low = x.max(2), x.min(2)
    spread = np.where(top > low, top - low, 1)
    r, g, b = np.moveaxis(x, 2, 0)
    hue = np.select(
        [top == low, r == top, g == top], [0, (g - b) / spread % 6, (b - r) / spread + 2], (r - g) / spread + 4
    )
    return hue, np.where(top > 0, (top - low) / np.where(top > 0, top, 1), 0), top


def from_hsv(hue, saturation, value):
    def channel(offset):
        k = (offset + hue) % 6
        return value - value * saturation * np.clip(np.minimum(k, 4 - k), 0, 1)

    return np.stack([channel(5), channel(3), channel(1)], axis=2)


def brightness(x, image, amount):
    if x.shape[2] == 1:
        return x + amount
    hue, saturation, value = hsv(x)
    return from_hsv(hue, saturation, np.clip(value + amount, 0, 1))


def saturate(x, image, factor, offset):
    if x.shape[2] == 1:
        return x
    hue, saturation, value = hsv(x)
    return from_hsv(hue, np.clip(saturation * factor + offset, 0, 1), value)


def contrast(x, image, factor):
    mean = x.mean((0, 1), keepdims=True)
    return (x - mean) * factor + mean


def elastic(x, image, strength, sigma, reach):
    side = x.shape[0]
    random = 2 * shares("elastic", 6 + 2 * side * side) - 1
    middle, half = side // 2, side // 3
    corners = np.array([[middle + half, middle + half], [middle + half, middle - half], [middle - half, middle - half]])
    moved = corners + reach * random[:6].reshape(3, 2)
    back = np.linalg.solve(np.column_stack([moved, np.ones(3)]), corners)  # moved (x, y, 1) -> corner (x, y)
    shift = random[6:].reshape(side, 2, side).transpose(1, 0, 2)
    shift = [
        strength * (ndimage.gaussian_filter(part, sigma, mode="reflect", truncate=3) if sigma else part)
        for part in shift
    ]
    y, z = np.mgrid[0:side, 0:side]
    from_x, from_y = np.moveaxis(np.stack([z + shift[0], y + shift[1], np.ones_like(x[:, :, 0])], 2) @ back, 2, 0)
    return each(x, lambda plane: ndimage.map_coordinates(plane, [from_y, from_x], order=1, mode="mirror"))


def pixelate(x, image, share):
    side = image.shape[0]
    small = pillow(image).resize((int(side * share),) * 2, Image.Resampling.BOX)
    return pixels(small.resize((side, side), Image.Resampling.BOX)) / 255


def jpeg(x, image, quality):
    file = io.BytesIO()
    pillow(image).save(file, "JPEG", quality=int(quality))
    return pixels(Image.open(file)) / 255


REFERENCES = {
    "gaussian-noise": gaussian_noise, "shot": shot, "impulse": impulse, "speckle": speckle, "gaussian-blur": gaussian_blur,
    "defocus": defocus, "motion": motion, "zoom": zoom, "fog": fog, "brightness": brightness, "contrast": contrast,
    "saturate": saturate, "elastic": elastic, "pixelate": pixelate, "jpeg": jpeg,
}  # fmt: skip


def check_jpeg(difference: np.ndarray) -> None:
    """A coefficient halfway between two multiples may be rounded the other way, which changes its whole block a little."""
    assert difference.mean() <= 1
    assert (difference > 0).mean() <= 0.2


@pytest.mark.parametrize(("size", "channels"), CASES)
@pytest.mark.parametrize("kind", REFERENCES)
def test_a_corruption_is_its_reference(kind: str, size: int, channels: int) -> None:
    for severity in SEVERITIES:
        image = textured(size, size, channels, severity)
        constants = KINDS[kind].constants(severity, size=size)
        expected = to_bytes(REFERENCES[kind](image / 255, image, *constants))
        difference = np.abs(corrupted(kind, severity, image).astype(int) - expected)
        if kind == "jpeg":
            check_jpeg(difference)
        else:  # single precision may fall on the other side of a level
            assert difference.max() <= 1, f"severity {severity}"
            assert (difference > 0).mean() <= 0.005, f"severity {severity}"


def test_every_corruption_has_a_reference() -> None:
    assert {name for name, kind in KINDS.items() if kind.group != "geometry"} == set(REFERENCES)
    assert [name for name, kind in KINDS.items() if kind.official is None] == ["rotation", "shift", "occlusion"]
    assert all(len(kind.small) == len(kind.large) == 5 for kind in KINDS.values())


@pytest.mark.parametrize("severity", SEVERITIES)
def test_geometry_is_pillows(severity: int) -> None:
    image = textured(32, 32, 3, severity)
    sign, _, _ = draws("rotation")
    expected = pillow(image).rotate(10 * severity if sign < 0.5 else -10 * severity)
    assert np.array_equal(corrupted("rotation", severity, image), pixels(expected))
    angle, reach = 2 * math.pi * draws("shift")[1], 0.12 * severity * 32
    matrix = (1, 0, reach * math.cos(angle), 0, 1, reach * math.sin(angle))
    expected = pillow(image).transform((32, 32), Image.Transform.AFFINE, matrix)
    assert np.array_equal(corrupted("shift", severity, image), pixels(expected))
    side, expected = 0.12 * severity * 32, pillow(image)
    corner = [int(max(0.0, draw * 32 - side / 2)) for draw in draws("occlusion")[1:]]
    ImageDraw.Draw(expected).rectangle((*corner, *(min(32, near + side) for near in corner)), (125, 123, 114))
    assert np.array_equal(corrupted("occlusion", severity, image), pixels(expected))


@pytest.mark.parametrize("quality", [1, 8, 30, 49, 50, 75, 95, 100])
@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_of_any_quality_is_pillows(quality: int, channels: int) -> None:
    for seed, size in enumerate((16, 32, 45, 64)):
        image = textured(size, size, channels, seed)
        difference = np.abs(
            ours(f"resize > jpeg({quality})", image, size).astype(int) - to_bytes(jpeg(0, image, quality))
        )
        check_jpeg(difference)


def test_jpeg_of_smooth_images_is_pillows_to_a_fiftieth_of_a_level() -> None:
    small = np.random.default_rng(0).integers(0, 256, (10, 7, 7, 3), np.uint8)
    images = np.stack([np.asarray(Image.fromarray(one).resize((96, 96), Image.Resampling.BICUBIC)) for one in small])
    for severity in SEVERITIES:
        codes = corrupt_images(images, "jpeg", severity, seed=0, indices=np.arange(10), threads=2)
        quality = KINDS["jpeg"].constants(severity, size=96)[0]
        expected = np.stack([to_bytes(jpeg(0, image, quality)) for image in images])
        assert np.abs(codes.astype(int) - expected).mean() <= 0.02


def test_noise_is_normal_and_independent() -> None:
    """Its distribution, not only its formula: of 300,000 values, at a gray that is never clipped."""
    images = np.full((100, 32, 32, 3), 128, np.uint8)
    noise = corrupt_images(images, "gaussian-noise", 3, seed=0, indices=np.arange(100), threads=2).astype(float) - 127.5
    assert abs(noise.mean()) < 0.15
    assert abs(noise.std() / (0.08 * 255) - 1) < 0.01
    edges = np.array([-40, -20, -10, -0.5, 10, 20, 40.0])
    expected = stats.norm.cdf(edges - 0.5, scale=0.08 * 255)
    assert np.abs([(noise < edge).mean() for edge in edges] - expected).max() < 0.02
    rows = noise.reshape(100, -1)
    assert abs(np.corrcoef(rows[:, :-1].ravel(), rows[:, 1:].ravel())[0, 1]) < 0.01
    assert np.abs(np.corrcoef(rows) - np.eye(100)).max() < 0.1
    counts = corrupt_images(images, "shot", 5, seed=0, indices=np.arange(100), threads=2) / 255 * 50
    assert abs(counts.var() / (128 / 255 * 50) - 1) < 0.03
    hit = corrupt_images(images, "impulse", 5, seed=0, indices=np.arange(100), threads=2)
    assert abs((hit == 0).mean() - 0.035) < 0.002
    assert abs((hit == 255).mean() - 0.035) < 0.002
