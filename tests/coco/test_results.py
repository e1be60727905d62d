"""COCO's results, there and back: the truth scores 100, and what was shifted, dropped or invented scores what a hand computes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dssl_coco.data import CocoData, draw_mask, read_split
from dssl_coco.results import COLUMNS, Detection, ground_truth, score, to_results
from tests.coco.drawing import crowd, draw, square, triangle, write

LEVELS = 101
"""Recalls at which COCO reads the precision: 0.00, 0.01, ..., 1.00."""


def perfect(data: CocoData, *, shift: float = 0.0) -> list[Detection]:
    """Detections as a detector gives them (corners, labels, soft masks), from polygons that this test fills by itself."""
    from matplotlib.path import Path as Outline

    results: list[Detection] = []
    for image in data.images:
        height, width = image.size
        rows, columns = np.mgrid[0:height, 0:width]
        centres = np.stack([columns.ravel() + 0.5 - shift, rows.ravel() + 0.5], axis=1)
        masks, boxes, labels = [], [], []
        for one in image.objects:
            assert isinstance(one["segmentation"], list)
            inside = np.zeros(height * width, dtype=bool)
            for polygon in one["segmentation"]:
                inside |= Outline(np.reshape(polygon, (-1, 2)), closed=False).contains_points(centres)
            masks.append(inside.reshape(image.size))
            left, top, wide, high = one["bbox"]
            boxes.append([left + shift, top, left + shift + wide, top + high])
            labels.append(one["label"])
        if not boxes:
            continue
        found = {
            "boxes": torch.tensor(boxes),
            "labels": torch.tensor(labels),
            "scores": torch.linspace(0.9, 0.8, len(boxes)),
            "masks": torch.from_numpy(np.stack(masks)).float()[:, None] * 0.8,
        }
        results += to_results(image, found, data.category_ids)
    return results


def six(data: CocoData, results: list[Detection]) -> list[float]:
    scores = score(data, results)
    return [scores.box[name] for name in COLUMNS] + [scores.mask[name] for name in COLUMNS]


@pytest.fixture
def squares(tmp_path: Path) -> CocoData:
    """Four squares of 60 pixels, one an image; the first annotation has id 0."""
    write(tmp_path, "all", [(100, 80, [square(10, 10, 60)]) for _ in range(4)])
    return read_split(tmp_path, "all")


def test_the_truth_as_detections_scores_100_in_all_six_columns(squares: CocoData) -> None:
    assert six(squares, perfect(squares)) == pytest.approx([100] * 6)


def test_the_truth_of_a_mixed_set_scores_100_too(tmp_path: Path) -> None:
    """Gaps in the ids, two categories, a crowd, an empty image; masks by pycocotools itself, so that triangles agree."""
    from pycocotools import mask

    data = read_split(draw(tmp_path), "all")
    truth = ground_truth(data)
    sizes = {image.id: image.size for image in data.images}
    results = []
    for one in truth["annotations"]:
        if not one["iscrowd"]:
            runs = mask.merge(mask.frPyObjects(one["segmentation"], *sizes[one["image_id"]]))
            segmentation = {"size": runs["size"], "counts": runs["counts"].decode()}
            kept = {name: one[name] for name in ("image_id", "category_id", "bbox")}
            results.append({**kept, "score": 0.7, "segmentation": segmentation})
    assert six(data, results) == pytest.approx([100] * 6)
    classes = {one.name: (one.objects, one.box, one.mask) for one in score(data, results).classes}
    assert classes["square"] == pytest.approx((3, 100, 100))
    assert classes["triangle"] == pytest.approx((3, 100, 100))
    assert classes["never there"] == (0, None, None)


def test_a_dropped_box_costs_the_recalls_beyond_three_quarters(squares: CocoData) -> None:
    kept = perfect(squares)[:3]
    expected = 100 * 76 / LEVELS  # precision 1 at the recalls 0.00 .. 0.75, and 0 beyond
    assert six(squares, kept) == pytest.approx([expected] * 6)


def test_a_shifted_box_counts_up_to_its_overlap(squares: CocoData) -> None:
    """12 of 60 pixels to the right: the overlap is 48 / 72 = 0.667, enough for 0.50, 0.55, 0.60 and 0.65 of ten."""
    assert six(squares, perfect(squares, shift=12.0)) == pytest.approx([40, 100, 0] * 2)


def test_a_box_that_is_surer_of_nothing_halves_the_precision(tmp_path: Path) -> None:
    """One object, found second: at every recall the best precision is 1 of 2."""
    write(tmp_path, "all", [(100, 80, [square(5, 5, 30)])])
    data = read_split(tmp_path, "all")
    (right,) = perfect(data)
    wrong = dict(perfect(data, shift=50.0)[0], score=0.99)
    assert six(data, [wrong, right]) == pytest.approx([50] * 6)


def test_the_wrong_category_scores_nothing(squares: CocoData) -> None:
    assert six(squares, [dict(one, category_id=90) for one in perfect(squares)]) == pytest.approx([0] * 6)


def test_nothing_found_scores_nothing(squares: CocoData) -> None:
    assert six(squares, []) == pytest.approx([0] * 6)


def test_detections_in_a_crowd_are_not_punished(tmp_path: Path) -> None:
    """The surest detection lies in a crowd: there it is ignored; without the crowd it would halve the precision."""
    scores = []
    for name, objects in {"with": [square(5, 5, 30), crowd(100, 80, rows=40)], "without": [square(5, 5, 30)]}.items():
        write(tmp_path / name, "all", [(100, 80, objects)])
        data = read_split(tmp_path / name, "all")
        (right,) = perfect(data)
        inside = dict(perfect(data, shift=60.0)[0], score=0.99)
        scores.append(six(data, [inside, right]))
    assert scores[0] == pytest.approx([100] * 6)
    assert scores[1] == pytest.approx([50] * 6)


def test_the_conversion_of_one_detection(tmp_path: Path) -> None:
    """Corners become x, y, width, height; label 1 is the smallest id; a mask is on where it is above one half."""
    from pycocotools import mask

    data = read_split(draw(tmp_path), "all")
    soft = torch.zeros(2, 1, 48, 64)
    soft[0, 0, 10:20, 5:9], soft[0, 0, 0, 0], soft[1] = 0.51, 0.5, 0.2
    found: dict[str, Any] = {
        "boxes": torch.tensor([[5.0, 10.0, 9.0, 20.5], [0.0, 0.0, 3.0, 4.0]]),
        "labels": torch.tensor([1, 3]),
        "scores": torch.tensor([0.75, 0.25]),
        "masks": soft,
    }
    first, second = to_results(data.images[0], found, data.category_ids)
    assert (first["image_id"], first["category_id"], first["score"]) == (10, 3, 0.75)
    assert first["bbox"] == [5.0, 10.0, 4.0, 10.5]
    assert second["category_id"] == 90
    drawn = draw_mask(first["segmentation"], before=(48, 64), after=(48, 64))
    assert drawn.shape == (48, 64)
    assert drawn.sum() == 40
    assert drawn[10:20, 5:9].all()
    assert mask.area(second["segmentation"]) == 0


def test_triangles_are_scored_by_their_pixels(tmp_path: Path) -> None:
    """The box around a triangle as its mask: boxes agree wholly, masks to one half only."""
    from pycocotools import mask

    write(tmp_path, "all", [(100, 100, [triangle(10, 10, 80)])])
    data = read_split(tmp_path, "all")
    filled = np.zeros((100, 100), dtype=np.uint8, order="F")
    filled[10:90, 10:90] = 1
    runs = mask.encode(filled)
    one = {
        "image_id": 10, "category_id": 90, "score": 0.9, "bbox": [10, 10, 80, 80],
        "segmentation": {"size": [100, 100], "counts": runs["counts"].decode()},
    }  # fmt: skip
    overlap = mask.iou([runs], [mask.merge(mask.frPyObjects(data.images[0].objects[0]["segmentation"], 100, 100))], [0])
    assert overlap[0, 0] == pytest.approx(0.5, abs=0.01)
    measured = six(data, [one])
    assert measured[:3] == pytest.approx([100] * 3)
    assert measured[3] <= 10
    assert measured[5] == 0
