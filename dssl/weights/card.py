"""The model card: what the weights are, what they were made from, how, and what was measured."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dssl.errors import DsslError
from dssl.text import markdown
from dssl.version import VERSION
from dssl.weights.encoder import Encoder
from dssl.weights.formats import FORMATS, Exported

CARD_FILE = "README.md"
_SOURCE = re.compile(r"^\| SHA-256 of the source \| ([0-9a-f]{64}) \|$", re.MULTILINE)
_FILE = re.compile(r"^`([^`]+)`: every tensor was loaded by .*?^```python$.*?^```$\n*", re.MULTILINE | re.DOTALL)
_SAME = ("sha256", "image_size", "normalization")
"""What must be equal for a number to be about the exported model."""


def clear_other_weights(folder: Path, loaded: Encoder, *, own: bool) -> list[str]:
    """See to it that the folder holds nothing but files of these weights; the lines say what went.

    In the run's own folder of exports those of its earlier weights go. Elsewhere they may be all that there is of them, and
    the folder is refused, as it is where its README.md is not a model card.
    """
    try:
        found = _SOURCE.search((folder / CARD_FILE).read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return []
    if found is None:
        raise DsslError(f"{folder / CARD_FILE} is not a model card of dssl and would be replaced: name another --out")
    if found[1] == loaded.sha256:
        return []
    if not own:
        raise DsslError(
            f"{folder} holds an export of other weights (SHA-256 {found[1][:16]}): name another --out, or delete it"
        )
    old = [path for file, _ in FORMATS.values() if (path := folder / file).is_file()]
    for path in (*old, folder / CARD_FILE):
        path.unlink()
    return [f"{path}: of the run's earlier weights, removed" for path in old]


def earlier_files(path: Path, exported: Sequence[Exported]) -> list[str]:
    """The lines of an earlier card of these weights about files that are still there and were not written again."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    now = {one.path.name for one in exported}
    return [
        line
        for found in _FILE.finditer(text)
        if found[1] not in now and (path.parent / found[1]).is_file()
        for line in found[0].splitlines()
    ]


def card(
    loaded: Encoder,
    exported: Sequence[Exported],
    *,
    evaluation: Mapping[str, Any] | None,
    earlier: Sequence[str] = (),
) -> str:
    """Markdown; ``evaluation`` is what `dssl evaluate` wrote for the same weights, ``earlier`` is of ``earlier_files``."""
    config = loaded.header.get("config") or {}
    init, teacher = config.get("init"), config.get("teacher")
    # whether the weights that a run started from or learned from knew labels, nobody here can say
    alone = loaded.header and init is None and teacher is None
    lines = [f"# {loaded.name}, pretrained without labels" if alone else f"# {loaded.name}", ""]
    lines += markdown(
        ("", ""),
        [
            ("encoder", loaded.name),
            ("input", f"{loaded.channels} x {loaded.image_size} x {loaded.image_size}, values 0 to 1, then normalised"),
            *([] if (values := loaded.value_range) is None else [("values that become 0 and 1", f"`{values.text()}`")]),
            ("mean", ", ".join(f"{value:g}" for value in loaded.normalization.mean)),
            ("deviation", ", ".join(f"{value:g}" for value in loaded.normalization.std)),
            *([] if init is None else [("started from the weights", f"`{init}`")]),
            *([] if teacher is None else [("taught by", f"`{teacher}`")]),
            ("data", str(config.get("data", "unknown"))),
            ("data's fingerprint", str(loaded.header.get("fingerprint", "unknown"))),
            ("method", str((config.get("method") or {}).get("name", "unknown"))),
            ("view graph", f"`{config['graph']}`" if "graph" in config else "unknown"),
            ("standard policy", f"`{config['standard']}`" if "standard" in config else "unknown"),
            ("heavy policy", f"`{config['heavy']}`" if "heavy" in config else "unknown"),
            ("epoch", str(loaded.header.get("epoch", "unknown"))),
            ("seed", str(config.get("seed", "unknown"))),
            ("verdict of the run", str(loaded.header.get("verdict", "unknown"))),
            ("made with", f"dssl {loaded.header.get('dssl_version', 'unknown')}, exported by dssl {VERSION}"),
            ("SHA-256 of the source", loaded.sha256),
        ],
    )
    lines += ["", "## Files", "", *earlier]
    for one in exported:
        lines += [
            f"`{one.path.name}`: every tensor was loaded by {one.client}; largest difference {one.difference:.3g}."
        ]
        lines += ["", "```python", *one.code, "```", ""]
    lines += ["## Numbers", ""]
    if evaluation is None:
        lines.append("None were measured. Run `dssl evaluate`, then export again to list them here.")
    else:
        rows = [
            (
                one["name"],
                f"{one['accuracy']:.2f} %",
                "{:.2f} to {:.2f}".format(*one["interval_95"]),
                f"{one['protocol']['train_images']} / {one['protocol']['test_images']}",
                str(one["protocol"].get("test_data", "unknown")),
                one["protocol"]["backbone"],
            )
            for one in evaluation["results"]
        ]
        heads = ("protocol", "top-1", "95 % interval", "train / test images", "test set", "backbone")
        lines += markdown(heads, rows)
    return "\n".join(lines) + "\n"


def evaluation_of(loaded: Encoder, path: Path) -> dict[str, Any] | None:
    """What `dssl evaluate` wrote, if it is about these weights on images as they are prepared here."""
    here = loaded.protocol()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        measured = found["checkpoint"]
        # JSON has no tuples
        same = all(json.dumps(measured.get(name)) == json.dumps(here[name]) for name in _SAME)
        return found if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
