"""Memory over the epochs of a real run: the small encoder at batch 512, which must stay flat and under 3 GB.

    python -m benchmarks.memory [--data cifar10:FOLDER] [--epochs 6] [--limit 10000]

``dssl train`` runs as a process of its own; its resident memory is read ten times a second and told apart by epochs.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import charts, record

ROOT = Path(__file__).parent.parent


def resident(pid: int) -> float:
    """Megabytes that a process holds now; 0 once it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    match = re.search(r"VmRSS:\s+(\d+) kB", text)
    return int(match[1]) / 1024 if match else 0.0


def epoch_of(file: Path) -> float:
    try:
        last = file.read_text(encoding="utf-8").splitlines()[-1]
        return float(json.loads(last)["epoch"])
    except (OSError, IndexError, ValueError):
        return 0.0


def main() -> int:
    parser = record.parser(__doc__)
    parser.add_argument("--data", default="shapes", help="cifar10:FOLDER, or another source")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--limit", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--method", default="simsiam")
    options = parser.parse_args()
    clock = record.Clock()
    peaks: dict[int, float] = {}
    samples: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        words = [sys.executable, "-m", "dssl", "train", "shapes", "--method", options.method, "--data", options.data,
                 "--limit", str(options.limit), "--batch-size", str(options.batch), "--epochs", str(options.epochs), "--out",
                 str(folder), "--health.every", "2", "--knn-every", "2"]  # fmt: skip
        start = time.perf_counter()
        with subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
        ) as process:
            while process.poll() is None:
                now = resident(process.pid)
                epoch = epoch_of(folder / "metrics.jsonl")
                peaks[int(epoch)] = max(peaks.get(int(epoch), 0.0), now)
                samples.append((time.perf_counter() - start, now))
                time.sleep(0.1)
            assert process.stderr is not None
            if process.returncode:
                raise RuntimeError(process.stderr.read().decode())
    last = options.epochs - 1
    early = peaks.get(1, max(peaks.values()))
    content = {
        "data": options.data.partition(":")[0], "batch": options.batch, "encoder": "small", "method": options.method,
        "images": options.limit, "peak_mb": max(peaks.values()), "peak_mb_by_epoch": peaks,
        "growth_from_epoch_2_to_the_last": peaks.get(last, early) / early - 1,
    }  # fmt: skip
    print(f"peak {content['peak_mb']:,.0f} MB; by epoch " + ", ".join(f"{value:,.0f}" for value in peaks.values()))
    record.write("memory", clock, content, folder=options.out)
    thin = samples[:: max(1, len(samples) // 400)]
    line = ([time_ for time_, _ in thin], [value for _, value in thin])
    charts.curves({"dssl train": line}, options.out / "memory.png", x="seconds", y="resident memory, MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
