"""What the project has to show, checked against what was measured, and where somebody else is faster."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Results = Mapping[str, Any]
"""The JSON of each benchmark by its name; those that have not been run are missing."""


@dataclass(frozen=True)
class Bar:
    claim: str
    measured: str
    holds: bool


def rows_of(results: Results, name: str) -> list[dict[str, Any]]:
    return results[name]["results"] if name in results else []


def _rate(row: Mapping[str, Any], name: str) -> float | None:
    return next((one["rate"]["median"] for one in row["rows"] if one["name"] == name), None)


PRECISIONS = ("fp32", "bf16")


def speed_up(row: Mapping[str, Any], precision: str) -> float:
    """Our rate over that of the fastest other program at the same precision."""
    ours = _rate(row, f"dssl, {precision}")
    assert ours is not None
    names = [
        one["name"] for one in row["rows"] if one["name"].endswith(precision) and not one["name"].startswith("dssl")
    ]
    return ours / max(rate for name in names if (rate := _rate(row, name)) is not None)


def bars(results: Results) -> list[Bar]:
    return [*_views(results), *_lock(results), *_training(results), *_others(results), *_shards(results)]


def _views(results: Results) -> Iterable[Bar]:
    found = [row for row in rows_of(results, "views") if row["setting"] == "32 px, one core"]
    ours = [row["ratio"] for row in found if row["name"].startswith("dssl")]
    if ours:
        yield Bar(
            "views at 32 px: 30 times the Pillow composition",
            f"{min(ours):.1f} to {max(ours):.1f} times",
            min(ours) >= 30,
        )


def _lock(results: Results) -> Iterable[Bar]:
    if "lock" in results:
        found = results["lock"]
        held, ratio, gain = (
            found[name][key]["median"]
            for name, key in (("lock", "milliseconds"), ("operation", "ratio"), ("gain", "ratio"))
        )
        yield Bar("interpreter lock per image of four views: at most 0.15 ms", f"{held:.3f} ms", held <= 0.15)
        yield Bar("a small operation while 8 loader threads run: at most 1.3 times its cost while another process runs them",
                  f"{ratio:.2f} times", ratio <= 1.3)  # fmt: skip
        yield Bar(
            "the second loader thread gains at least 0.98 of what plain threads gain", f"{gain:.2f}", gain >= 0.98
        )


def _training(results: Results) -> Iterable[Bar]:
    rows = rows_of(results, "train")
    if rows:
        lost = [line for line in peers_ahead(results) if line.startswith("training")]
        yield Bar(
            "no slower than any peer at equal precision", f"slower in {len(lost)} of {len(rows)} settings", not lost
        )
        shares = [row["end_to_end_share_of_compute"] for row in rows]
        text = f"{min(shares):.1%} to {max(shares):.1%} of the speed of pure compute"
        yield Bar("end to end within 10% of pure compute", text, min(shares) >= 0.9)


def _others(results: Results) -> Iterable[Bar]:
    for row in rows_of(results, "startup"):
        if row["name"] == "dssl --help":
            seconds = row["seconds"]["median"]
            yield Bar("`dssl --help` in under half a second", f"{seconds:.2f} s", seconds < 0.5)
    files = results["growth"]["results"].get("files", []) if "growth" in results else []
    for row in files:
        if row["x"] == 1_000_000:
            made, again = row["scan_seconds"], row["reopen_seconds"]["median"]
            yield Bar("1,000,000 paths indexed in under 30 s", f"{made:.1f} s", made < 30)
            yield Bar("and reopened in under 1 s", f"{again:.2f} s", again < 1)
    if "memory" in results:
        peak, more = results["memory"]["peak_mb"], results["memory"]["growth_from_epoch_2_to_the_last"]
        text = f"{peak / 1024:.2f} GB; {more:+.1%} from the second epoch to the last"
        yield Bar("memory at batch 512 with the small encoder under 3 GB, flat", text, peak < 3 * 1024 and more < 0.03)


def _shards(results: Results) -> Iterable[Bar]:
    if "shards" not in results:
        return
    index, rates = results["shards"]["index"], reading_rates(results["shards"])
    made, again, memory = (index[key] for key in ("scan_seconds", "reopen_seconds", "private_mb_per_million"))
    yield Bar(f"{index['members']:,} members of tar shards indexed in under 60 s", f"{made:.1f} s", made < 60)
    yield Bar("and reopened in under 1 s", f"{again:.2f} s", again < 1)
    yield Bar("with under 100 MB of a process's own memory", f"{memory or 'below 1'} MB", memory < 100)
    ratios = [
        rates[ours, cold] / rates[peer, cold]
        for ours, peer in READERS
        for cold in (True, False)
        if (peer, cold) in rates
    ]
    if ratios:
        yield Bar("shards read no slower than by WebDataset and datasets", _span(ratios), min(ratios) >= 1)


READERS = (("tar, --shuffle images", "webdataset"), ("tar, --shuffle shards", "webdataset"), ("parquet", "datasets"))
"""Who reads the same files."""


def reading_rates(result: Mapping[str, Any]) -> dict[tuple[str, bool], float]:
    """Images a second by reader, and whether the files were cold."""
    return {(row["reader"], row["cold"]): row["images_per_second"]["median"] for row in result["readers"]}


def _span(values: list[float]) -> str:
    return f"{min(values):.2f} times" if len(values) == 1 else f"{min(values):.2f} to {max(values):.2f} times"


def peers_ahead(results: Results) -> list[str]:
    """One line for every row in which somebody else is faster than we are, at equal precision."""
    found = []
    for row in rows_of(results, "train"):
        where = f"training, {row['encoder']}, {row['method']}, {row['graph']}"
        for precision in ("fp32", "bf16"):
            ours = _rate(row, f"dssl, {precision}")
            for one in row["rows"]:
                if one["name"].startswith("dssl") or not one["name"].endswith(precision) or ours is None:
                    continue
                if one["rate"]["median"] > ours:
                    found.append(f"{where}: {one['name']} is {one['rate']['median'] / ours:.2f} times as fast")
    settings = dict.fromkeys(row["setting"] for row in rows_of(results, "views"))
    for setting in settings:
        rows = [row for row in rows_of(results, "views") if row["setting"] == setting]
        ours = max(row["rate"]["median"] for row in rows if row["name"].startswith("dssl"))
        for row in rows:
            if not row["name"].startswith("dssl") and row["rate"]["median"] > ours:
                found.append(f"views, {setting}: {row['name']} is {row['rate']['median'] / ours:.2f} times as fast")
    evaluation = rows_of(results, "evaluate")
    for kind, ours_name in (("kNN", "dssl, kNN"), ("probe", "dssl, probe, one strength")):
        ours = next((row["seconds"]["median"] for row in evaluation if row["name"] == ours_name), None)
        for row in evaluation:
            if kind in row["name"] and not row["name"].startswith("dssl") and ours and row["seconds"]["median"] < ours:
                times = ours / row["seconds"]["median"]
                found.append(f"evaluation: {row['name']} is {times:.2f} times as fast as {ours_name}")
    rates = reading_rates(results["shards"]) if "shards" in results else {}
    for name, peer in READERS:
        for cold in (True, False):
            if (peer, cold) in rates and rates[peer, cold] > rates[name, cold]:
                times = rates[peer, cold] / rates[name, cold]
                found.append(
                    f"shards, {'cold' if cold else 'warm'}: {peer} is {times:.2f} times as fast as dssl, {name}"
                )
    for row in results["view_costs"]["operations"] if "view_costs" in results else []:
        if row.get("ratio", 1) < 1:
            found.append(
                f"one operation, {row['size']} px: Pillow's {row['operation']} is {1 / row['ratio']:.2f} times as fast"
            )
    return found
