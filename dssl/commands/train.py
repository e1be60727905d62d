"""``dssl train``: from images to a pretrained encoder."""

import dataclasses
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dssl import config_io
from dssl.commands.arguments import is_first_process
from dssl.config import RunConfig
from dssl.errors import DsslError, memory_for
from dssl.files import write_text
from dssl.methods import METHODS
from dssl.recipes import HEAVY_POLICIES, RECIPES, recipe

logger = logging.getLogger("dssl")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Pretrain an encoder: dssl train RECIPE --data ... --out ..., or --config FILE. Rerunning the command resumes it.

    Recipes: shapes (built-in images, minutes on a CPU), cifar10, imagenet (the paper's settings), folder (your own images),
    adapt (your own images, starting from ImageNet weights or --init FILE), robust (the same weights, made to survive noise,
    blur and bad light; with --keep-head so gently that a classifier on the old features stays in use).
    --method simsiam, byol, simclr, vicreg, barlowtwins or match picks the method and the settings under method.*; --guard 1 is
    short for --method.guard 1. With several processes: torchrun --nproc-per-node 8 -m dssl train ...
    """

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    out: Path = Path("runs")
    """The run's folder: checkpoints, metrics.jsonl, views.png; runs/RECIPE by default."""
    write_config: Path | None = None
    """Only write the configuration to this JSON file, for editing and use with --config."""


def defaults(words: Sequence[str]) -> tuple[Arguments, list[str]]:
    """Take recipe, --config and --method out of the words: they decide which settings exist, and their defaults."""
    rest = [word.replace("--adapt.most-drift", "--adapt.max-drift") for word in words]  # its earlier name
    name = rest.pop(0) if rest and not rest[0].startswith("-") else None
    from dssl.data.source import expanded

    file, method = _take(rest, "--config"), _take(rest, "--method")
    if name is not None and file is not None:
        raise DsslError(f"both the recipe {name} and --config {file} are given; choose one")
    if file is not None:
        config = config_io.load(Path(expanded(file)))
        if method is not None:
            raise DsslError(f"--method {method} with --config {file}: the file names the method; change it there")
        out = Path("runs") / Path(file).stem
    elif name is not None:
        out = Path("runs") / name
        if method is None:
            method = _method_in(Path(expanded(_take([*rest], "--out") or str(out))))
        keep_head = "--keep-head" in rest
        rest = [word for word in rest if word != "--keep-head"]
        config = recipe(name, method=method, keep_head=keep_head, **_channels(rest))
    elif {"-h", "--help"} & set(rest):
        config, out = recipe("shapes", method=method), Path("runs/shapes")
    else:
        raise DsslError(f"no recipe given: expected one of {', '.join(RECIPES)}, or --config FILE")
    guard = _take(rest, "--guard")
    if guard is not None:
        _require_setting(config, "guard", given=f"--guard {guard}")
        rest += ["--method.guard", guard]
    rest = [word.replace("regularise", "regularize", 1) if word.startswith("--method.") else word for word in rest]
    for word in rest:
        if (flag := word.partition("=")[0]).startswith("--method."):
            _require_setting(config, flag.removeprefix("--method.").replace("-", "_"), given=flag)
    return Arguments(config=config, out=out), rest


def run(arguments: Arguments) -> int:
    config = arguments.config
    if arguments.write_config is not None:
        import json

        write_text(arguments.write_config, json.dumps(config_io.to_dict(config), indent=2) + "\n")
        print(f"configuration written to {arguments.write_config}")
        return 0
    if config.data in ("cifar10", "imagenet", "folder") and not Path(config.data).exists():
        hint = {"cifar10": "cifar10:FOLDER (dssl data cifar10 FOLDER fetches it)"}.get(config.data, "FOLDER")
        raise DsslError(f"this recipe needs to know where the images are: --data {hint}")
    from dssl.log import show_messages
    from dssl.report.pictures import draw_gallery
    from dssl.training.pretrain import train

    show_messages()
    if _chosen_in_vain(config):
        logger.warning(
            f"--heavy {config.heavy!r} has no effect: no view of the graph {config.graph} is heavy; see --graph dssl"
        )
    needed = f"batch_size {config.batch_size}, image_size {config.image_size} and the encoder {config.encoder}"
    with memory_for(needed, "lower one of them; checkpoints that were written stay"):
        result = train(config, arguments.out, gallery=draw_gallery)
    if result.checkpoint is not None and result.signal is None and is_first_process():
        accuracy = f", kNN {result.knn:.1f} %" if result.knn is not None else ""
        print(f"{result.verdict.status}{accuracy}: {result.checkpoint}")
    return result.exit_code


def _chosen_in_vain(config: RunConfig) -> bool:
    """Whether a heavy policy was named, other than that of a recipe, and no view uses it."""
    used = any(re.search(r"\bheavy\b", view.policy) for view in config.view_graph.made)
    return not used and config.heavy not in HEAVY_POLICIES


def _require_setting(config: RunConfig, setting: str, *, given: str) -> None:
    """Refuse what only other methods have; what none has is left to the parser, which knows the nearest name."""
    having = [name for name, kind in METHODS.items() if setting in {field.name for field in dataclasses.fields(kind)}]
    if having and config.method.name not in having:
        *others, last = having
        those = f"{', '.join(others)} and {last} have" if others else f"{last} has"
        raise DsslError(f"{given}: {config.method.name} has no {setting}, {those} one; leave it out")


def _method_in(out: Path) -> str | None:
    """The method of the run in this folder: without --method it stays, whatever the recipe's own is now."""
    from dssl.run import RunFolder

    folder = RunFolder(out)
    if not folder.has_run:
        return None
    name = config_io.flat(folder.read_config()).get("config.method.name")
    return name if name in METHODS else None


def _channels(words: Sequence[str]) -> dict[str, int]:
    """The number of channels, which the policies of a recipe depend on; empty where it is left to the recipe."""
    text = _take([*words], "--channels")
    return {"channels": int(text)} if text is not None and text.isascii() and text.isdigit() else {}


def _take(words: list[str], flag: str) -> str | None:
    """Remove ``--flag value`` or ``--flag=value`` and return the value."""
    for position, word in enumerate(words):
        if word.startswith(f"{flag}="):
            del words[position]
            return word.removeprefix(f"{flag}=")
        if word == flag:
            if position + 1 >= len(words):
                raise DsslError(f"{flag} needs a value")
            value = words[position + 1]
            del words[position : position + 2]
            return value
    return None
