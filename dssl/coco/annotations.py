"""COCO's annotation files: read once, checked whole, and said aloud where something in them is left out."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dssl.data.decode import printable
from dssl.errors import DsslError

Segmentation = list[list[float]] | dict[str, Any]
"""Polygons (x, y, x, y, ... in pixels), or a run-length encoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One annotated object."""

    label: int
    """1 .. number of categories, without the gaps that ids may have."""
    box: tuple[float, float, float, float]
    """x, y, width, height, as the file says them."""
    area: float
    crowd: bool
    segmentation: Segmentation


@dataclass(frozen=True, slots=True, kw_only=True)
class CocoImage:
    id: int
    path: Path
    width: int
    height: int
    instances: tuple[Instance, ...]

    @property
    def objects(self) -> tuple[Instance, ...]:
        """What a detector is trained on: everything but crowds."""
        return tuple(one for one in self.instances if not one.crowd)


@dataclass(frozen=True, slots=True, kw_only=True)
class CocoData:
    """One split: its images in the order of their ids, and the categories."""

    name: str
    images: tuple[CocoImage, ...]
    category_ids: tuple[int, ...]
    """The file's id of label 1, 2, ..."""
    category_names: tuple[str, ...]
    fingerprint: str
    notes: tuple[str, ...]
    """What was left out, in words."""

    def trainable(self) -> tuple[CocoImage, ...]:
        """The images with at least one object: an empty one would teach the proposals nothing but background."""
        return tuple(image for image in self.images if image.objects)


def read_split(folder: Path, split: str, *, limit: int | None = None) -> CocoData:
    """``folder/annotations/instances_SPLIT.json`` and the images in ``folder/SPLIT``; the first ``limit`` with an object."""
    file = folder / "annotations" / f"instances_{split}.json"
    if not file.is_file():
        there = sorted(entry.name for entry in file.parent.glob("instances_*.json")) if file.parent.is_dir() else []
        found = f"there are {', '.join(there)}" if there else "there is none"
        raise DsslError(
            f"{file} is not there ({found}): expected COCO's layout, annotations/instances_SPLIT.json and the images in SPLIT"
        )
    return read_annotations(file, folder / split, name=f"{folder.name} {split}", limit=limit)


def read_annotations(file: Path, images: Path, *, name: str, limit: int | None = None) -> CocoData:
    """Read and check one annotation file; a fault that would change what is trained or scored is refused by its name."""
    content = file.read_bytes()
    try:
        plain = json.loads(content)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DsslError(f"{file} is no JSON: {error}") from None
    for key in ("images", "annotations", "categories"):
        if not isinstance(plain, dict) or not isinstance(plain.get(key), list):
            raise DsslError(f"{file} has no list {key!r}: expected COCO's instances format")
    categories = sorted((_id(one, file, "category"), str(one.get("name", one["id"]))) for one in plain["categories"])
    _unique([number for number, _ in categories], file, "category")
    if not categories:
        raise DsslError(f"{file} has no categories: there is nothing to detect")
    labels = {number: position + 1 for position, (number, _) in enumerate(categories)}
    left_out: Counter[str] = Counter()
    by_image = _instances(plain["annotations"], plain["images"], labels, file, left_out)
    chosen = [
        CocoImage(
            id=one["id"],
            path=images / one["file_name"],
            width=one["width"],
            height=one["height"],
            instances=tuple(by_image[one["id"]]),
        )
        for one in sorted(plain["images"], key=lambda one: int(one["id"]))
    ]
    if limit is not None:
        chosen = [image for image in chosen if image.objects][:limit]
    if not chosen:
        raise DsslError(f"{file} has no images: there is nothing to train on or to score")
    digest = hashlib.sha256(content)
    for image, size in zip(chosen, _sizes(chosen, images), strict=True):
        digest.update(f"\n{image.id} {size}".encode())
    return CocoData(
        name=name,
        images=tuple(chosen),
        category_ids=tuple(number for number, _ in categories),
        category_names=tuple(text for _, text in categories),
        fingerprint=digest.hexdigest(),
        notes=_notes(chosen, left_out),
    )


