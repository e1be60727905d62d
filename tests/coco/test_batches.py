"""Training images: boxes, masks and pixels move together, and every choice is a function of seed, step and index."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dssl.coco.annotations import CocoImage, read_split
from dssl.coco.batches import Choices, CocoBatches, Sample, make_sample, scaled_size
from dssl.coco.masks import decode, draw_mask, encode
from dssl.errors import DsslError
from tests.coco.drawing import crowd, draw, square, tiny, write


@pytest.fixture
def image(tmp_path: Path) -> CocoImage:
    """A red square at 20, 10 with a side of 30, in 100 x 60 pixels of gray noise."""
    write(tmp_path, "all", [(100, 60, [square(20, 10, 30)])])
    return read_split(tmp_path, "all").images[0]


def _extent(sample: Sample) -> list[int]:
    """Left, top, right, bottom of the mask's pixels."""
    rows, columns = torch.where(sample.masks[0] == 1)
    return [int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1]


@pytest.mark.parametrize("shorter", [60, 30, 120])
@pytest.mark.parametrize("mirror", [False, True])
def test_pixels_boxes_and_masks_move_together(image: CocoImage, shorter: int, mirror: bool) -> None:
    scale = shorter / 60
    sample = make_sample(image, shorter=shorter, longest=999, mirror=mirror, key=1)
    assert sample.pixels.shape == (3, shorter, round(100 * scale))
    left = (100 - 20 - 30 if mirror else 20) * scale
    expected = [left, 10 * scale, left + 30 * scale, 40 * scale]
    assert sample.boxes.tolist() == [pytest.approx(expected)]
    assert _extent(sample) == [pytest.approx(value, abs=1) for value in expected]
    assert int(sample.masks.sum()) == pytest.approx(900 * scale**2, rel=0.07)
    red = (sample.pixels[0] > 200) & (sample.pixels[1] < 40)
    overlap = (red & sample.masks[0].bool()).sum() / (red | sample.masks[0].bool()).sum()
    assert overlap > 0.85, "the mask does not lie on the red square"


def test_mirroring_is_exact(image: CocoImage) -> None:
    plain, mirrored = (make_sample(image, shorter=60, longest=999, mirror=one, key=1) for one in (False, True))
    assert torch.equal(mirrored.pixels, plain.pixels.flip(2))
    assert torch.equal(mirrored.masks, plain.masks.flip(2))
    assert mirrored.boxes[0].tolist() == [50, 10, 80, 40]


def test_the_longer_side_has_a_limit() -> None:
    assert scaled_size(640, 480, shorter=800, longest=1333) == (1067, 800)
    assert scaled_size(1000, 100, shorter=800, longest=1333) == (1333, 133)
    assert scaled_size(480, 640, shorter=240, longest=1333) == (240, 320)


def test_a_picture_of_another_size_is_refused(image: CocoImage) -> None:
    from PIL import Image

    Image.new("RGB", (60, 100)).save(image.path)
    with pytest.raises(DsslError, match=r"has 60 x 100 pixels, its annotations are for 100 x 60"):
        make_sample(image, shorter=60, longest=999, mirror=False, key=1)


def test_a_broken_picture_is_named(image: CocoImage) -> None:
    image.path.write_bytes(b"no picture")
    with pytest.raises(DsslError, match=str(image.path)):
        make_sample(image, shorter=60, longest=999, mirror=False, key=1)


def test_a_crowd_is_no_target(tmp_path: Path) -> None:
    write(tmp_path, "all", [(64, 64, [square(2, 2, 30), crowd(64, 64, rows=20)])])
    (image,) = read_split(tmp_path, "all").images
    sample = make_sample(image, shorter=64, longest=64, mirror=False, key=1)
    assert len(sample.boxes) == len(sample.labels) == len(sample.masks) == 1


def test_a_box_is_cut_at_the_edge_of_its_image(tmp_path: Path) -> None:
    write(tmp_path, "all", [(64, 64, [square(50, 40, 30)])])
    (image,) = read_split(tmp_path, "all").images
    assert make_sample(image, shorter=64, longest=64, mirror=False, key=1).boxes.tolist() == [[50, 40, 64, 64]]


def test_every_epoch_shows_every_image_once_at_every_size_and_both_ways(tmp_path: Path) -> None:
    config = tiny(tmp_path, batch_size=3, sizes=(48, 56, 64))
    choices = Choices(10, config)
    shown = [choices.at(step, row) for step in range(40) for row in range(3)]
    for epoch in range(12):
        assert sorted(one[0] for one in shown[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert len({tuple(one[0] for one in shown[10 * epoch : 10 * epoch + 10]) for epoch in range(12)}) == 12
    assert {one[1] for one in shown} == {48, 56, 64}
    assert 40 < sum(one[2] for one in shown) < 80
    assert len({one[3] for one in shown}) == len(shown)
    assert [Choices(10, config).at(7, 1)] == [shown[22]]
    assert not any(Choices(10, tiny(tmp_path, flip=False)).at(step, 0)[2] for step in range(50))


def test_batches_are_the_same_from_any_start_on_any_number_of_threads_and_ranks(tmp_path: Path) -> None:
    images = read_split(draw(tmp_path), "all").trainable()

    def batch(step: int, *, start: int, threads: int, ranks: int) -> list[Sample]:
        samples: list[Sample] = []
        for rank in range(ranks):
            config = tiny(tmp_path, batch_size=4, threads=threads, steps=9)
            with CocoBatches(images, config, start=start, rank=rank, world_size=ranks) as batches:
                for before in range(start, step):
                    batches.at(before)
                samples += batches.at(step)
        return samples

    expected = batch(5, start=0, threads=1, ranks=1)
    assert len(expected) == 4
    for start, threads, ranks in ((5, 1, 1), (3, 3, 1), (5, 2, 2), (4, 1, 4)):
        for one, other in zip(batch(5, start=start, threads=threads, ranks=ranks), expected, strict=True):
            assert one.key == other.key
            assert torch.equal(one.pixels, other.pixels)
            assert torch.equal(one.masks, other.masks)
            assert torch.equal(one.boxes, other.boxes)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@given(arrays(np.uint8, st.tuples(st.integers(1, 40), st.integers(1, 40)), elements=st.integers(0, 1)))
def test_run_lengths_are_decoded_as_pycocotools_does(pixels: np.ndarray) -> None:
    from pycocotools import mask

    runs = encode(pixels)
    assert np.array_equal(decode(runs), pixels)
    assert np.array_equal(decode(runs), mask.decode({**runs, "counts": runs["counts"].encode()}))


def test_run_lengths_that_are_plain_numbers() -> None:
    """Down the columns, zeros first: 3 zeros, 2 ones, 1 zero in two columns of three."""
    assert decode({"size": [3, 2], "counts": [3, 2, 1]}).tolist() == [[0, 1], [0, 1], [0, 0]]
    drawn = draw_mask({"size": [3, 2], "counts": [3, 2, 1]}, before=(2, 3), after=(4, 6))
    assert drawn.tolist() == [[0, 0, 1, 1]] * 4 + [[0, 0, 0, 0]] * 2


def test_polygons_are_drawn_at_the_size_that_is_wanted() -> None:
    """Half of a square, four times larger: the diagonal has steps of one pixel, not of four."""
    triangle = [[0.0, 0.0, 10.0, 10.0, 0.0, 10.0]]
    drawn = draw_mask(triangle, before=(10, 10), after=(40, 40))
    assert len(set(drawn.sum(axis=1).tolist())) > 35
    assert int(drawn.sum()) == pytest.approx(800, abs=40)
