"""The model card of a repository on the Hugging Face Hub: its header, what is known of licences, and how to load it."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dssl.text import markdown
from dssl.weights.encoder import Encoder
from dssl.weights.formats import Exported, card, in_timm, public
from dssl.weights.load import HUB_PREFIX, WORD

_FOLDERS = re.compile(r"(?<![\w./])/(?:[^\s/|`]+/)+")
"""The folders of an absolute path, and nothing of a URL."""


def hub_card(
    loaded: Encoder, exported: Exported, *, evaluation: Mapping[str, Any] | None,
    comparison: Mapping[str, Any] | None = None, license: str = "unknown", repository: str = "USER/NAME",
) -> str:  # fmt: skip
    """The card of an export with the header that the Hub reads; no path of this machine is in it.

    ``license`` is what the user says of the weights. What nobody has stated is called unknown.
    """
    config, held = loaded.header.get("config") or {}, in_timm(loaded)
    base, start = _start(loaded, config.get("init"))
    header: dict[str, Any] = {
        "library_name": "timm" if held else "dssl",
        "pipeline_tag": "image-feature-extraction",
        "tags": ["image-feature-extraction", "dssl", "self-supervised-learning", *(["timm"] if held else [])],
        "license": license,
        **({} if base is None else {"base_model": base}),
    }
    if evaluation is not None:
        header["model-index"] = [{"name": repository, "results": [_result(row) for row in evaluation["results"]]}]
    code = ["import dssl", f'encoder, transform = dssl.load_encoder("hf:{repository}", transform=True)']
    if held:
        code += ["", "import timm", "", f'encoder = timm.create_model("hf-hub:{repository}", pretrained=True).eval()']
    text = card(
        public(loaded), [replace(exported, path=Path(exported.path.name), code=tuple(code))],
        evaluation=evaluation, comparison=comparison,
    )  # fmt: skip
    if not held:
        text = text.replace(
            "## Files\n", "## Files\n\ntimm does not have this encoder: `pip install dssl` loads it.\n", 1
        )
    licences = [("these weights", license), ("the images", "unknown")]
    licences += [] if config.get("init") is None else [("the weights that the run started from", start)]
    text += "\n".join(["", "## Licences", "", *markdown(("of", "licence"), licences)]) + "\n"
    # JSON is YAML
    lines = [f"{key}: {json.dumps(value)}" for key, value in header.items()]
    return _FOLDERS.sub("", "\n".join(["---", *lines, "---", "", text]))


def _start(loaded: Encoder, init: str | None) -> tuple[str | None, str]:
    """The repository of the weights that a run started from and their licence, as far as timm or the name states them."""
    if init is not None and init.startswith(HUB_PREFIX):
        return init.removeprefix(HUB_PREFIX).partition("@")[0], "see their repository"
    if init == WORD and loaded.name.startswith("timm:"):
        import timm

        if (stated := timm.get_pretrained_cfg(loaded.name.removeprefix("timm:"))) is not None:
            return stated.hf_hub_id, f"{stated.license} (as timm states it)" if stated.license else "unknown"
    return None, "unknown"


def _result(row: Mapping[str, Any]) -> dict[str, Any]:
    data = str(row["protocol"].get("test_data", "unknown"))
    return {
        "task": {"type": "image-classification"},
        "dataset": {"name": data, "type": re.sub(r"[^\w-]+", "-", _FOLDERS.sub("", data)).strip("-") or "unknown"},
        "metrics": [
            {"type": "accuracy", "name": f"{row['name']}, top-1 in percent", "value": round(row["accuracy"], 4)}
        ],
    }
