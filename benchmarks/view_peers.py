"""Other libraries' views, each as near to ours as it can be asked to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from benchmarks import pillow_views
from benchmarks.record import reason
from dssl.augment import IMAGENET

T = TypeVar("T")

VIEWS = 4
"""Views made of every image."""
Job = Callable[[], int]
"""Makes views of a fixed set of images and says how many."""


def nothing() -> None:
    """What most contenders do between their turns."""


@dataclass(frozen=True)
class Contender:
    """Somebody to measure: ``job`` says how many views were made since ``resume`` or the call before."""

    job: Job
    note: str = ""
    resume: Callable[[], None] = nothing
    pause: Callable[[], None] = nothing
    """Whoever works in threads of its own stops here, so that nothing is made in the turns of others."""
    close: Callable[[], None] = nothing


def per_image(chain: Callable[[T], object], images: Sequence[T], *, views: int = VIEWS) -> Job:
    def job() -> int:
        for image in images:
            for _ in range(views):
                chain(image)
        return views * len(images)

    return job


def pillow(size: int, images: list[np.ndarray]) -> Job:
    return per_image(pillow_views.chain(size), [Image.fromarray(image) for image in images])


def torchvision_v2(size: int, images: list[np.ndarray]) -> Job:
    chain = v2.Compose([
        v2.RandomResizedCrop(size, scale=(0.2, 1.0), antialias=True),
        v2.RandomHorizontalFlip(),
        v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
        v2.RandomGrayscale(p=0.2),
        v2.RandomApply([v2.GaussianBlur(max(3, size // 20 * 2 + 1), (0.1, 2.0))], p=0.5),
        v2.RandAugment(2, 9),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(IMAGENET.mean, IMAGENET.std),
    ])  # fmt: skip
    return per_image(chain, [torch.from_numpy(image.copy()).permute(2, 0, 1).contiguous() for image in images])


def kornia(size: int, images: list[np.ndarray]) -> Job:
    import kornia.augmentation as K

    height, width = (32, 32) if size == 32 else (400, 500)
    batch = torch.stack([
        torch.from_numpy(np.array(Image.fromarray(image).resize((width, height)))).permute(2, 0, 1).float() / 255
        for image in images
    ])  # fmt: skip
    chain = K.AugmentationSequential(
        K.RandomResizedCrop((size, size), scale=(0.2, 1.0)),
        K.RandomHorizontalFlip(),
        K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
        K.RandomGrayscale(p=0.2),
        K.RandomGaussianBlur((max(3, size // 20 * 2 + 1),) * 2, (0.1, 2.0), p=0.5),
        K.auto.RandAugment(n=2, m=9),
        K.Normalize(torch.tensor(IMAGENET.mean), torch.tensor(IMAGENET.std)),
        data_keys=["input"],
    )

    def job() -> int:
        with torch.no_grad():
            for _ in range(VIEWS):
                chain(batch)
        return VIEWS * len(batch)

    return job


def albumentations(size: int, images: list[np.ndarray]) -> Job:
    import albumentations as A
    import cv2

    cv2.setNumThreads(1)
    chain = A.Compose([
        A.RandomResizedCrop((size, size), scale=(0.2, 1.0)),
        A.HorizontalFlip(),
        A.ColorJitter((0.6, 1.4), (0.6, 1.4), (0.6, 1.4), (-0.1, 0.1), p=0.8),
        A.ToGray(p=0.2),
        A.GaussianBlur((0, 0), (0.1, 2.0), p=0.5),
        A.Normalize(IMAGENET.mean, IMAGENET.std),
    ])  # fmt: skip
    return per_image(lambda image: chain(image=image), list(images))


def lightly(size: int, images: list[np.ndarray]) -> Job:
    from lightly.transforms.simsiam_transform import SimSiamTransform

    chain = SimSiamTransform(input_size=size, gaussian_blur=0.5)  # makes two views a call
    job = per_image(chain, [Image.fromarray(image) for image in images], views=VIEWS // 2)
    return lambda: 2 * job()


PEERS: tuple[tuple[str, str, Callable[[int, list[np.ndarray]], Job], str], ...] = (
    ("torchvision v2, tensors", "torchvision", torchvision_v2, "its own RandAugment table"),
    ("kornia, batched", "kornia", kornia, "draws RandAugment once a batch"),
    ("albumentations", "albumentations", albumentations, "standard views only: has no RandAugment"),
    ("lightly SimSiamTransform", "lightly", lightly, "standard views only"),
)


def peers(size: int, images: list[np.ndarray]) -> tuple[dict[str, Contender], dict[str, str]]:
    """The libraries that work here, and why the others do not."""
    found, missing = {}, {}
    for name, package, build, note in PEERS:
        try:
            job = build(size, images)
            job()
            found[name] = Contender(job, f"{package} {version(package)}; {note}")
        except Exception as problem:  # any reason at all: the page says which
            missing[name] = reason(problem)
            print(f"  {name:28} left out: {missing[name]}")
    return found, missing
