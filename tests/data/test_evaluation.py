"""Evaluation: every image once, and the centre as torchvision cuts it out."""

import queue
import threading
from collections.abc import Generator
from typing import cast

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from dssl.augment import Normalization
from dssl.data import Quarantine, Source, UnreadableImage
from dssl.data.loader import EvaluationBatches, centre_crop
from dssl.data.pipeline import in_threads
from dssl.errors import DsslError

GENERATOR = np.random.default_rng(2)


class Pictures(Source):
    name, fingerprint = "pictures", "p"

    def __init__(self, shapes, bad=frozenset()):
        self.images = [GENERATOR.integers(0, 256, (*shape, 3), np.uint8) for shape in shapes]
        self.bad = bad

    def __len__(self):
        return len(self.images)

    def image(self, index):
        if index in self.bad:
            raise UnreadableImage(f"/data/{index}.jpg", "bad")
        return self.images[index]

    def label_of(self, index):
        return f"{index}.jpg"


NORM = Normalization((0.5, 0.4, 0.3), (0.2, 0.3, 0.25))


@pytest.mark.parametrize("shape", [(50, 80), (81, 47), (40, 40), (20, 20), (13, 200), (256, 341), (33, 32), (5, 300)])
def test_the_crop_is_torchvisions(shape):
    image = np.random.Generator(np.random.Philox(sum(shape))).integers(0, 256, (*shape, 3), np.uint8)
    reference = transforms.Compose([transforms.Resize(round(32 / 0.875)), transforms.CenterCrop(32)])(
        Image.fromarray(image)
    )
    difference = np.abs(centre_crop(image, size=32).astype(int) - np.asarray(reference).astype(int))
    # of a very long image only the kept part is resized, in another order of passes: a rounding in each may differ
    assert difference.max() <= (2 if max(shape) > 16 * min(shape) else 0)


def test_an_image_of_the_right_size_is_left_alone():
    image = GENERATOR.integers(0, 256, (32, 32, 3), np.uint8)
    assert np.array_equal(centre_crop(image, size=32), image)


def test_very_long_images_need_no_memory():
    assert centre_crop(np.zeros((30_000, 1, 3), np.uint8), size=224).shape == (224, 224, 3)
    assert centre_crop(np.zeros((1, 1, 1), np.uint8), size=8).shape == (8, 8, 1)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 20])
def test_nothing_is_dropped_padded_or_random(count):
    source = Pictures([(32, 32)] * count)
    runs = []
    for threads in (1, 3):
        with EvaluationBatches(source, size=32, batch_size=8, normalization=NORM, threads=threads) as batches:
            found = list(batches)
        assert len(found) == len(batches) == -(-count // 8)
        assert np.concatenate([batch.indices for batch in found]).tolist() == list(range(count))
        runs.append(torch.cat([batch.images for batch in found]))
    assert torch.equal(*runs)
    plain = np.stack(source.images).astype(np.float64) / 255
    expected = ((plain - NORM.mean) / NORM.std).transpose(0, 3, 1, 2)
    assert np.abs(runs[0].numpy() - expected).max() < 1e-5
    assert found[0].images.is_contiguous(memory_format=torch.channels_last)


def test_the_numbers_are_those_of_the_view_maker():
    """A view without randomness and the evaluation agree bit for bit on what a normalised pixel is."""
    from dssl.augment import CIFAR10, ViewMaker
    from dssl.graph import View

    source = Pictures([(32, 32)] * 4)
    maker = ViewMaker([View(name="s1", policy="resize")], size=32, seed=0, normalization=CIFAR10)
    out = maker.allocate(4)
    plan = maker.plan(np.arange(4), epoch=0)
    for row in range(4):
        maker.apply_many(plan, row, [source.image(row)], out, row)
    with EvaluationBatches(source, size=32, normalization=CIFAR10) as batches:
        (batch,) = batches
    assert np.array_equal(batch.images.permute(0, 2, 3, 1).numpy(), out["s1"])


@pytest.mark.parametrize("threads", [0, -1])
def test_no_threads_at_all_are_refused(threads):
    with pytest.raises(DsslError, match=f"threads {threads}"):
        EvaluationBatches(Pictures([(4, 4)]), size=4, threads=threads)
    with pytest.raises(DsslError, match=f"threads {threads}"):
        list(in_threads(abs, [1], threads=threads))


def test_chosen_indices_and_bytes():
    source = Pictures([(32, 32)] * 9)
    with EvaluationBatches(source, size=32, batch_size=2, indices=np.array([8, 0, 8])) as batches:
        found = torch.cat([batch.images for batch in batches])
    assert found.dtype == torch.uint8
    assert np.array_equal(found.permute(0, 2, 3, 1).numpy(), np.stack([source.images[index] for index in (8, 0, 8)]))


def test_a_bad_file_is_an_error_or_left_out_and_named():
    source = Pictures([(32, 32)] * 10, bad={4})
    with EvaluationBatches(source, size=32) as batches, pytest.raises(UnreadableImage, match=r"/data/4\.jpg"):
        list(batches)
    quarantine = Quarantine(source, max_share=0.5)
    with EvaluationBatches(source, size=32, batch_size=3, quarantine=quarantine) as batches:
        found = [batch.indices.tolist() for batch in batches]
    assert found == [[0, 1, 2], [3, 5], [6, 7, 8], [9]]
    assert quarantine.reasons == {"/data/4.jpg": "bad"}


def test_a_map_that_is_left_early_may_be_closed_by_one_of_its_own_threads() -> None:
    """As the garbage collector does, which runs in whatever thread allocates."""
    begun, problems = threading.Event(), queue.Queue[Exception | None]()

    def close_at_five(item: int) -> int:
        if item == 5:
            begun.wait(10)
            try:
                mapped.close()
                problems.put(None)
            except Exception as problem:  # what the collector would report
                problems.put(problem)
        return item

    mapped = cast(Generator[int], in_threads(close_at_five, range(600), threads=2))
    assert next(mapped) == 0
    begun.set()
    assert problems.get(timeout=10) is None
