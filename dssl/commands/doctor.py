"""``dssl doctor``: what this machine has, what works, and how long a run would take."""

import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from dssl.methods import declaration_of
from dssl.recipes import recipe
from dssl.version import VERSION

_PACKAGES = (
    "torch",
    "torchvision",
    "numpy",
    "numba",
    "pillow",
    "safetensors",
    "timm",
    "pycocotools",
    "onnx",
    "onnxruntime",
)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Check versions, devices, bf16, threads and disk, and measure what a run would cost here."""

    recipe: str = "shapes"
    """The recipe whose speed is measured: shapes, cifar10, imagenet, folder or adapt."""
    method: str | None = None
    """simsiam, byol or simclr; the recipe's own by default."""
    images: int | None = None
    """How many images the run would have; the recipe's usual number by default."""
    out: Path = Path()
    """Where the run would be written: its free space is shown."""


def run(arguments: Arguments) -> int:
    import torch

    from dssl.distributed import pick_device
    from dssl.train.estimate import measure_speed

    config = recipe(arguments.recipe, method=arguments.method)
    print(f"dssl {VERSION}, Python {platform.python_version()}, {platform.platform()}")
    for package in _PACKAGES:
        print(f"  {package:<12} {_version(package)}")
    device = pick_device("auto")
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    print(f"device       {device}{': ' + ', '.join(names) if names else ''}")
    print(f"threads      {os.cpu_count()} cores, torch uses {torch.get_num_threads()}")
    place = next(folder for folder in (arguments.out.resolve(), *arguments.out.resolve().parents) if folder.exists())
    writable = "" if os.access(place, os.W_OK) else "  NOT WRITABLE"
    print(f"disk         {shutil.disk_usage(place).free / 1e9:.1f} GB free at {place}{writable}")
    method = declaration_of(config.method).name
    print(f"measuring    {arguments.recipe}: {config.encoder}, {method}, {config.graph}, batch {config.batch_size} ...")
    speed = measure_speed(config, device)
    print(f"precision    {speed.why}")
    print(
        f"views        {speed.views_per_second:,.0f} a second on one thread, "
        f"from images in memory ({config.image_size} px, decoding not counted)"
    )
    print(f"training     {speed.images_per_second:,.0f} images a second ({speed.precision})")
    print(f"checkpoint   {speed.checkpoint_bytes / 1e6:.0f} MB each")
    count = (
        arguments.images
        or {"shapes": 10_000, "cifar10": 50_000, "imagenet": 1_281_167, "folder": 10_000, "adapt": 2_000}[
            arguments.recipe
        ]
    )
    seconds = count * config.epochs / speed.images_per_second
    print(f"a run        {config.epochs} epochs of {count:,} images: about {_duration(seconds)}")
    if speed.on_one_thread is not None and speed.on_one_thread > 1.1 * speed.images_per_second:  # a tie is noise
        print(
            f"warning      one torch thread reaches {speed.on_one_thread:,.0f} images a second: on cores that are busy with "
            "something else threads wait for each other; set OMP_NUM_THREADS=1, or wait until the machine is idle"
        )
    bound = speed.views_per_second * (os.cpu_count() or 1) / len(speed.views)
    if bound < 1.2 * speed.images_per_second:
        print(
            f"warning      views for only {bound:,.0f} images a second: the processor would wait for data; add cores or --threads"
        )
    return 0


def _version(package: str) -> str:
    name = {"pillow": "PIL"}.get(package, package)
    if importlib.util.find_spec(name) is None:
        return "not installed"
    return metadata.version(package)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
