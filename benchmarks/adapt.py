"""Does adaptation help? docs/results/adapt.md: from ImageNet's MobileNetV2 to photos of clothing and to gray solar cells (ELPV).

python -m benchmarks.adapt --photos TRAIN TEST --elpv FOLDER --out runs/adapt

Runs one cell after the other, training and then one comparison with the start on the test images; last, fine-tuning from both
starts. The numbers of a finished cell are kept in docs/results/adapt.json, which is committed, so that the same command resumes
on any machine. After every cell the page is rewritten.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dssl.files import write_text
from dssl.text import markdown

PAGE = Path(__file__).parent.parent / "docs" / "results" / "adapt.md"
KEPT = PAGE.with_suffix(".json")
"""By cell and protocol: before, after, difference and interval."""
Numbers = dict[str, dict[str, dict[str, Any]]]
SEEDS = (0, 1)
GRAPHS = {
    "standard": ("standard pair", ""),
    "dssl": ("DSSL", "--graph dssl --epochs 5 --adapt.head-epochs 3 --optimizer.warmup-epochs 0.2"),
    "heavy": ("heavy pair", "--graph heavy"),
}
GRAY = "crop(0.4,1) > flip > (identity | rotate(90) | rotate(180) | rotate(270)) > jitter(0.4,0.4,0,0)?0.8"
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
        '--data ELPV/train --channels 1 --standard "$GRAY"',
        "--data ELPV",
    ),
}
_ABOUT = """<!-- written by `python -m benchmarks.adapt`: do not edit -->

MobileNetV2 with torchvision's ImageNet weights, adapted by `dssl train adapt` ([how](../howto/adapt.md)).
It is compared on the same test images with the weights that it started from.
The settings were chosen on a split of the training images, and each run reads the test images once.
Accuracy in %, before → after, then the difference in points with its 95% interval over the test images.
1% and 10% of the labels are drawn 20 and 10 times.
**Bold**: the interval excludes zero.
+0.0 (+0.0 to +0.0): the result is the start itself, since everything else drifted too far.
DSSL has four views and half the epochs of the encoder: equal compute."""
COLUMNS = {
    "knn k=20": "kNN",
    "linear probe": "probe",
    "linear probe, 1% of the labels": "1% of the labels",
    "linear probe, 10% of the labels": "10% of the labels",
}
FINETUNED = {
    "fine-tuned, 1% of the labels": "1% of the labels",
    "fine-tuned, 10% of the labels": "10% of the labels",
    "fine-tuned": "all labels",
}
_FINETUNED = """## All weights fine-tuned

From the adapted weights and from the start, with the same labels, epochs and order of images: 60 epochs with 1% of the labels,
30 with 10%, 5 with all of them. One draw of the labels."""


@dataclass(frozen=True)
class Cell:
    data: str
    graph: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.data}-{self.graph}-{self.seed}"

    def train(self) -> str:
        return f"dssl train adapt {DATA[self.data][2]} {GRAPHS[self.graph][1]} --seed {self.seed} --out OUT/{self.name}"

    def compare(self) -> str:
        return f"dssl evaluate OUT/{self.name} {DATA[self.data][3]} --against start"

    def finetune(self) -> tuple[tuple[str, str], ...]:
        """Where each comparison is kept under the run's folder, and its command."""
        few, every = "finetune-few", "finetune-all"
        return (
            (few, f"{self.compare()} --protocols finetune-1 finetune-10 --out OUT/{self.name}/{few}"),
            (every, f"{self.compare()} --protocols finetune --epochs 5 --out OUT/{self.name}/{every}"),
        )


def cells() -> Iterator[Cell]:
    """The first seed of everything comes first."""
    for seed in SEEDS:
        for graph in GRAPHS:
            for data in DATA:
                yield Cell(data, graph, seed)


FINETUNE = tuple(Cell(data, "standard", 0) for data in DATA)
"""The cells whose weights are also fine-tuned: minutes to half an hour each."""


def kept() -> Numbers:
    found: Numbers = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    return found


