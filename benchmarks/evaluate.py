"""Evaluation: features, kNN and the linear probe, time and memory, ours against scikit-learn, faiss and lightly.

    python -m benchmarks.evaluate [--data cifar10:FOLDER] [--encoder small] [--weights FILE] [--threads 2] [--rounds 5]

Without ``--data`` the built-in shapes are used. Every job runs in a process of its own, round after round, on the same features,
and reports wall time, CPU time, and how much more memory it took than a process that only holds the features. All search exactly
(faiss: ``IndexFlatIP``), and all answers are compared. lightly's kNN is its own function, on the whole test set at once and in
batches of 512. "Features, the usual way" is Pillow and torchvision transforms in two worker processes with the default memory
layout, in fp32.
"""

import dataclasses
import importlib.util
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from benchmarks import charts, record
from dssl.augment import CIFAR10
from dssl.data import open_source
from dssl.evaluation.knn import knn_predict
from dssl.evaluation.probe import DEFAULT_STRENGTH, Problem, choose_strength
from dssl.models import build_encoder, evaluating
from dssl.precision import choose_precision
from dssl.weights.encoder import Encoder
from dssl.weights.load import load_encoder

K, TEMPERATURE = 200, 0.1
Data = dict[str, torch.Tensor]


def classes(data: Data) -> int:
    return int(data["train_labels"].max()) + 1


def ours_knn(data: Data) -> torch.Tensor:
    (predicted,) = knn_predict(
        data["train"], data["train_labels"], data["test"], k=[K], temperature=TEMPERATURE, classes=classes(data)
    )
    return predicted


def sklearn_knn(data: Data) -> torch.Tensor:
    from sklearn.neighbors import KNeighborsClassifier

    train, test = (F.normalize(data[name], dim=1).numpy() for name in ("train", "test"))
    model = KNeighborsClassifier(
        n_neighbors=K, algorithm="brute", weights=lambda d: np.exp((1 - d**2 / 2) / TEMPERATURE), n_jobs=-1
    )
    return torch.from_numpy(model.fit(train, data["train_labels"].numpy()).predict(test))


def faiss_knn(data: Data) -> torch.Tensor:
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    train, test = (F.normalize(data[name], dim=1).numpy() for name in ("train", "test"))
    index = faiss.IndexFlatIP(train.shape[1])
    index.add(train)
    similarities, places = index.search(test, K)
    weights = torch.from_numpy(similarities).div(TEMPERATURE).exp()
    scores = torch.zeros(len(test), classes(data))
    return scores.scatter_add_(1, data["train_labels"][torch.from_numpy(places)], weights).argmax(1)


