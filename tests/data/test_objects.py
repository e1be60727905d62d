"""Images that a Python program holds: every kind gives the same pixels, and what cannot be resumed or read is an error."""

import time
from collections.abc import Callable, Iterator, Sized
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torchvision.transforms.v2 import functional as transforms

from dssl.data import NoSplitError, open_source, register_source
from dssl.data.objects import as_source, named
from dssl.errors import DsslError

PIXELS = np.random.default_rng(3).integers(0, 256, (30, 9, 12, 3), dtype=np.uint8)
LABELS = [number % 3 for number in range(30)]


class Made(Dataset[Any]):
    """A torch Dataset that makes its items with a function."""

    def __init__(self, make: Callable[[int], Any], length: int = 30) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def picture(index: int) -> Pillow.Image:
    return Pillow.fromarray(PIXELS[index])


def to_tensor(index: int) -> torch.Tensor:
    return transforms.to_dtype(transforms.pil_to_tensor(picture(index)), torch.float32, scale=True)


HOLDERS: dict[str, Callable[[], Sized]] = {
    "array": lambda: PIXELS,
    "read-only array": lambda: np.frombuffer(PIXELS.tobytes(), np.uint8).reshape(PIXELS.shape),
    "array of floats": lambda: PIXELS / 255,
    "pictures": lambda: [picture(index) for index in range(30)],
    "pictures with labels": lambda: Made(lambda index: (picture(index), LABELS[index])),
    "tensors": lambda: TensorDataset(torch.from_numpy(PIXELS).permute(0, 3, 1, 2)),
    "what ToTensor gives": lambda: Made(lambda index: (to_tensor(index), LABELS[index])),
    "half precision": lambda: Made(lambda index: {"x": to_tensor(index).half(), "path": "a.png"}),
    "mappings": lambda: Made(lambda index: {"id": index, "pixels": PIXELS[index], "label": "cat"}),
    "a part of a Dataset": lambda: Subset(Made(picture), range(30)),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_every_kind_of_object_gives_the_pixels(kind: str) -> None:
    source = as_source(HOLDERS[kind]())
    assert len(source) == 30
    for index in (0, 17, 29):
        image = source.image(index)
        assert np.array_equal(image, PIXELS[index])
        assert image.flags.c_contiguous


def test_paths_are_read_by_the_decoder_and_name_their_images(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(4)]
    for number, path in enumerate(paths):
        picture(number).save(path)
    source = as_source([(str(path), "cat") for path in paths])
    assert np.array_equal(source.image(2), PIXELS[2])
    assert source.label_of(2) == str(paths[2])
    assert source.classes == ("cat",)
    with pytest.raises(DsslError, match=r"missing\.png"):
        as_source([tmp_path / "missing.png"])


def test_rows_of_a_hugging_face_dataset() -> None:
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    features = datasets.Features({
        "img": datasets.Image(), "fine": datasets.ClassLabel(names=["ant", "bee", "cow"]), "text": datasets.Value("string"),
    })  # fmt: skip
    rows = {"img": [picture(index) for index in range(30)], "fine": LABELS, "text": ["x"] * 30}
    table = datasets.Dataset.from_dict(rows, features=features)
    assert as_source(table).labels is None  # "fine" is not the name of a label that everybody uses
    source = as_source(table, label="fine")
    assert np.array_equal(source.image(7), PIXELS[7])
    assert source.labels is not None
    assert source.labels.tolist() == LABELS
    assert source.classes == ("ant", "bee", "cow")
    with pytest.raises(DsslError, match="train, test"):
        as_source(datasets.DatasetDict({"train": table, "test": table}))


def test_gray_colour_and_more_channels() -> None:
    gray = PIXELS[:, :, :, 0]
    with named(gray) as text:
        assert text is not None
        assert np.array_equal(open_source(text, channels=1).image(3), gray[3][:, :, None])
        assert np.array_equal(open_source(text).image(3), np.repeat(gray[3][:, :, None], 3, axis=2))
    with named(PIXELS) as text:
        assert text is not None
        expected = np.asarray(picture(3).convert("L"))
        assert np.array_equal(open_source(text, channels=1).image(3)[:, :, 0], expected)
    many = np.concatenate([PIXELS, PIXELS[..., :2]], axis=3)
    with named(many) as text:
        assert text is not None
        assert np.array_equal(open_source(text, channels=5).image(3), many[3])
        with pytest.raises(DsslError, match="9 x 12 x 5"):
            open_source(text).image(3)


@pytest.mark.parametrize(
    ("label", "classes"), [(lambda n: n % 3, ("0", "1", "2")), (lambda n: torch.tensor(10 * (n % 3)), ("0", "10", "20")),
                           (lambda n: "abc"[n % 3], ("a", "b", "c")), (lambda n: {"boxes": []}, None)],
)  # fmt: skip
def test_labels_are_collected(label: Callable[[int], Any], classes: tuple[str, ...] | None) -> None:
    source = as_source(Made(lambda index: (PIXELS[index], label(index))))
    assert source.classes == classes
    assert source.labels is None if classes is None else source.labels.tolist() == LABELS


def test_labels_may_be_given_and_are_then_not_collected() -> None:
    asked: list[int] = []

    def item(index: int) -> NDArray[np.uint8]:
        asked.append(index)
        return PIXELS[index]

    source = as_source(Made(item), labels=LABELS)
    before = len(asked)
    assert source.labels is not None
    assert source.labels.tolist() == LABELS
    assert len(asked) == before
    with pytest.raises(DsslError, match="2 labels for 30"):
        _ = as_source(PIXELS, labels=[0, 1]).labels


def test_a_name_opens_while_the_call_lasts_and_no_longer() -> None:
    with named(PIXELS) as text:
        assert text is not None
        assert text.startswith("python:ndarray(30 images, ")
        assert len(open_source(text)) == 30
        with pytest.raises(NoSplitError):
            open_source(text, split="test")
    with pytest.raises(DsslError, match=r"dssl\.train"):
        open_source(text)
    with pytest.raises(DsslError, match="python"):
        register_source("python", lambda place, split, channels: as_source(PIXELS))
    with named("shapes") as text:
        assert text == "shapes"


def test_the_fingerprint_is_of_the_content_and_not_of_its_holder() -> None:
    array, tensors = as_source(PIXELS), as_source(Made(to_tensor))
    assert array.fingerprint == tensors.fingerprint
    assert as_source(PIXELS[:29]).fingerprint != array.fingerprint
    assert as_source(PIXELS ^ 1).fingerprint != array.fingerprint
    assert as_source(Made(lambda index: (PIXELS[index], 1))).fingerprint != array.fingerprint
    assert array.stamp() != as_source(PIXELS).stamp()  # features of one are not those of the other


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(PIXELS)


NORMALIZED = (to_tensor(0) - 0.45) / 0.225
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "normalized": (lambda: [NORMALIZED] * 3, "Normalize"),
    "16 bits": (lambda: PIXELS.astype(np.uint16), "uint16"),
    "channels first": (lambda: PIXELS.transpose(0, 3, 1, 2), "3 x 9 x 12"),
    "augmented": (lambda: Made(lambda index: np.random.permutation(PIXELS[index])), "differs"),  # noqa: NPY002
    "a table of splits": (lambda: {"train": PIXELS, "test": PIXELS}, "train, test"),
    "a stream": (lambda: Stream(), "__len__"),
    "a loader": (lambda: DataLoader(Made(picture)), r"loader\.dataset"),
    "numbers": (lambda: [1, 2, 3], "int"),
    "batches": (lambda: [PIXELS, PIXELS], r"\(30, 9, 12, 3\)"),
    "nothing": (list, "list"),
    "two images in each item": (lambda: [{"left": PIXELS[0], "right": PIXELS[1]}], "left, right"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_used_is_refused(kind: str) -> None:
    make, fact = REFUSED[kind]
    with pytest.raises(DsslError, match=fact):
        as_source(make()).image(0)


def test_a_dataset_that_answers_threads_wrongly_is_asked_by_one_at_a_time() -> None:
    """It keeps where it reads, as one with an open file does."""
    place = 0

    def item(index: int) -> NDArray[np.uint8]:
        nonlocal place
        place = index
        time.sleep(0.002)
        return PIXELS[place]

    source = as_source(Made(item))
    with ThreadPoolExecutor(4) as pool:
        images = list(pool.map(source.image, range(30)))
    assert np.array_equal(images, PIXELS)


def test_an_item_that_cannot_be_read_is_named_and_the_others_are_used() -> None:
    def item(index: int) -> tuple[NDArray[np.uint8], int]:
        if index == 5:
            raise OSError("cut short")
        return PIXELS[index], LABELS[index]

    source = as_source(Made(item))
    with pytest.raises(DsslError, match="Made 5"):
        source.image(5)
    assert source.labels is not None
    assert source.labels[6:].tolist() == LABELS[6:]
