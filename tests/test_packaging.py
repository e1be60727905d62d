"""The versions that the tests run with are ones that the package allows, and every extra is complete."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PRIVATE = ("numba", "tyro")
"""Packages whose private parts are used: a new version may change them without a word."""


def test_constraints_are_within_the_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    pinned = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    extras = [text for texts in project["optional-dependencies"].values() for text in texts]
    wanted = [Requirement(text) for text in (*project["dependencies"], *extras)]
    for one in wanted:
        if one.name != "dssl":
            assert one.specifier.contains(pinned[one.name.lower()]), one
    bounded = {one.name for one in wanted if any(part.operator == "<" for part in one.specifier)}
    assert bounded >= set(PRIVATE)