def lightly_knn(data: Data, batch: int) -> torch.Tensor:
    found = importlib.util.find_spec("lightly")
    if found is None or found.origin is None:
        raise ImportError("lightly is not installed")
    # its package needs Lightning; the function itself needs only torch
    path = Path(found.origin).parent / "utils" / "benchmarking" / "knn.py"
    spec = importlib.util.spec_from_file_location("lightly_knn", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    bank, test = F.normalize(data["train"], dim=1).T.contiguous(), F.normalize(data["test"], dim=1)
    parts = [
        module.knn_predict(part, bank, data["train_labels"], num_classes=classes(data), knn_k=K, knn_t=TEMPERATURE)[
            :, 0
        ]
        for part in torch.split(test, batch)
    ]
    return torch.cat(parts)


def lightly_whole(data: Data) -> torch.Tensor:
    return lightly_knn(data, len(data["test"]))


def lightly_batches(data: Data) -> torch.Tensor:
    return lightly_knn(data, 512)


def ours_probe(data: Data) -> torch.Tensor:
    problem = Problem(data["train"], data["train_labels"], classes=classes(data))
    return problem.solve(DEFAULT_STRENGTH).predict(data["test"])


def ours_probe_chosen(data: Data) -> torch.Tensor:
    choice = choose_strength(data["train"], data["train_labels"], classes=classes(data), seed=0)
    problem = Problem(data["train"], data["train_labels"], classes=classes(data))
    return problem.solve(choice.strength).predict(data["test"])


def sklearn_probe(data: Data) -> torch.Tensor:
    from sklearn.linear_model import LogisticRegression

    mean = data["train"].mean(0)
    scale = (data["train"] - mean).square().sum(1).mean().sqrt()
    train, test = (((data[name] - mean) / scale).numpy() for name in ("train", "test"))
    model = LogisticRegression(C=1 / (DEFAULT_STRENGTH * len(train)), tol=1e-6, max_iter=2000)
    return torch.from_numpy(model.fit(train, data["train_labels"].numpy()).predict(test))


def nothing(data: Data) -> torch.Tensor:
    return torch.zeros_like(data["test_labels"])


BASE = "the features alone"
JOBS: dict[str, Callable[[Data], torch.Tensor]] = {
    BASE: nothing,
    "kNN, scikit-learn": sklearn_knn,
    "kNN, faiss": faiss_knn,
    "kNN, lightly, batches of 512": lightly_batches,
    "kNN, lightly, whole test set": lightly_whole,
    "dssl, kNN": ours_knn,
    "probe, scikit-learn, one strength": sklearn_probe,
    "dssl, probe, one strength": ours_probe,
    "dssl, probe, strength chosen among 7": ours_probe_chosen,
}


def child(name: str, path: str, threads: int, answer: Any) -> None:
    torch.set_num_threads(threads)
    data = torch.load(path, weights_only=True)
    try:
        # libraries load, compile and start their threads on a small part
        JOBS[name]({key: value[:2000] for key, value in data.items()})
        wall, cpu = time.perf_counter(), time.process_time()
        predicted = JOBS[name](data)
    except ImportError as error:
        answer.send({"skipped": record.reason(error)})
        return
    seconds, busy = time.perf_counter() - wall, time.process_time() - cpu
    record.check_threads(threads)
    accuracy = 100 * float((predicted == data["test_labels"]).double().mean())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    answer.send({"seconds": seconds, "cpu_seconds": busy, "memory_mb": memory, "accuracy": accuracy,
                 "predicted": predicted.numpy()})  # fmt: skip


def measure(name: str, path: str, threads: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(name, path, threads, send))
    process.start()
    send.close()  # so that the death of the process ends the wait
    try:
        result: dict[str, Any] = receive.recv()
    except EOFError:
        process.join()
        return {"skipped": f"the process ended with code {process.exitcode} (-9: out of memory)"}
    process.join()
    print(f"  {name}: {result.get('seconds', 0):.1f} s", file=sys.stderr)
    return result


class Plain(Dataset[torch.Tensor]):
    """A source as Pillow images through torchvision's transforms."""

    def __init__(self, source: Any, count: int) -> None:
        self.source, self.count = source, count
        self.chain = transforms.Compose([transforms.ToTensor(), transforms.Normalize(CIFAR10.mean, CIFAR10.std)])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        view: torch.Tensor = self.chain(Image.fromarray(self.source.image(index)))
        return view


def features(options: Any, path: str) -> list[record.Record]:
    """Compute and keep the features; how fast, in both precisions and the usual way, taking turns."""
    torch.manual_seed(0)
    network = load_encoder(options.weights) if options.weights else build_encoder(options.encoder, image_size=32)
    encoder = Encoder(network=network, name=options.encoder, image_size=32, normalization=CIFAR10)
    data: Data = {}
    for split in ("train", "test"):
        source = open_source(options.data, split=split)
        data[split] = encoder.features(source).values[: options.limit]
        assert source.labels is not None
        data[f"{split}_labels"] = torch.from_numpy(source.labels)[: options.limit]
    torch.save(data, path)
    source = open_source(options.data, split="test")
    count = min(options.count, len(source))
    plain = build_encoder(options.encoder, image_size=32) if not options.weights else load_encoder(options.weights)
    ours = dataclasses.replace(encoder, network=network.to(memory_format=torch.channels_last), threads=options.threads)

    def usual() -> None:
        with evaluating(plain):
            for images in DataLoader(Plain(source, count), batch_size=256, num_workers=2):
                plain(images)

    def with_precision(dtype: torch.dtype | None) -> Callable[[], object]:
        return lambda: dataclasses.replace(ours, autocast=dtype).features(source, indices=np.arange(count))

    jobs: dict[str, Callable[[], object]] = {
        "features, the usual way, fp32": usual, "dssl, features, fp32": with_precision(None),
        "dssl, features, bf16": with_precision(torch.bfloat16),
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(options.rounds + 1):
        for name, job in jobs.items():
            times[name].append(record.seconds(job))
            record.check_threads(options.threads)
    found = {name: record.rates(count, values[1:]) for name, values in times.items()}
    base = found["features, the usual way, fp32"]["median"]
    return [{"name": name, "rate": rate, "ratio": rate["median"] / base} for name, rate in found.items()]


def main() -> int:
    parser = record.parser(__doc__)
    parser.add_argument("--data", default="shapes", help="cifar10:FOLDER, or another source with labels")
    parser.add_argument("--encoder", default="small")
    parser.add_argument("--weights", help="a checkpoint; without it the encoder is untrained")
    parser.add_argument("--limit", type=int, help="use only so many features of each split")
    parser.add_argument("--count", type=int, default=10_000, help="images whose features are timed")
    parser.add_argument("--threads", type=int, default=record.CORES)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    clock = record.Clock()
    record.set_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "features.pt")
        feature_rows = features(options, path)
        shape = {name: list(value.shape) for name, value in torch.load(path, weights_only=True).items()}
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in JOBS}
        for _ in range(options.rounds):
            for name in JOBS:
                if not (runs[name] and "skipped" in runs[name][0]):
                    runs[name].append(measure(name, path, options.threads))
    missing = {name: found[0]["skipped"] for name, found in runs.items() if "skipped" in found[0]}
    base = min(run["memory_mb"] for run in runs[BASE])
    rows = []
    for name, found in runs.items():
        if name == BASE or name in missing:
            continue
        kind = "dssl, kNN" if "kNN" in name else "dssl, probe, one strength"
        reference = runs[kind][0]["predicted"]
        rows.append({
            "name": name, "seconds": record.summary([run["seconds"] for run in found]),
            "cpu_seconds": record.summary([run["cpu_seconds"] for run in found]),
            "extra_memory_mb": max(0.0, max(run["memory_mb"] for run in found) - base),
            "accuracy": found[0]["accuracy"], "same_as_dssl": 100 * float((found[0]["predicted"] == reference).mean()),
        })  # fmt: skip
    for row in feature_rows:
        print(f"{row['name']:<40}{row['rate']['median']:10,.0f} images/s")
    for row in rows:
        print(
            f"{row['name']:<40}{row['seconds']['median']:8.1f} s{row['extra_memory_mb']:8.0f} MB more"
            f"{row['accuracy']:8.2f} %   equal to dssl {row['same_as_dssl']:.2f} %"
        )
    encoder = build_encoder(options.encoder, image_size=32)
    precision, _ = choose_precision(encoder, image_size=32, channels=3, device=torch.device("cpu"))
    content = {
        "data": options.data.partition(":")[0], "encoder": options.encoder, "trained": bool(options.weights),
        "shapes": shape, "k": K, "temperature": TEMPERATURE, "threads": options.threads, "missing": missing,
        "precision_here": precision, "features": feature_rows, "results": rows,
    }  # fmt: skip
    record.write("evaluate", clock, content, folder=options.out)
    groups = {}
    for kind in ("kNN", "probe"):
        shown = [row for row in rows if kind in row["name"]]
        ours = next(row for row in shown if row["name"].startswith("dssl"))["seconds"]["median"]
        groups[f"{kind}, seconds (and times as long as dssl's)"] = [
            {"name": row["name"], "rate": row["seconds"], "ratio": row["seconds"]["median"] / ours} for row in shown
        ]
    charts.bars(groups, options.out / "evaluate.png", label="seconds: less is better", digits=2)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
