"""What all settings share: checks that name the setting, what was given and what was expected; it costs no torch import."""

import math

from dssl.errors import DsslError


def require(condition: bool, name: str, given: object, expected: str) -> None:
    if not condition:
        raise DsslError(f"{name} is {given}, expected {expected}")


LARGEST = {"image_size": 4096, "epochs": 1_000_000, "threads": 1024, "head": 65_536}
"""A larger value is a typing mistake, and the machine would fail with a worse message."""


def finite(name: str, value: float, *, strictly: bool = False) -> None:
    """Above zero (``strictly``), or at least zero."""
    enough = value > 0 if strictly else value >= 0
    require(math.isfinite(value) and enough, name, value, f"a number {'above' if strictly else 'of at least'} 0")


def between(name: str, value: int, largest: int) -> None:
    require(value >= 1, name, value, "at least 1")
    require(value <= largest, name, value, f"at most {largest:,}")
