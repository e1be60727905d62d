"""Single operations over their magnitudes."""

import numpy as np
import pytest
from PIL import Image as Pillow

from dssl.augment import KINDS
from dssl.report.views import SHOWN_MAGNITUDES, contrast_of_pixels, operation_table, tables_of


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
