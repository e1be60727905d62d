"""Every operation and the whole chain against Pillow and torchvision, bit for bit."""

import math

import numpy as np
import PIL
import pytest
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps
from torchvision.transforms import functional

from dssl import rng
from dssl.augment import TABLES, ViewMaker
from dssl.graph import View

SIZES = (32, 33, 57)
RESIZES_ALIKE = pytest.mark.skipif(
    int(PIL.__version__.partition(".")[0]) < 13, reason="Pillow rounds a resize in another way until version 12"
)


def textured(height: int, width: int, channels: int, seed: int) -> np.ndarray:
    """Waves, edges, noise, flat patches and saturated colours: smooth images hide differences in rounding."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    image = np.empty((height, width, channels), np.float64)
    for c in range(channels):
        a, b, phase = generator.uniform(-0.9, 0.9, 3)
        image[:, :, c] = 128 + 127 * np.sin(a * x + b * y + 7 * phase)
    image += generator.normal(0, generator.choice([0.0, 8.0, 60.0]), image.shape)
    top, left = generator.integers(0, height), generator.integers(0, width)
    image[top : top + height // 3, left : left + width // 3] = generator.choice([0, 255, 128], channels)
    return np.clip(image, 0, 255).astype(np.uint8)


def pillow(image: np.ndarray) -> Image.Image:
    return Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)


def pixels(image: Image.Image) -> np.ndarray:
    array = np.asarray(image)
    return array[:, :, None] if array.ndim == 2 else array


def ours(policy: str, image: np.ndarray, size: int) -> np.ndarray:
    maker = ViewMaker([View(name="v", policy=policy)], size=size, seed=0, channels=image.shape[2])
    out = maker.allocate(1)
    maker.apply_many(maker.plan(np.zeros(1, np.int64), epoch=0), 0, [image], out, 0)
    return out["v"][0]


def enhance(kind: type, image: Image.Image, factor: float) -> Image.Image:
    return kind(image).enhance(factor)


def affine(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix)


def cutout(image: Image.Image, side: float, draws: tuple[float, float]) -> Image.Image:
    corner = [int(max(0.0, draw * image.width - side / 2)) for draw in draws]
    far = [min(image.width, near + side) for near in corner]
    image = image.copy()
    ImageDraw.Draw(image).rectangle((*corner, *far), (125, 123, 114) if image.mode == "RGB" else 123)
    return image


def solarize_add(image: Image.Image, amount: float) -> Image.Image:
    added = np.clip(np.asarray(image).astype(np.int64) + int(amount), 0, 255).astype(np.uint8)
    return ImageOps.solarize(Image.fromarray(added), 128)


def by_pillow(name: str, image: Image.Image, value: float, draws: tuple[float, float] = (0.0, 0.0)) -> Image.Image:
    """The reference for every operation, by its name and value."""
    size = image.width
    factors = {"color": ImageEnhance.Color, "contrast": ImageEnhance.Contrast, "brightness": ImageEnhance.Brightness}
    if name in factors:
        return enhance(factors[name], image, value)
    references = {
        "identity": lambda: image,
        "autocontrast": lambda: Image.blend(image, ImageOps.autocontrast(image), value),
        "equalize": lambda: Image.blend(image, ImageOps.equalize(image), value),
        "invert": lambda: ImageOps.invert(image),
        "gray": lambda: functional.to_grayscale(image, 3 if image.mode == "RGB" else 1),
        "rotate": lambda: image.rotate(value),
        "posterize": lambda: ImageOps.posterize(image, max(1, int(value))),
        "solarize": lambda: ImageOps.solarize(image, value),
        "solarize-add": lambda: solarize_add(image, value),
        "sharpness": lambda: enhance(ImageEnhance.Sharpness, image, value),
        "hue": lambda: functional.adjust_hue(image, value),
        "shear-x": lambda: affine(image, 1, value, 0, 0, 1, 0),
        "shear-y": lambda: affine(image, 1, 0, 0, value, 1, 0),
        "translate-x": lambda: affine(image, 1, 0, value * size, 0, 1, 0),
        "translate-y": lambda: affine(image, 1, 0, 0, 0, 1, value * size),
        "translate-x-pixels": lambda: affine(image, 1, 0, value, 0, 1, 0),
        "translate-y-pixels": lambda: affine(image, 1, 0, 0, 0, 1, value),
        "cutout": lambda: cutout(image, value * size, draws),
        "cutout-pixels": lambda: cutout(image, value, draws),
    }
    return references[name]()


VALUES: dict[str, list[float]] = {
    "identity": [0],
    "autocontrast": [0, 0.31, 0.5, 1],
    "equalize": [0, 0.31, 0.5, 1],
    "invert": [0],
    "gray": [0],
    "rotate": [-360, -270, -180, -90, -30, -7.3, -1, 0, 0.1, 5, 9, 15, 29.9, 45, 90, 135, 180, 270, 360],
    "posterize": [0, 0.67, 1, 1.2, 2, 3.99, 4, 5, 6, 7, 8],
    "solarize": [0, 0.5, 1, 42.67, 76.8, 128, 255, 255.5, 256],
    "solarize-add": [-30, 0, 0.9, 18.33, 33, 110, 127, 255],
    "color": [0, 0.1, 0.4, 0.64, 1, 1.36, 1.9, 3],
    "contrast": [0, 0.1, 0.4, 0.64, 1, 1.36, 1.9, 3],
    "brightness": [0, 0.1, 0.4, 0.64, 1, 1.36, 1.9, 3],
    "sharpness": [0, 0.1, 0.4, 0.64, 1, 1.36, 1.9, 3],
    "hue": [-0.5, -0.1, -0.0621, -0.001, 0, 0.002, 0.05, 0.1, 0.333, 0.5],
    "shear-x": [-2, -0.3, -0.09, 0, 0.05, 0.1, 0.3, 1.5],
    "shear-y": [-2, -0.3, -0.09, 0, 0.05, 0.1, 0.3, 1.5],
    "translate-x": [-1, -0.45, -0.1, 0, 0.015, 0.2, 1],
    "translate-y": [-1, -0.45, -0.1, 0, 0.015, 0.2, 1],
    "translate-x-pixels": [-100, -30, -3.5, -0.5, -0.4, 0, 0.4, 0.5, 3.5, 16.67, 30, 100],
    "translate-y-pixels": [-100, -30, -3.5, -0.5, -0.4, 0, 0.4, 0.5, 3.5, 16.67, 30, 100],
    "cutout": [0, 0.1, 0.5, 1, 2],
    "cutout-pixels": [0, 1, 6.67, 12, 40, 300],
}


def test_values_cover_every_operation_of_every_table():
    assert {row.operation for table in TABLES.values() for row in table} <= set(VALUES)


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", VALUES)
def test_operation_is_pillows(name: str, channels: int):
    values = VALUES[name]
    takes_no_value = name in ("identity", "invert", "gray")
    draws = rng.uniforms(rng.key(0, "view", 0, "v"), np.zeros(1, np.int64), 2)[0]
    for seed, size in enumerate(SIZES * 3):
        image = textured(size, size, channels, seed)
        for value in values:
            policy = f"resize > {name}" if takes_no_value else f"resize > {name}({value!r})"
            expected = pixels(by_pillow(name, pillow(image), value, tuple(draws)))
            np.testing.assert_array_equal(
                ours(policy, image, size), expected, err_msg=f"{policy} at {size}, seed {seed}"
            )


@pytest.mark.parametrize("channels", [3, 1])
def test_blur_is_pillows(channels: int):
    for seed, size in enumerate((1, 2, 5, 32, 33, 57)):
        image = textured(size, size, channels, seed)
        for sigma in (0, 0.1, 0.3, 0.5, 0.77, 1, 1.3, 1.7, 1.99, 2, 3.1, 6, 20):
            expected = pixels(pillow(image).filter(ImageFilter.GaussianBlur(sigma)))
            np.testing.assert_array_equal(
                ours(f"resize > blur({sigma},{sigma})", image, size), expected, err_msg=f"{sigma} {size}"
            )


def test_hue_of_every_kind_of_colour_is_pillows():
    # the hue depends on the order of the channels, their spread and the middle one: all of these, at two brightnesses
    high, middle = np.meshgrid(np.arange(256), np.arange(256), indexing="ij")
    for low_part, order in (
        (0, (0, 1, 2)),
        (1, (1, 0, 2)),
        (0, (1, 2, 0)),
        (1, (2, 1, 0)),
        (0, (2, 0, 1)),
        (1, (0, 2, 1)),
    ):
        low = np.minimum(high, middle) * low_part // 3
        image = np.stack([high, np.minimum(middle, high), low], axis=2).astype(np.uint8)[:, :, list(order)]
        image = np.ascontiguousarray(image)
        for value in (-0.37, -0.1, 0.004, 0.0431, 0.1, 0.5):
            expected = pixels(functional.adjust_hue(pillow(image), value))
            np.testing.assert_array_equal(ours(f"resize > hue({value})", image, 256), expected)


@RESIZES_ALIKE
def test_resize_is_pillows():
    generator = np.random.default_rng(0)
    for case in range(300):
        channels = 3 if case % 4 else 1
        height, width = (round(2 ** generator.uniform(0, 9)) for _ in range(2))
        size = round(2 ** generator.uniform(0, 8))
        image = textured(height, width, channels, case)
        expected = pixels(pillow(image).resize((size, size), Image.Resampling.BILINEAR))
        np.testing.assert_array_equal(ours("resize", image, size), expected, err_msg=f"{height}x{width} to {size}")


def crop_box(height: int, width: int, draws: np.ndarray) -> tuple[int, int, int, int]:
    """torchvision's RandomResizedCrop.get_params, from given numbers."""
    for attempt in range(10):
        area = height * width * (0.2 + 0.8 * draws[2 * attempt])
        ratio = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * draws[2 * attempt + 1])
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(draws[20] * (height - h + 1)), int(draws[21] * (width - w + 1)), h, w
    w, h = width, height
    if width / height < 3 / 4:
        h = round(w / (3 / 4))
    elif width / height > 4 / 3:
        w = round(h * (4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


class Draws:
    """The numbers of one view of one image, taken in the order in which the policy names its parts."""

    def __init__(self, seed: int, epoch: int, index: int, view: str):
        self.numbers = rng.uniforms(rng.key(seed, "view", epoch, view), np.array([index]), 100)[0]
        self.used = 0

    def take(self, count: int) -> np.ndarray:
        self.used += count
        return self.numbers[self.used - count : self.used]


def standard(image: Image.Image, size: int, draws: Draws) -> Image.Image:
    top, left, height, width = crop_box(image.height, image.width, draws.take(22))
    image = functional.resized_crop(
        image, top, left, height, width, [size, size], functional.InterpolationMode.BILINEAR
    )
    if draws.take(1)[0] < 0.5:
        image = functional.hflip(image)
    happens, *factors, order = draws.take(6)
    if happens < 0.8:
        adjust = (functional.adjust_brightness, functional.adjust_contrast, functional.adjust_saturation)
        todo = [lambda img, a=a, u=u: a(img, 0.6 + 0.8 * u) for a, u in zip(adjust, factors[:3], strict=True)]
        todo.append(lambda img: functional.adjust_hue(img, (2 * factors[3] - 1) * 0.1))
        for which in orders()[int(order * 24)]:
            image = todo[which](image)
    happens, _, _ = draws.take(3)
    if happens < 0.2:
        image = functional.to_grayscale(image, 3 if image.mode == "RGB" else 1)
    happens, sigma = draws.take(2)
    if happens < 0.5:
        image = image.filter(ImageFilter.GaussianBlur(float(0.1 + 1.9 * sigma)))
    return image


def orders() -> list[tuple[int, ...]]:
    return [(a, b, c, 6 - a - b - c) for a in range(4) for b in range(4) for c in range(4) if len({a, b, c}) == 3]


def randaugment(image: Image.Image, count: int, magnitude: float, table: str, draws: Draws) -> Image.Image:
    rows = TABLES[table]
    numbers = draws.take(4 * count).reshape(count, 4)
    for choice, sign, *own in numbers:
        row = rows[int(choice * len(rows))]
        value = row.low + magnitude / 30 * (row.high - row.low)
        if sign >= 0.5 and row.sign != "none":
            value = -value if row.sign == "negate" else 2 - value
        image = by_pillow(row.operation, image, value, tuple(own))
    return image


def jigsaw(image: Image.Image, tiles: int, draws: Draws) -> Image.Image:
    order = np.argsort(draws.take(tiles**2), kind="stable")
    source, result = pixels(image), np.empty_like(pixels(image))
    edges = [k * image.width // tiles for k in range(tiles + 1)]
    for place, tile in enumerate(order):
        (y, x), (v, u) = divmod(place, tiles), divmod(int(tile), tiles)
        part = source[edges[v] : edges[v + 1], edges[u] : edges[u + 1]]
        height, width = edges[y + 1] - edges[y], edges[x + 1] - edges[x]
        part = np.pad(part, ((0, 1), (0, 1), (0, 0)), mode="edge")
        result[edges[y] : edges[y + 1], edges[x] : edges[x + 1]] = part[:height, :width]
    return Image.fromarray(result[:, :, 0] if result.shape[2] == 1 else result)


@pytest.mark.parametrize(
    ("size", "count", "channels", "policy", "tiles"),
    [
        (32, 400, 3, "ra(2,9)", 0),
        (32, 100, 3, "ra(2,5,monotone14) > jigsaw(5)", 5),
        (33, 100, 1, "ra(8,16) > jigsaw(4)", 4),
        pytest.param(224, 200, 3, "ra(2,9) > jigsaw(4)", 4, marks=RESIZES_ALIKE),
        pytest.param(224, 24, 1, "ra(2,14,randaugment14)", 0, marks=RESIZES_ALIKE),
    ],
)
def test_whole_chain_is_pillows(size: int, count: int, channels: int, policy: str, tiles: int):
    views = [View(name="s1", policy="standard"), View(name="h1", policy=policy, source="s1")]
    maker = ViewMaker(views, size=size, seed=7, channels=channels)
    plan = maker.plan(np.arange(count), epoch=3)
    out = maker.allocate(count)
    number, magnitude, *table = policy.split(")")[0].removeprefix("ra(").split(",")
    for index in range(count):
        height, width = (32, 32) if size < 100 else (180 + 31 * (index % 11), 150 + 37 * (index % 13))
        image = textured(height, width, channels, index)
        maker.apply_many(plan, index, [image], out, index)
        expected = standard(pillow(image), size, Draws(7, 3, index, "s1"))
        np.testing.assert_array_equal(out["s1"][index], pixels(expected), err_msg=f"standard view of image {index}")
        draws = Draws(7, 3, index, "h1")
        expected = randaugment(expected, int(number), float(magnitude), (table or ["dssl16"])[0], draws)
        if tiles:
            expected = jigsaw(expected, tiles, draws)
        np.testing.assert_array_equal(out["h1"][index], pixels(expected), err_msg=f"heavy view of image {index}")
