"""Where the compiled kernels are kept, and what is said when they have to be compiled."""

import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from numba import njit
from numba.core import event

import dssl
from dssl.augment.kernels.program import Announce
from dssl.files import first_alone

PREPARE = "from dssl.augment.kernels.program import uncompiled_kernels as made; run, where = made(); print(where)"


def package_without_caches(folder: Path) -> Path:
    """A copy of the package in which no cache directory can be made, as in a read-only installation."""
    copy = folder / "site"
    shutil.copytree(Path(dssl.__file__).parent, copy / "dssl", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "dssl" / "augment" / "kernels" / "__pycache__").write_text("a file where a directory would have to be")
    return copy


def where(site: Path, **variables: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("NUMBA", "XDG"))}
    environment |= {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"} | variables
    command = [sys.executable, "-c", PREPARE]
    done = subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.strip()


def test_a_read_only_package_keeps_its_kernels_with_the_user(tmp_path: Path):
    site, home = package_without_caches(tmp_path), tmp_path / "home"
    home.mkdir()
    assert where(site, HOME=str(home)).startswith(f"once: later starts read them from {home}")


def test_without_any_writable_directory_the_kernels_still_work(tmp_path: Path):
    site = package_without_caches(tmp_path)
    assert "set NUMBA_CACHE_DIR" in where(site, HOME="/dev/null")
    assert str(tmp_path / "kept") in where(site, HOME="/dev/null", NUMBA_CACHE_DIR=str(tmp_path / "kept"))


def test_of_several_first_starts_one_compiles_and_the_others_wait(tmp_path: Path):
    kept, inside, waited = tmp_path / "new" / "program.run-1.nbi", threading.Event(), []

    def first() -> None:
        with first_alone(str(kept.parent), kept="program.*.nbi"):
            inside.set()
            waited.append(second.join(0.3))
            assert second.is_alive()
            kept.write_text("the result")

    def later() -> None:
        inside.wait()
        with first_alone(str(kept.parent), kept="program.*.nbi"):
            waited.append(kept.read_text())

    second = threading.Thread(target=later)
    second.start()
    first()
    second.join()
    assert waited == [None, "the result"]
    with (
        first_alone(str(kept.parent), kept="program.*.nbi"),
        first_alone(str(kept.parent), kept="program.*.nbi"),
        first_alone(None, kept="*"),
        first_alone("/dev/null/nothing", kept="*"),
    ):
        pass  # neither a filled cache nor one that cannot be written makes anybody wait


def test_compiling_is_announced_once(caplog: pytest.LogCaptureFixture):
    @njit
    def inner(x):
        return x + 1

    @njit
    def outer(x):
        return inner(x) + inner(1.5)

    with (
        caplog.at_level(logging.INFO, logger="dssl"),
        event.install_listener("numba:compile", Announce("once: kept here")),
    ):
        assert outer(1) == 4.5
        outer(2)
    assert [record.getMessage() for record in caplog.records] == [
        "compiling the image kernels, about a minute; once: kept here"
    ]


def test_a_change_of_any_kernel_file_is_another_cache_entry(tmp_path: Path):
    site = package_without_caches(tmp_path)
    code = "from dssl.augment.kernels.program import _sources_digest; print(_sources_digest())"

    def digest() -> str:
        environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True, check=True).stdout

    before = digest()
    assert digest() == before
    color = site / "dssl" / "augment" / "kernels" / "color.py"
    color.write_text(color.read_text() + "\n")
    assert digest() != before
