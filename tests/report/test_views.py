"""Measured numbers against numbers worked out by hand, on images that are known."""

import math
import weakref
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from dssl.augment import KINDS
from dssl.data import Source, UnreadableImage, open_source
from dssl.errors import DsslError
from dssl.report import views
from dssl.report.views import (
    FLAT_BELOW,
    SHOWN_MAGNITUDES,
    PolicyStrength,
    change,
    contrast_of_pixels,
    nearly_flat,
    operation_table,
    survey,
    tables_of,
)


class Memory(Source):
    """Twelve textured images of several sizes, of which number 4 cannot be read."""

    name = "memory"
    fingerprint = "0"

    def __init__(self, *, bad: tuple[int, ...] = (4,), count: int = 12, channels: int = 3) -> None:
        self.bad, self.count, self.channels = bad, count, channels

    def __len__(self) -> int:
        return self.count

    def image(self, index: int) -> np.ndarray:
        if index in self.bad:
            raise UnreadableImage(f"file {index}", "cut off")
        shape = (40 + index, 50, self.channels)
        ramp = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
        return ((ramp * (index + 3)) % 253).astype(np.uint8)

    def label_of(self, index: int) -> str:
        return f"image {index}"


def _survey(
    *policies: str, channels: int = 3, standard: str = "resize", sample: int = 12, source: Memory | None = None
):
    return survey(
        source or Memory(channels=channels), policies=policies, standard=standard, size=24, channels=channels, seed=5, examples=3,
        sample=sample,
    )  # fmt: skip


@pytest.mark.parametrize("channels", [1, 3])
def test_known_policies_have_the_numbers_they_must_have(channels: int) -> None:
    found = _survey("identity", "invert", "brightness(0)", channels=channels)
    same, inverted, black = found.policies
    assert (found.measured, found.total, found.unreadable) == (11, 12, ("file 4: cut off",))
    assert same.change.max() == 0
    assert (same.flat, same.far, black.flat) == (0.0, 0.0, 1.0)
    resized = {}
    for index in set(range(12)) - {4}:
        pixels = Memory(channels=channels).image(index)
        pillow = Pillow.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
        smaller = pillow.resize((24, 24), Pillow.Resampling.BILINEAR)
        resized[f"image {index}"] = np.asarray(smaller).reshape(24, 24, channels)
    expected = [np.abs(255.0 - 2.0 * pixels).mean() for pixels in resized.values()]
    assert sorted(inverted.change) == pytest.approx(sorted(expected))
    for example in found.examples:
        assert np.array_equal(example.standard, resized[example.name])
        assert np.array_equal(example.heavy[1], 255 - example.standard)
        assert example.original.shape[2] == channels


def test_heavy_views_come_from_the_standard_view_that_is_shown() -> None:
    found = _survey("invert", standard="standard")
    assert all(np.array_equal(example.heavy[0], 255 - example.standard) for example in found.examples)
    assert 0 <= found.standard_flat <= 1


def test_a_policy_gives_the_same_views_whatever_is_beside_it_and_whatever_the_sample() -> None:
    alone, beside = _survey("ra(2,5)"), _survey("ra(2,5)", "ua", sample=7)
    for first, second in zip(alone.examples, beside.examples, strict=True):
        assert first.name == second.name
        assert np.array_equal(first.standard, second.standard)
        assert np.array_equal(first.heavy[0], second.heavy[0])


def test_nothing_readable_is_said_in_one_line() -> None:
    nothing = Memory(bad=tuple(range(12)))
    with pytest.raises(DsslError, match=r"memory.*file"):
        _survey("ua", source=nothing)


class Photos(Memory):
    """Large images, which knows how many of those that it gave away are still in memory."""

    def __init__(self) -> None:
        super().__init__(bad=(), count=70)  # more than a block
        self.given: list[weakref.ref[np.ndarray]] = []
        self.most = 0

    def image(self, index: int) -> np.ndarray:
        image = np.full((300, 400, 3), 3 * index, np.uint8)
        self.given = [one for one in self.given if one() is not None] + [weakref.ref(image)]
        self.most = max(self.most, len(self.given))
        return image


def test_of_large_images_only_thumbnails_are_kept() -> None:
    source = Photos()
    found = survey(
        source, policies=("identity",), standard="resize", size=24, channels=3, seed=5, examples=66, sample=70
    )
    assert source.most <= 2  # one in use while the next is decoded
    assert [example.original.shape for example in found.examples] == [(216, 288, 3)] * 66
    assert all(int(example.original[0, 0, 0]) == int(example.standard[0, 0, 0]) for example in found.examples)
    assert not any(one() is not None for one in source.given)


@pytest.mark.parametrize(
    ("flat", "far", "colour"), [(0.498, 0.9, "bad"), (0.07, 0.1, "warn"), (0.01, 0.73, "warn"), (0.01, 0.5, "good")]
)
def test_verdicts(flat: float, far: float, colour: str) -> None:
    strength = PolicyStrength(policy="ra(8,16)", change=np.arange(1.0, 101.0), flat=flat, far=far)
    assert strength.median == 50.5
    assert views.judge(strength)[0] == colour


class Levels(Memory):
    """Four images of one gray each, 0, 40, 80 and 120, with a little texture."""

    def __init__(self) -> None:
        super().__init__(bad=(), count=4)

    def image(self, index: int) -> np.ndarray:
        texture = np.arange(24 * 24 * 3).reshape(24, 24, 3) % 16
        return (40 * index + texture).astype(np.uint8)


