"""Images that a Python program holds: a torch Dataset, arrays, a list of paths or pictures, a Hugging Face Dataset.

They have no place that a later process could open, so ``open_source`` knows them by a name for as long as a call lasts.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import sys
import threading
import uuid
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from torch import Tensor

from dssl import rng
from dssl.data.decode import UnreadableImage, naming, pixels_of, read_image
from dssl.data.pipeline import in_threads
from dssl.data.source import NoSplitError, Source, Split
from dssl.errors import DsslError
from dssl.files import printable
from dssl.types import Image

logger = logging.getLogger("dssl")
PREFIX = "python"
Data = str | Path | Sized
"""What names images, or holds them: anything with ``__len__`` and ``__getitem__``."""
SAMPLE = 24
"""Images that are read when the data is opened, for the fingerprint and the checks."""
_UNREADABLE = b"unreadable"
_held: dict[str, Source] = {}


def as_source(
    data: Sized,
    *,
    image: Hashable = None,
    label: Hashable = None,
    labels: Iterable[Any] | None = None,
) -> Source:
    """Images that are Python objects, as every verb takes them; needed only to say what cannot be found out.

    Args:
        data: Anything with ``__len__`` and ``__getitem__``. An item is an image, a tuple that begins with an image and its label,
            or a mapping. An image is a picture of Pillow, a path, an array (height x width x channels), or a tensor (channels x
            height x width); arrays and tensors are uint8, or floating point from 0 to 1.
        image: The key of the image in items that are mappings, such as the rows of a Hugging Face Dataset; by default the only
            one that holds an image.
        label: The key of the label in such items; by default ``"label"``.
        labels: The labels of all images. By default they are those of the items, and every item is read once to collect them if
            a measurement needs them.
    """
    return data if isinstance(data, Source) else Objects(data, image=image, label=label, labels=labels)


@contextmanager
def named(data: Data | None) -> Iterator[str | None]:
    """The text by which ``open_source`` finds the images, of objects while the block runs."""
    if data is None or isinstance(data, str | Path):
        yield None if data is None else str(data)
        return
    source = as_source(data)
    text = source.name if isinstance(source, Objects) else f"{PREFIX}:{source.name}"
    _held[text] = source
    try:
        yield text
    finally:
        _held.pop(text, None)


def open_held(place: str, split: Split, channels: int) -> Source:
    """The images that a call of this process holds."""
    if (source := _held.get(f"{PREFIX}:{place}")) is None:
        raise DsslError(
            f"{PREFIX}:{place} were objects of a Python program: make its call again with the same objects, such as "
            "dssl.train(..., data=OBJECT), or name other images with --data"
        )
    if split == "test":
        raise NoSplitError(f"{source.name}: no test split: give test=OBJECT")
    return source.with_channels(channels) if isinstance(source, Objects) else source


class Objects(Source):
    """Anything with ``__len__`` and ``__getitem__`` that gives images, with or without labels.

    Its fingerprint is that of a sample. An item that differs when it is asked for again is an error: no run could be resumed.
    """

    def __init__(
        self, data: Any, *, image: Hashable = None, label: Hashable = None, labels: Iterable[Any] | None = None
    ) -> None:
        kind = type(data).__name__
        if isinstance(data, Mapping):
            raise DsslError(f"data ({kind}) has the keys {', '.join(map(str, data))}: give one of them: data[KEY]")
        try:
            count = len(data)
            first = data[0] if count else None
        except (TypeError, NotImplementedError, KeyError) as error:
            raise DsslError(
                f"data ({kind}) cannot be read by number ({error}): expected an object with __len__ and __getitem__, "
                "such as a torch Dataset, a list or an array; of a DataLoader give loader.dataset"
            ) from None
        if not count:
            raise DsslError(f"data ({kind}) is empty: expected at least one image")
        self._data, self._kind, self._count, self._channels = data, kind, count, 3
        self._image, self._label, self._labels = image, label, labels
        self._lock: threading.Lock | None = None
        self._seen: dict[int, int | str | None] = {}
        self._stamp = uuid.uuid4().hex
        if isinstance(first, Mapping):
            self._find_keys(first)
        elif image is not None or label is not None:
            raise DsslError(f"the items of data ({kind}) are not mappings: leave out image and label")
        self.fingerprint = self._checked()
        self.name = f"{PREFIX}:{kind}({count} images, {self.fingerprint[:8]})"

    def __len__(self) -> int:
        return self._count

    def with_channels(self, channels: int) -> Objects:
        other = copy.copy(self)
        other._channels = channels
        return other

    def image(self, index: int) -> Image:
        with naming(self.label_of(index)):
            image, label = self._parts(index)
            self._seen[index] = _plain(label)
            return _pixels(image, self._channels)

    def label_of(self, index: int) -> str:
        """The path, in a list of them."""
        item = self._data[index] if isinstance(self._data, list | tuple) else None
        path = item[0] if isinstance(item, tuple | list) and item else item
        return printable(str(path)) if isinstance(path, str | Path) else f"{self._kind} {index}"

    def stamp(self, indices: Sequence[int] | None = None) -> str:
        """Of this object alone: its fingerprint is that of a sample, too little to reuse features of an earlier call."""
        return self._stamp

    @cached_property
    def labels(self) -> NDArray[np.int64] | None:  # type: ignore[override]  # known only after all items are read
        return None if self._classified is None else self._classified[0]

    @cached_property
    def classes(self) -> tuple[str, ...] | None:  # type: ignore[override]  # as above
        return None if self._classified is None else self._classified[1]

    @cached_property
    def _classified(self) -> tuple[NDArray[np.int64], tuple[str, ...]] | None:
        values, names = self._all_labels()
        if len(values) != self._count:
            raise DsslError(f"{self.name}: {len(values)} labels for {self._count} images: expected one for each")
        present = sorted({value for value in values if value is not None}, key=lambda value: (str(type(value)), value))
        if not present:
            return None
        number = {value: place for place, value in enumerate(present)} | {None: 0}  # None: of an unreadable image
        return np.array([number[value] for value in values]), tuple(names.get(value, str(value)) for value in present)

    def _all_labels(self) -> tuple[list[int | str | None], dict[int | str | None, str]]:
        """One for each image, None where there is none, and the names of those that have one."""
        if self._labels is not None:
            return [_plain(value) for value in self._labels], {}
        library = sys.modules.get("datasets")
        if library is not None and isinstance(self._data, library.Dataset) and self._label in self._data.features:
            feature = self._data.features[self._label]
            names = feature.names if isinstance(feature, library.ClassLabel) else ()
            return [_plain(value) for value in self._data[self._label]], dict(enumerate(names))
        if all(self._label_at(index) is None for index in range(min(3, self._count))):
            return [None] * self._count, {}
        return list(in_threads(self._label_at, range(self._count))), {}

    def _label_at(self, index: int) -> int | str | None:
        if index in self._seen:
            return self._seen[index]
        try:
            with naming(self.label_of(index)):
                return _plain(self._parts(index)[1])
        except UnreadableImage:
            return None

    def _parts(self, index: int) -> tuple[Any, Any]:
        """Image and label of an item."""
        if self._lock is None:
            item = self._data[index]
        else:
            with self._lock:
                item = self._data[index]
        if isinstance(item, Mapping):
            return item[self._image], item.get(self._label)
        if isinstance(item, tuple | list):
            return item[0] if item else None, item[1] if len(item) > 1 else None
        return item, None

    def _find_keys(self, item: Mapping[Any, Any]) -> None:
        """The keys of image and label, where they were not named."""
        if self._image is None:
            images = [key for key, value in item.items() if isinstance(value, Pillow.Image | Path) or _is_array(value)]
            self._image = images[0] if len(images) == 1 else None
        for what, key in {"image": self._image, "label": self._label}.items():
            if key not in item and (what == "image" or key is not None):
                raise DsslError(
                    f"the items of data ({self._kind}) have the keys {', '.join(map(str, item))}, and not one of them is "
                    f"clearly the {what}: name it: dssl.as_source(data, {what}=KEY)"
                )
        self._label = "label" if self._label is None else self._label

    def _checked(self) -> str:
        """The fingerprint, of the number of images and a sample, which is read twice and then by two threads."""
        sample = rng.sample(rng.key(0, "python"), self._count, SAMPLE).tolist()
        first = [self._digest(index) for index in sample]
        if set(first) == {_UNREADABLE}:
            self.image(sample[0])  # raises what is wrong
        for index, before in zip(sample, first, strict=True):
            if before != self._digest(index):
                raise DsslError(
                    f"item {index} of data ({self._kind}) differs when it is asked for again, as with random transforms: leave "
                    "them out, since dssl makes the views itself and must get the same images again to resume"
                )
        if list(in_threads(self._digest, sample, threads=2)) != first:
            self._lock = threading.Lock()
            if os.environ.get("RANK", "0") == "0":
                logger.warning(
                    f"two threads get wrong images of this {self._kind}: they are read one at a time now; images in a folder or "
                    "in a list of paths are decoded in parallel"
                )
        digest = hashlib.sha256(f"{self._count}".encode())
        for part in first:
            digest.update(part)
        return digest.hexdigest()

    def _digest(self, index: int) -> bytes:
        """Of what an item holds, whatever holds it; of an unreadable one the same, whatever the reason."""
        digest = hashlib.sha256()
        try:
            with naming(self.label_of(index)):
                image, label = self._parts(index)
                if isinstance(image, str | Path):
                    digest.update(Path(image).read_bytes())
                elif isinstance(image, Pillow.Image):
                    digest.update(f"{image.mode} {image.size}".encode() + image.tobytes())
                else:
                    pixels = _array(image)
                    digest.update(f"{pixels.shape}".encode() + pixels.tobytes())
                digest.update(repr(_plain(label)).encode())
        except UnreadableImage:
            return _UNREADABLE
        return digest.digest()


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray | Tensor) and value.ndim in (2, 3)


def _pixels(image: Any, channels: int) -> Image:
    """Height x width x channels, contiguous."""
    if isinstance(image, str | Path):
        return read_image(os.fspath(image), channels=channels)
    if isinstance(image, Pillow.Image):
        if channels not in (1, 3):
            raise DsslError(f"a picture of Pillow has 1 or 3 channels, expected {channels}: give arrays")
        return pixels_of(image, channels=channels)
    pixels = _array(image)
    depth = pixels.shape[2]
    if depth != channels:
        if channels not in (1, 3) or depth not in (1, 3, 4):
            raise DsslError(
                f"an image has {' x '.join(map(str, pixels.shape))} values as height x width x channels, expected {channels} "
                "channels: an array has them last, a tensor first"
            )
        return pixels_of(Pillow.fromarray(pixels[:, :, 0] if depth == 1 else pixels), channels=channels)
    return np.ascontiguousarray(pixels)


def _array(image: Any) -> NDArray[np.uint8]:
    """Bytes of height x width x channels; of floating point the nearest, so that what ToTensor made comes back exactly."""
    if not _is_array(image):
        shape = f" of shape {tuple(image.shape)}" if isinstance(image, np.ndarray | Tensor) else ""
        raise DsslError(
            f"an image is of type {type(image).__name__}{shape}: expected a picture of Pillow, a path, an array or a tensor"
        )
    values: NDArray[Any] = image
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        values = (image.float() if image.is_floating_point() else image).numpy()
        values = values.transpose(1, 2, 0) if values.ndim == 3 else values
    if values.ndim == 2:
        values = values[:, :, None]
    if np.issubdtype(values.dtype, np.floating):
        low, high = float(values.min(initial=0)), float(values.max(initial=0))
        if not (low >= 0 and high <= 1):
            raise DsslError(
                f"an image has floating-point values from {low:.3g} to {high:.3g}, expected 0 to 1 as ToTensor gives them: leave "
                "Normalize out, since dssl normalises itself, or give uint8"
            )
        values = np.rint(values * 255).astype(np.uint8)
    if values.dtype != np.uint8:
        raise DsslError(f"an image has values of type {values.dtype}, expected uint8, or floating point from 0 to 1")
    return values


def _plain(label: Any) -> int | str | None:
    """A class by number or name; None for anything else, such as boxes."""
    if isinstance(label, np.ndarray | Tensor | np.generic) and label.ndim == 0:
        label = label.item()
    return label if isinstance(label, int | str) else None
