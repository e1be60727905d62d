"""COCO's annotation files: read once, checked completely, with a note on everything that is left out."""

import hashlib
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dssl.errors import DsslError
from dssl.files import printable

THINNEST = 0.01
"""Pixels of a box's side inside its image: scaled and in float32 a thinner one may have none, which torchvision rejects."""

Segmentation = list[list[float]] | dict[str, Any]
"""Polygons (x, y, x, y, ... in pixels), or a run-length encoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One annotated object."""

    label: int
    """1 .. number of categories, without the gaps that ids may have."""
    box: tuple[float, float, float, float]
    """x, y, width, height, as in the file."""
    area: float
    crowd: bool
    segmentation: Segmentation


@dataclass(frozen=True, slots=True, kw_only=True)
class CocoImage:
    id: int
    path: Path
    size: tuple[int, int]
    """Height and width."""
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
    """What was left out, for people."""

    def trainable(self) -> tuple[CocoImage, ...]:
        """The images with at least one object: an empty one would teach the proposals nothing but background."""
        return tuple(image for image in self.images if image.objects)


def read_split(folder: Path, split: str, *, limit: int | None = None) -> CocoData:
    """Read ``folder/annotations/instances_SPLIT.json`` and find its images in ``folder/SPLIT``; ``limit`` keeps the first
    images with an object. A fault that would change what is trained or scored is an error with the file and the id."""
    file = folder / "annotations" / f"instances_{split}.json"
    if not file.is_file():
        there = sorted(entry.name for entry in file.parent.glob("instances_*.json")) if file.parent.is_dir() else []
        found = f"the folder has {', '.join(there)}" if there else "the folder has no such files"
        raise DsslError(
            f"{file} does not exist ({found}): expected COCO's layout, annotations/instances_SPLIT.json and the images in SPLIT"
        )
    content = file.read_bytes()
    try:
        plain = json.loads(content)
    except ValueError as error:  # of JSON or of UTF-8
        raise DsslError(f"{file} is not valid JSON: {error}") from None
    for key in ("images", "annotations", "categories"):
        if not isinstance(plain, dict) or not isinstance(plain.get(key), list):
            raise DsslError(f"{file} has no list {key!r}: expected COCO's instances format")
        _check_ids(plain[key], file, {"images": "image", "annotations": "annotation", "categories": "category"}[key])
    categories = sorted((one["id"], str(one.get("name", one["id"]))) for one in plain["categories"])
    if not categories:
        raise DsslError(f"{file} has no categories: there is nothing to detect")
    labels = {number: label for label, (number, _) in enumerate(categories, 1)}
    sizes = {one["id"]: _size(one, file) for one in plain["images"]}
    instances, left_out = _instances(plain["annotations"], sizes, labels, file)
    images = [
        CocoImage(
            id=one["id"],
            path=folder / split / one["file_name"],
            size=sizes[one["id"]],
            instances=tuple(instances[one["id"]]),
        )
        for one in sorted(plain["images"], key=lambda one: int(one["id"]))
    ]
    if limit is not None:
        images = [image for image in images if image.objects][:limit]
    if not images:
        raise DsslError(f"{file} has no images: there is nothing to train on or to score")
    digest = hashlib.sha256(content)
    for image, count in zip(images, _bytes_of(images, folder / split), strict=True):
        digest.update(f"\n{image.id} {count}".encode())
    return CocoData(
        name=f"{folder.name} {split}",
        images=tuple(images),
        category_ids=tuple(number for number, _ in categories),
        category_names=tuple(text for _, text in categories),
        fingerprint=digest.hexdigest(),
        notes=_notes(images, left_out),
    )


def run_lengths(text: str | bytes) -> list[int]:
    """The counts in COCO's compressed text, to check them: pycocotools fills pixels beyond them with whatever is in memory.

    Five bits a character, lowest first; from the fourth count on, differences.
    """
    counts: list[int] = []
    value = shift = 0
    for character in text.encode() if isinstance(text, str) else text:
        bits = character - 48
        value |= (bits & 0x1F) << shift
        shift += 5
        if bits & 0x20:
            continue
        if bits & 0x10:
            value -= 1 << shift
        counts.append(value + counts[-2] if len(counts) > 2 else value)
        value = shift = 0
    return counts


