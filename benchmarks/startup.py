"""Start-up: help, the first step of a new run and of a continued one, and where the time goes.

    python -m benchmarks.startup [--rounds 5]

The first step is there when its line is in metrics.jsonl. Seconds are wall-clock from the start of the process; the parts are
those of one process that takes the same steps one after the other, and the imports come from ``python -X importtime``.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import charts, record

ROOT = Path(__file__).parent.parent
_GROUPS = ("torch._dynamo", "torch._inductor", "torchvision", "torch", "sympy", "numba", "numpy", "tensorboard",
           "matplotlib", "PIL", "dssl")  # fmt: skip

_PARTS = """
import json, sys, time
start = time.perf_counter()
found = {}
def part(name):
    global start
    now = time.perf_counter()
    found[name] = now - start
    start = now
import torch
part("import torch")
from dssl.training import pretrain as loop
part("import the rest of the loop")
from dssl.recipes import recipe
from dssl.precision import choose_precision
from dssl.training.prepare import build_method, fit_to_data, training_data, view_maker
config = recipe("shapes", epochs=2)
method = build_method(config)
part("build the method")
data = training_data(config)
fit_to_data(config, method, data, new=True)
part("open the data")
choose_precision(method.encoder, image_size=config.image_size, channels=config.channels, device=torch.device("cpu"))
part("measure the precision")
from dssl.optim import build_optimizer
build_optimizer(method, config.optimizer)
part("build the optimiser")
from torch.utils.tensorboard.summary import scalar
part("import TensorBoard")
from dssl.augment.kernels.program import load_kernels
load_kernels()
part("load the compiled kernels")
from dssl.data.loader import Batches
batches = Batches(data.source, view_maker(config, config.view_graph, data.normalization), batch_size=256, seed=0, steps=10)
batches.at(0)
batches.close()
part("first batch")
print(json.dumps(found))
"""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


def run(*words: str) -> float:
    return record.seconds(
        lambda: subprocess.run([sys.executable, *words], check=True, capture_output=True, env=environment())
    )


def lines(file: Path) -> int:
    return file.read_text(encoding="utf-8").count("\n") if file.is_file() else 0


def to_first_step(folder: Path, *, limit: float = 120.0) -> float:
    """Start (or continue) a run, wait for its next line of metrics, stop it."""
    file = folder / "metrics.jsonl"
    before = lines(file)
    words = [sys.executable, "-m", "dssl", "train", "shapes", "--out", str(folder), "--health.every", "1",
             "--data", "shapes:2000", "--batch-size", "64", "--optimizer.warmup-epochs",
             "0", "--knn-every", "0", "--epochs", "100"]  # fmt: skip
    start = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment()) as process:
        while lines(file) <= before and time.perf_counter() - start < limit:
            if process.poll() is not None:
                assert process.stderr is not None
                raise RuntimeError(process.stderr.read().decode())
            time.sleep(0.01)
        seconds = time.perf_counter() - start
        process.send_signal(signal.SIGTERM)  # it saves itself, so that the next one continues it
        process.wait(timeout=limit)
    return seconds


def imports(code: str) -> dict[str, float]:
    """Seconds of each group of packages, each module counted by its own time."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], check=True, capture_output=True, text=True, env=environment()
    )
    found: dict[str, float] = {}
    for match in re.finditer(r"import time:\s+(\d+) \|\s+\d+ \|\s*(\S+)", result.stderr):
        name = match[2]
        group = next((one for one in _GROUPS if name == one or name.startswith(f"{one}.")), "the rest")
        found[group] = found.get(group, 0.0) + int(match[1]) / 1e6
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def main() -> int:
    parser = record.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    clock = record.Clock()
    found: dict[str, list[float]] = {}
    help_words = {f"dssl {' '.join(words)}": words for words in (["--help"], ["train", "--help"], ["graph", "dssl"])}
    with tempfile.TemporaryDirectory() as place:
        for number in range(options.rounds):
            for name, words in help_words.items():
                found.setdefault(name, []).append(run("-m", "dssl", *words))
            found.setdefault("python, import torch (what torch itself takes)", []).append(run("-c", "import torch"))
            folder = Path(place) / f"run{number}"
            found.setdefault("dssl train, to the first step", []).append(to_first_step(folder))
            found.setdefault("dssl train continued, to the next step", []).append(to_first_step(folder))
    rows: list[record.Record] = [{"name": name, "seconds": record.summary(values)} for name, values in found.items()]
    parts: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        text = subprocess.run(
            [sys.executable, "-c", _PARTS], check=True, capture_output=True, text=True, env=environment()
        )
        for name, value in json.loads(text.stdout.splitlines()[-1]).items():
            parts.setdefault(name, []).append(value)
    for row in rows:
        print(f"{row['name']:<50}{row['seconds']['median']:7.2f} s")
    part_rows: list[record.Record] = [
        {"name": name, "seconds": record.summary(values)} for name, values in parts.items()
    ]
    for row in part_rows:
        print(f"  {row['name']:<48}{row['seconds']['median']:7.2f} s")
    content = {
        "results": rows, "parts": part_rows,
        "imports": {"dssl --help": imports("import dssl.cli"), "dssl train": imports("import dssl.training.pretrain")},
    }  # fmt: skip
    record.write("startup", clock, content, folder=options.out)
    groups = {
        "from the start of the process": [
            {
                "name": row["name"],
                "rate": row["seconds"],
                "ratio": row["seconds"]["median"] / rows[0]["seconds"]["median"],
            }
            for row in rows
        ]
    }
    charts.bars(groups, options.out / "startup.png", label="seconds (times dssl --help)", digits=2)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
