"""What makes an encoder robust? docs/results/robust.md: MobileNetV2 on photos of clothing and on gray solar cells (ELPV).

python -m benchmarks.robust --photos TRAIN TEST --elpv FOLDER --weights mobilenet_v2.pth --out runs/robust

Trains every arm with every seed and measures it once on corrupted test images. Which answers were right is kept for each image in
docs/results/robust.json, which is committed, so that the same command resumes on any machine. After every run the page is
rewritten.
"""

import argparse
import base64
import json
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.adapt import run as run_command
from dssl.augment import KINDS, SEVERITIES, corrupt_images, kinds_seen
from dssl.data import open_source
from dssl.data.loader import Batches, EvaluationBatches
from dssl.evaluation.robustness import Robustness, resampled
from dssl.files import write_text
from dssl.models import feature_dim
from dssl.recipes import recipe
from dssl.text import markdown
from dssl.training.prepare import view_maker
from dssl.weights import checkpoint
from dssl.weights.load import linear_head, open_weights

PAGE = Path(__file__).parent.parent / "docs" / "results" / "robust.md"
KEPT = PAGE.with_suffix(".json")
SEEDS = (0, 1, 2)
CORRUPTED = "h1 = heavy(s1)"
ARMS = {
    # the words for an arm, and its command; those without one are made from the run of the first
    "directed": ("**the student sees corruptions: `dssl train robust`**", "dssl train robust"),
    "keep-head": ("the same, `--keep-head`", "dssl train robust --keep-head"),
    "symmetric": (
        "both see them, drawn independently (symmetric)",
        f"dssl train robust --graph 'h1->h2, {CORRUPTED}, h2 = heavy(s1)'",
    ),
    "reversed": ("the teacher sees them (reversed)", f"dssl train robust --graph 's1->h1, {CORRUPTED}'"),
    "clean": ("nobody sees them", "dssl train robust --heavy identity"),
    "projector": (
        "the student sees them, compared behind a projector",
        f"dssl train robust --method simclr --graph 'h1->teacher(s1), {CORRUPTED}' --teacher WEIGHTS "
        "--teacher-encoder mobilenet_v2 --epochs 7 --adapt.head-epochs 1",
    ),
    "adapt": ("two standard views: `dssl train adapt`", "dssl train adapt"),
    "batchnorm": ("BatchNorm re-estimated on corrupted images, no training", ""),
    "start": ("the start: ImageNet weights", ""),
}
OF_DIRECTION = ("directed", "symmetric", "reversed", "clean", "start")
DATA = {
    "photos": (
        "Photos of clothing",
        "1,513 training and 341 test photos of 10 classes",
        "--data TRAIN",
        "--data TRAIN --test TEST",
    ),
    "elpv": (
        "Solar cells (ELPV), gray",
        "1,960 training and 664 test images, defective or functional",
        "--data ELPV/train --channels 1",
        "--data ELPV",
    ),
}
SETS = ("clean", "seen", "not seen", "geometry")
"""What is kept of a run: for each image, the right answers over these sets of conditions. The same five kinds count as seen for
every arm: those that the policy ``corrupt`` draws from."""
PROTOCOLS = {"linear probe": "linear", "knn k=20": "kNN"}
_ABOUT = """<!-- written by `python -m benchmarks.robust`: do not edit -->

MobileNetV2 with torchvision's ImageNet weights, changed without labels and then measured on clean and corrupted test images.
A linear probe and kNN (k = 20) learn from clean training images ([how](../robust.md)).
*Seen* is the mean of the five kinds of corruption that training draws from, *not seen* of the ten others, at severities 1 to 5.
Every arm has the same images, the same number of steps and the same passes through the network.
Two differ: `dssl train adapt` has its own defaults, and the projector has one more epoch for its heads.
The settings were chosen on a split of the training images; the test images were read once for each run.
Differences are paired by image and averaged over the seeds; the 95% interval resamples the test images.
**Bold**: the interval excludes zero."""


@dataclass(frozen=True)
class Cell:
    data: str
    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.data}-{self.arm}-{self.seed}"

    def train(self) -> str:
        command = f"{ARMS[self.arm][1]} {DATA[self.data][2]} --init WEIGHTS --encoder mobilenet_v2"
        return f"{command} --seed {self.seed} --out OUT/{self.name}"

    def evaluate(self) -> str:
        file = {
            "start": f"OUT/{self.data}-directed-0/start.safetensors",
            "batchnorm": f"OUT/{self.data}-batchnorm-0.safetensors",
        }.get(self.arm, f"OUT/{self.name}")
        return f"dssl evaluate {file} {DATA[self.data][3]} --corruptions --no-page --out OUT/{self.name}-evaluation"


def cells() -> Iterator[Cell]:
    """The first seed of everything comes first; arms without training have only that. Solar cells have the arms of direction."""
    for seed in SEEDS:
        for data in DATA:
            for arm, (_, command) in ARMS.items():
                if (command or seed == 0) and (data == "photos" or arm in OF_DIRECTION):
                    yield Cell(data, arm, seed)


