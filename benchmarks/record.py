"""What every benchmark shares: medians with their spread, what was measured on, and a file that says which command made it."""

import argparse
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import setup

RESULTS = Path(__file__).parent / "results"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
PACKAGES = (
    "torch", "torchvision", "numpy", "numba", "pillow", "scikit-learn", "lightly", "stable-pretraining", "lightning",
    "kornia", "albumentations", "faiss-cpu", "pyarrow", "webdataset", "datasets",
)  # fmt: skip

Record = dict[str, Any]


def summary(values: Sequence[float]) -> Record:
    """Median, quartiles, and how many: what is reported of every measurement."""
    ordered = sorted(values)
    low, _, high = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    return {"median": statistics.median(ordered), "low": low, "high": high, "n": len(ordered)}


def rates(count: float, seconds: Sequence[float]) -> Record:
    """Things a second, from the seconds that each measurement of ``count`` things took."""
    return summary([count / value for value in seconds])


def seconds(job: Callable[[], object]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def parser(text: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=RESULTS, help="the folder of the JSON file and the plot")
    return made


def add_photos(made: argparse.ArgumentParser) -> None:
    made.add_argument("--photos", type=Path, help="a folder with JPEG files, in any depth; without it, drawn images")


def set_threads(count: int) -> None:
    """Give torch its threads; ``check_threads`` says when somebody has changed them."""
    import torch

    torch.set_num_threads(count)


def check_threads(count: int) -> None:
    import torch

    found = torch.get_num_threads()
    assert found == count, f"something changed torch's threads from {count} to {found}"


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def processor() -> str:
    """The processor's name and those of its features that decide how fast matrices are."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    name = re.search(r"model name\s*:\s*(.*)", text)
    flags = re.search(r"flags\s*:\s*(.*)", text)
    wanted = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flags and flag in flags[1].split()]
    return f"{name[1] if name else platform.machine()} ({', '.join(wanted)})"


def command() -> str:
    """The command of this process, without the folders of this machine."""
    module = Path(sys.argv[0])
    name = "benchmarks" if module.stem == "__main__" else f"benchmarks.{module.stem}"
    words = [re.sub(r"(^|[:=])[~/]\S*", r"\1FOLDER", word) for word in sys.argv[1:]]
    return " ".join(["python -m", name, *words])


class Clock:
    """Notes the load before the measurement and its length."""

    def __init__(self) -> None:
        self.load = os.getloadavg()[0]
        self.start = time.perf_counter()

    def environment(self) -> Record:
        return {
            "processor": processor(),
            "cores": CORES,
            "python": platform.python_version(),
            "system": platform.system(),
            "load_before": round(self.load, 2),
            "load_after": round(os.getloadavg()[0], 2),
            "minutes": round((time.perf_counter() - self.start) / 60, 2),
            "packages": versions(),
        }


def write(name: str, clock: Clock, content: Mapping[str, Any], *, folder: Path) -> Path:
    """Keep a result; a folder of this machine in it is a mistake of the benchmark."""
    environment = clock.environment()
    absent = {
        peer: why for peer, why in setup.failures().items() if environment["packages"].get(peer) == "not installed"
    }
    record = {"benchmark": name, "command": command(), "environment": environment, "not_installed": absent, **content}
    text = json.dumps(_rounded(record), indent=1) + "\n"
    assert not re.search(r'"[^"]*(/tmp|/home|/root|/work|/Users)[/"]', text), "a result names a folder of this machine"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path.name}; {record['environment']['minutes']} minutes, load {record['environment']['load_after']}")
    return path


def read(name: str, *, folder: Path = RESULTS) -> Record | None:
    path = folder / f"{name}.json"
    if not path.is_file():
        return None
    found: Record = json.loads(path.read_text(encoding="utf-8"))
    return found if found.get("benchmark") == name else None


def reason(problem: BaseException) -> str:
    """Why something was left out, in one line without folders."""
    lines = str(problem).strip().splitlines() or [""]
    return re.sub(r"(?<![\w.])/\S+", "FOLDER", f"{type(problem).__name__}: {lines[0]}")[:160]


def _rounded(value: Any) -> Any:
    """Six digits are more than any timing has."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
