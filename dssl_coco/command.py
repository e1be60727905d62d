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
    from dssl_coco.finetune import COMPARABLE, finetune
    from dssl_coco.results import write_page

    config = dataclasses.replace(arguments.settings, weights=expanded(arguments.settings.weights))
    show_messages()
    result = finetune(config, arguments.out)
    if result.scores is not None:
        command = command_line("evaluate-coco", arguments)
        written = write_page(result, arguments.out, pictures=config.pictures, command=command)
        print(result.scores.table(), f"note: {COMPARABLE}", written, sep="\n")
    elif result.ending.signal is None and result.ending.exit_code and is_first_process():
        print(f"{result.ending.verdict.status}: {result.ending.checkpoint}")
    return result.ending.exit_code
