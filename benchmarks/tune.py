"""Does a score without labels tell good heavy policies from bad ones? Short runs from one start, scored and measured.

python -m benchmarks.tune run --data FOLDER --work FOLDER       # resumes: rows that are there are not made again
python -m benchmarks.tune page [--work FOLDER]                  # docs/results/tune.md, from its rows or from new ones

CIFAR-10, the encoder `whitened`, SimCLR at the settings of the scale `cpu`. Of the training images 5,000 judge and never train;
the test images are never read.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.encoder_search import BANK, HELD_OUT, score
from dssl import rng
from dssl.augment import CIFAR10, ViewMaker
from dssl.config import RunConfig
from dssl.data import Source, Subset
from dssl.data.cifar10 import Cifar10
from dssl.data.loader import Batches
from dssl.distributed import World
from dssl.evaluation.quality import Turned, alignment, retrieval, rotation_accuracy, uniformity
from dssl.files import write_text
from dssl.graph import View
from dssl.methods.losses import effective_rank, nt_xent
from dssl.models import evaluating, forward
from dssl.models.for_cpus import WhitenedEncoder, whiten
from dssl.run import Run, RunFolder
from dssl.text import markdown
from dssl.training.prepare import TrainingData, build_method, images_to_whiten
from dssl.training.tune import continued, short_run
from dssl.weights import checkpoint
from dssl.weights.encoder import Encoder
from dssl_reproduce.scales import named_scale

NONE = "none"
"""In place of a policy: two standard pairs, which are equal compute without heavy views."""
POLICIES = (
    "identity", "jigsaw(4)", "ra(8,16)", "ra(2,1)", "ra(2,5)", "ra(2,9,monotone14)", "0.9*ra(2,5) | 0.1*jigsaw(4)",
    "jigsaw(2)", "ra(1,3,monotone14)", "gray", "cutout(0.5)", "ra(4,20,monotone14)",
)  # fmt: skip
JUDGES = 2_000
SCORES = {
    "rotation 0.0001": (1, "rotation probe, regularisation 1e-4"),
    "rotation 0.001": (1, "rotation probe, 1e-3"),
    "rotation 0.01": (1, "rotation probe, 1e-2"),
    "effective rank": (1, "effective rank of the features (RankMe)"),
    "rank centred": (1, "effective rank of the centred features"),
    "spectrum decay": (-1, "alpha-ReQ: slow decay of the spectrum"),
    "alignment": (-1, "alignment of two standard views"),
    "uniformity": (-1, "uniformity of the features"),
    "loss": (-1, "contrastive loss of standard pairs"),
    "retrieval": (1, "a standard view finds the other one of its image"),
    "retrieval heavy": (1, "a heavy view of the policy finds its image"),
    "retrieval monotone": (1, "a view of ra(2,9,monotone14) finds its image"),
}
"""By name: 1 where a larger value should be better, -1 where a smaller one should, and what it is."""
START_STEPS, TRIAL_STEPS = 60, 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "page"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, help="without it, the page is written from docs/results/tune.jsonl")
    parser.add_argument("--start", type=int, default=START_STEPS)
    parser.add_argument("--steps", type=int, default=TRIAL_STEPS)
    parser.add_argument("--graph", default="heavy")
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    {"run": run, "page": write}[options.command](options)


def config_of(options: argparse.Namespace) -> RunConfig:
    config = named_scale("cpu").settings("cifar10", "simclr")
    return dataclasses.replace(
        config, data=f"cifar10:{options.data}", graph="standard", threads=1, knn_every=0, precision="fp32", limit=None,
        seed=options.seed,
    )  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """The shared start, then every trial that has no row yet: trained, scored and measured."""
    config, world, images = config_of(options), World(0, 1, torch.device("cpu")), Cifar10(options.data)
    order = rng.permutation(rng.key(7, "search"), len(images))
    train_rows, held_out = order[:-HELD_OUT], order[-HELD_OUT:]
    bank = train_rows[rng.permutation(rng.key(8, "bank"), len(train_rows))[:BANK]]
    judges = Subset(images, held_out[rng.permutation(rng.key(9, "judges"), HELD_OUT)[:JUDGES]])
    source = Subset(images, np.sort(train_rows))
    options.work.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(options.work / f"start-{options.start}-{options.seed}")
    method = build_method(config)
    data = TrainingData(source, CIFAR10)
    header = {"fingerprint": source.fingerprint}
    if (found := checkpoint.newest_good(folder.checkpoints)) is None:
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        whiten_all(method, images_to_whiten(config, source, CIFAR10))
        run = Run(world=world, folder=folder)
        short_run(config, data, method, steps=options.start, precision="fp32", run=run, header=header)
        found = checkpoint.newest_good(folder.checkpoints)
    assert found is not None
    file = options.work / "scores.jsonl"
    for policy in options.policies:
        about = {
            "policy": policy, "graph": options.graph, "start": options.start, "steps": options.steps, "seed": options.seed,
        }  # fmt: skip
        kept = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        if any(about.items() <= row.items() for row in kept):
            continue
        began = time.process_time()
        graph, heavy = ("standard2", "identity") if policy == NONE else (options.graph, policy)
        trial, its = continued(dataclasses.replace(config, graph=graph, heavy=heavy), found[1])
        ending = short_run(trial, data, its, steps=options.steps, precision="fp32", run=Run(world=world), header=header)
        trained = time.process_time()
        row: dict[str, Any] = {**about, "verdict": ending.verdict.status, "cpu_seconds": round(trained - began)}
        row |= scores(its, judges, heavy=policy)
        row |= score(its.encoder, images, bank, held_out)
        row["score_seconds"] = round(time.process_time() - trained)
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def whiten_all(method: Any, images: torch.Tensor) -> None:
    for module in method.modules():
        if isinstance(module, WhitenedEncoder):
            whiten(module, images)


def scores(method: Any, source: Source, *, heavy: str) -> dict[str, float]:
    """All that can be said of an encoder without labels, from images that it was not trained on."""
    encoder = method.encoder
    plain = features_of(encoder, source)
    views = {
        "s1": "standard-cifar", "s2": "standard-cifar", "m1": "standard-cifar > ra(2,9,monotone14)",
        "h1": "standard-cifar" if heavy == NONE else f"standard-cifar > ({heavy})",
    }  # fmt: skip
    maker = ViewMaker(
        [View(name=name, policy=policy) for name, policy in views.items()], size=32, seed=5, normalization=CIFAR10
    )
    made: dict[str, list[torch.Tensor]] = {name: [] for name in views}
    losses = []
    with Batches(source, maker, batch_size=250, seed=5, epochs=1, threads=1) as batches, evaluating(method):
        for batch in batches:
            for name in views:
                made[name].append(forward(encoder, batch.views[name]))
            pair = [method.predict(batch.views[name]).projection for name in ("s1", "s2")]
            losses.append(float(nt_xent(pair[0], pair[1], temperature=method.temperature)))
    view = {name: torch.cat(parts) for name, parts in made.items()}
    turned = features_of(Turned(encoder), source)
    return {
        **{f"rotation {strength:g}": rotation_accuracy(turned, strength=strength) for strength in (1e-2, 1e-3, 1e-4)},
        "effective rank": effective_rank(plain),
        "rank centred": effective_rank(plain - plain.mean(dim=0)),
        "spectrum decay": decay(plain),
        "alignment": alignment(view["s1"], view["s2"]),
        "uniformity": uniformity(plain),
        "loss": float(np.mean(losses)),
        "retrieval": retrieval(view["s1"], view["s2"]),
        "retrieval heavy": retrieval(view["h1"], view["s2"]),
        "retrieval monotone": retrieval(view["m1"], view["s2"]),
    }


def features_of(encoder: nn.Module, source: Source) -> torch.Tensor:
    return (
        Encoder(network=encoder, name="whitened", image_size=32, normalization=CIFAR10, threads=1)
        .features(source)
        .values
    )


def decay(features: torch.Tensor) -> float:
    """alpha-ReQ: the exponent of the power law that the eigenvalues of the covariance follow, by least squares."""
    values = torch.linalg.eigvalsh(features.double().T.cov()).flip(0)
    values = values[10:100].clamp(min=1e-12)
    index = torch.arange(11, 11 + len(values)).double().log()
    index, logs = index - index.mean(), values.log()
    return -float((index * (logs - logs.mean())).sum() / index.square().sum())


def spearman(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """The correlation of the ranks, equal values sharing the mean of theirs; NaN where all are equal."""
    ranks = [
        np.array([(values < one).sum() + (values == one).sum() / 2 for one in values]) for values in (first, second)
    ]
    if min(one.std() for one in ranks) == 0:
        return float("nan")
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def interval(first: NDArray[np.float64], second: NDArray[np.float64], *, draws: int = 4_000) -> tuple[float, float]:
    """95 %, from resampling the policies."""
    generator = np.random.Generator(np.random.Philox(0))
    found = []
    for _ in range(draws):
        rows = generator.integers(0, len(first), len(first))
        found.append(spearman(first[rows], second[rows]))
    low, high = np.nanquantile(found, (0.025, 0.975))
    return float(low), float(high)


def write(options: argparse.Namespace) -> None:
    """docs/results/tune.md, and the rows that it is made of."""
    folder = Path(__file__).parent.parent / "docs" / "results"
    if options.work:
        found = sorted(options.work.rglob("scores.jsonl"))
        write_text(folder / "tune.jsonl", "".join(file.read_text() for file in found))
    rows = [json.loads(line) for line in (folder / "tune.jsonl").read_text().splitlines()]
    write_text(folder / "tune.md", "\n".join(page_of(rows)) + "\n")


def page_of(rows: list[dict[str, Any]]) -> list[str]:
    """The rows of the heavy pair by seed and as the mean of the seeds; those of DSSL in a table of their own."""
    seeds = sorted({row["seed"] for row in rows if row["graph"] == "heavy"})
    by_seed = [{row["policy"]: row for row in rows if row["graph"] == "heavy" and row["seed"] == one} for one in seeds]
    groups = [*([one] for one in by_seed), by_seed]
    common = [[policy for policy in by_seed[0] if all(policy in one for one in group)] for group in groups]
    if len(by_seed) > 1:
        common[1] = list(by_seed[1])
    first = next(iter(by_seed[0].values()))

    def values(name: str, number: int) -> NDArray[np.float64]:
        return np.array([np.mean([one[policy][name] for one in groups[number]]) for policy in common[number]])

    linear = [values("linear", number) for number in range(len(groups))]
    found = []
    for name, (sign, text) in SCORES.items():
        cells, both = [], sign * values(name, -1)
        for number in range(len(groups)):
            pair = sign * values(name, number), linear[number]
            low, high = interval(*pair)
            cells.append(f"{spearman(*pair):+.2f} ({low:+.2f} to {high:+.2f})")
        choice = f"{common[-1][int(both.argmax())]} ({linear[-1][int(both.argmax())]:.1f})"
        found.append((spearman(both, linear[-1]), [text, *cells, choice]))
    found.sort(key=lambda one: -one[0])
    shown = []
    for policy in sorted(by_seed[0], key=lambda policy: -by_seed[0][policy]["linear"]):
        accuracies = [f"{one[policy]['linear']:.1f}" if policy in one else "" for one in by_seed]
        shown.append([policy, *accuracies, *(_cell(by_seed[0][policy][name]) for name in SCORES)])
    directed = sorted((row for row in rows if row["graph"] == "dssl"), key=lambda row: -row["linear"])
    seed_names = [f"seed {one}" for one in seeds]
    return [
        "# Does a score without labels find the better policy?",
        "",
        f"{len(by_seed[0])} heavy policies on CIFAR-10, each continuing a shared start of {first['start']} steps of standard "
        f"pairs for {first['steps']} steps. `python -m benchmarks.tune page` writes",
        "this page from [tune.jsonl](tune.jsonl).",
        "",
        "- Encoder `whitened`, SimCLR at the settings of the scale `cpu` (batch 128, peak rate 0.1, temperature 0.2), fp32, "
        f"{sum(row['cpu_seconds'] + row['score_seconds'] for row in rows) / 60:.0f} CPU-minutes for all rows.",
        "- 45,000 training images train. Of the other 5,000, 2,000 judge without labels, and all give the linear accuracy "
        "(10,000 labels, the best",
        "  of four strengths). The test images were never read. The standard error of such an accuracy is 0.7 points.",
        "",
        "## With the graph `dssl`, policies hardly differ",
        "",
        f"In runs this short ({directed[0]['start']} + {directed[0]['steps']} steps) the best and the worst of these are "
        f"{directed[0]['linear'] - directed[-1]['linear']:.1f} points apart, within the error,",
        "although `ra(8,16)` leaves half of its "
        "views blank: the direction of the edges protects the encoder. No score can predict such a difference.",
        "",
        *markdown(
            ("policy", "linear", *_DIRECTED.values()),
            [[row["policy"], f"{row['linear']:.1f}", *(_cell(row[name]) for name in _DIRECTED)] for row in directed],
            align="<>>>>",
        ),
        "",
        "## With the heavy pair they do: rank correlation with the linear accuracy",
        "",
        "Graph `heavy`: both views are heavy. Over the policies the accuracy (seed 0) has a standard deviation of "
        f"{linear[0].std(ddof=1):.1f}.",
        "Spearman, with a 95 % interval from resampling the policies:",
        "",
        *markdown(
            ("score", *(f"{name}, {len(common[number])} policies" for number, name in enumerate(seed_names)),
             f"mean of the seeds, {len(common[-1])}", "its choice (linear)"),
            [one for _, one in found], align="<>>><",
        ),
        "",
        "Seed 0 was measured first, and the score of `dssl tune` was chosen on it; seed 1 checks that choice.",
        "",
        "## Every policy with the heavy pair",
        "",
        "The scores are those of seed 0.",
        "",
        *markdown(
            ("policy", *(f"linear, {name}" for name in seed_names), *SCORES), shown,
            align="<" + ">" * (len(seeds) + len(SCORES)),
        ),
    ]  # fmt: skip


_DIRECTED = {"retrieval monotone": "finds its image", "rotation 0.0001": "rotation", "effective rank": "rank"}


def _cell(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


if __name__ == "__main__":
    main()
