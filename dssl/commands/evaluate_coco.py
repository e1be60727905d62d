"""``dssl evaluate-coco``: what an encoder is worth where objects must be found and outlined."""

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path

from dssl.coco.config import CocoConfig


@dataclass(frozen=True, kw_only=True)
class Arguments(CocoConfig):
    """Fine-tune Mask R-CNN on COCO from an encoder and score boxes and masks: dssl evaluate-coco WEIGHTS FOLDER.

    The same command again continues a run that was stopped. The defaults are the 1x schedule with a feature pyramid; it wants
    GPUs: torchrun --nproc-per-node 8 -m dssl evaluate-coco ... Needs pycocotools: pip install 'dssl[coco]'. The detector is
    torchvision's, so that its numbers are not strictly comparable with those of Detectron; docs/coco.md says more.
    """

    out: Path = Path("runs/coco")
    """The run's folder: checkpoints, metrics.jsonl, results.json, evaluation.json, evaluation.html."""


def run(arguments: Arguments) -> int:
    import logging
    import os

    from dssl.data.sources import expanded

    arguments = dataclasses.replace(arguments, weights=expanded(arguments.weights))
    config = CocoConfig(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(CocoConfig)})
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("dssl").setLevel(logging.INFO)
    from dssl.coco.finetune import COMPARABLE, finetune
    from dssl.coco.report import table

    result = finetune(config, arguments.out, command=_command(arguments))
    if result.scores is not None:
        print(table(result.scores))
        print(f"note: {COMPARABLE}")
        print(result.page)
    elif result.ending.signal is None and result.ending.exit_code and os.environ.get("RANK", "0") == "0":
        print(f"{result.ending.opinion.verdict}: {result.ending.checkpoint}")
    return result.ending.exit_code


def _command(arguments: Arguments) -> str:
    """The command that makes this result again."""
    words = ["dssl", "evaluate-coco", arguments.weights, str(arguments.data)]
    default = Arguments(weights=arguments.weights, data=arguments.data)
    for field in dataclasses.fields(Arguments):
        value = getattr(arguments, field.name)
        if value == getattr(default, field.name):
            continue
        flag = field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return shlex.join(words)
