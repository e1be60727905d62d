"""Features that are kept: taken again where they are those of the same images, encoder and crop, and else computed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from safetensors import safe_open
from safetensors.torch import save_file

from dssl.data.shapes import Shapes
from dssl.evaluation.protocols import PROTOCOLS, Task
from dssl.evaluation.store import FeatureStore


@pytest.mark.parametrize(("side", "ratio", "cropped"), [(32, 1.0, 0), (40, 0.875, 101), (None, 0.875, 50)])
def test_the_protocol_records_the_crop_that_was_made(
    task: Callable[..., Task], memory: Any, side: int | None, ratio: float, cropped: int
) -> None:
    """Images of the encoder's size are taken whole; None: every second image is larger."""
    shapes = Shapes(101, split="test")
    images = [np.array(Pillow.fromarray(shapes.image(i)).resize(((side or 32 + 8 * (i % 2)),) * 2)) for i in range(101)]
    test = memory(np.zeros((101, 1), np.uint8), list(shapes.labels), shapes.classes)
    test.images, test.fingerprint = images, f"shapes of {side}"
    one = task(test=test)
    result = PROTOCOLS["knn"](one)[0]
    assert (result.protocol["crop_ratio"], result.protocol["cropped_test_images"]) == (ratio, cropped)
    # features that are kept say the same
    store = FeatureStore(one.loaded, folder=one.store.folder, threads=1)
    assert store.of(test, allow_unreadable=False).cropped == cropped
    assert store.computed == 0


def test_features_kept_before_crops_were_counted_are_computed_again(task: Callable[..., Task]) -> None:
    one = task()
    first = one.store.of(one.test, allow_unreadable=False)
    (path,) = one.store.folder.glob("*.safetensors")  # type: ignore[union-attr]
    with safe_open(path, framework="pt") as file:
        metadata = {name: text for name, text in file.metadata().items() if name != "cropped"}
        tensors = {name: file.get_tensor(name) for name in ("values", "rows")}
    save_file(tensors, path, metadata=metadata)
    again = FeatureStore(one.loaded, folder=one.store.folder, threads=1)
    assert torch.equal(again.of(one.test, allow_unreadable=False).values, first.values)
    assert again.computed == 101


def test_damaged_or_foreign_features_are_computed_again(task: Callable[..., Task]) -> None:
    one = task()
    first = one.store.of(one.test, allow_unreadable=False)
    (path,) = one.store.folder.glob("*.safetensors")  # type: ignore[union-attr]
    fresh = FeatureStore(one.loaded, folder=one.store.folder, threads=1)
    assert torch.equal(fresh.of(one.test, allow_unreadable=False).values, first.values)
    assert fresh.computed == 0
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    repaired = FeatureStore(one.loaded, folder=one.store.folder, threads=1)
    assert torch.equal(repaired.of(one.test, allow_unreadable=False).values, first.values)
    assert repaired.computed == 101
    other = FeatureStore(one.loaded, folder=one.store.folder, threads=1, crop_ratio=1.0)
    other.of(one.test, allow_unreadable=False)
    assert other.computed == 101  # another crop is another feature
