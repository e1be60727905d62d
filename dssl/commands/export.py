"""``dssl export``: weights for other programs, each loaded back by the program that will read it."""

from dataclasses import dataclass
from pathlib import Path

from dssl.commands.arguments import WeightsArguments, check_counts, default_folder, open_encoder
from dssl.errors import DsslError
from dssl.files import write_text


@dataclass(frozen=True, kw_only=True)
class Arguments(WeightsArguments):
    """Write an encoder for torchvision, timm, Detectron2, ONNX, torch.export or as safetensors, with a model card.

    Each file is loaded back (by its real client, except for Detectron2's) and the features are compared. A format whose client
    lacks the encoder (small, whitened, or a CIFAR stem) is refused, with the lines of code that rebuild it.
    """

    formats: tuple[str, ...] = ("safetensors",)
    """Any of: safetensors torchvision timm detectron2 onnx torch."""
    out: Path | None = None
    """The folder for the files; by default export in the run's folder, and for a file of weights in the current one."""


def run(arguments: Arguments) -> int:
    from dssl.run import EVALUATION_FILE
    from dssl.weights.formats import CARD_FILE, card, clear_other_weights, earlier_files, evaluation_of, export

    check_counts(arguments, ("image_size",))
    if not arguments.formats:
        raise DsslError("--formats is empty: expected names such as safetensors torchvision")
    loaded = open_encoder(arguments)
    base, out = default_folder(arguments.weights), folder_of(arguments)
    own = arguments.out is None and (arguments.weights.is_dir() or base != Path())
    for line in clear_other_weights(out, loaded, own=own):
        print(line)
    exported = export(loaded, out, formats=arguments.formats)
    for file in exported:
        print(file.text(), *(f"    {line}" for line in file.code), sep="\n")
    evaluation = evaluation_of(loaded, base / "evaluation" / EVALUATION_FILE)
    path = out / CARD_FILE
    write_text(path, card(loaded, exported, evaluation=evaluation, earlier=earlier_files(path, exported)))
    print(f"{path}: model card{'' if evaluation is None else ', with what dssl evaluate measured'}")
    return 0


def folder_of(arguments: Arguments) -> Path:
    """Where the files are written."""
    return arguments.out or default_folder(arguments.weights) / "export"
