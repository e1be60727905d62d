"""Images to measure on: one's own photos, or drawn ones where there are none."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from dssl.data import open_source


def photo_files(folder: Path | None, *, count: int) -> list[bytes]:
    """JPEG files as bytes, the first so many of a folder."""
    if folder is None:
        return drawn_photos(count)
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in (".jpg", ".jpeg")]
    if not paths:
        raise SystemExit(f"no JPEG files in {folder}")
    return [path.read_bytes() for path in paths[:count]]


def drawn_photos(count: int) -> list[bytes]:
    """JPEG files of 400 x 500 pixels: shapes, enlarged, with the noise of a camera."""
    source = open_source("shapes:64")
    generator = np.random.Generator(np.random.Philox(0))
    files = []
    for index in range(count):
        picture = Image.fromarray(source.image(index % len(source))).resize((400, 500), Image.Resampling.BICUBIC)
        noisy = np.clip(np.asarray(picture) + generator.normal(0, 8, (500, 400, 3)), 0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(noisy).save(buffer, "JPEG", quality=90)
        files.append(buffer.getvalue())
    return files


def tiny_photo() -> bytes:
    """A JPEG file of one block."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    return buffer.getvalue()


def decoded(files: list[bytes]) -> list[np.ndarray]:
    return [np.array(Image.open(io.BytesIO(data)).convert("RGB")) for data in files]


def resized(photos: list[np.ndarray], size: int) -> np.ndarray:
    """All photos as one array of squares."""
    return np.stack([np.array(Image.fromarray(photo).resize((size, size))) for photo in photos])
