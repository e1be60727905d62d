"""What commands do with their arguments: check counts, open weights, and turn them back into a command line."""

import dataclasses
import functools
import itertools
import math
import os
import shlex
import sys
import time
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dssl import plugins
from dssl.commands.options import options_of
from dssl.errors import LARGEST, LEAST, DsslError, within

if TYPE_CHECKING:
    from dssl.weights.encoder import Encoder


def check_counts(arguments: object, *names: str) -> None:
    """An error for a number below the least, or above the limit that a configuration has for the same name."""
    for name in names:
        least, most = LEAST.get(name, 1), LARGEST.get(name, math.inf)
        within(name, vars(arguments)[name], f"[{least}, {most}{']' if name in LARGEST else ')'}")


@dataclass(frozen=True, kw_only=True)
class WeightsArguments:
    """The arguments that name an encoder, with what its file may not state."""

    weights: Path
    """The folder of a run, a checkpoint, an export, or weights of torchvision, timm, lightly, solo-learn or MoCo."""
    encoder: str | None = None
    """The encoder, if the file does not name it: resnet50, resnet18-cifar, timm:NAME."""
    stem: Literal["cifar", "padding2", "norelu"] | None = None
    """The 3x3 stem of a CIFAR ResNet, if the file does not show it; padding2 is solo-learn's."""
    image_size: int | None = None
    """Image size, if the file does not state it or you want another one."""
    normalization: Literal["cifar10", "imagenet"] | None = None
    """Pixel normalisation, if the file does not state it."""


@dataclass(frozen=True, kw_only=True)
class EncoderArguments(WeightsArguments):
    """And how the encoder is run."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the encoder."""
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """auto: CUDA, else Apple's GPU, else the CPU."""
    threads: int | None = None
    """Threads that decode images; by default one per core."""


def open_encoder(arguments: WeightsArguments) -> "Encoder":
    """The encoder; what was loaded and what was not is printed."""
    from dssl.augment import CIFAR10, IMAGENET
    from dssl.weights.load import open_weights

    loaded = open_weights(
        arguments.weights,
        encoder=arguments.encoder,
        stem=arguments.stem,
        image_size=arguments.image_size,
        normalization={"cifar10": CIFAR10, "imagenet": IMAGENET, None: None}[arguments.normalization],
    )
    print(loaded.report)
    return loaded


def open_on_device(arguments: EncoderArguments) -> "Encoder":
    """The encoder, ready to compute features."""
    from dssl.distributed import pick_device
    from dssl.precision import half_type

    encoder = open_encoder(arguments)
    return dataclasses.replace(
        encoder,
        network=encoder.network.to(pick_device(arguments.device)),
        autocast=half_type(arguments.precision),
        threads=arguments.threads,
        progress=show_progress,
    )


def images_of(given: str | None, encoder: "Encoder") -> str:
    """The images that were named, or else those of the encoder's run."""
    data: str | None = given or (encoder.header.get("config") or {}).get("data")
    if data is None:
        raise DsslError(
            "no images given: expected --data, such as a folder that contains train and val, or cifar10:FOLDER"
        )
    return data


def recipe_of(source: str) -> str:
    """The recipe that trains on these images."""
    kind = source.partition(":")[0]
    return {"shapes": "shapes", "figures": "shapes", "cifar10": "cifar10"}.get(kind, "folder")


class Progress:
    """Prints how much is done: on a terminal a line that is overwritten, in a log a new line every half minute."""

    def __init__(self, pause: float = 30.0) -> None:
        self._pause, self._printed = pause, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        text, now = f"{min(done, total):,} of {total:,}", time.monotonic()
        if sys.stderr.isatty():
            print(f"\r{text}", end="\n" if done >= total else "", file=sys.stderr, flush=True)
        elif now - self._printed >= self._pause:
            print(text, file=sys.stderr, flush=True)
            self._printed = now


show_progress = Progress()


def is_first_process() -> bool:
    """Of those that torchrun started: only one of them prints results."""
    return os.environ.get("RANK", "0") == "0"


def default_folder(weights: Path) -> Path:
    """The run's folder for a run or a checkpoint in it; the current folder for any other file."""
    from dssl.weights.checkpoint import FOLDER

    if weights.is_dir():
        return weights.parent if weights.name == FOLDER else weights
    return weights.parent.parent if weights.parent.name == FOLDER else Path()


def command_line(command: str, arguments: Any, *, always: Container[str] = (), leave_out: Container[str] = ()) -> str:
    """The command that has these arguments: positional ones, then every flag whose value is not the default.

    ``always`` names flags that are given even at their default, ``leave_out`` those that do not belong to the result.
    """
    values: dict[str, list[str]] = {}
    for option in options_of(type(arguments)):
        value = functools.reduce(lambda owner, name: vars(owner)[name], option.path, arguments)
        by_position = option.name in arguments.USAGE.positional
        if option.name in leave_out or (value == option.default and (by_position or option.name not in always)):
            continue
        if isinstance(value, bool):
            values[option.name] = [option.flag if value else option.negative]
        else:
            values[option.name] = [*([] if by_position else [option.flag]), *_words(value)]
    positional = [word for name in arguments.USAGE.positional for word in values.pop(name, [])]
    return shlex.join(["dssl", command, *positional, *itertools.chain(*values.values()), *plugins.words()])


def _words(value: Any) -> list[str]:
    return [str(entry) for entry in value] if isinstance(value, tuple) else [str(value)]
