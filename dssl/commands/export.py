"""``dssl export``: weights for other programs, each loaded back by the program that will read it."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dssl.commands.arguments import WeightsArguments, check_counts, default_folder, open_encoder
from dssl.commands.options import Usage
from dssl.errors import DsslError
from dssl.files import write_text


@dataclass(frozen=True, kw_only=True)
class Arguments(WeightsArguments):
    """Write an encoder for torchvision, timm, Detectron2, ONNX, torch.export, the Hub or as safetensors, with a model card.

    dssl loads each file back (with the program it is for, except Detectron2) and compares the features. If that program lacks the
    encoder (small, whitened, or a CIFAR stem), the error shows the code that rebuilds it.
    """

    USAGE: ClassVar[Usage] = Usage(
        positional={"weights": "WEIGHTS"},
        examples=(
            "dssl export runs/photos",
            "dssl export runs/photos --formats torchvision timm",
            "dssl export runs/photos --formats onnx --onnx-preprocessing",
        ),
    )

    formats: tuple[str, ...] = ("safetensors",)
    """Any of: safetensors torchvision timm detectron2 onnx torch hub."""
    onnx_preprocessing: bool = False
    """The ONNX file takes uint8 pixels (N x height x width x channels, of the image size) and normalises them itself."""
    license: str = "unknown"
    """With the format hub: the licence of the weights for its card, as the Hub calls it, such as apache-2.0."""
    out: Path | None = None
    """The folder for the files; by default export in the run's folder, and for a file of weights in the current one."""

    def __post_init__(self) -> None:
        check_counts(self, "image_size")


def run(arguments: Arguments, *, repository: str = "USER/NAME") -> int:
    """``repository`` is the one of the Hub, where it is known."""
    from dssl.run import EVALUATION_FILE
    from dssl.weights.formats import (
        CARD_FILE,
        HUB_FOLDER,
        card,
        check_formats,
        clear_other_weights,
        earlier_files,
        evaluation_of,
        export,
    )
    from dssl.weights.hub import hub_card

    if not arguments.formats:
        raise DsslError("--formats is empty: expected names such as safetensors torchvision")
    if arguments.onnx_preprocessing and "onnx" not in arguments.formats:
        raise DsslError(
            f"--onnx-preprocessing belongs to the format onnx, and --formats is {' '.join(arguments.formats)}"
        )
    loaded = open_encoder(arguments)
    base, out = default_folder(arguments.weights), folder_of(arguments)
    own = arguments.out is None and (arguments.weights.is_dir() or base != Path())
    check_formats(loaded, out, arguments.formats)
    for line in clear_other_weights(out, loaded, own=own):
        print(line)
    print(f"writing and verifying {', '.join(arguments.formats)} ...", file=sys.stderr, flush=True)
    exported = export(loaded, out, formats=arguments.formats, onnx_preprocessing=arguments.onnx_preprocessing)
    for file in exported:
        print(file.text(), *(f"    {line}" for line in file.code), sep="\n")
    print(f"preprocessing: {loaded.preprocessing.text()}")
    measured = base / "evaluation"
    evaluation, comparison = (evaluation_of(loaded, measured / file) for file in (EVALUATION_FILE, "comparison.json"))
    path = out / CARD_FILE
    earlier = earlier_files(path, exported)
    write_text(path, card(loaded, exported, evaluation=evaluation, comparison=comparison, earlier=earlier))
    known = ", with what dssl evaluate measured" if evaluation is not None or comparison is not None else ""
    print(f"{path}: model card{known}")
    for file in exported:
        if file.path.parent.name == HUB_FOLDER:
            text = hub_card(
                loaded,
                file,
                evaluation=evaluation,
                comparison=comparison,
                license=arguments.license,
                repository=repository,
            )
            write_text(file.path.with_name(CARD_FILE), text)
            print(f"{file.path.with_name(CARD_FILE)}: model card for the Hub; look at it before you push")
    return 0


def folder_of(arguments: Arguments) -> Path:
    """Where the files are written."""
    return arguments.out or default_folder(arguments.weights) / "export"