def kept() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    return found


def counts(measured: Robustness) -> dict[str, Any]:
    """For each protocol and set the right answers of each image as bytes, and the number of conditions in each set."""
    familiarity = kinds_seen(["corrupt"])
    sets = replace(measured, familiarity={kind: familiarity[kind] for kind in measured.kinds}).sets()
    right = {
        protocol: {name: _text(right[sets[name]].sum(axis=0).astype(np.uint8)) for name in SETS}
        for protocol, right in measured.right.items()
    }
    return {"right": right, "conditions": {name: len(sets[name]) for name in SETS}}


def scores(run: Mapping[str, Any], protocol: str) -> NDArray[np.float64]:
    """Images x sets, in percent."""
    right = {name: _counts(text) for name, text in run["right"][protocol].items()}
    return np.stack([100.0 * right[name] / run["conditions"][name] for name in SETS], axis=1)


def page(runs: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["# Robust without labels, measured", "", *_ABOUT.splitlines()]
    for data, (title, about, *_) in DATA.items():
        arms = {
            arm: [runs[cell.name] for cell in cells() if (cell.data, cell.arm) == (data, arm) and cell.name in runs]
            for arm in ARMS
        }
        if not arms["start"]:
            continue
        lines += ["", f"## {title}", "", f"{about}. Linear / kNN, %; seeds in brackets."]
        rows = [[ARMS[arm][0], *_accuracies(found)] for arm, found in arms.items() if found]
        lines += ["", *markdown(["who sees corruptions", *SETS, "CPU seconds"], rows)]
        for other in ("start", "symmetric", "reversed", "clean"):
            if not arms[other]:
                continue
            lines += ["", f"Against *{ARMS[other][0]}*, linear:", ""]
            rows = [
                [ARMS[arm][0], *_differences(found, arms[other])]
                for arm, found in arms.items()
                if found and arm not in (other, "start", "batchnorm")
            ]
            lines += markdown(["", *SETS], rows)
        if data == "photos":
            lines += _heads(runs)
    missing = [cell.name for cell in cells() if cell.name not in runs]
    lines += ["", f"Not measured yet: {', '.join(missing)}."] if missing else []
    lines += ["", "## Commands", "", "```"]
    lines += ["python -m benchmarks.robust --photos TRAIN TEST --elpv ELPV --weights WEIGHTS --out OUT", ""]
    for cell in cells():
        if cell.seed == 0:
            lines += [*([cell.train()] if ARMS[cell.arm][1] else []), cell.evaluate()]
    return "\n".join([*lines, "```", ""])


def _accuracies(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    means = [np.mean([scores(run, protocol).mean(axis=0) for run in runs], axis=0) for protocol in PROTOCOLS]
    texts = [" / ".join(f"{mean[column]:.1f}" for mean in means) for column in range(len(SETS))]
    seconds = [run["seconds"] for run in runs if run.get("seconds")]
    return [f"{texts[0]} ({len(runs)})", *texts[1:], f"{np.mean(seconds):.0f}" if seconds else ""]


def _differences(runs: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> list[str]:
    """Image by image: the mean of the arm's seeds minus the mean of the other's."""
    protocol = next(iter(PROTOCOLS))
    ours, theirs = (np.mean([scores(run, protocol) for run in arm], axis=0) for arm in (runs, others))
    drawn = resampled(ours - theirs)
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    texts = []
    for column, difference in enumerate((ours - theirs).mean(axis=0)):
        mark = "**" if low[column] > 0 or high[column] < 0 else ""
        texts.append(f"{mark}{difference:+.1f} ({low[column]:+.1f} to {high[column]:+.1f}){mark}")
    return texts


def head_counts(run: Path, weights: Path, photos: str) -> dict[str, Any]:
    """Under how many corruptions not seen the weights' own classifier gives each photo the class that it gave the clean one.

    The first count is with the encoder of the start, the second with that of the run; with them the clean photos that keep it.
    """
    encoders = [open_weights(path) for path in (run / "start.safetensors", run)]
    source = open_source(photos)
    with EvaluationBatches(source, size=encoders[0].image_size, channels=encoders[0].channels) as batches:
        images = np.concatenate([batch.images.permute(0, 2, 3, 1).numpy() for batch in batches])
    familiarity = kinds_seen(["corrupt"])
    kinds = [kind for kind, about in KINDS.items() if about.group != "geometry" and familiarity[kind] != "seen"]
    normalization, indices = encoders[0].normalization, np.arange(len(images))
    scale, offset = normalization.scale_and_offset()

    width = feature_dim(encoders[0].network, image_size=encoders[0].image_size)
    found = linear_head(weights, encoders[0].name, width=width)
    assert found is not None
    head: nn.Linear = found

    def classes(network: nn.Module, pixels: NDArray[np.uint8]) -> NDArray[np.int64]:
        batches = [
            torch.from_numpy(pixels[first : first + 64] * scale + offset).permute(0, 3, 1, 2)
            for first in range(0, len(pixels), 64)
        ]
        with torch.no_grad():
            numbers: NDArray[np.int64] = torch.cat([head(network(batch)).argmax(dim=1) for batch in batches]).numpy()
        return numbers

    before = classes(encoders[0].network, images)
    kept = [np.zeros(len(images), np.uint8) for _ in encoders]
    for kind in kinds:
        for severity in SEVERITIES:
            pixels = corrupt_images(images, kind, severity, seed=0, indices=indices, threads=1)
            for count, encoder in zip(kept, encoders, strict=True):
                count += classes(encoder.network, pixels) == before
    clean = (classes(encoders[1].network, images) == before).astype(np.uint8)
    names = ("start", "run", "clean")
    return {
        "conditions": len(kinds) * len(SEVERITIES),
        **{name: _text(count) for name, count in zip(names, (*kept, clean), strict=True)},
    }


def _text(counts: NDArray[np.uint8]) -> str:
    return base64.b64encode(counts.tobytes()).decode()


def _counts(text: str) -> NDArray[np.float64]:
    return np.frombuffer(base64.b64decode(text), np.uint8).astype(float)


def _heads(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What became of the classifier that came with the weights, on the test photos."""
    rows = []
    for arm in ("directed", "keep-head"):
        heads = [run["head"] for name, run in runs.items() if name.startswith(f"photos-{arm}-") and "head" in run]
        if heads:
            clean = np.mean([_counts(head["clean"]).mean() for head in heads])
            start, after = (np.mean([_counts(head[key]) for head in heads], axis=0) for key in ("start", "run"))
            start, after = 100 * start / heads[0]["conditions"], 100 * after / heads[0]["conditions"]
            low, high = np.quantile(resampled((after - start)[:, None]), [0.025, 0.975])
            difference = f"{(after - start).mean():+.1f} ({low:+.1f} to {high:+.1f})"
            share = f"{100 * clean:.1f} ({len(heads)})"
            rows.append([ARMS[arm][0], share, f"{start.mean():.1f}", f"{after.mean():.1f}", difference])
    if not rows:
        return []
    return [
        "", "The ImageNet classifier that came with the weights, on the test photos, in %: how often it gives a clean photo the",
        "class that it gave it before, and a photo under corruptions not seen the class of the clean photo before.", "",
        *markdown(["", "clean", "corrupted, start", "corrupted, after", "difference"], rows),
    ]  # fmt: skip


def re_estimate(start: Path, data: str, out: Path) -> None:
    """The start with the statistics of BatchNorm measured anew on corrupted training images, as a checkpoint."""
    encoder, opened = open_weights(start), checkpoint.read(start)
    norms = [module for module in encoder.network.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
        norm.train()
    config = recipe("robust", data=data, channels=encoder.channels)
    source = open_source(data, channels=encoder.channels)
    maker = view_maker(config, config.view_graph, encoder.normalization)
    steps = len(source) // config.batch_size
    with Batches(source, maker, batch_size=config.batch_size, seed=0, steps=steps) as batches, torch.no_grad():
        for step in range(steps):
            encoder.network(batches.at(step).views["h1"])
    tensors = {f"method.encoder.{name}": value for name, value in encoder.network.state_dict().items()}
    checkpoint.write(out, opened.header, tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", nargs=2, metavar=("TRAIN", "TEST"))
    parser.add_argument("--elpv", metavar="FOLDER")
    parser.add_argument("--weights", required=True, help="torchvision's MobileNetV2, IMAGENET1K_V1")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=list(SEEDS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    places = {"OUT": str(options.out), "WEIGHTS": options.weights}
    places |= dict(zip(("TRAIN", "TEST"), options.photos, strict=True)) if options.photos else {}
    places |= {"ELPV": options.elpv} if options.elpv else {}
    for cell in cells():
        wanted = {"photos": options.photos, "elpv": options.elpv}[cell.data] and cell.arm in options.arms
        if not wanted or cell.seed not in options.seeds or cell.name in kept():
            continue
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        if ARMS[cell.arm][1]:
            run_command(cell.train(), places)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if cell.arm == "batchnorm":
            train = {"photos": places.get("TRAIN"), "elpv": f"{options.elpv}/train"}[cell.data]
            start = options.out / f"{cell.data}-directed-0" / "start.safetensors"
            re_estimate(start, str(train), options.out / f"{cell.data}-batchnorm-0.safetensors")
        run_command(cell.evaluate(), places)
        path = options.out / f"{cell.name}-evaluation" / "robustness.json"
        measured = Robustness.of(json.loads(path.read_text(encoding="utf-8")))
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        run = counts(measured) | {"seconds": round(seconds)}
        if cell.data == "photos" and cell.arm in ("directed", "keep-head"):
            run["head"] = head_counts(options.out / cell.name, Path(options.weights), places["TEST"])
        runs = kept() | {cell.name: run}
        write_text(KEPT, json.dumps(runs, indent=1, sort_keys=True) + "\n")
        write_text(PAGE, page(runs))


if __name__ == "__main__":
    main()
