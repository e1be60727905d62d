"""``dssl evaluate-coco``: how well an encoder serves to detect and outline objects."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dssl.commands.arguments import command_line, is_first_process
from dssl.commands.options import Usage
from dssl_coco import CocoConfig


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Fine-tune Mask R-CNN on COCO from an encoder, and score boxes and masks.

    The same command resumes a stopped run. The defaults are the 1x schedule with a feature pyramid, which needs GPUs. It also
    needs pycocotools. The detector is torchvision's, so its numbers are not strictly comparable with Detectron's.
    """

    USAGE: ClassVar[Usage] = Usage(
        positional={"weights": "WEIGHTS", "data": "FOLDER"},
        examples=(
            "dssl evaluate-coco runs/imagenet coco",
            "dssl evaluate-coco scratch coco --encoder resnet18 --schedule 0.5",
            "torchrun --nproc-per-node 8 -m dssl evaluate-coco runs/imagenet coco",
        ),
    )

    settings: CocoConfig
    out: Path = Path("runs/coco")
    """The run folder: checkpoints, metrics.jsonl, results.json, evaluation.json, evaluation.html."""


def run(arguments: Arguments) -> int:
    from dssl.data.source import expanded
    from dssl.log import show_messages
    from dssl.run import EVALUATION_PAGE
    from dssl_coco.finetune import COMPARABLE, finetune

    config = dataclasses.replace(arguments.settings, weights=expanded(arguments.settings.weights))
    show_messages()
    ending, scores = finetune(config, arguments.out, command=command_line("evaluate-coco", arguments))
    if scores is not None:
        print(scores.table(), f"note: {COMPARABLE}", arguments.out / EVALUATION_PAGE, sep="\n")
    elif ending.signal is None and ending.exit_code and is_first_process():
        print(f"{ending.verdict.status}: {ending.checkpoint}")
    return ending.exit_code