def keep(out: Path) -> None:
    """Take the numbers of the comparisons that are there, and write the page."""
    numbers = kept()
    for cell in cells():
        for place in ("evaluation", *(place for place, _ in cell.finetune())):
            path = out / cell.name / place / "comparison.json"
            if path.is_file():
                known = numbers.setdefault(cell.name if place == "evaluation" else f"{cell.name}-{place}", {})
                for one in json.loads(path.read_text(encoding="utf-8"))["against"][0]["protocols"]:
                    if one["name"] in COLUMNS | FINETUNED:
                        known[one["name"]] = {key: one[key] for key in ("before", "after", "difference", "interval")}
    write_text(KEPT, json.dumps(numbers, indent=1, sort_keys=True) + "\n")
    write_text(PAGE, page(numbers))


def page(numbers: Numbers) -> str:
    lines = ["# From ImageNet weights to your own images, measured", "", *_ABOUT.splitlines()]
    missing = []
    for data, (title, about, *_) in DATA.items():
        rows = []
        for cell in sorted((one for one in cells() if one.data == data), key=lambda one: list(GRAPHS).index(one.graph)):
            if cell.name not in numbers:
                missing.append(cell.name)
                continue
            found = numbers[cell.name]
            rows.append([f"{GRAPHS[cell.graph][0]}, seed {cell.seed}", *(_cell(found[name]) for name in COLUMNS)])
        lines += ["", f"## {title}", "", f"{about}.", "", *markdown(["", *COLUMNS.values()], rows)]
    rows = []
    for cell in FINETUNE:
        found = {}
        for place, _ in cell.finetune():
            found |= numbers.get(f"{cell.name}-{place}", {})
        rows.append([DATA[cell.data][0], *(_cell(found[name]) if name in found else "-" for name in FINETUNED)])
    lines += ["", *_FINETUNED.splitlines(), "", *markdown(["standard pair, seed 0", *FINETUNED.values()], rows)]
    if missing:
        lines += ["", f"Not measured yet: {', '.join(missing)}."]
    lines += ["", "## Commands", "", "```", "python -m benchmarks.adapt --photos TRAIN TEST --elpv ELPV --out OUT"]
    lines += ["", f"GRAY={shlex.quote(GRAY)}"]
    for cell in cells():
        lines += [" ".join(cell.train().split()), cell.compare()]
        lines += [command for _, command in cell.finetune()] if cell in FINETUNE else []
    return "\n".join([*lines, "```", ""])


def _cell(found: dict[str, Any]) -> str:
    low, high = found["interval"]
    change = f"{found['difference']:+.1f} ({low:+.1f} to {high:+.1f})"
    mark = "**" if low > 0 or high < 0 else ""
    return f"{found['before']:.1f} → {found['after']:.1f}, {mark}{change}{mark}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", nargs=2, metavar=("TRAIN", "TEST"))
    parser.add_argument("--elpv", metavar="FOLDER")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    places = {"OUT": str(options.out), "$GRAY": GRAY}
    if options.photos:
        places |= dict(zip(("TRAIN", "TEST"), options.photos, strict=True))
    if options.elpv:
        places["ELPV"] = options.elpv
    for cell in cells():
        given = {"photos": options.photos, "elpv": options.elpv}[cell.data]
        if given and cell.name not in kept():
            for command in (cell.train(), cell.compare()):
                run(command, places)
            keep(options.out)
    for cell in FINETUNE:
        for place, command in cell.finetune():
            if {"photos": options.photos, "elpv": options.elpv}[cell.data] and f"{cell.name}-{place}" not in kept():
                run(cell.train(), places)  # returns at once where the run is finished
                run(command, places)
                keep(options.out)


def run(command: str, places: Mapping[str, str]) -> None:
    """Run a command of the page with the places of this machine in place of the names in capitals."""
    words = shlex.split(command)[1:]
    for name, place in places.items():
        words = [
            place + word.removeprefix(name) if word == name or word.startswith(f"{name}/") else word for word in words
        ]
    print(shlex.join(["dssl", *words]), flush=True)
    code = subprocess.run([sys.executable, "-m", "dssl", *words, "--threads", "1"], check=False).returncode
    if code not in (0, 5):  # 5: below where it started, which is a result
        sys.exit(code)


if __name__ == "__main__":
    main()
