"""Growth: images/s and memory against batch, views, image size, edges and processes, and the index against the number of files.

    python -m benchmarks.growth [--subjects batch views] [--files 1000 10000 100000 1000000] [--seconds 3]

Every point is a process of its own, so that its peak memory is its own, and is measured twice, the second time in reverse order,
so that a machine whose speed drifts does not bend the curve. SimSiam with the small encoder at bf16 where nothing else is said. A
straight line on log-log axes is a power law: its exponent is in the legend (1: twice as much takes twice as long).
"""

import dataclasses
import functools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import charts, record

ROOT = Path(__file__).parent.parent
_EDGES = ("s1<->s2", "s3<->s4", "s1<->s3", "s2<->s4", "s1<->s4", "s2<->s3")
FILES = (1_000, 10_000, 100_000, 1_000_000)
SUBJECTS = ("batch", "views", "image size", "edges", "edges, simclr", "ranks", "files")


def points(subject: str, options: Any) -> list[dict[str, Any]]:
    """What each point of a subject trains."""
    base = {"method": "simsiam", "graph": "dssl", "batch": 128, "size": 32}
    pairs = [", ".join(f"s{2 * pair + 1}<->s{2 * pair + 2}" for pair in range(count // 2)) for count in (2, 4, 8, 16)]
    found: dict[str, list[dict[str, Any]]] = {
        "batch": [base | {"x": batch, "batch": batch} for batch in (32, 64, 128, 256, 512)],
        "views": [base | {"x": 2 ** (power + 1), "graph": text} for power, text in enumerate(pairs)],
        "image size": [base | {"x": size, "size": size, "batch": 32} for size in (32, 64, 128, 224)],
        "edges": [base | {"x": 2 * count, "graph": ", ".join(_EDGES[:count])} for count in (2, 3, 4, 6)],
        "edges, simclr": [
            base | {"x": 2 * count, "graph": ", ".join(_EDGES[:count]), "method": "simclr", "batch": 256}
            for count in (2, 4, 6)
        ],
    }
    return found[subject][: options.points]


def train_point(point: dict[str, Any], seconds: float, threads: int) -> record.Record:
    """In a process of its own: steps for some seconds."""
    from benchmarks.train_ours import Ours, settings
    from dssl.data import open_source

    record.set_threads(threads)
    config = settings(point["method"], "dssl", "small", point["batch"])
    config = dataclasses.replace(config, graph=point["graph"], image_size=point["size"])
    job = Ours(config, open_source("shapes:2000"), threads=threads)
    job.step()
    job.step()
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        times.append(record.seconds(job.step))
    record.check_threads(threads)
    job.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"times": times, "memory_mb": peak}


def index_point(count: int) -> record.Record:
    """In a process of its own: files in folders of a thousand, then the index made, reopened, and an epoch begun."""
    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_CACHE_HOME"] = str(Path(place) / "cache")
        root = Path(place) / "images"
        for first in range(0, count, 1000):
            folder = root / f"class{first // 1000:04}"
            folder.mkdir(parents=True)
            for number in range(first, min(first + 1000, count)):
                os.close(os.open(f"{folder}/image{number:07}.jpg", os.O_CREAT | os.O_WRONLY))
        from dssl.data import open_source
        from dssl.data.index import open_index
        from dssl.data.order import Order

        def begin_epoch(seed: int) -> None:
            Order(count, batch_size=256, seed=seed).at(0)

        time.sleep(2.5)  # an index of folders that have only just changed is not kept
        scan = record.seconds(lambda: open_index(root))
        reopen = [record.seconds(lambda: open_index(root)) for _ in range(3)]
        folder_open = [record.seconds(lambda: open_source(str(root))) for _ in range(3)]
        epochs = [record.seconds(functools.partial(begin_epoch, seed)) for seed in range(3)]
        size = sum(file.stat().st_size for file in Path(os.environ["XDG_CACHE_HOME"]).rglob("*.npy")) / 2**20
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        assert size > 0, "the index was not kept"
        assert len(open_index(root)) == count
        shutil.rmtree(root)
    return {
        "scan_seconds": scan, "reopen_seconds": record.summary(reopen), "open_source_seconds": record.summary(folder_open),
        "epoch_start_seconds": record.summary(epochs), "index_mb": size, "memory_mb": peak,
    }  # fmt: skip


def ranks_point(ranks: int, seconds: float, threads: int) -> record.Record:
    """``dssl train`` under torchrun; its own images/s, the first health check left out."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        each = max(1, threads // ranks)
        steps = max(12, round(seconds * 4))
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "dssl",
                 "train", "shapes", "--out", str(folder), "--batch-size", "128", "--epochs", "1", "--knn-every", "0",
                 "--data", f"shapes:{128 * steps}", "--health.every", "4", "--threads", str(each), "--precision", "bf16",
                 "--optimizer.warmup-epochs", "0"]  # fmt: skip
        variables = os.environ | {"OMP_NUM_THREADS": str(each), "PYTHONPATH": str(ROOT)}
        subprocess.run(words, check=True, capture_output=True, env=variables, cwd=place)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        found = [line["images_per_second"] for line in lines if "images_per_second" in line][1:]
    return {"rate": record.summary(found), "threads_each": each}


def in_process(words: dict[str, Any]) -> record.Record:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.growth", "--point", json.dumps(words)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if result.returncode:
        raise RuntimeError(result.stderr.strip().splitlines()[-1])
    answer: record.Record = json.loads(result.stdout.splitlines()[-1])
    return answer


def panels(results: dict[str, list[record.Record]]) -> dict[str, dict[str, Any]]:
    """The plots: seconds of a step and memory for training, seconds for the index."""
    found: dict[str, dict[str, Any]] = {}
    for subject, rows in results.items():
        xs = [row["x"] for row in rows]
        if subject == "files":
            timed = {
                "index made": "scan_seconds",
                "index reopened": "reopen_seconds",
                "epoch begun": "epoch_start_seconds",
            }
            found[subject] = {"x": "files", "y": "seconds", "curves": {
                name: (xs, [row[key]["median"] if isinstance(row[key], dict) else row[key] for row in rows])
                for name, key in timed.items()}}  # fmt: skip
        else:
            rates = [row["rate"]["median"] for row in rows]
            label = {"ranks": "processes"}.get(subject, subject.partition(",")[0])
            found[f"{subject}: speed"] = {"x": label, "y": "images per second", "curves": {"images/s": (xs, rates)}}
            if "memory_mb" in rows[0]:
                memory = [row["memory_mb"] for row in rows]
                found[f"{subject}: memory"] = {"x": label, "y": "peak memory, MB", "curves": {"MB": (xs, memory)}}
    return found


def main() -> int:
    parser = record.parser(__doc__)
    parser.add_argument("--subjects", nargs="+", default=list(SUBJECTS), choices=SUBJECTS)
    parser.add_argument("--files", nargs="+", type=int, default=list(FILES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--points", type=int, default=9, help="at most so many points of a subject")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement")
    parser.add_argument("--threads", type=int, default=record.CORES)
    parser.add_argument("--point", help="used by the benchmark itself, for one point in a process of its own")
    options = parser.parse_args()
    if options.point is not None:
        one = json.loads(options.point)
        answer = index_point(one["files"]) if "files" in one else train_point(one, one["seconds"], one["threads"])
        print(json.dumps(answer))
        return 0
    clock = record.Clock()
    common = {"seconds": options.seconds, "threads": options.threads}
    results: dict[str, list[record.Record]] = {}
    for subject in options.subjects:
        rows = results[subject] = []
        if subject == "files":
            rows += [{"x": count, **in_process({"files": count})} for count in options.files]
        elif subject == "ranks":
            rows += [{"x": count, **ranks_point(count, **common)} for count in options.ranks]
        else:
            chosen = points(subject, options)
            found = {point["x"]: [in_process(point | common)] for point in chosen}
            for point in reversed(chosen):
                found[point["x"]].append(in_process(point | common))
            for point in chosen:
                times = [seconds for one in found[point["x"]] for seconds in one["times"]]
                memory = max(one["memory_mb"] for one in found[point["x"]])
                rows.append({"x": point["x"], "rate": record.rates(point["batch"], times), "memory_mb": memory})
        for row in rows:
            values = {
                key: value["median"] if isinstance(value, dict) else value for key, value in row.items() if key != "x"
            }
            print(
                f"{subject} {row['x']:,}: " + ", ".join(f"{key} {value:,.3g}" for key, value in values.items()),
                flush=True,
            )
    drawn = panels(results)
    exponents = {
        f"{title}: {name}": charts.exponent(*curve)
        for title, panel in drawn.items() for name, curve in panel["curves"].items() if len(curve[0]) > 1
    }  # fmt: skip
    median_of = statistics.median(
        [row["rate"]["n"] for rows in results.values() for row in rows if "rate" in row] or [0]
    )
    content = {"threads": options.threads, "steps_per_point": median_of, "results": results, "exponents": exponents}
    record.write("growth", clock, content, folder=options.out)
    charts.growth(drawn, options.out / "growth.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
