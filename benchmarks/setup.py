"""The peers' own virtual environment: ``python -m benchmarks.setup`` fills ``benchmarks/.venv`` from PyPI.

It sees the packages of the environment that made it, so that everybody runs on the same torch. Each peer is installed on its
own: one that cannot be is reported, there and on the page, and the others go on.
"""

import json
import subprocess
import sysconfig
import venv
from pathlib import Path

FOLDER = Path(__file__).parent / ".venv"
PEERS = (
    "lightly",
    "stable-pretraining",
    "kornia",
    "albumentations",
    "faiss-cpu",
    "webdataset",
    "datasets",
    "pandas",
    "duckdb",
)
FAILURES = FOLDER / "failures.json"


def python() -> Path:
    return FOLDER / "bin" / "python"


def failures() -> dict[str, str]:
    """The peers that could not be installed, and why."""
    if not FAILURES.is_file():
        return dict.fromkeys(PEERS, "`make bench-setup` has not been run")
    found: dict[str, str] = json.loads(FAILURES.read_text(encoding="utf-8"))
    return found


def main() -> int:
    if not python().is_file():
        venv.create(FOLDER, with_pip=True)
    place = subprocess.run(
        [python(), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True,
        capture_output=True,
        text=True,
    )
    Path(place.stdout.strip(), "ours.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    wrong: dict[str, str] = {}
    for peer in PEERS:
        result = subprocess.run(
            [python(), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", peer],
            capture_output=True,
            text=True,
        )
        if result.returncode:
            lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["pip gave no reason"]
            wrong[peer] = lines[-1][:160]
        print(f"{peer}: {wrong.get(peer, 'installed')}", flush=True)
    FAILURES.write_text(json.dumps(wrong, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
