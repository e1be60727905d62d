"""Whether an operation gets stronger with its magnitude, from the change that was measured at each magnitude."""

from collections.abc import Sequence
from dataclasses import dataclass

from dssl.report.page import Colour

_LEAST = 1.0
"""Differences of less than one of 255 levels are not called a trend."""

_SHARE = 0.05
"""Nor are differences of less than this share of the operation's largest change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """What growing magnitude does to an operation; ``weakens`` when a larger magnitude somewhere changes less."""

    verdict: Colour
    text: str
    weakens: bool


def trend(magnitudes: Sequence[float], changes: Sequence[float]) -> Trend:
    """Read the trend from the mean change at each magnitude, magnitudes ascending."""
    if len(magnitudes) != len(changes) or len(changes) < 2:
        raise ValueError(
            f"{len(magnitudes)} magnitudes and {len(changes)} changes: need one change for each of two or more"
        )
    peak = max(changes)
    tolerance = max(_LEAST, _SHARE * peak)
    if peak < _LEAST:
        return Trend(verdict="neutral", text="changes nothing", weakens=False)
    rise, _, _ = _largest_rise(changes)
    fall, begin, end = _largest_rise([-change for change in changes])
    if fall <= tolerance and rise <= tolerance:
        return Trend(verdict="neutral", text="same at every m", weakens=False)
    if fall <= tolerance:
        return Trend(verdict="good", text="grows with m", weakens=False)
    if rise <= tolerance:
        return Trend(verdict="bad", text="weaker as m grows", weakens=True)
    if begin == 0:
        text = f"weaker up to m = {magnitudes[end]:g}"
    elif end == len(changes) - 1:
        text = f"weaker from m = {magnitudes[begin]:g}"
    else:
        text = f"weaker from m = {magnitudes[begin]:g} to {magnitudes[end]:g}"
    return Trend(verdict="bad", text=text, weakens=True)


def _largest_rise(values: Sequence[float]) -> tuple[float, int, int]:
    """The most that a later value exceeds an earlier one, and the places of the two."""
    lowest, rise, begin, end = 0, 0.0, 0, 0
    for place, value in enumerate(values):
        if value < values[lowest]:
            lowest = place
        if value - values[lowest] > rise:
            rise, begin, end = value - values[lowest], lowest, place
    return rise, begin, end
