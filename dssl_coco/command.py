"""``dssl evaluate-coco``: how well an encoder serves to detect and outline objects."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dssl.commands.arguments import command_line, is_first_process
from dssl_coco.config import CocoConfig


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Fine-tune Mask R-CNN on COCO from an encoder and score boxes and masks: dssl evaluate-coco WEIGHTS FOLDER.

    Rerunning the command resumes a stopped run. The defaults are the 1x schedule with a feature pyramid, which needs GPUs:
    torchrun --nproc-per-node 8 -m dssl evaluate-coco ... It also needs pycocotools: pip install 'dssl[coco]'. The detector is
    torchvision's, so its numbers are not strictly comparable with those of Detectron; see docs/coco.md.
    """

    config: Annotated[CocoConfig, tyro.conf.arg(name="")]
    out: Path = Path("runs/coco")
    """The run folder: checkpoints, metrics.jsonl, results.json, evaluation.json, evaluation.html."""


def run(arguments: Arguments) -> int:
    from dssl.data.source import expanded
    from dssl.log import show_messages
    from dssl_coco.finetune import COMPARABLE, finetune
    from dssl_coco.results import write_page

    config = dataclasses.replace(arguments.config, weights=expanded(arguments.config.weights))
    show_messages()
    result = finetune(config, arguments.out)
    if result.scores is not None:
        command = command_line("evaluate-coco", arguments)
        written = write_page(result, arguments.out, pictures=config.pictures, command=command)
        print(result.scores.table(), f"note: {COMPARABLE}", written, sep="\n")
    elif result.ending.signal is None and result.ending.exit_code and is_first_process():
        print(f"{result.ending.verdict.status}: {result.ending.checkpoint}")
    return result.ending.exit_code
