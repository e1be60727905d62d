"""Counts what was tried and what survived, and says so at the end; places for faulty disks."""

import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Tally:
    """Every injected fault goes through ``trial``: what leaves it by an exception is lost."""

    def __init__(self) -> None:
        self.tried: Counter[str] = Counter()
        self.survived: Counter[str] = Counter()

    @contextmanager
    def trial(self, fault: str, count: int = 1) -> Iterator[None]:
        """``count`` faults that are judged together by the block."""
        self.tried[fault] += count
        yield
        self.survived[fault] += count


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Iterator[Tally]:
    counts = Tally()
    yield counts
    for fault, tried in counts.tried.items():
        record_property("fault", (fault, tried, counts.survived[fault]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tried: Counter[str] = Counter()
    survived: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) != "teardown":  # the only one that carries what the fixture recorded last
                continue
            for name, value in report.user_properties:
                if name == "fault":
                    tried[value[0]] += value[1]
                    survived[value[0]] += value[2]
    if not tried:
        return
    terminalreporter.section("faults: tried, survived, lost")
    for fault in tried:
        terminalreporter.line(f"{tried[fault]:>7,} {survived[fault]:>7,} {tried[fault] - survived[fault]:>4,}  {fault}")
    total, kept = sum(tried.values()), sum(survived.values())
    terminalreporter.line(f"{total:>7,} {kept:>7,} {total - kept:>4,}  in all")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """``small_disk("size=40m")`` mounts a real file system in memory with these options; skipped where that is forbidden."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "dssl-test", place], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    if shutil.which("mount") is None:
        pytest.skip("needs the command mount")
    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", place], check=True)
