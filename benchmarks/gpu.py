"""What only a GPU can show: images a second, the share of time that waits for data, and peak memory against the count.

    python -m benchmarks.gpu [--photos FOLDER] [--steps 120]
    python -m benchmarks.gpu --memory

Real runs of ``dssl train imagenet`` with ResNet-50 on one GPU, then on all of them with torchrun, from JPEG files: about 10
minutes on two GPUs. It prints one table to paste into docs/gpu.md. Without a GPU it says so and ends with exit code 1.
With --memory it prints the memory that encoders and batches would need, counted, which takes no GPU: 2 minutes on an idle core.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import images, record
from dssl import config_io
from dssl.config import CheckpointConfig, HealthConfig, Precision, RunConfig
from dssl.methods import METHODS
from dssl.recipes import recipe
from dssl.run import RunFolder
from dssl.text import markdown
from dssl.training.estimate import step_budget

BATCHES = (512, 256, 128, 64, 32, 16)
"""Images on one GPU, the largest that fits."""
LOOK = 10
"""Steps between two measurements of the loop."""
_PHOTOS = 2048
ENCODERS, COUNTED = ("resnet18", "resnet50", "resnet101", "vit_b_16"), (64, 256, 512)
"""Of the table of memory."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run of the table."""

    method: str
    gpus: int = 1
    checkpointed: bool = False
    precision: Literal["auto", "fp32"] = "auto"

    @property
    def counted(self) -> Precision:
        """What memory is counted in; fp16 takes as much as bf16."""
        return "fp32" if self.precision == "fp32" else "bf16"

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


def configuration(row: Row, *, data: Path, steps: int, memory: int, base: RunConfig) -> RunConfig:
    """The recipe with the largest batch that the count allows, for so many steps."""
    made = replace(
        base,
        data=str(data),
        checkpoint_activations=row.checkpointed,
        precision=row.precision,
        knn_every=0,
        health=HealthConfig(every=LOOK),
        checkpoint=CheckpointConfig(every_minutes=1000),
    )
    for count in BATCHES:
        made = replace(made, batch_size=count * row.gpus)
        if step_budget(made, gpus=row.gpus, precision=row.counted).needed <= memory:
            break
    per_epoch = max(1, _count(data) // made.batch_size)
    epochs = -(-steps // per_epoch)
    return replace(made, epochs=epochs, optimizer=replace(made.optimizer, warmup_epochs=min(1, epochs)))


def _count(data: Path) -> int:
    return sum(1 for _ in data.rglob("*.jp*g"))


def measure(row: Row, config: RunConfig, folder: Path) -> dict[str, Any]:
    """Train in processes of their own; what the loop measured after its first health checks, and the peak that torch saw."""
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
    from dssl.training import train

    config = config_io.from_dict(json.loads(asked.read_text()), where=str(asked))
    ending = train(config, out)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    (asked.parent / f"peak-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(peak))
    return ending.exit_code


def report(rows: list[tuple[Row, RunConfig, dict[str, Any]]], *, gpu: str) -> str:
    lines = []
    for row, config, found in rows:
        counted = step_budget(config, gpus=row.gpus, precision=row.counted).peak
        lines.append(
            (
                row.name,
                str(row.gpus),
                str(config.batch_size // row.gpus),
                f"{found['images_per_second']:,.0f}",
                f"{100 * found['data_share']:.0f} %",
                f"{found['peak'] / 2**30:.1f}",
                f"{counted / 2**30:.1f}",
            )
        )
    titles = ("run", "GPUs", "images per GPU", "images/s", "waits for data", "peak GiB", "counted GiB")
    body = "\n".join(markdown(titles, lines, align="<>>>>>>"))
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return f"{gpu}, torch {torch.__version__}, {cuda}, {os.cpu_count()} cores; the loop's own records, median\n\n{body}"


def memory_table(encoders: Sequence[str] = ENCODERS, images: Sequence[int] = COUNTED) -> str:
    """GiB per GPU of a step at 224 px in bf16, by encoder, method and images on the GPU."""
    lines = []
    for encoder in encoders:
        for method in METHODS:
            base = recipe("imagenet", method=method, encoder=encoder)
            peaks = [step_budget(replace(base, batch_size=count)).peak for count in images]
            lines.append((encoder, method, *(f"{peak / 2**30:.1f}" for peak in peaks)))
    titles = ("encoder", "method", *(f"{count} images" for count in images))
    return "\n".join(markdown(titles, lines, align="<<" + ">" * len(images)))


def run(photos: Path | None, *, steps: int, gpus: int, memory: int, gpu: str, base: RunConfig | None = None) -> str:
    """All runs and their table; ``base`` replaces the recipe for ImageNet in a test."""
    with tempfile.TemporaryDirectory() as held:
        data = photos or Path(held) / "photos"
        if photos is None:
            data.mkdir()
            for number, content in enumerate(images.drawn_photos(_PHOTOS if base is None else 32)):
                (data / f"{number}.jpg").write_bytes(content)
        found = []
        for number, row in enumerate(rows(gpus)):
            folder = Path(held) / str(number)
            folder.mkdir()
            start = base or recipe("imagenet", method=row.method)
            config = configuration(row, data=data, steps=steps, memory=memory, base=start)
            print(f"{row.name} on {row.gpus} GPUs, {config.batch_size // row.gpus} images each ...", file=sys.stderr)
            found.append((row, config, measure(row, config, folder)))
        return report(found, gpu=gpu)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_photos(parser)
    parser.add_argument("--steps", type=int, default=120, help="steps of each run")
    parser.add_argument("--memory", action="store_true", help="count the memory by encoder and batch; needs no GPU")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        return child(options.child, options.out)
    if options.memory:
        print(memory_table())
        return 0
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
            memory=gpu.total_memory,
            gpu=f"{torch.cuda.device_count()} x {gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)",
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
