"""``dssl doctor``: what this machine has, and how long a run on it would take."""

import importlib.util
import os
import platform
import shutil
import tempfile
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dssl.commands.arguments import check_counts
from dssl.commands.options import Usage
from dssl.errors import memory_for
from dssl.recipes import recipe
from dssl.text import duration
from dssl.version import VERSION

if TYPE_CHECKING:
    from dssl.config import RunConfig

_PACKAGES = (
    "torch", "torchvision", "numpy", "numba", "pillow", "safetensors", "timm", "pycocotools", "onnx", "onnxruntime",
)  # fmt: skip
_USUAL = {"shapes": 10_000, "cifar10": 50_000, "imagenet": 1_281_167, "folder": 10_000, "adapt": 2_000, "robust": 2_000}
"""Images of a run by recipe."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Check versions, devices, bf16, threads and disk, and measure how fast a run would be and whether the loader keeps up."""

    USAGE: ClassVar[Usage] = Usage(
        positional={"data": "[IMAGES]"},
        examples=(
            "dssl doctor",
            "dssl doctor photos --recipe folder",
            "dssl doctor --recipe cifar10 --encoder resnet50 --image-size 64",
        ),
    )

    recipe: str = "shapes"
    """The recipe whose speed is measured: shapes, cifar10, imagenet, folder, adapt or robust."""
    method: str | None = None
    """A name that dssl train takes, such as simclr; the recipe's own by default."""
    data: str | None = None
    """Images to measure the loader on; by default dssl draws some."""
    images: int | None = None
    """How many images the run would have; by default as many as IMAGES has, or the recipe's usual number."""
    encoder: str | None = None
    """An encoder other than the recipe's."""
    image_size: int | None = None
    """A size of the views other than the recipe's, in pixels."""
    epochs: int | None = None
    """A number of epochs other than the recipe's."""
    batch_size: int | None = None
    """A batch size other than the recipe's; for one of several GPUs, its share."""
    checkpoint_activations: bool = False
    """Measure with checkpointed activations."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """The device to measure on."""
    out: Path = Path()
    """Where the run would be written; the free space there is shown."""

    def __post_init__(self) -> None:
        check_counts(self, "images", "image_size", "epochs", "batch_size")


def run(arguments: Arguments) -> int:
    import torch

    from dssl.data.pipeline import default_threads
    from dssl.distributed import pick_device
    from dssl.training.budget import drawn_images, measured
    from dssl.training.prepare import open_data

    config, device = _configuration(arguments), pick_device(arguments.device)
    print(f"dssl {VERSION}, Python {platform.python_version()}, {platform.platform()}")
    for package in _PACKAGES:
        print(f"  {package:<12} {_version(package)}")
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    print(f"device       {device}{': ' + ', '.join(names) if names else ''}")
    print(f"threads      {default_threads()} cores, torch uses {torch.get_num_threads()}")
    place = next(folder for folder in (arguments.out.resolve(), *arguments.out.resolve().parents) if folder.exists())
    writable = "" if os.access(place, os.W_OK) else "  NOT WRITABLE"
    print(f"disk         {shutil.disk_usage(place).free / 1e9:.1f} GB free at {place}{writable}")
    what = f"{config.encoder}, {config.method.name}, {config.graph}, batch {config.batch_size}"
    print(f"measuring    {arguments.recipe}: {what}, views of {config.image_size} px ...")
    count = arguments.images or _USUAL[arguments.recipe]
    with tempfile.TemporaryDirectory() as folder:
        data, about = arguments.data, arguments.data
        if data is None:
            data, about = drawn_images(config.image_size, Path(folder))
        source = open_data(replace(config, data=data))
        if arguments.data is not None and arguments.images is None:
            count = len(source)
        needed = f"batch_size {config.batch_size}, image_size {config.image_size} and the encoder {config.encoder}"
        with memory_for(needed, "lower one of them, or add --checkpoint-activations"):
            speed = measured(config, source, device, seconds=4.0)
    loader = speed.loader
    print(f"loader       {loader:,.0f} images a second, from {about}")
    print(f"precision    {speed.why}")
    print(f"training     {speed.steps:,.0f} images a second ({speed.precision})")
    print(f"checkpoint   {speed.checkpoint_bytes / 1e6:.0f} MB each")
    epochs = arguments.epochs or config.epochs
    time = duration(count * epochs / min(loader, speed.steps))
    print(
        f"a run        {epochs} epochs of {count:,} images: about {time}, without measuring (the start, kNN) and saving"
    )
    if speed.one_is_faster:
        remedy = "set OMP_NUM_THREADS=1, or wait until the machine is idle"
        print(f"warning      one torch thread reaches {speed.on_one_thread:,.0f} images a second: on busy "
              f"cores threads wait for each other; {remedy}")  # fmt: skip
    if loader < 1.2 * speed.steps:
        remedy = "pack the images (dssl data) or add cores"
        print(f"warning      the loader gives {loader:,.0f} images a second: training would wait for data; {remedy}")
    return 0


def _configuration(arguments: Arguments) -> "RunConfig":
    given: dict[str, Any] = {name: vars(arguments)[name] for name in ("encoder", "image_size", "batch_size")}
    changes = {name: value for name, value in given.items() if value is not None}
    changes["checkpoint_activations"] = arguments.checkpoint_activations
    return recipe(arguments.recipe, method=arguments.method, **changes)


def _version(package: str) -> str:
    if importlib.util.find_spec("PIL" if package == "pillow" else package) is None:
        return "not installed"
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # onnxruntime-gpu and pillow-simd have the module under another name
        return "installed, version unknown"
