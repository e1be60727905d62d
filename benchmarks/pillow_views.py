"""The paper's views, composed of Pillow and torchvision as its scripts do: what everything is compared with."""

import io
import math
import random

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps
from torchvision import transforms

from dssl.augment import IMAGENET, TABLES, Normalization
from dssl.augment.operations import Row

_GENERATOR = np.random.default_rng(0)


def operation(name: str, image: Image.Image, value: float) -> Image.Image:
    """One operation of ``dssl16`` as the paper's code writes it."""
    moves = {"shear-x": (1, value, 0, 0, 1, 0), "shear-y": (1, 0, 0, value, 1, 0),
             "translate-x-pixels": (1, 0, value, 0, 1, 0), "translate-y-pixels": (1, 0, 0, 0, 1, value)}  # fmt: skip
    if name in moves:
        return image.transform(image.size, Image.Transform.AFFINE, moves[name])
    if name in ("color", "contrast", "brightness", "sharpness"):
        enhanced: Image.Image = getattr(ImageEnhance, name.capitalize())(image).enhance(value)
        return enhanced
    if name in ("autocontrast", "equalize", "invert"):
        changed: Image.Image = getattr(ImageOps, name)(image)
        return changed
    if name == "rotate":
        return image.rotate(value)
    if name == "posterize":
        return ImageOps.posterize(image, max(1, int(value)))
    if name == "solarize":
        return ImageOps.solarize(image, math.ceil(value))  # the same levels are below it: they are whole
    if name == "solarize-add":
        added = np.clip(np.asarray(image).astype(int) + int(value), 0, 255).astype(np.uint8)
        return ImageOps.solarize(Image.fromarray(added), 128)
    left, top = (int(max(0, random.random() * side - value / 2)) for side in image.size)
    image = image.copy()
    ImageDraw.Draw(image).rectangle(
        (left, top, min(image.width, left + value), min(image.height, top + value)), (125, 123, 114)
    )
    return image


def value_at(row: Row, magnitude: float) -> float:
    """The value of an operation at a magnitude from 0 to 30, before a sign is drawn."""
    return magnitude / 30 * (row.high - row.low) + row.low


class RandAugment:
    """Operations of ``dssl16`` at one magnitude, drawn with replacement, with a random sign."""

    def __init__(self, count: int, magnitude: float) -> None:
        self.count, self.magnitude = count, magnitude

    def __call__(self, image: Image.Image) -> Image.Image:
        for _ in range(self.count):
            row = random.choice(TABLES["dssl16"])
            value = value_at(row, self.magnitude)
            image = operation(row.operation, image, -value if row.sign == "negate" and random.random() < 0.5 else value)
        return image


def blur(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))


def noise(image: Image.Image) -> Image.Image:
    values = np.asarray(image) + _GENERATOR.normal(scale=25.5, size=(image.height, image.width, 3))
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))


def jpeg(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=30)
    return Image.open(file).convert("RGB")


def standard(size: int, *, blurred: bool) -> list[object]:
    """The standard view up to the tensor; CIFAR-10's has no blur."""
    return [
        transforms.RandomResizedCrop(size, scale=(0.2, 1.0)),
        transforms.RandomHorizontalFlip(),
        transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
        transforms.RandomGrayscale(p=0.2),
        *([transforms.RandomApply([transforms.Lambda(blur)], p=0.5)] if blurred else []),
    ]


def to_tensor(normalization: Normalization) -> list[object]:
    return [transforms.ToTensor(), transforms.Normalize(normalization.mean, normalization.std)]


def chain(size: int) -> transforms.Compose:
    """The whole chain of one heavy view: standard, RandAugment(2, 9), normalised."""
    return transforms.Compose([*standard(size, blurred=True), RandAugment(2, 9), *to_tensor(IMAGENET)])
