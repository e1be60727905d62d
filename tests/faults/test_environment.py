"""Where the program is started: no home, a plain locale, odd paths, read-only places, one thread."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dssl
from tests.faults.conftest import Tally
from tests.faults.inside import train
from tests.faults.processes import command
from tests.train.running import end_of

ODD = "a b  größe 图 'quoted' $HOME"
BARE = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(dssl.__file__).parents[1])}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("environment") / "untouched"
    assert train("simsiam", out) == 0
    return out


def namespace() -> list[str]:
    """A process that may mount without anybody else seeing it."""
    words = ["unshare", "--mount", "--propagation", "private"]
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a mount namespace is not allowed here")
    return words


def start(out: Path, script: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """``dssl train`` at the end of a shell script in a mount namespace of its own."""
    words = [
        *namespace(),
        "sh",
        "-ec",
        f'{script}\nexec "$@"',
        "sh",
        sys.executable,
        "-m",
        "dssl",
        *command("simsiam", out),
    ]
    return subprocess.run(words, env=BARE | variables, capture_output=True, timeout=1200, check=False)


def read_only(place: Path | str) -> str:
    return f'mount --bind "{place}" "{place}"; mount -o remount,ro,bind "{place}"\n'


def test_no_home_a_plain_locale_an_odd_path_and_a_folder_that_is_not_ours(
    untouched: Path, tally: Tally, tmp_path: Path
) -> None:
    """All at once; the compiled kernels are found where the package keeps them."""
    with tally.trial("no HOME, LANG=C, one thread, an odd path, a current folder that cannot be written to", 5):
        here = tmp_path / "here"
        here.mkdir()
        out = tmp_path / ODD / "run"
        done = start(out, f'{read_only(here)}cd "{here}"', LANG="C", LC_ALL="C")
        assert done.returncode == 0, done.stderr
        assert b"Traceback" not in done.stderr
        assert end_of(out) == end_of(untouched)
        assert list(here.iterdir()) == []


@pytest.mark.faults
def test_a_default_folder_that_cannot_be_made(tally: Tally, tmp_path: Path) -> None:
    """Without --out the run goes to runs/RECIPE, here in a read-only folder: one line that names it."""
    with tally.trial("a current folder that cannot be written to"):
        here = tmp_path / "here"
        here.mkdir()
        words = command("simsiam", Path("runs/shapes"))
        script = f'{read_only(here)}cd "{here}"\nexec "$@"'
        done = subprocess.run(
            [*namespace(), "sh", "-ec", script, "sh", sys.executable, "-m", "dssl", *words],
            env=BARE, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert done.stderr.startswith("dssl: runs")
        assert "Read-only file system" in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.faults
def test_a_read_only_package_without_a_home(untouched: Path, tally: Tally, tmp_path: Path) -> None:
    """Compiled kernels are kept with the user; tests/augment/test_cache.py takes that place away too."""
    with tally.trial("a read-only package, with and without a home", 2):
        package = Path(dssl.__file__).parent
        for number, variables in enumerate(({}, {"HOME": str(tmp_path / "home")})):
            (tmp_path / "home").mkdir(exist_ok=True)
            copy = tmp_path / f"site{number}"
            shutil.copytree(package, copy / "dssl", ignore=shutil.ignore_patterns("__pycache__"))
            out = tmp_path / f"run{number}"
            done = start(out, f'{read_only(copy)}cd "{copy}"', PYTHONPATH=str(copy), **variables)
            assert done.returncode == 0, done.stderr
            assert b"Traceback" not in done.stderr
            assert end_of(out) == end_of(untouched)
            assert not list(copy.rglob("__pycache__"))
