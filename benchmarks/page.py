"""docs/performance.md from benchmarks/results/*.json: ``python -m benchmarks.page``. No number of a table is typed by hand."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.bars import PRECISIONS, Results, bars, peers_ahead, reading_rates, speed_up

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
NAMES = ("views", "view_costs", "lock", "train", "evaluate", "startup", "growth", "memory", "shards")
Lines = list[str]

_HEAD = """# Performance

<!-- written by `python -m benchmarks.page` from benchmarks/results/*.json: do not edit -->
"""

_HOW = """Every number on this page comes from a JSON file in `benchmarks/results/`.
The file names the command that made it, all versions, and the load of the machine before and after.

## Measure it yourself

```
make bench-setup      # the peers, from PyPI, into a separate virtual environment
make bench            # views, training steps, evaluation, start-up: about half an hour on two cores
make bench-long       # growth, memory, shards: about 20 minutes
make bench ONLY=train # one of them: {names}
make bench PHOTOS=FOLDER CIFAR10=FOLDER   # on your own JPEG files and on CIFAR-10 instead of drawn images
```

One row, in about two minutes after `make bench-setup`:

```
benchmarks/.venv/bin/python -m benchmarks.views --rounds 2 --out /tmp/bench
benchmarks/.venv/bin/python -m benchmarks.train --encoders small --batches 128 --methods simclr --graphs dssl --out /tmp/bench
```

## How to read it

- Ratios say more than rates: all candidates are measured in turn in the same run, and rates differ between machines.
- A number is the median of its rounds. The whiskers of a plot and "x to y" are the quartiles, and "±" is half their distance.
- Thread counts are asserted: torch has as many threads as there are cores, or one if the row says "one core".
- fp32 and bf16 rows separate precision from engineering: compare rows of the same precision.
- [The list below](#where-somebody-else-is-faster) names every peer that is faster. It is computed from the same results.
- The [log](log.md#2026-11-16-what-was-slow) says what was found to be slow, and what became of it.
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Lines:
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows), ""]


def number(value: float) -> str:
    """Three digits, and thousands apart."""
    if abs(value) >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"


def spread(summary: dict[str, Any]) -> str:
    return f"{number(summary['median'])} ({number(summary['low'])} to {number(summary['high'])})"


def short(summary: dict[str, Any]) -> str:
    """For wide tables: the median and half the distance of the quartiles."""
    return f"{number(summary['median'])} ± {number((summary['high'] - summary['low']) / 2)}"


def picture(name: str, what: str) -> Lines:
    return [f"![{what}](../benchmarks/results/{name}.png)", ""]


def source(result: dict[str, Any]) -> Lines:
    about = result["environment"]
    return [
        f"<sub>`{result['command']}`: {about['minutes']:g} minutes, load {about['load_before']:g} before and "
        f"{about['load_after']:g} after, {about['cores']} cores, {about['processor']}, torch {about['packages']['torch']}</sub>",
        "",
    ]


def show_summary(results: Results) -> Lines:
    """What a user asks first, each number with its caveat."""
    found = [
        line for part in (_summary_of_views, _summary_of_training, _summary_of_evaluation) for line in part(results)
    ]
    if not found:
        return []
    cores = sorted({str(result["environment"]["cores"]) for result in results.values()})
    where = f"How fast is dssl compared with what you would use instead, on {' or '.join(cores)} CPU cores?"
    return [where, "", *(f"- {line}" for line in found), ""]


def _summary_of_views(results: Results) -> Lines:
    rows = results["views"]["results"] if "views" in results else []
    lines: Lines = []
    for setting, caveat in (
        ("32 px, one core", "It was measured on one core."),
        ("224 px without decoding, one core", "It was measured on one core, without decoding."),
    ):
        ours = [row["ratio"] for row in rows if row["setting"] == setting and row["name"].startswith("dssl")]
        if ours:
            span = f"{min(ours):.1f}" if len(ours) == 1 else f"{min(ours):.1f} to {max(ours):.1f}"
            size = " ".join(setting.replace(",", "").split()[:2])
            lines.append(f"**Views at {size}**: {span} times as fast as a Pillow composition. {caveat}")
    return lines


def _summary_of_training(results: Results) -> Lines:
    settings = results["train"]["results"] if "train" in results else []
    lines: Lines = []
    for encoder in dict.fromkeys(row["encoder"] for row in settings):
        rows = [row for row in settings if row["encoder"] == encoder]
        rounds = sorted({one["rate"]["n"] for row in rows for one in row["rows"]})
        spans = []
        for precision in reversed(PRECISIONS):
            ratios = [speed_up(row, precision) for row in rows]
            spans.append(f"{min(ratios):.2f} to {max(ratios):.2f} times in {precision}")
        lines.append(
            f"**Training steps with `{encoder}`**: {' and '.join(spans)} as fast as the fastest of lightly, "
            f"stable-pretraining and the paper's way at the same precision, medians of {' or '.join(map(str, rounds))} rounds."
        )
    return lines


def _summary_of_evaluation(results: Results) -> Lines:
    lines: Lines = []
    if "evaluate" in results:
        seconds = {row["name"]: row["seconds"]["median"] for row in results["evaluate"]["results"]}
        ours, other = seconds.get("dssl, probe, one strength"), seconds.get("probe, scikit-learn, one strength")
        if ours and other:
            lines.append(
                f"**Linear probe**: {other / ours:.0f} times as fast as scikit-learn's logistic regression. "
                "Both use one strength of regularisation."
            )
        ours, other = seconds.get("dssl, kNN"), seconds.get("kNN, faiss")
        if ours and other:
            than = f"{ours / other:.2f} times as fast as dssl" if other < ours else "slower than dssl"
            shapes = results["evaluate"]["shapes"]
            sizes = f"{shapes['test'][0]:,} test images against {shapes['train'][0]:,} training images"
            lines.append(f"**kNN**: {number(ours)} s for {sizes}. faiss is {than}.")
    return lines


def show_bars(results: Results) -> Lines:
    """The claims and what was measured."""
    rows = [(bar.claim, bar.measured, "yes" if bar.holds else "**no**") for bar in bars(results)]
    return ["## What it must show", "", *table(("claim", "measured", "holds"), rows)]


def show_ahead(results: Results) -> Lines:
    lines = peers_ahead(results)
    found = [f"- {line}" for line in lines] or ["- in no row of the results on this page"]
    return ["## Where somebody else is faster", "", *found, ""]


def show_missing(results: Results) -> Lines:
    measured = [name for name in ("views", "train", "evaluate") if name in results]
    missing = {
        f"{benchmark}: {name}": why
        for benchmark in measured
        for key in ("not_installed", "missing")
        for name, why in results[benchmark].get(key, {}).items()
    }
    if not missing:
        return ["No peer is missing: all could be installed, and all ran.", ""] if measured else []
    return ["Peers that are missing from the tables:", "", *(f"- {name}: {why}" for name, why in missing.items()), ""]


def views(result: dict[str, Any]) -> Lines:
    lines = [
        "## Views", "",
        "A view is the whole chain: crop, flip, colour jitter, gray, blur, two RandAugment operations, normalised float32.",
        "Only views that are made inside a window count. The loader's threads rest while others are measured.", "",
        *picture("views", "views per second by library"),
    ]  # fmt: skip
    for setting in dict.fromkeys(row["setting"] for row in result["results"]):
        rows = [
            (row["name"], spread(row["rate"]), f"{row['ratio']:.1f}", row["note"])
            for row in result["results"] if row["setting"] == setting
        ]  # fmt: skip
        lines += table((setting, "views/s", "times Pillow", ""), rows)
    return lines + source(result)


def view_costs(result: dict[str, Any]) -> Lines:
    sizes = [
        (f"{row['size']} px", spread(row["rate"]), spread(row["pillow_rate"]), f"{row['ratio']:.1f}",
         f"{row['share_of_memcpy']:.1%}")
        for row in result["sizes"]
    ]  # fmt: skip
    first = result["sizes"][0]
    lines = [
        "### By image size, and the physical limit", "",
        f"One core copies {first['memcpy_bytes_per_second'] / 1e9:.1f} GB/s (read and written).",
        "A view has to read an image of its own size and write three float32 channels.",
        "The last column is the share of that rate that views reach.", "",
        *picture("view_sizes", "views per second against image size"),
        *table(("", "dssl, views/s", "Pillow, views/s", "ratio", "of memcpy"), sizes),
        "### By operation", "", *picture("view_operations", "microseconds of each operation"),
    ]  # fmt: skip
    known = list(dict.fromkeys(row["size"] for row in result["operations"]))
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for row in result["operations"]:
        by_name.setdefault(row["operation"], {})[row["size"]] = row
    head = ["operation", *(text for size in known for text in (f"{size} px, us", f"Pillow {size} px, us"))]
    rows = [  # a corruption that Pillow has no call for has no time of Pillow's
        [name, *(number(found[size][key]["median"]) if key in found[size] else "-"
                 for size in known for key in ("microseconds", "pillow_microseconds"))]
        for name, found in by_name.items()
    ]  # fmt: skip
    return [*lines, *table(head, rows), *source(result)]


def lock(result: dict[str, Any]) -> Lines:
    held, operation, gain = result["lock"], result["operation"], result["gain"]
    rows = [
        ("lock per image, ms", spread(held["milliseconds"])),
        ("share of the loader's CPU time", f"{held['share']['median']:.1%}"),
        *((f"small operation, us, {name}", spread(value)) for name, value in operation["microseconds"].items()),
        ("same process / another process", spread(operation["ratio"])),
        ("second thread: loader, times", spread(gain["loader"])),
        ("second thread: plain threads, times", spread(gain["kernels"])),
    ]
    return [
        "## The interpreter lock", "",
        "The loader makes four views of 224 px from each JPEG file.",
        f"The small operation runs in the main thread while {result['threads']} loader threads run in the same process, "
        "or in another one.", "",
        *table(("", "measured"), rows),
        *source(result),
    ]  # fmt: skip


def train(result: dict[str, Any]) -> Lines:
    machine = result["machine"]
    bare = [
        (row["encoder"], row["precision"], number(row["images_per_second"]), f"{row['share_of_matrix_rate']:.0%}")
        for row in result["bare_encoder"]
    ]  # fmt: skip
    lines = [
        "## Training step", "",
        "The table shows images per second, end to end, with four views of each image.",
        "Everybody trains the same encoder with heads of the same shape, the same batch and SGD, "
        f"{machine['torch_threads']} torch threads and {machine['worker_processes']} worker processes (dssl: threads).",
        "The paper's way makes views with Pillow in workers, one pass per view, with BYOL's eight passes. The paper used fp32.",
        "lightly and stable-pretraining run their own modules, losses, transforms and loops, extended to four views.",
        "The last two columns compare dssl with the fastest other program at the same precision.", "",
        *picture("train", "images per second of training by library"),
    ]  # fmt: skip
    columns = list(dict.fromkeys(one["name"] for row in result["results"] for one in row["rows"]))
    rows, parts = [], []
    for row in result["results"]:
        found = {one["name"]: one for one in row["rows"]}
        name = f"{row['encoder']}, {row['method']}, {row['graph']}, batch {row['batch']}"
        cells = [short(found[column]["rate"]) if column in found else "missing" for column in columns]
        rows.append([name, *cells, *(f"**{speed_up(row, precision):.2f}**" for precision in PRECISIONS)])
        parts.append([
            name, f"{row['passes']} of {row['passes_of_the_paper']}", f"{row['end_to_end_share_of_compute']:.1%}",
            f"{row['share_of_matrix_rate']:.0%}", *(f"{share:.1%}" for share in row["time"].values()),
        ])  # fmt: skip
    lines += table(["", *columns, *(f"dssl / fastest other, {precision}" for precision in PRECISIONS)], rows)
    lines += [
        f"One large matrix product reaches {machine['matrix_rate_bf16'] / 1e9:,.0f} GFLOP/s in bf16 and "
        f"{machine['matrix_rate_fp32'] / 1e9:,.0f} in fp32 here.",
        "The share of it counts the multiplications of the encoder only, three passes' worth for each view with a gradient.",
        "Heads, BatchNorm, loss and optimiser are counted as nothing.", "",
    ]  # fmt: skip
    head = [
        "dssl, bf16",
        "encoder passes, of the paper's",
        "end to end / compute",
        "of the matrix rate",
        *result["results"][0]["time"],
    ]
    lines += table(head, parts)
    return [*lines, *table(("bare encoder", "", "images/s", "of the matrix rate"), bare), *source(result)]


def evaluate(result: dict[str, Any]) -> Lines:
    features = [(row["name"], spread(row["rate"]), f"{row['ratio']:.2f}") for row in result["features"]]
    rows = [
        (row["name"], spread(row["seconds"]), number(row["cpu_seconds"]["median"]), number(row["extra_memory_mb"]),
         f"{row['accuracy']:.2f}", f"{row['same_as_dssl']:.2f}%")
        for row in result["results"]
    ]  # fmt: skip
    shapes = result["shapes"]
    state = "trained" if result["trained"] else "untrained"
    return [
        "## Evaluation", "",
        f"The data are {shapes['train'][0]:,} training and {shapes['test'][0]:,} test rows of {shapes['train'][1]} features "
        f"({result['data']}, {state} encoder {result['encoder']}).",
        f"k is {result['k']}, with {result['threads']} threads. All searches are exact.",
        "Features in bf16 are compared with the usual way in fp32.", "",
        *picture("evaluate", "seconds of kNN and linear probe"),
        *table(("features", "images/s", "times the usual way"), features),
        *table(("", "seconds", "CPU seconds", "more memory, MB", "accuracy, %", "answers equal to dssl's"), rows),
        *source(result),
    ]  # fmt: skip


def startup(result: dict[str, Any]) -> Lines:
    rows = [(row["name"], spread(row["seconds"])) for row in result["results"]]
    parts = [(row["name"], spread(row["seconds"])) for row in result["parts"]]
    lines = [
        "## Start-up",
        "",
        *picture("startup", "seconds to help and to the first step"),
        *table(("", "seconds"), rows),
    ]
    lines += [
        "This is where the time to the first step goes, in a process that takes the same steps one after the other:",
        "",
    ]
    lines += table(("part", "seconds"), parts)
    for name, found in result["imports"].items():
        text = ", ".join(f"{group} {seconds:.2f}" for group, seconds in list(found.items())[:8] if seconds >= 0.005)
        lines += [
            f"Imports of `{name}`, seconds by package (`-X importtime`, which itself costs time): {text or 'below 0.005 each'}.",
            "",
        ]
    return lines + source(result)


def growth(result: dict[str, Any]) -> Lines:
    lines = [
        "## Growth", "",
        "The runs use SimSiam with the small encoder in bf16.",
        "An exponent of 0 means that the quantity does not matter.",
        "With 1, twice as much takes twice as long, and with -1 it goes half as fast.",
        "Images per second should fall with the views (-1) and with the area of an image (-2 for its side).",
        "They should hardly fall with the edges, which cost no pass of the encoder.",
        "Memory grows less than what it holds.",
        "Every number is the median over two visits, the second in reverse order.", "",
        *picture("growth", "speed, memory and index on log-log axes"),
    ]  # fmt: skip
    for subject, found in result["results"].items():
        rows: list[tuple[str, ...]]
        if subject == "files":
            rows = [
                (f"{row['x']:,}", number(row["scan_seconds"]), number(row["reopen_seconds"]["median"]),
                 number(row["open_source_seconds"]["median"]), number(row["epoch_start_seconds"]["median"]),
                 number(row["index_mb"]))
                for row in found
            ]  # fmt: skip
            head = ("files", "index made, s", "reopened, s", "source opened, s", "epoch begun, s", "index, MB")
            lines += [
                *table(head, rows),
                "The files are new and empty: names and sizes come from the system's cache, not from a disk.",
                "",
            ]
        else:
            rows = [
                (f"{row['x']:,}", spread(row["rate"]),
                 number(row["memory_mb"]) if "memory_mb" in row else f"{row['threads_each']} threads each")
                for row in found
            ]  # fmt: skip
            lines += table((subject, "images/s", "peak memory, MB" if "memory_mb" in found[0] else ""), rows)
    powers = [(name, f"{value:.2f}") for name, value in result["exponents"].items()]
    return [*lines, *table(("curve", "exponent"), powers), *source(result)]


def memory(result: dict[str, Any]) -> Lines:
    rows = [(str(int(epoch) + 1), number(value)) for epoch, value in result["peak_mb_by_epoch"].items()]
    return [
        "## Memory of a run", "",
        f"The run is `dssl train` with the {result['encoder']} encoder, {result['method']}, graph dssl, batch {result['batch']}, "
        "with kNN and checkpoints.",
        f"Resident memory was read ten times a second. Its peak is {result['peak_mb'] / 1024:.2f} GB.", "",
        *picture("memory", "resident memory over time"), *table(("epoch", "peak, MB"), rows), *source(result),
    ]  # fmt: skip


def shared(result: dict[str, Any]) -> Lines:
    """A line if other work took processor time from the measurement."""
    about = result["environment"]
    if about["load_before"] <= about["cores"]:
        return []
    load = f"load {about['load_before']:g} on {about['cores']} cores"
    return [f"The machine was shared with other work ({load}): compare ratios, not rates.", ""]


def shards(result: dict[str, Any]) -> Lines:
    rates = reading_rates(result)
    rows = []
    names = ("webdataset", "datasets")
    for row in result["readers"]:
        kind = "cold" if row["cold"] else "warm"
        peers = [f"{rates[row['reader'], row['cold']] / rates[peer, row['cold']]:.2f}"
                 if (peer, row["cold"]) in rates else "missing" for peer in names]  # fmt: skip
        rows.append((row["reader"], kind, spread(row["images_per_second"]), *peers, spread(row["first_batch_seconds"])))
    index = result["index"]
    return [
        "## Shards", "",
        "The table shows images per second over an epoch from the same JPEG files, decoded by the same function, without views.",
        f"dssl has {result['environment']['cores']} threads, and its peers as many worker processes of torch's DataLoader.",
        "An epoch includes opening the data set and starting threads or workers, and so does the time to the first batch.",
        "Everybody has a turn in each round.",
        "*Cold* means that the pages of the files were dropped before (`posix_fadvise`).",
        "The host of a virtual disk may still hold them.",
        "A packed copy holds pixels: nothing is decoded.", "",
        *shared(result),
        *table(("reader", "", "images/s", *(f"times {name}" for name in names), "first batch, s"), rows),
        f"The index of {index['members']:,} members in ten tar shards:", "",
        f"- is made in {number(index['scan_seconds'])} s ({number(index['scan_cpu_seconds'])} s of CPU),",
        f"- is reopened in {number(index['reopen_seconds'])} s ({number(index['reopen_cpu_seconds'])} s of CPU),",
        f"- takes {index['index_bytes_per_image']:.0f} bytes per image in a file that all processes of a node share,",
        f"- takes {index['private_mb_per_million'] or 'below 1'} MB of a process's own memory per million.", "",
        *source(result),
    ]  # fmt: skip


SECTIONS: dict[str, Callable[[dict[str, Any]], Lines]] = {
    "views": views, "view_costs": view_costs, "lock": lock, "train": train, "evaluate": evaluate, "startup": startup,
    "growth": growth, "memory": memory, "shards": shards,
}  # fmt: skip


def write(folder: Path, page: Path) -> list[str]:
    """Write the page; returns the benchmarks whose results are missing."""
    results = {name: found for name in NAMES if (found := record.read(name, folder=folder)) is not None}
    lines = [_HEAD, *show_summary(results), _HOW.format(names=", ".join(NAMES))]
    lines += [*show_bars(results), *show_ahead(results), *show_missing(results)]
    for name, section in SECTIONS.items():
        if name in results:
            lines += section(results[name])
    absent = [name for name in NAMES if name not in results]
    lines += [f"`{name}` is not measured yet." for name in absent]
    page.write_text("\n".join(lines).rstrip("\n") + "\n", encoding="utf-8")
    return absent


def main() -> int:
    parser = record.parser(__doc__)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    absent = write(options.out, options.page)
    print(f"wrote {options.page.name}" + (f"; not measured yet: {', '.join(absent)}" if absent else ""))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
