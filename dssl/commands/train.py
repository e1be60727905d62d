"""``dssl train``: from images to a pretrained encoder."""

import dataclasses
import logging
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dssl import config_io
from dssl.commands.arguments import is_first_process
from dssl.config import RunConfig
from dssl.errors import DsslError, choices, memory_for
from dssl.files import write_text
from dssl.methods import METHODS
from dssl.recipes import HEAVY_POLICIES, RECIPES, recipe

if TYPE_CHECKING:
    from dssl.loop import Ending

logger = logging.getLogger("dssl")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Pretrain an encoder: dssl train RECIPE --data ... --out ..., or --config FILE. Rerunning the command resumes it.

    Recipes: shapes (built-in images, minutes on a CPU), cifar10, imagenet (the paper's settings), folder (your own images),
    adapt (your own images, starting from ImageNet weights or --init FILE), robust (the same weights, made to survive noise,
    blur and bad light; with --keep-head so gently that a classifier on the old features stays in use).
    --minutes 30 (or --hours 2) fits the run to that time. --resume RUN resumes a run without its command.
    --method simsiam, byol, simclr, vicreg, barlowtwins or match picks the method and the settings under method.*; --guard 1 is
    short for --method.guard 1. With several processes: torchrun --nproc-per-node 8 -m dssl train ...
    """

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    out: Path = Path("runs")
    """The run's folder: checkpoints, metrics.jsonl, views.png; runs/RECIPE by default."""
    log: tuple[str, ...] = ()
    """Trackers that get the curves, too: wandb, mlflow, trackio. A resumed run keeps its own; --log without a name drops them."""
    write_config: Path | None = None
    """Only write the configuration to this JSON file, for editing and use with --config."""
    recipe: Annotated[str | None, tyro.conf.Suppress] = None
    """The recipe that was named."""
    typed: Annotated[frozenset[str], tyro.conf.Suppress] = frozenset()
    """The settings that were given, which no measurement chooses."""


def defaults(words: Sequence[str]) -> tuple[Arguments, list[str]]:
    """Take recipe, --config, --resume and --method out of the words: they decide which settings exist, and their defaults.

    Where a run exists, it gives the value of everything that is not typed.
    """
    rest = [word.replace("--adapt.most-drift", "--adapt.max-drift") for word in words]  # its earlier name
    name = rest.pop(0) if rest and not rest[0].startswith("-") else None
    from dssl.data.source import expanded

    file, resumed, method = _take(rest, "--config"), _take(rest, "--resume"), _take(rest, "--method")
    _take_hours(rest)
    keep_head = "--keep-head" in rest
    rest = [word for word in rest if word != "--keep-head"]
    ways = {"recipe": name, "--config": file, "--resume": resumed}
    given = [f"{way} {value}" for way, value in ways.items() if value is not None]
    if len(given) > 1:
        raise DsslError(f"both {' and '.join(given)} are given; choose one")
    flags = (word.partition("=")[0] for word in rest if word.startswith("--"))
    typed = frozenset(flag.removeprefix("--").replace("-", "_") for flag in flags)
    if keep_head and name is None:
        raise DsslError("--keep-head is for the recipe robust: expected dssl train robust --keep-head")
    if {"minutes", "epochs"} <= typed:
        raise DsslError("both --minutes and --epochs are given; choose one: the minutes decide the number of epochs")
    if resumed is not None:
        out = Path(expanded(resumed))
        if "out" in typed:
            raise DsslError(f"--out with --resume {resumed}: the run stays where it is; leave --out out")
        if (before := _run_in(out)) is None:
            raise DsslError(f"--resume is {resumed}, which holds no run of dssl train (no config.json): name its --out")
        config, name = before
        _require_no_fewer(config, rest)
        if method is not None and method != config.method.name:
            raise DsslError(
                f"--method {method} with --resume {resumed}: the run has {config.method.name}; leave it out"
            )
    elif file is not None:
        path = Path(expanded(file))
        config = config_io.load(path)
        if method is not None:
            raise DsslError(f"--method {method} with --config {file}: the file names the method; change it there")
        out = Path("runs") / path.stem
        if path.name == "config.json":
            with suppress(DsslError):  # of a file that is not a run's
                out = path.parent if _run_in(path.parent) is not None else out
    elif name is not None:
        out = Path("runs") / name
        before = _run_in(Path(expanded(_take([*rest], "--out") or str(out))))
        if before is None:
            config = recipe(name, method=method, keep_head=keep_head, **_numbers(rest, "channels", "epochs"))
        else:
            config = before[0]
            _require_same_recipe(name, before)
            _require_no_fewer(config, rest)
            if method is not None and method != config.method.name:  # an error, which names the difference
                config = dataclasses.replace(config, method=recipe(name, method=method).method)
    elif {"-h", "--help"} & set(rest):
        config, out = recipe("shapes", method=method), Path("runs/shapes")
    else:
        raise DsslError(f"no recipe given: expected one of {', '.join(RECIPES)}, --config FILE or --resume RUN")
    guard = _take(rest, "--guard")
    if guard is not None:
        _require_setting(config, "guard", given=f"--guard {guard}")
        rest += ["--method.guard", guard]
    rest = [word.replace("regularise", "regularize", 1) if word.startswith("--method.") else word for word in rest]
    for word in rest:
        if (flag := word.partition("=")[0]).startswith("--method."):
            _require_setting(config, flag.removeprefix("--method.").replace("-", "_"), given=flag)
    run_folder = Path(expanded(_take([*rest], "--out") or str(out)))
    return Arguments(config=config, out=out, log=_trackers_in(run_folder), recipe=name, typed=typed), rest


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
    from dssl.trackers import check_trackers
    from dssl.training.budget import Planner
    from dssl.training.pretrain import train

    show_messages()
    check_trackers(arguments.log)
    if _chosen_in_vain(config):
        logger.warning(
            f"--heavy {config.heavy!r} has no effect: no view of the graph {config.graph} is heavy; see --graph dssl"
        )
    if "minutes" in arguments.typed and _run_in(arguments.out) is not None:
        logger.info(f"--minutes fits a new run: this one keeps its {config.epochs} epochs")
    needed = f"batch_size {config.batch_size}, image_size {config.image_size} and the encoder {config.encoder}"
    with memory_for(needed, "lower one of them; checkpoints that were written stay"):
        planner = Planner(recipe=arguments.recipe, typed=arguments.typed)
        result = train(config, arguments.out, gallery=draw_gallery, planner=planner, trackers=arguments.log)
    if result.checkpoint is not None and result.signal is None and is_first_process():
        progress = f", {result.progress}" if result.progress else ""
        accuracy = f"; kNN {result.knn:.1f}% on the test split" if result.knn is not None else ""
        print(
            f"{result.verdict.status}{progress}{accuracy}",
            result.checkpoint,
            f"next: {_next(arguments, result)}",
            sep="\n",
        )
    return result.exit_code


def _next(arguments: Arguments, result: "Ending") -> str:
    """The command that tells more: why the run went wrong, or what its features are worth."""
    if result.exit_code:
        return shlex.join(["dssl", "report", str(arguments.out)])
    against = "untrained" if arguments.config.init is None else "start"
    if result.knn is not None:
        return shlex.join(["dssl", "evaluate", str(arguments.out), "--against", against])
    return shlex.join(["dssl", "explore", str(arguments.out)])


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


def _run_in(out: Path) -> tuple[RunConfig, str | None] | None:
    """The configuration of the run in this folder and the recipe that it was started with, if that is recorded."""
    if not (out / "config.json").is_file():  # without torch, which the folder's own module needs
        return None
    from dssl.run import RunFolder

    folder = RunFolder(out)
    kept = folder.read_config()
    if "task" in kept:  # of another command, which the run will say
        return None
    return config_io.from_dict(kept["config"], where=str(folder.config_file)), kept.get("recipe")


def _trackers_in(out: Path) -> tuple[str, ...]:
    """The trackers that the run in this folder has."""
    if not (out / "trackers").is_dir():
        return ()
    from dssl.run import RunFolder
    from dssl.trackers import trackers_of

    return trackers_of(RunFolder(out))


def _require_same_recipe(name: str, before: tuple[RunConfig, str | None]) -> None:
    """An error if the run was another recipe's: its settings, not those of the recipe that is named, would be used."""
    if name not in RECIPES:
        raise choices("recipe", name, RECIPES)
    config, earlier = before
    adapts = "adapt" in RECIPES[name]()
    if (earlier or name) != name or adapts != (config.adapt is not None):
        other = earlier or ("one that adapts weights" if config.adapt is not None else "one that trains from scratch")
        raise DsslError(f"the run in --out was started with another recipe ({other}), not {name}: name another --out")


def _require_no_fewer(config: RunConfig, words: Sequence[str]) -> None:
    epochs = _numbers(words, "epochs").get("epochs", config.epochs)
    if epochs < config.epochs:
        raise DsslError(
            f"--epochs is {epochs}, and the run in --out has {config.epochs}: give it more, or name another --out"
        )


def _take_hours(words: list[str]) -> None:
    """--hours 2 is --minutes 120."""
    if (hours := _take(words, "--hours")) is not None:
        try:
            words += ["--minutes", f"{60 * float(hours):g}"]
        except ValueError:
            raise DsslError(f"--hours is {hours}, expected a number of hours, such as --hours 2") from None


def _numbers(words: Sequence[str], *names: str) -> dict[str, int]:
    """Typed settings that others of the recipe depend on: policies on the channels, warm-up on the epochs."""
    numbers: dict[str, int] = {}
    for name in names:
        rest = [*words]
        while (text := _take(rest, f"--{name}")) is not None:  # the last one counts
            numbers |= {name: int(text)} if text.isascii() and text.isdigit() else {}
    return numbers


def _take(words: list[str], flag: str) -> str | None:
    """Remove ``--flag value`` or ``--flag=value`` and return the value."""
    for position, word in enumerate(words):
        if word.startswith(f"{flag}="):
            del words[position]
            return word.removeprefix(f"{flag}=")
        if word == flag:
            if position + 1 >= len(words):
                raise DsslError(f"{flag} needs a value; see dssl train --help")
            value = words[position + 1]
            del words[position : position + 2]
            return value
    return None