def test_far_is_farther_than_another_image() -> None:
    """Two of the four are 40, 80 or 120 levels apart: adding 20 keeps a view nearer than that, adding 135 does not."""
    found = survey(
        Levels(), policies=("identity", "add(0.08)", "add(0.53)"), standard="resize", size=24, channels=3, seed=5, examples=3,
        sample=4,
    )  # fmt: skip
    assert [policy.far for policy in found.policies] == [0, 0, 1]
    alone = survey(
        Levels(), policies=("add(0.5)",), standard="resize", size=24, channels=3, seed=5, examples=1, sample=1
    )
    assert alone.policies[0].far == 0  # there is no other to compare with


def test_a_policy_that_destroys_photos_is_not_called_good(test_data: Path) -> None:
    harmless = ("ra(2,5)", "ua", "standard")
    found = survey(
        open_source(str(test_data / "photos")), policies=(*harmless, "ra(8,16)"), standard="standard", size=128, channels=3,
        seed=0, examples=1, sample=128,
    )  # fmt: skip
    colours = {policy.policy: views.judge(policy)[0] for policy in found.policies}
    assert colours == dict.fromkeys(harmless, "good") | {"ra(8,16)": "warn"}


def test_change_is_the_mean_absolute_difference() -> None:
    first = np.array([[[[0, 10, 255]]], [[[5, 5, 5]]]], dtype=np.uint8)
    second = np.array([[[[255, 7, 0]]], [[[5, 5, 6]]]], dtype=np.uint8)
    assert change(first, second).tolist() == [pytest.approx((255 + 3 + 255) / 3), pytest.approx(1 / 3)]


def test_one_flat_colour_is_flat_whatever_the_colour() -> None:
    red = np.zeros((1, 8, 8, 3), dtype=np.uint8)
    red[..., 0] = 255
    assert contrast_of_pixels(red).tolist() == [0.0]
    assert nearly_flat(red).tolist() == [True]


def test_contrast_by_hand() -> None:
    image = np.zeros((1, 1, 2, 3), dtype=np.uint8)
    image[0, 0, 1] = (20, 0, 40)  # deviations 10, 0 and 20 around the channels' means
    assert contrast_of_pixels(image)[0] == pytest.approx(math.sqrt((100 + 0 + 400) / 3))
    assert contrast_of_pixels(image[..., :1])[0] == pytest.approx(10)


def test_contrast_equals_the_textbook_on_large_images() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 300, 200, 3), dtype=np.uint8)
    images[1] = 255
    expected = [math.sqrt(np.mean([np.var(image[..., c].astype(np.float64)) for c in range(3)])) for image in images]
    assert contrast_of_pixels(images).tolist() == pytest.approx(expected)
    assert contrast_of_pixels(images)[1] == 0


def test_the_threshold_divides() -> None:
    below, above = (np.zeros((1, 1, 2, 1), dtype=np.uint8) for _ in range(2))
    below[0, 0, 1] = math.ceil(2 * FLAT_BELOW) - 1
    above[0, 0, 1] = math.ceil(2 * FLAT_BELOW)
    assert nearly_flat(below).tolist() == [True]
    assert nearly_flat(above).tolist() == [False]


def _probes() -> list[np.ndarray]:
    coarse = np.random.default_rng(0).integers(0, 256, (12, 6, 6, 3), dtype=np.uint8)
    return [np.asarray(Pillow.fromarray(image).resize((32, 32), Pillow.Resampling.BICUBIC)) for image in coarse]


def test_strips_mark_what_comes_out_blank() -> None:
    published = {strip.name: strip for strip in operation_table("dssl16", _probes(), seed=0).operations}
    assert len(published) == 16
    assert {name: strip.blank_from for name, strip in published.items() if strip.blank_from is not None} == {
        "cutout-pixels": 30.0,
        "translate-x-pixels": 10.0,
        "translate-y-pixels": 10.0,
    }
    monotone = operation_table("monotone14", _probes(), seed=0).operations
    assert [strip.changes[0] for strip in monotone] == [0.0] * 14


def test_strips_show_and_measure_the_operation_itself() -> None:
    probes = _probes()
    (inverted,) = [strip for strip in operation_table("dssl16", probes, seed=0).operations if strip.name == "invert"]
    expected = np.mean([np.abs(255.0 - 2.0 * image).mean() for image in probes])
    assert inverted.changes == pytest.approx([expected] * len(SHOWN_MAGNITUDES))
    liveliest = probes[int(contrast_of_pixels(np.stack(probes)).argmax())]
    assert all(np.array_equal(image, 255 - liveliest) for image in inverted.images)


def test_tables_of_policies() -> None:
    assert tables_of(["ra(2,5)", "ua"]) == ("dssl16",)
    assert tables_of(["ua", "jigsaw(4)"]) == ("uniform13",)
    assert tables_of(["0.9*ra(2,5) | 0.1*jigsaw(4)"]) == ("dssl16",)
    assert tables_of(["jigsaw(4)", "corrupt"]) == ()
    assert tables_of(["ra(2,5) > corruption(fog,3)?0.5"]) == ("dssl16", "corruptions")


def test_strips_of_corruptions_go_over_the_severities() -> None:
    table = operation_table("corruptions", _probes(), seed=0)
    assert table.magnitudes == (1, 2, 3, 4, 5)
    assert [strip.name for strip in table.operations] == list(KINDS)
    two = operation_table("corruptions", [image[:, :, :2] for image in _probes()], seed=0)
    assert {"fog", "jpeg"} == {"fog", "jpeg", "motion"} - {strip.name for strip in two.operations}
