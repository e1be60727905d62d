"""What annotation files hold and lack: read correctly, left out with a note, or refused with the file and the id."""

import json
from pathlib import Path
from typing import Any

import pytest

from dssl.errors import DsslError
from dssl_coco.data import read_split
from tests.coco.drawing import CATEGORIES, crowd, draw, square, triangle, write
from tests.rejecting import rejects, states


def test_categories_with_gaps_get_labels_without(tmp_path: Path) -> None:
    data = read_split(draw(tmp_path), "all")
    assert data.category_ids == (3, 41, 90)
    assert data.category_names == ("square", "never there", "triangle")
    assert [[one["label"] for one in image.objects] for image in data.images] == [[1], [3], [1, 3], [], [1], [3]]
    assert [image.id for image in data.images] == [10, 20, 30, 40, 50, 60]


def test_empty_images_and_crowds_are_scored_but_not_trained_on(tmp_path: Path) -> None:
    data = read_split(draw(tmp_path), "all")
    assert len(data.images) == 6
    assert [image.id for image in data.trainable()] == [10, 20, 30, 50, 60]
    (with_crowd,) = (image for image in data.images if image.id == 50)
    assert [one["iscrowd"] for one in with_crowd.annotations] == [0, 1]
    assert len(with_crowd.objects) == 1
    assert any(note.startswith("1 images") for note in data.notes)
    assert any("1 crowd regions" in note for note in data.notes)


def test_an_image_with_nothing_but_a_crowd_is_not_trained_on(tmp_path: Path) -> None:
    write(tmp_path, "all", [(40, 40, [crowd(40, 40, rows=9)]), (40, 40, [square(1, 1, 20)])])
    assert [image.id for image in read_split(tmp_path, "all").trainable()] == [20]


@pytest.mark.parametrize("box", [[5, 5, 0, 10], [5, 5, 10, 0], [5, 5, -4, 10], [40, 5, 10, 10], [-20, 5, 20, 10]])
def test_a_box_without_area_in_its_image_is_left_out_and_counted(tmp_path: Path, box: list[float]) -> None:
    write(tmp_path, "all", [(40, 40, [square(1, 1, 20), square(5, 5, 10) | {"bbox": box}])])
    data = read_split(tmp_path, "all")
    assert [one["bbox"] for one in data.images[0].annotations] == [[1, 1, 20, 20]]
    (note,) = data.notes
    states(note, "1 annotations", "box", 0.01)


@pytest.mark.parametrize("box", [[35, 5, 1e-5, 10], [5, 5, 10, 1e-3], [39.999995, 5, 10, 10]])
def test_a_box_that_would_vanish_in_float32_is_left_out(tmp_path: Path, box: list[float]) -> None:
    """torchvision refuses it in the middle of a run, and again after every resume."""
    write(tmp_path, "all", [(40, 40, [square(1, 1, 20), square(5, 5, 10) | {"bbox": box}])])
    data = read_split(tmp_path, "all")
    assert len(data.images[0].annotations) == 1
    (note,) = data.notes
    states(note, "1 annotations", "box", 0.01)


def test_a_box_that_reaches_out_of_its_image_stays(tmp_path: Path) -> None:
    write(tmp_path, "all", [(40, 40, [square(30, 5, 20)])])
    assert len(read_split(tmp_path, "all").images[0].objects) == 1


def test_polygons_without_inside_are_left_out(tmp_path: Path) -> None:
    """A polygon with two corners would be taken for a box by pycocotools."""
    both = square(1, 1, 20)
    both["segmentation"] = [[1, 1, 5, 5], *both["segmentation"]]
    none = square(1, 1, 20) | {"segmentation": [[1, 1, 5, 5]]}
    write(tmp_path, "all", [(40, 40, [both, none | {"segmentation": []}, triangle(1, 1, 30)])])
    broken = json.loads((tmp_path / "annotations" / "instances_all.json").read_text())
    broken["annotations"][1]["segmentation"] = [[1, 1, 5, 5]]
    (tmp_path / "annotations" / "instances_all.json").write_text(json.dumps(broken))
    data = read_split(tmp_path, "all")
    assert [len(one["segmentation"]) for one in data.images[0].annotations] == [1, 1]
    (note,) = data.notes
    states(note, "1 annotations", "mask", "polygon")


def test_a_limit_takes_the_first_images_with_an_object(tmp_path: Path) -> None:
    draw(tmp_path)
    assert [image.id for image in read_split(tmp_path, "all", limit=4).images] == [10, 20, 30, 50]


