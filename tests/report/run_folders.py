"""Run folders as ``dssl train`` leaves them, without the training: curves of known shape."""

import dataclasses
import json
import math
from pathlib import Path

from PIL import Image

from dssl import config_io
from dssl.config import RunConfig
from dssl.graph import named_graph
from dssl.recipes import recipe


def config(graph: str, **changes: object) -> RunConfig:
    return dataclasses.replace(recipe("shapes"), data="shapes:1024", graph=graph, epochs=12, batch_size=128, **changes)


def write_run(
    folder: Path,
    graph: str = "dssl",
    *,
    floor: float = 0.95,
    knn: float | None = 40.0,
    verdict: str = "healthy",
    share: float = 1.0,
    views_png: bool = True,
    **changes: object,
) -> Path:
    """A run whose spread falls to ``floor``, whose kNN accuracy rises to ``knn``, and of which ``share`` is done."""
    settings = config(graph, **changes)
    (folder / "checkpoints").mkdir(parents=True)
    about = {"config": config_io.to_dict(settings), "precision": "bf16", "images": 1024, "fingerprint": "f" * 32}
    (folder / "config.json").write_text(json.dumps(about))
    views = [view.name for view in named_graph(graph).made]
    edges = [edge.name for edge in named_graph(graph).active_edges]
    steps_per_epoch, records = 8, []
    reason = {
        "reason": f"embeddings of view {views[0]} are one point; likely cause: the edge {edges[0]}",
        "remedies": ["use --graph dssl", "second", "third"],
    }
    for step in range(4, int(96 * share) + 1, 4):
        done = step / 96
        spread = floor + (0.99 - floor) * math.exp(-6 * done) - 0.1 * math.exp(-(((done - 0.1) / 0.05) ** 2))
        loss = -0.9 * (1 - math.exp(-3 * done))
        records.append(
            {
                "step": step, "epoch": step / steps_per_epoch, "loss": loss, "edges": dict.fromkeys(edges, loss),
                "spread": dict.fromkeys(views, spread), "rank": dict.fromkeys(views, 0.6 * spread**3), "source": {},
                "target": {}, "rate": 0.03, "images_per_second": 640.0 if step > 4 else 80.0, "data_share": 0.04,
                "verdict": "too early" if done < 0.25 else verdict,
                **(reason if done == 0.25 and verdict != "healthy" else {}),
            }
        )  # fmt: skip
        if knn is not None and step % 16 == 0:
            accuracy = knn - (knn - 11) * math.exp(-4 * done)
            protocol = {"k": 200, "temperature": 0.1, "bank": 1024, "queries": 2000}
            records.append({"step": step, "epoch": step / steps_per_epoch, "knn": accuracy, "knn_protocol": protocol})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if views_png:
        Image.effect_mandelbrot((1100, 420), (-2, -1, 1, 1), 40).convert("RGB").save(folder / "views.png")
    return folder
