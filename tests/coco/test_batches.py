"""Training images: boxes, masks and pixels move together, and every choice is a function of seed, epoch and image."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dssl import rng
from dssl.errors import DsslError
from dssl_coco.data import Choices, CocoBatches, CocoImage, Sample, draw_mask, make_sample, read_split, scaled_size
from dssl_coco.results import encode_mask
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
    sample = make_sample(image, shorter=shorter, longest=999, mirror=mirror)
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
    plain, mirrored = (make_sample(image, shorter=60, longest=999, mirror=one) for one in (False, True))
    assert torch.equal(mirrored.pixels, plain.pixels.flip(2))
    assert torch.equal(mirrored.masks, plain.masks.flip(2))
    assert mirrored.boxes[0].tolist() == [50, 10, 80, 40]


def test_the_longer_side_has_a_limit() -> None:
    assert scaled_size((480, 640), shorter=800, longest=1333) == (800, 1067)
    assert scaled_size((100, 1000), shorter=800, longest=1333) == (133, 1333)
    assert scaled_size((640, 480), shorter=240, longest=1333) == (320, 240)


def test_a_picture_of_another_size_is_refused(image: CocoImage) -> None:
    from PIL import Image

    Image.new("RGB", (60, 100)).save(image.path)
    with pytest.raises(DsslError, match=r"60 x 100 .*100 x 60"):
        make_sample(image, shorter=60, longest=999, mirror=False)


def test_a_broken_picture_is_named(image: CocoImage) -> None:
    image.path.write_bytes(b"no picture")
    with pytest.raises(DsslError, match=str(image.path)):
        make_sample(image, shorter=60, longest=999, mirror=False)


def test_a_crowd_is_no_target(tmp_path: Path) -> None:
    write(tmp_path, "all", [(64, 64, [square(2, 2, 30), crowd(64, 64, rows=20)])])
    (image,) = read_split(tmp_path, "all").images
    sample = make_sample(image, shorter=64, longest=64, mirror=False)
    assert len(sample.boxes) == len(sample.labels) == len(sample.masks) == 1


def test_a_box_is_cut_at_the_edge_of_its_image(tmp_path: Path) -> None:
    write(tmp_path, "all", [(64, 64, [square(50, 40, 30)])])
    (image,) = read_split(tmp_path, "all").images
    assert make_sample(image, shorter=64, longest=64, mirror=False).boxes.tolist() == [[50, 40, 64, 64]]


def test_every_epoch_shows_every_image_once_at_every_size_and_both_ways(tmp_path: Path) -> None:
    config = tiny(tmp_path, batch_size=3, sizes=(48, 56, 64))
    choices = Choices(10, config)
    shown = [one for step in range(40) for one in choices.at(step, range(3))]
    for epoch in range(12):
        assert sorted(one[0] for one in shown[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert len({tuple(one[0] for one in shown[10 * epoch : 10 * epoch + 10]) for epoch in range(12)}) == 12
    assert {one[1] for one in shown} == {48, 56, 64}
    assert 40 < sum(one[2] for one in shown) < 80
    assert Choices(10, config).at(7, range(1, 3)) == shown[22:24]
    straight = Choices(10, tiny(tmp_path, flip=False))
    assert not any(mirror for step in range(25) for _, _, mirror in straight.at(step, range(2)))


@pytest.mark.parametrize(("start", "epochs"), [(0, [0, 1, 2, 3, 4]), (6, [2, 3, 4])])
def test_the_order_is_computed_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, epochs: list[int]
) -> None:
    """12 steps of 2 over 5 images, by three threads; position 24 would begin the next epoch."""
    images = read_split(draw(tmp_path), "all").trainable()
    config = tiny(tmp_path, steps=12, threads=3)
    asked: list[int] = []
    permutation = rng.permutation

    def counted(stream: int, length: int) -> np.ndarray:
        asked.append(stream)
        return permutation(stream, length)

    monkeypatch.setattr(rng, "permutation", counted)
    with CocoBatches(images, config, start=start) as batches:
        for step in range(start, 12):
            batches.at(step)
    assert asked == [rng.key(config.seed, "coco order", epoch) for epoch in epochs]


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
            assert torch.equal(one.labels, other.labels)
            assert torch.equal(one.pixels, other.pixels)
            assert torch.equal(one.masks, other.masks)
            assert torch.equal(one.boxes, other.boxes)


@given(arrays(np.uint8, st.tuples(st.integers(1, 40), st.integers(1, 40)), elements=st.integers(0, 1)))
def test_run_lengths_of_pycocotools_are_decoded_to_the_pixels_they_were_made_of(pixels: np.ndarray) -> None:
    size = (pixels.shape[0], pixels.shape[1])
    assert np.array_equal(draw_mask(encode_mask(pixels), before=size, after=size), pixels)


def test_run_lengths_that_are_plain_numbers() -> None:
    """Down the columns, zeros first: 3 zeros, 2 ones, 1 zero in two columns of three."""
    runs = {"size": [3, 2], "counts": [3, 2, 1]}
    assert draw_mask(runs, before=(3, 2), after=(3, 2)).tolist() == [[0, 1], [0, 1], [0, 0]]
    assert draw_mask(runs, before=(3, 2), after=(6, 4)).tolist() == [[0, 0, 1, 1]] * 4 + [[0, 0, 0, 0]] * 2


def test_polygons_are_drawn_at_the_size_that_is_wanted() -> None:
    """Half of a square, four times larger: the diagonal has steps of one pixel, not of four."""
    triangle = [[0.0, 0.0, 10.0, 10.0, 0.0, 10.0]]
    drawn = draw_mask(triangle, before=(10, 10), after=(40, 40))
    assert len(set(drawn.sum(dim=1).tolist())) > 35
    assert int(drawn.sum()) == pytest.approx(800, abs=40)


def test_polygons_follow_both_sides() -> None:
    """A rectangle of 4 x 2 pixels at 2, 6, stretched to three times the width and half the height."""
    drawn = draw_mask([[2.0, 6.0, 6.0, 6.0, 6.0, 8.0, 2.0, 8.0]], before=(10, 20), after=(5, 60))
    expected = np.zeros((5, 60), dtype=np.uint8)
    expected[3:4, 6:18] = 1
    assert np.array_equal(drawn, expected)


def test_samples_for_a_gpu_are_bytes_in_pinned_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    images = read_split(draw(tmp_path), "all").trainable()
    with CocoBatches(images, tiny(tmp_path, steps=1, threads=1), start=0, pinned=True) as batches:
        samples = batches.at(0)
    held = {id(tensor) for tensor in pinned}
    assert all(id(part) in held for one in samples for part in (one.pixels, one.boxes, one.labels, one.masks))
    assert {one.pixels.dtype for one in samples} == {torch.uint8}
