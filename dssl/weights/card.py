"""The model card: what the weights are, what they were made from, how, and what was measured."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dssl.text import markdown
from dssl.version import VERSION
from dssl.weights.formats import Exported
from dssl.weights.load import LoadedEncoder

_SAME = ("sha256", "image_size", "normalization")
"""What must be equal for a number to be about the exported model."""


def card(loaded: LoadedEncoder, exported: Sequence[Exported], *, evaluation: Mapping[str, Any] | None) -> str:
    """Markdown; ``evaluation`` is what `dssl evaluate` wrote for the same weights."""
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
    lines += ["", "## Files", ""]
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


def evaluation_of(loaded: LoadedEncoder, path: Path) -> dict[str, Any] | None:
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
