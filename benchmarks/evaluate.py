"""Evaluation on CIFAR-10's 60,000 images: time and memory of kNN and the linear probe, ours against scikit-learn and lightly.

    python -m benchmarks.evaluate --data cifar10:FOLDER [--encoder small] [--weights FILE] [--threads 2]

Features are computed once (and kept with --features FILE); then each job runs in a process of its own, which reports its wall
time, its CPU time, and how much more memory it took than a process that only holds the features. lightly's kNN is its own
function, on the whole test set at once and in batches of 512.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dssl.augment import CIFAR10
from dssl.data import open_source
from dssl.evaluate.features import compute_features
from dssl.evaluate.knn import knn_predict
from dssl.evaluate.probe import DEFAULT_STRENGTH, Problem, choose_strength
from dssl.export.load import load_encoder
from dssl.models import build_encoder

K, TEMPERATURE = 200, 0.1
Data = dict[str, torch.Tensor]


def ours_knn(data: Data) -> torch.Tensor:
    found = knn_predict(
        data["train"], data["train_labels"], data["test"], k=[20, K], temperature=TEMPERATURE, classes=10
    )
    return found[1]


def sklearn_knn(data: Data) -> torch.Tensor:
    from sklearn.neighbors import KNeighborsClassifier

    train, test = (F.normalize(data[name], dim=1).numpy() for name in ("train", "test"))
    model = KNeighborsClassifier(
        n_neighbors=K, algorithm="brute", weights=lambda d: np.exp((1 - d**2 / 2) / TEMPERATURE), n_jobs=-1
    )
    return torch.from_numpy(model.fit(train, data["train_labels"].numpy()).predict(test))


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
        module.knn_predict(part, bank, data["train_labels"], num_classes=10, knn_k=K, knn_t=TEMPERATURE)[:, 0]
        for part in test.split(batch)
    ]
    return torch.cat(parts)


def lightly_whole(data: Data) -> torch.Tensor:
    return lightly_knn(data, 10_000)


def lightly_batches(data: Data) -> torch.Tensor:
    return lightly_knn(data, 512)


def ours_probe(data: Data) -> torch.Tensor:
    return Problem(data["train"], data["train_labels"], classes=10).solve(DEFAULT_STRENGTH).predict(data["test"])


def ours_probe_chosen(data: Data) -> torch.Tensor:
    choice = choose_strength(data["train"], data["train_labels"], classes=10, seed=0)
    return Problem(data["train"], data["train_labels"], classes=10).solve(choice.strength).predict(data["test"])


def sklearn_probe(data: Data) -> torch.Tensor:
    from sklearn.linear_model import LogisticRegression

    mean = data["train"].mean(0)
    scale = (data["train"] - mean).square().sum(1).mean().sqrt()
    train, test = (((data[name] - mean) / scale).numpy() for name in ("train", "test"))
    model = LogisticRegression(C=1 / (DEFAULT_STRENGTH * len(train)), tol=1e-6, max_iter=2000)
    return torch.from_numpy(model.fit(train, data["train_labels"].numpy()).predict(test))


def nothing(data: Data) -> torch.Tensor:
    return torch.zeros_like(data["test_labels"])


JOBS: dict[str, Callable[[Data], torch.Tensor]] = {
    "the features alone": nothing,
    "kNN, dssl (k=20 and k=200)": ours_knn,
    "kNN, scikit-learn (k=200)": sklearn_knn,
    "kNN, lightly, batches of 512 (k=200)": lightly_batches,
    "kNN, lightly, whole test set (k=200)": lightly_whole,
    "probe, dssl, one strength": ours_probe,
    "probe, dssl, strength chosen among 7": ours_probe_chosen,
    "probe, scikit-learn, one strength": sklearn_probe,
}


def child(name: str, path: str, threads: int, answer: Any) -> None:
    torch.set_num_threads(threads)
    data = torch.load(path, weights_only=True)
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        predicted = JOBS[name](data)
    except ImportError as error:
        answer.send({"name": name, "skipped": str(error)})
        return
    seconds, busy = time.perf_counter() - wall, time.process_time() - cpu
    accuracy = 100 * float((predicted == data["test_labels"]).double().mean())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    answer.send({"name": name, "seconds": seconds, "cpu_seconds": busy, "memory_mb": memory, "accuracy": accuracy,
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
        return {"name": name, "skipped": f"the process ended with code {process.exitcode} (-9: out of memory)"}
    process.join()
    print(f"{name}: {result.get('seconds', 0):.1f} s", file=sys.stderr)
    return result


def features(arguments: argparse.Namespace, path: str) -> dict[str, float]:
    torch.manual_seed(0)
    encoder = load_encoder(arguments.weights) if arguments.weights else build_encoder(arguments.encoder, image_size=32)
    data, seconds = {}, {}
    for split in ("train", "test"):
        source = open_source(arguments.data, split=split)
        begun = time.perf_counter()
        data[split] = compute_features(encoder, source, image_size=32, normalization=CIFAR10).values
        seconds[split] = time.perf_counter() - begun
        assert source.labels is not None
        data[f"{split}_labels"] = torch.from_numpy(source.labels)
    torch.save(data, path)
    return {"dimensions": data["train"].shape[1], **{f"seconds_{split}": value for split, value in seconds.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", required=True)
    parser.add_argument("--encoder", default="small")
    parser.add_argument("--weights")
    parser.add_argument("--features", type=Path, help="keep the features in this file, or take them from it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "evaluate.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = str(arguments.features or Path(folder) / "features.pt")
        about = {} if Path(path).exists() else features(arguments, path)
        print(f"features of {arguments.weights or arguments.encoder}: {about}")
        results = [measure(name, path, arguments.threads) for name in JOBS]
    base = results[0]["memory_mb"]
    reference = {result["name"]: result.pop("predicted", None) for result in results}
    for result in results[1:]:
        if "skipped" in result:
            print(f"{result['name']:<40} skipped: {result['skipped']}")
            continue
        result["extra_memory_mb"] = result.pop("memory_mb") - base
        kind = "kNN, dssl (k=20 and k=200)" if result["name"].startswith("kNN") else "probe, dssl, one strength"
        result["same_as_dssl"] = 100 * float((reference[result["name"]] == reference[kind]).mean())
        print(
            f"{result['name']:<40}{result['seconds']:8.1f} s{result['cpu_seconds']:8.1f} s CPU"
            f"{result['extra_memory_mb']:8.0f} MB more"
            f"{result['accuracy']:8.2f} %   equal to dssl {result['same_as_dssl']:.2f} %"
        )
    packages = {}
    for name in ("torch", "scikit-learn", "lightly", "numpy"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    environment = {
        "python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count(), "threads": arguments.threads,
        "load average at the end": os.getloadavg()[0], "packages": packages,
    }  # fmt: skip
    arguments.out.parent.mkdir(exist_ok=True)
    content = {"environment": environment, "features": about, "results": results[1:]}
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
