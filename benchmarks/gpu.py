"""What only a GPU can show: images a second, the share of time that waits for data, and peak memory.

    python -m benchmarks.gpu [--photos FOLDER] [--steps 120]

Real runs of ``dssl train imagenet`` with ResNet-50 on one GPU, then on all of them with torchrun, from JPEG files: about 10
minutes on two GPUs. It prints one table to paste into docs/howto/gpu.md. Without a GPU it says so and ends with exit code 1.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import images, record
from dssl import config_io
from dssl.config import CheckpointConfig, HealthConfig, RunConfig
from dssl.recipes import recipe
from dssl.run import RunFolder
from dssl.text import markdown

BATCHES = (512, 256, 128, 64, 32, 16)
"""Images on one GPU: the first that fits."""
LOOK = 10
"""Steps between two measurements of the loop."""
_PHOTOS = 2048


@dataclass(frozen=True, slots=True)
class Row:
    """One run of the table."""

    method: str
    gpus: int = 1
    checkpointed: bool = False
    precision: Literal["auto", "fp32"] = "auto"

    @property
    def name(self) -> str:
        extra = ", checkpointed" if self.checkpointed else ""
        return f"{self.method}{extra}{'' if self.precision == 'auto' else f', {self.precision}'}"


def rows(gpus: int) -> list[Row]:
    alone = [
        Row("simsiam"),
        Row("byol"),
        Row("simclr"),
        Row("simsiam", checkpointed=True),
        Row("simsiam", precision="fp32"),
    ]
    return alone + ([Row("simsiam", gpus=gpus), Row("byol", gpus=gpus)] if gpus > 1 else [])


def configuration(row: Row, *, data: Path, steps: int, images: int, base: RunConfig) -> RunConfig:
    """The recipe with so many images on each GPU, for so many steps."""
    batch_size = images * row.gpus
    epochs = -(-steps // max(1, _count(data) // batch_size))
    return replace(
        base,
        batch_size=batch_size,
        epochs=epochs,
        optimizer=replace(base.optimizer, warmup_epochs=min(1, epochs)),
        data=str(data),
        checkpoint_activations=row.checkpointed,
        precision=row.precision,
        knn_every=0,
        health=HealthConfig(every=LOOK),
        checkpoint=CheckpointConfig(every_minutes=1000),
    )


def _count(data: Path) -> int:
    return sum(1 for _ in data.rglob("*.jp*g"))


def measure(row: Row, config: RunConfig, folder: Path) -> dict[str, Any] | None:
    """Train in processes of their own; what the loop measured after its first health checks, and the peak that torch saw.

    None if the batch does not fit into a GPU.
    """
    folder.mkdir()
    asked = folder / "config.json"
    asked.write_text(json.dumps(config_io.to_dict(config)))
    launcher = [sys.executable]
    if row.gpus > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(row.gpus), "--rdzv-backend", "c10d"]
        launcher += ["--rdzv-endpoint", f"127.0.0.1:{port}"]
    words = [*launcher, "-m", "benchmarks.gpu", "--child", str(asked), "--out", str(folder / "run")]
    found = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    if "out of memory" in found.stderr and found.returncode != 0:
        return None
    if found.returncode not in (0, 3):
        raise SystemExit(f"{row.name} on {row.gpus} GPUs failed:\n{found.stderr[-3000:]}")
    checks = [json.loads(line) for line in RunFolder(folder / "run").metrics_file.read_text().splitlines()]
    settled = checks[2:] or checks[-1:]  # the first checks hold the start of the threads and cuDNN's search
    return {
        "images_per_second": statistics.median(check["images_per_second"] for check in settled),
        "data_share": statistics.median(check["data_share"] for check in settled),
        "peak": max(json.loads(path.read_text()) for path in folder.glob("peak-*.json")),
    }


def child(asked: Path, out: Path) -> int:
    """One process of a run: trains, and writes the peak memory of its GPU beside the run."""
    from dssl.training.pretrain import train

    config = config_io.from_dict(json.loads(asked.read_text()), where=str(asked))
    ending = train(config, out)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    (asked.parent / f"peak-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(peak))
    return ending.exit_code


def report(rows: list[tuple[Row, RunConfig, dict[str, Any]]], *, gpu: str) -> str:
    lines = []
    for row, config, found in rows:
        lines.append(
            (
                row.name,
                str(row.gpus),
                str(config.batch_size // row.gpus),
                f"{found['images_per_second']:,.0f}",
                f"{100 * found['data_share']:.0f} %",
                f"{found['peak'] / 2**30:.1f}",
            )
        )
    titles = ("run", "GPUs", "images per GPU", "images/s", "waits for data", "peak GiB")
    body = "\n".join(markdown(titles, lines, align="<>>>>>"))
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return f"{gpu}, torch {torch.__version__}, {cuda}, {os.cpu_count()} cores; the loop's own records, median\n\n{body}"


def run(photos: Path | None, *, steps: int, gpus: int, gpu: str, base: RunConfig | None = None) -> str:
    """All runs and their table; ``base`` replaces the recipe for ImageNet in a test."""
    with tempfile.TemporaryDirectory() as held:
        data = photos or Path(held) / "photos"
        if photos is None:
            data.mkdir()
            for number, content in enumerate(images.drawn_photos(_PHOTOS if base is None else 32)):
                (data / f"{number}.jpg").write_bytes(content)
        found = []
        for row in rows(gpus):
            start = base or recipe("imagenet", method=row.method)
            for count in BATCHES:
                config = configuration(row, data=data, steps=steps, images=count, base=start)
                print(f"{row.name} on {row.gpus} GPUs, {count} images each ...", file=sys.stderr)
                result = measure(row, config, Path(held) / f"{row.name} {row.gpus} {count}")
                if result is not None:
                    found.append((row, config, result))
                    break
        return report(found, gpu=gpu)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_photos(parser)
    parser.add_argument("--steps", type=int, default=120, help="steps of each run")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        return child(options.child, options.out)
    if not torch.cuda.is_available():
        print(
            "no GPU was found: this benchmark needs at least one that torch can use (see dssl doctor)", file=sys.stderr
        )
        return 1
    gpu = torch.cuda.get_device_properties(0)
    print(
        run(
            options.photos,
            steps=options.steps,
            gpus=torch.cuda.device_count(),
            gpu=f"{torch.cuda.device_count()} x {gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)",
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