def _instances(
    annotations: list[Any], sizes: Mapping[int, tuple[int, int]], labels: Mapping[int, int], file: Path
) -> tuple[dict[int, list[Instance]], Counter[str]]:
    """By image, and how many were left out for which reason."""
    found: dict[int, list[Instance]] = {number: [] for number in sizes}
    left_out: Counter[str] = Counter()
    for one in annotations:
        where = f"{file}: annotation {one['id']}"
        if one.get("image_id") not in sizes:
            raise DsslError(f"{where} belongs to image {one.get('image_id')!r}, which the file does not list")
        if one.get("category_id") not in labels:
            raise DsslError(f"{where} has category {one.get('category_id')!r}, which the file does not list")
        box, area, crowd = one.get("bbox"), one.get("area"), one.get("iscrowd", 0)
        if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
            raise DsslError(f"{where} has the box {box!r}: expected four numbers x, y, width, height")
        if not _is_number(area):
            raise DsslError(f"{where} has the area {area!r}: expected a number of pixels")
        if crowd not in (0, 1):
            raise DsslError(f"{where} has iscrowd {crowd!r}: expected 0 or 1")
        size = height, width = sizes[one["image_id"]]
        left, top, wide, high = map(float, box)
        inside = min(left + wide, width) - max(left, 0), min(top + high, height) - max(top, 0)
        if min(inside) <= 0:
            left_out["whose box has no area inside its image"] += 1
            continue
        if min(inside) < THINNEST:
            left_out[f"whose box is thinner than {THINNEST:g} pixels"] += 1
            continue
        segmentation = _segmentation(one.get("segmentation"), size, where)
        if not segmentation:
            left_out["whose mask has no polygon with three corners"] += 1
            continue
        found[one["image_id"]].append(
            Instance(
                label=labels[one["category_id"]],
                box=(left, top, wide, high),
                area=float(area),
                crowd=bool(crowd),
                segmentation=segmentation,
            )
        )
    return found, left_out


def _segmentation(given: Any, size: tuple[int, int], where: str) -> Segmentation:
    """The polygons that enclose an area (pycocotools takes one with two corners for a box), or the run lengths."""
    if isinstance(given, dict):
        counts = given.get("counts")
        if given.get("size") != list(size) or not isinstance(counts, str | list):
            raise DsslError(
                f"{where} has a run-length mask of size {given.get('size')}, expected its image's {list(size)} and counts"
            )
        runs = run_lengths(counts) if isinstance(counts, str) else counts
        if not all(isinstance(run, int) and run >= 0 for run in runs) or sum(runs) != math.prod(size):
            raise DsslError(f"{where} has run lengths that do not add up to its image's {math.prod(size)} pixels")
        return given
    if not isinstance(given, list):
        raise DsslError(f"{where} has no mask: expected polygons or run lengths in 'segmentation'")
    for polygon in given:
        if not isinstance(polygon, list) or len(polygon) % 2 or not all(map(_is_number, polygon)):
            raise DsslError(f"{where} has a polygon that is not a list of numbers x, y, x, y, ...")
        # pycocotools' memory grows with the coordinates, and it does not notice when there is none
        if any(not -max(size) <= value <= 2 * max(size) for value in polygon):
            raise DsslError(
                f"{where} has a polygon with a corner far outside of its image of {size[1]} x {size[0]} pixels: "
                "expected corners in pixels"
            )
    return [polygon for polygon in given if len(polygon) >= 6]


def _size(one: dict[str, Any], file: Path) -> tuple[int, int]:
    height, width = one.get("height"), one.get("width")
    if not isinstance(height, int) or not isinstance(width, int) or min(height, width) < 1:
        raise DsslError(f"{file}: image {one['id']} needs width and height in whole pixels")
    if not isinstance(one.get("file_name"), str):
        raise DsslError(f"{file}: image {one['id']} needs a file_name")
    return height, width


def _bytes_of(images: list[CocoImage], folder: Path) -> list[int]:
    """The size of every image's file; missing files are reported before anything starts."""
    sizes, missing = [], []
    for image in images:
        try:
            sizes.append(image.path.stat().st_size)
        except OSError:
            missing.append(printable(image.path.name))
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise DsslError(f"{folder} lacks {len(missing)} of the {len(images)} annotated images: {shown}")
    return sizes


def _notes(images: list[CocoImage], left_out: Counter[str]) -> tuple[str, ...]:
    empty = sum(not image.objects for image in images)
    crowds = sum(one.crowd for image in images for one in image.instances)
    notes = [f"{count} annotations {why} are left out" for why, count in left_out.items()]
    if empty:
        notes.append(f"{empty} images without an object are not trained on; when scored, detections in them are false")
    if crowds:
        notes.append(f"{crowds} crowd regions are not trained on; scoring ignores them and the detections in them")
    return tuple(notes)


def _check_ids(entries: list[Any], file: Path, what: str) -> None:
    seen = set()
    for one in entries:
        number = one.get("id") if isinstance(one, dict) else None
        if not isinstance(number, int) or isinstance(number, bool):
            raise DsslError(f"{file}: a {what} has the id {number!r}: expected a whole number")
        if number in seen:
            raise DsslError(f"{file}: duplicate {what} id {number}: ids must be unique")
        seen.add(number)


def _is_number(value: Any) -> bool:
    # JSON's integers have no limit: one that overflows a float is an error, too
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