def test_the_fingerprint_follows_annotations_choice_and_files(tmp_path: Path) -> None:
    draw(tmp_path)
    before = read_split(tmp_path, "all").fingerprint
    assert read_split(tmp_path, "all").fingerprint == before
    assert read_split(tmp_path, "all", limit=2).fingerprint != before
    with (tmp_path / "all" / "3.png").open("ab") as file:
        file.write(b"more")
    assert read_split(tmp_path, "all").fingerprint != before


def _changed(place: str, **changes: Any) -> Any:
    """A function that changes the second annotation, image or category of a file."""

    def change(content: dict[str, Any]) -> None:
        content[place][1].update(changes)

    return change


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (_changed("annotations", image_id=77), ["annotation 1", "image_id", 77]),
        (_changed("annotations", category_id=4), ["annotation 1", "category_id", 4]),
        (_changed("annotations", bbox=[1, 2, 3]), ["annotation 1", "bbox", "[1, 2, 3]"]),
        (_changed("annotations", bbox=[1, 2, 3, "4"]), ["annotation 1", "bbox", "'4'"]),
        (_changed("annotations", bbox=[1, 2, 3, float("nan")]), ["annotation 1", "bbox", "nan"]),
        (_changed("annotations", bbox=[1, 2, 3, 10**400]), ["annotation 1", "bbox", 10**400]),
        (_changed("annotations", segmentation=[[1, 1, 3e7, 1, 5, 5]]), ["annotation 1", "polygon", 3e7, "64 x 64"]),
        (_changed("annotations", segmentation=[[1, 1, 5, -1e300, 5, 5]]), ["annotation 1", "polygon", -1e300, "64 x 64"]),
        (_changed("annotations", area=None), ["annotation 1", "area", None]),
        (_changed("annotations", iscrowd=2), ["annotation 1", "iscrowd", 2]),
        (_changed("annotations", segmentation=None), ["annotation 1", "segmentation", None]),
        (_changed("annotations", segmentation=[[1, 2, 3, 4, 5]]), ["annotation 1", "polygon", "[1, 2, 3, 4, 5]"]),
        (_changed("annotations", segmentation={"size": [9, 9], "counts": "abc"}), ["annotation 1", "[9, 9]", "[64, 64]"]),
        (_changed("annotations", segmentation={"size": [64, 64], "counts": [5, 5]}), ["annotation 1", "[5, 5]", 4096]),
        (_changed("annotations", segmentation={"size": [64, 64], "counts": None}), ["annotation 1", None, 4096]),
        (_changed("annotations", id=0), ["annotation id", 0]),
        (_changed("annotations", id="a"), ["annotation", "a", "whole"]),
        (_changed("images", id=10), ["image id", 10]),
        (_changed("images", width=0), ["image 20", "width", "0, 64"]),
        (_changed("images", file_name=None), ["image 20", "file_name", None]),
        (_changed("images", file_name="gone.png"), ["1 of the 6", "gone.png"]),
        (_changed("categories", id=90), ["category id", 90]),
        (lambda content: content.pop("annotations"), ["'annotations'"]),
        (lambda content: content.update(categories=[], annotations=[]), ["no categories"]),
        (lambda content: content.update(images=[], annotations=[]), ["no images"]),
    ],
)  # fmt: skip
def test_faulty_files_are_refused_with_the_file_and_the_id(tmp_path: Path, change: Any, facts: list[object]) -> None:
    file = draw(tmp_path) / "annotations" / "instances_all.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with rejects(tmp_path, *facts):
        read_split(tmp_path, "all")


def test_a_file_that_is_missing_or_not_json(tmp_path: Path) -> None:
    draw(tmp_path)
    with pytest.raises(DsslError, match=r"instances_val2017\.json.*instances_all\.json"):
        read_split(tmp_path, "val2017")
    (tmp_path / "annotations" / "instances_all.json").write_text("[1, 2")
    with pytest.raises(DsslError, match=r"instances_all\.json"):
        read_split(tmp_path, "all")
    with pytest.raises(DsslError, match="nowhere"):
        read_split(tmp_path / "nowhere", "all")


def test_missing_files_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    draw(tmp_path)
    for number in (1, 2, 4, 6):
        (tmp_path / "all" / f"{number}.png").unlink()
    with pytest.raises(DsslError, match=r"4 of the 6 .*1\.png, 2\.png, 4\.png, \.\.\.$"):
        read_split(tmp_path, "all")


def test_the_drawn_file_is_as_untidy_as_coco() -> None:
    assert [one["id"] for one in CATEGORIES] != sorted(one["id"] for one in CATEGORIES)
