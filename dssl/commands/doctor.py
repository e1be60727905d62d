"""``dssl doctor``: what this machine has, what a run would need on a GPU, and how long it would take."""

import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dssl.commands.arguments import check_counts
from dssl.data.pipeline import default_threads
from dssl.errors import DsslError, choices
from dssl.recipes import recipe
from dssl.text import duration
from dssl.version import VERSION

if TYPE_CHECKING:
    import torch

    from dssl.config import Precision, RunConfig
    from dssl.training.estimate import Budget

_PACKAGES = (
    "torch", "torchvision", "numpy", "numba", "pillow", "safetensors", "timm", "pycocotools", "onnx", "onnxruntime",
)  # fmt: skip
_USUAL = {"shapes": 10_000, "cifar10": 50_000, "imagenet": 1_281_167, "folder": 10_000, "adapt": 2_000, "robust": 2_000}
"""Images of a run by recipe."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Check versions, devices, bf16, threads and disk; measure how fast a run would be, or count what it would need on a GPU."""

    recipe: str = "shapes"
    """The recipe whose speed is measured: shapes, cifar10, imagenet, folder or adapt."""
    method: str | None = None
    """simsiam, byol, simclr, vicreg or barlowtwins; the recipe's own by default."""
    images: int | None = None
    """How many images the run would have; the recipe's usual number by default."""
    data: str | None = None
    """Images to measure the loader on; synthetic ones by default."""
    encoder: str | None = None
    """An encoder other than the recipe's."""
    batch_size: int | None = None
    """A batch size other than the recipe's, over all GPUs."""
    checkpoint_activations: bool = False
    """Count with checkpointed activations."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """cuda works without a GPU too: what the run would need is counted, and nothing is trained."""
    gpus: int = 1
    """Number of GPUs that share the batch."""
    card: str | None = None
    """With --device cuda, the GPU to assume if this machine has none: V100, A100 (the default) or H100."""
    out: Path = Path()
    """Where the run would be written; the free space there is shown."""


def run(arguments: Arguments) -> int:
    import torch

    from dssl.distributed import pick_device

    config = _configuration(arguments)
    print(f"dssl {VERSION}, Python {platform.python_version()}, {platform.platform()}")
    for package in _PACKAGES:
        print(f"  {package:<12} {_version(package)}")
    device = pick_device("cpu" if arguments.device == "cpu" else "auto")
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    print(f"device       {device}{': ' + ', '.join(names) if names else ''}")
    print(f"threads      {default_threads()} cores, torch uses {torch.get_num_threads()}")
    place = next(folder for folder in (arguments.out.resolve(), *arguments.out.resolve().parents) if folder.exists())
    writable = "" if os.access(place, os.W_OK) else "  NOT WRITABLE"
    print(f"disk         {shutil.disk_usage(place).free / 1e9:.1f} GB free at {place}{writable}")
    what = f"{config.encoder}, {config.method.name}, {config.graph}, batch {config.batch_size}"
    print(f"measuring    {arguments.recipe}: {what} ...")
    if device.type == "cuda" or arguments.device == "cuda":
        _gpu(arguments, config, device)
    else:
        if arguments.data is not None or arguments.gpus > 1 or arguments.card is not None:
            which = "--data, --gpus and --card are about a GPU"
            raise DsslError(f"{which}, which this machine does not have: add --device cuda")
        _measure(arguments, config, device)
    return 0


def _configuration(arguments: Arguments) -> "RunConfig":
    check_counts(arguments, ("images", "batch_size"))
    given: dict[str, Any] = {"encoder": arguments.encoder, "batch_size": arguments.batch_size}
    changes = {name: value for name, value in given.items() if value is not None}
    changes["checkpoint_activations"] = arguments.checkpoint_activations
    config = recipe(arguments.recipe, method=arguments.method, **changes)
    if arguments.gpus < 1 or config.batch_size % arguments.gpus or config.batch_size // arguments.gpus < 2:
        expected = "expected a number of GPUs that divides the batch into parts of at least 2 images"
        raise DsslError(f"gpus is {arguments.gpus} and the batch is {config.batch_size}: {expected}")
    return config


def _measure(
    arguments: Arguments, config: "RunConfig", device: "torch.device", *, batch_size: int | None = None
) -> float:
    """Train for some seconds and say how fast; images a second."""
    from dssl.training.estimate import measure_speed

    speed = measure_speed(config, device, batch_size=batch_size)
    print(f"precision    {speed.why}")
    about = f"from images in memory ({config.image_size} px, decoding not counted)"
    print(f"views        {speed.views_per_second:,.0f} a second on one thread, {about}")
    print(f"training     {speed.images_per_second:,.0f} images a second ({speed.precision})")
    print(f"checkpoint   {speed.checkpoint_bytes / 1e6:.0f} MB each")
    print(_length(arguments, config, arguments.gpus * speed.images_per_second, "about"))
    if speed.on_one_thread is not None and speed.on_one_thread > 1.1 * speed.images_per_second:  # a tie is noise
        remedy = "set OMP_NUM_THREADS=1, or wait until the machine is idle"
        print(f"warning      one torch thread reaches {speed.on_one_thread:,.0f} images a second: on busy "
              f"cores threads wait for each other; {remedy}")  # fmt: skip
    bound = speed.views_per_second * default_threads() / len(speed.views)
    if device.type != "cuda" and bound < 1.2 * speed.images_per_second:
        waits = "the processor would wait for data; add cores or --threads"
        print(f"warning      views for only {bound:,.0f} images a second: {waits}")
    return speed.images_per_second


def _length(arguments: Arguments, config: "RunConfig", rate: float, word: str) -> str:
    count = arguments.images or _USUAL.get(arguments.recipe, 2_000)  # the recipes that start from weights
    on = f" on {arguments.gpus} GPUs" if arguments.gpus > 1 else ""
    time = duration(count * config.epochs / rate)
    return f"a run        {config.epochs} epochs of {count:,} images{on}: {word} {time}"


def _gpu(arguments: Arguments, config: "RunConfig", device: "torch.device") -> None:
    """Memory by count, the loader by measurement, the GPU's appetite by measurement or from a table, and a verdict."""
    import torch

    from dssl.training.estimate import CARDS, ON_TOP, loader_rate, step_budget

    cards, name = {card.name: card for card in CARDS}, arguments.card or "A100"
    if name not in cards:
        raise choices("card", name, cards)
    card = cards[name]
    precision: Precision = "bf16" if config.precision == "auto" else config.precision
    budget = step_budget(config, gpus=arguments.gpus, precision=precision)
    print(
        f"memory       {budget.peak / 2**30:.1f} GiB per GPU, counted ({budget.images} images each, {precision}); "
        f"{budget.needed / 2**30:.1f} GiB with {ON_TOP:.0%} for workspaces"
    )
    given = loader_rate(config, arguments.data)
    what = arguments.data or ("JPEG files of 500 x 375 px" if config.image_size > 64 else "images in memory")
    print(f"loader       {given:,.0f} images a second, from {what}")
    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
        asked = _measure(arguments, config, device, batch_size=max(2, min(budget.images, budget.most(memory))))
    else:
        # sold as GB, counted as GiB, of which the driver keeps about a hundredth
        asked, name, memory = budget.rate(card), card.name, int(0.99 * card.memory * 2**30)
        print(
            f"{card.name:<12} asks for up to {asked:,.0f} images a second: {card.rate:,.0f} of ResNet-50 at 224 px "
            f"({card.source}), scaled by arithmetic; not measured"
        )
        print(_length(arguments, config, min(given, arguments.gpus * asked), "at least"))
    print(f"verdict      {verdict(budget, memory, name=name, gpus=arguments.gpus, asked=asked, given=given)}")


def verdict(budget: "Budget", memory: float, *, name: str, gpus: int, asked: float, given: float) -> str:
    """One line: does it fit, and is it fed."""
    card = f"{gpus} x {name}" if gpus > 1 else name
    sizes = f"{budget.needed / 2**30:.1f} of {memory / 2**30:.1f} GiB"
    space = f"fits on {card}: {sizes}"
    if budget.needed > memory:
        fitting = f"--batch-size {budget.most(memory) * gpus} or less"
        space = f"does not fit on {card}: {sizes}; take {fitting}, more GPUs, or --checkpoint-activations"
    wanted = asked * gpus
    if given >= wanted:
        return f"{space}; the loader keeps up: {given:,.0f} images a second of {wanted:,.0f}"
    waits = f"it would wait for data up to {1 - given / wanted:.0%} of the time"
    remedy = "pack the images (dssl data) or add cores"
    return f"{space}; the loader gives {given:,.0f} of {wanted:,.0f} images a second: {waits}; {remedy}"


def _version(package: str) -> str:
    if importlib.util.find_spec("PIL" if package == "pillow" else package) is None:
        return "not installed"
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # onnxruntime-gpu and pillow-simd have the module under another name
        return "installed, version unknown"
