"""A user's mistake, reported in one line: what was given, what was expected, what to do; and the checks of settings."""

import difflib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class DsslError(ValueError):
    """A mistake that the user can fix; the command line prints it without a traceback."""


class InvalidSetting(DsslError):
    """A setting with a value that it cannot have; the command line names it by the flag that was typed."""

    def __init__(self, setting: str, problem: str) -> None:
        super().__init__(f"{setting} {problem}")
        self.setting, self.problem = setting, problem


class Stopped(Exception):
    """A training inside a larger job was stopped by a signal, after it had saved itself if it has a folder."""

    def __init__(self, signal: int, *, saved: bool = True) -> None:
        super().__init__(f"stopped by signal {signal}" + (" and saved; the same command resumes it" if saved else ""))
        self.signal = signal


def one_line(error: object, *, longest: int = 200) -> str:
    """What another library's error says, without line breaks, cut if it is too long; its kind if it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= longest else f"{text[:longest]}..."


HABITS = {
    "learning_rate": "optimizer.rate", "lr": "optimizer.rate", "wd": "optimizer.weight_decay", "opt": "optimizer.name",
    "warmup": "optimizer.warmup_epochs", "workers": "threads", "num_workers": "threads", "arch": "encoder", "model": "encoder",
    "backbone": "encoder", "dataset": "data", "images": "data", "output": "out", "out_dir": "out", "img_size": "image_size",
    "resolution": "image_size", "crop_size": "image_size", "bs": "batch_size", "pretrained": "init", "checkpoint": "resume",
    "amp": "precision", "fp16": "precision", "gpu": "device", "augmentation": "heavy", "loss": "method",
    "momentum": "optimizer.momentum", "optimizer": "optimizer.name", "wandb": "log", "mlflow": "log", "trackio": "log",
    "randaug": "ra", "randaugment": "ra", "rand_augment": "ra", "resize_crop": "crop", "random_resized_crop": "crop",
    "pretrain": "train", "adapt": "train", "robust": "train", "eval": "evaluate",
    "horizontal_flip": "flip", "hflip": "flip", "color_jitter": "jitter", "grayscale": "gray", "gaussian_blur": "blur",
}  # fmt: skip
"""What other programs call things, with our names."""
_LISTED = 8


def nearest(given: str, possible: Iterable[str]) -> str | None:
    """The name that was probably meant: similar to what was given, or another program's word for it."""
    known = {name: name for name in possible}
    habits = {habit: name for habit, name in HABITS.items() if name in known}
    names = {name.rpartition(".")[2]: name for name in reversed(known)} | habits | known
    close = difflib.get_close_matches(given.lower(), names, n=1, cutoff=0.7)
    return names[close[0]] if close else None


def choices(what: str, given: str, possible: Iterable[str]) -> DsslError:
    """The error for an unknown name: names the nearest one and lists at most eight that exist."""
    names = sorted(possible)
    near = nearest(given, names)
    hint = [] if near is None else [f"did you mean {near!r}?"]
    if len(names) <= _LISTED:
        hint.append(f"choose from {', '.join(names)}")
    elif near is None:
        close = difflib.get_close_matches(given, names, n=_LISTED, cutoff=0)
        hint.append(f"there are {len(names)}, such as {', '.join(close)}")
    return DsslError(f"unknown {what} {given!r}: {' '.join(hint)}")


@contextmanager
def memory_for(what: str, advice: str) -> Iterator[None]:
    """Report in one line that memory did not suffice for ``what``, and what to do about it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # on a CPU torch raises a plain RuntimeError
        if not isinstance(error, MemoryError) and "allocate" not in str(error):
            raise
        raise DsslError(f"out of memory with {what}: {advice} ({one_line(error)})") from error


LEAST = {"image_size": 8}
"""A smaller image has no content that a network could learn from."""
LARGEST = {"image_size": 4096, "epochs": 1_000_000, "threads": 1024, "head": 65_536, "queue": 1_000_000}
"""A larger value is a typing mistake, and the machine would fail with a worse message."""


def require(condition: bool, name: str, given: object, expected: str) -> None:
    if not condition:
        raise InvalidSetting(name, f"is {given}, expected {expected}")


def within(name: str, value: float | None, interval: str) -> None:
    """An error for a number outside an interval such as ``[0, 1)``; None, a setting that is not given, is in all of them."""
    if value is None:
        return
    low, high = map(float, interval[1:-1].split(","))
    from_low, to_high = interval.startswith("["), interval.endswith("]")
    above = value >= low if from_low else value > low
    below = value <= high if to_high else value < high
    expected = f"{'at least' if from_low else 'above'} {low:g}"
    if math.isfinite(high):
        expected += f" and {'at most' if to_high else 'below'} {high:,.0f}"
    require(above and below, name, value, expected)