def _instances(
    annotations: list[Any], images: list[Any], labels: Mapping[int, int], file: Path, left_out: Counter[str]
) -> dict[int, list[Instance]]:
    sizes: dict[int, tuple[int, int]] = {}
    for one in images:
        number = _id(one, file, "image")
        width, height = one.get("width"), one.get("height")
        whole = all(isinstance(side, int) and side > 0 for side in (width, height))
        if not whole or not isinstance(one.get("file_name"), str):
            raise DsslError(f"{file}: image {number} needs file_name, width and height in whole pixels")
        sizes[number] = (width, height)
    _unique([one["id"] for one in images], file, "image")
    _unique([_id(one, file, "annotation") for one in annotations], file, "annotation")
    found: dict[int, list[Instance]] = {number: [] for number in sizes}
    for one in annotations:
        where = f"{file}: annotation {one['id']}"
        if one.get("image_id") not in sizes:
            raise DsslError(f"{where} belongs to image {one.get('image_id')!r}, which the file does not list")
        if one.get("category_id") not in labels:
            raise DsslError(f"{where} has category {one.get('category_id')!r}, which the file does not list")
        width, height = sizes[one["image_id"]]
        box, area = one.get("bbox"), one.get("area")
        if not isinstance(box, list) or len(box) != 4 or not all(_is_number(value) for value in box):
            raise DsslError(f"{where} has the box {box!r}: expected four numbers x, y, width, height")
        if not _is_number(area):
            raise DsslError(f"{where} has the area {area!r}: expected a number of pixels")
        if one.get("iscrowd", 0) not in (0, 1):
            raise DsslError(f"{where} has iscrowd {one['iscrowd']!r}: expected 0 or 1")
        left, top, wide, high = (float(value) for value in box)
        if min(left + wide, width) - max(left, 0) <= 0 or min(top + high, height) - max(top, 0) <= 0:
            left_out["whose box has no area inside its image"] += 1
            continue
        segmentation = _segmentation(one.get("segmentation"), (height, width), where)
        if not segmentation:
            left_out["whose mask has no polygon with three corners"] += 1
            continue
        found[one["image_id"]].append(
            Instance(
                label=labels[one["category_id"]],
                box=(left, top, wide, high),
                area=float(area),
                crowd=bool(one.get("iscrowd", 0)),
                segmentation=segmentation,
            )
        )
    return found


def _segmentation(given: Any, size: tuple[int, int], where: str) -> Segmentation:
    """The polygons that have an inside (pycocotools takes one with two corners for a box), or the run lengths."""
    if isinstance(given, dict):
        counts = given.get("counts")
        if list(given.get("size", ())) != list(size) or not isinstance(counts, str | list):
            raise DsslError(
                f"{where} has a run-length mask of size {given.get('size')}, expected its image's {list(size)} and counts"
            )
        if isinstance(counts, list) and (
            not all(isinstance(one, int) and one >= 0 for one in counts) or sum(counts) != size[0] * size[1]
        ):
            raise DsslError(f"{where} has run lengths that do not add up to its image's {size[0] * size[1]} pixels")
        return given
    if not isinstance(given, list):
        raise DsslError(f"{where} has no mask: expected polygons or run lengths in 'segmentation'")
    for polygon in given:
        if not isinstance(polygon, list) or len(polygon) % 2 or not all(_is_number(value) for value in polygon):
            raise DsslError(f"{where} has a polygon that is no list of x, y, x, y, ...")
    return [polygon for polygon in given if len(polygon) >= 6]


def _sizes(chosen: list[CocoImage], folder: Path) -> list[int]:
    """The size of every image's file; files that are missing are named before anything starts."""
    sizes, missing = [], []
    for image in chosen:
        try:
            sizes.append(image.path.stat().st_size)
        except OSError:
            missing.append(printable(image.path.name))
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise DsslError(f"{folder} lacks {len(missing)} of the {len(chosen)} images that are annotated: {shown}")
    return sizes


def _notes(chosen: list[CocoImage], left_out: Counter[str]) -> tuple[str, ...]:
    empty = sum(not image.objects for image in chosen)
    crowds = sum(one.crowd for image in chosen for one in image.instances)
    notes = [f"{count} annotations {why} are left out" for why, count in left_out.items()]
    if empty:
        notes.append(
            f"{empty} images without an object are not trained on; where they are scored, detections in them are false"
        )
    if crowds:
        notes.append(
            f"{crowds} crowd regions are not trained on; scoring neither asks for them nor punishes detections in them"
        )
    return tuple(notes)


def _id(one: Any, file: Path, what: str) -> int:
    number = one.get("id") if isinstance(one, dict) else None
    if not isinstance(number, int) or isinstance(number, bool):
        raise DsslError(f"{file}: a {what} has the id {number!r}: expected a whole number")
    return number


def _unique(ids: list[int], file: Path, what: str) -> None:
    twice = [number for number, count in Counter(ids).items() if count > 1]
    if twice:
        raise DsslError(f"{file}: the {what} id {twice[0]} is there twice: ids must be unique")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
