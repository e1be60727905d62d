"""Overfits four real images: a sign that boxes, masks, scaling and scoring fit together."""

import json
from pathlib import Path

import pytest

from dssl_coco import CocoConfig
from dssl_coco.finetune import finetune

IMAGES = 4


def choose(source: Path, folder: Path) -> Path:
    """The first images with at most four objects, none of them below 3 % of the image, as a split of their own."""
    plain = json.loads((source / "annotations" / "instances_train2017.json").read_text())
    objects: dict[int, list[dict[str, float]]] = {}
    for one in plain["annotations"]:
        objects.setdefault(one["image_id"], []).append(one)

    def is_simple(image: dict[str, int]) -> bool:
        there = objects.get(image["id"], [])
        smallest = 0.03 * image["width"] * image["height"]
        return 1 <= len(there) <= 4 and all(one["area"] >= smallest for one in there)

    chosen = [image for image in plain["images"] if is_simple(image)][:IMAGES]
    kept = {image["id"] for image in chosen}
    annotations = [one for one in plain["annotations"] if one["image_id"] in kept]
    (folder / "annotations").mkdir(parents=True)
    (folder / "few").symlink_to(source / "train2017")
    file = folder / "annotations" / "instances_few.json"
    file.write_text(json.dumps({**plain, "images": chosen, "annotations": annotations}))
    return folder


@pytest.mark.slow
def test_a_handful_of_real_images_is_overfitted(test_data: Path, tmp_path: Path) -> None:
    """ResNet-18 from scratch at 160 pixels, 240 steps of all four images, 1.4 s of one core's time each."""
    config = CocoConfig(
        weights="scratch", encoder="resnet18", data=choose(test_data / "coco-small", tmp_path / "data"),
        train="few", test="few", steps=240, batch_size=IMAGES, rate=0.08, warmup=30, clip=10.0, flip=False,
        sizes=(160,), test_size=160, max_size=256, anchors=(16, 32, 64, 128, 256), proposals=200, samples=24,
        precision="bf16", health_every=10, round=40,
    )  # fmt: skip
    _, scores = finetune(config, tmp_path / "run")
    assert scores is not None
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; box {scores.box}; mask {scores.mask}")
    assert scores.images == IMAGES
    assert losses[-1] < losses[0] / 10
    assert scores.box["AP"] >= 60
    assert scores.mask["AP"] >= 50
