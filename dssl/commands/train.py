"""``dssl train``: from images to a pretrained encoder."""

import dataclasses
import logging
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from dssl import config_io
from dssl.commands.arguments import is_first_process
from dssl.commands.options import NO_OPTION, Given, Typed, Usage, word
from dssl.config import RunConfig
from dssl.errors import DsslError, choices, memory_for, within
from dssl.files import write_text
from dssl.methods import METHODS, MatchConfig
from dssl.recipes import HEAVY_POLICIES, RECIPES, recipe

if TYPE_CHECKING:
    from dssl.loop import Ending

logger = logging.getLogger("dssl")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Pretrain an encoder on unlabelled images, or adapt one that is pretrained already.

    Rerun the same command to resume a run that was stopped.
    On several GPUs: torchrun --nproc-per-node 8 -m dssl train ...
    """

    USAGE: ClassVar[Usage] = Usage(
        positional={"recipe": "RECIPE", "data": "[IMAGES]"},
        groups={
            "common options": (
                "out", "minutes", "epochs", "method", "encoder", "image_size", "batch_size", "optimizer.rate", "graph", "resume",
            ),
            "data": ("limit", "channels", "range", "normalization", "shuffle", "window", "bad_share"),
            "views": ("standard", "heavy"),
            "model": ("init", "keep_head", "teacher", "teacher_encoder", "method."),
            "schedule": ("hours", "seed", "optimizer.", "adapt.", "schedule_from"),
            "hardware": (
                "device", "precision", "threads", "torch_threads", "compile", "tf32", "checkpoint_activations",
                "batchnorm_across_ranks",
            ),
        },
        examples=(
            "dssl train shapes --out runs/shapes",
            "dssl train folder photos --minutes 30",
            "dssl train adapt photos --encoder resnet50 --out runs/photos",
        ),
        defaults="The defaults depend on the recipe: dssl train RECIPE --help shows them. The settings of a method are in the "
        "help of a recipe, too: dssl train RECIPE --method NAME --help. One of them is --guard, against collapse.",
    )  # fmt: skip

    recipe: str | None = None
    """shapes (built-in images, minutes on a CPU), cifar10, imagenet (the paper's settings), folder (your own images, from
    scratch), adapt (your own images, from pretrained weights), or robust (from pretrained weights to an encoder that withstands
    noise, blur and bad light). Not needed with --config or --resume."""
    settings: RunConfig
    out: Path = Path("runs")
    """The run's folder, for checkpoints, metrics.jsonl and views.png; runs/RECIPE unless given."""
    log: tuple[str, ...] = ()
    """Trackers that get the curves, too: wandb, mlflow, trackio. A resumed run keeps its own; --log without a name drops them."""
    hours: float | None = None
    """The same as --minutes, in hours."""
    keep_head: bool = False
    """With the recipe robust: change the encoder so little that a classifier on its old features still works."""
    resume: Path | None = None
    """Resume the run in this folder, without its other options."""
    config: Path | None = None
    """Take the settings from this TOML or JSON file instead of a recipe."""
    write_config: Path | None = None
    """Only write the settings to this JSON file, for editing and use with --config."""
    typed: frozenset[str] = field(default=frozenset(), metadata=NO_OPTION)
    """The settings that were given, which no measurement chooses."""


def base(given: Given) -> Arguments:
    """The values of everything that was not given: those of the recipe, of --config, of --resume, or of the run in --out."""
    from dssl.data.source import expanded

    name, file, resumed, method = (word(given, option) for option in ("recipe", "config", "resume", "method"))
    ways = {"recipe": name, "--config": file, "--resume": resumed}
    both = [f"{way} {value}" for way, value in ways.items() if value is not None]
    if len(both) > 1:
        raise DsslError(f"both {' and '.join(both)} are given; choose one")
    keep_head = "keep_head" in given and given["keep_head"].value(bool)
    if keep_head and name is None:
        raise DsslError("--keep-head is for the recipe robust: expected dssl train robust --keep-head")
    if {"minutes", "hours"} <= given.keys():
        raise DsslError("both --minutes and --hours are given; choose one")
    if "hours" in given:
        hours = given["hours"].value(float)
        within("hours", hours, "(0, inf)")
        given["minutes"] = Typed("--hours", [f"{60 * hours:g}"])
    if {"minutes", "epochs"} <= given.keys():
        flag = given["minutes"].flag
        raise DsslError(f"both {flag} and --epochs are given; choose one: {flag} decides the number of epochs")
    if resumed is not None:
        out = Path(expanded(resumed))
        if "out" in given:
            raise DsslError(f"--out with --resume {resumed}: the run stays in its folder; leave --out out")
        if (before := _run_in(out)) is None:
            raise DsslError(
                f"--resume is {resumed}, which has no run in it (no config.json): expected the --out of dssl train"
            )
        settings, name = before
        _require_no_fewer(settings, given)
        if method is not None and method != settings.method.name:
            raise DsslError(
                f"--method {method} with --resume {resumed}: the run uses {settings.method.name}; leave --method out"
            )
    elif file is not None:
        path = Path(expanded(file))
        if not path.exists():
            raise DsslError(f"--config is {file}, which does not exist: expected a TOML or JSON file of settings")
        settings = config_io.load(path)
        if method is not None:
            raise DsslError(f"--method {method} with --config {file}: the file names the method; change it there")
        out = Path("runs") / path.stem
        if path.name == "config.json":
            with suppress(DsslError):  # of a file that is not a run's
                out = path.parent if _run_in(path.parent) is not None else out
    elif name is not None:
        out = Path("runs") / name
        _require_recipe(name)
        before = _run_in(Path(expanded(word(given, "out") or str(out))))
        if before is None:
            # settings that others of the recipe depend on: policies on the channels, warm-up on the epochs
            numbers = {key: given[key].value(int) for key in ("channels", "epochs") if key in given}
            settings = recipe(name, method=method, keep_head=keep_head, **numbers)
        else:
            settings = before[0]
            _require_same_recipe(name, before)
            _require_no_fewer(settings, given)
            if method is not None and method != settings.method.name:  # an error, which names the difference
                settings = dataclasses.replace(settings, method=recipe(name, method=method).method)
    else:
        raise DsslError(
            f"no recipe given: expected {', '.join(RECIPES)}, --config FILE or --resume RUN, as in dssl train folder photos"
        )
    for option, typed in given.items():
        group, _, setting = option.partition(".")
        if group == "method" and setting:
            _require_setting(settings, setting, given=typed.flag)
        if group == "adapt" and settings.adapt is None:
            raise DsslError(f"{typed.flag} is for the recipes adapt and robust, which start from weights; leave it out")
    run_folder = Path(expanded(word(given, "out") or str(out)))
    return Arguments(settings=settings, recipe=name, out=out, log=_trackers_in(run_folder), typed=frozenset(given))


def run(arguments: Arguments) -> int:
    config = arguments.settings
    if arguments.write_config is not None:
        import json

        write_text(arguments.write_config, json.dumps(config_io.to_dict(config), indent=2) + "\n")
        print(f"configuration written to {arguments.write_config}")
        return 0
    if config.data in ("cifar10", "imagenet", "folder") and not Path(config.data).exists():
        recipe = arguments.recipe or config.data
        hint = f"dssl train {recipe} {'cifar10:' if config.data == 'cifar10' else ''}FOLDER"
        fetch = " (dssl data cifar10 FOLDER downloads CIFAR-10)" if config.data == "cifar10" else ""
        raise DsslError(f"no images given: expected {hint}{fetch}")
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
    against = "untrained" if arguments.settings.init is None else "start"
    if objects := "".join(f", {name}=..." for name in arguments.settings.python_objects):  # which no command can name
        return f'dssl.evaluate("{arguments.out}"{objects}, against="{against}")'
    if result.knn is not None:
        corrupted = ["--corruptions"] if isinstance(arguments.settings.method, MatchConfig) else []
        return shlex.join(["dssl", "evaluate", str(arguments.out), *corrupted, "--against", against])
    return shlex.join(["dssl", "explore", str(arguments.out)])


def _chosen_in_vain(config: RunConfig) -> bool:
    """Whether a heavy policy was named, other than that of a recipe, and no view uses it."""
    used = any(re.search(r"\bheavy\b", view.policy) for view in config.view_graph.made)
    return not used and config.heavy not in HEAVY_POLICIES


def _require_setting(config: RunConfig, setting: str, *, given: str) -> None:
    """An error for a setting that only other methods have."""
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
    config, earlier = before
    adapts = "adapt" in RECIPES[name]()
    if (earlier or name) != name or adapts != (config.adapt is not None):
        other = earlier or ("one that adapts weights" if config.adapt is not None else "one that trains from scratch")
        raise DsslError(f"the run in --out was started with another recipe ({other}), not {name}: choose another --out")


def _require_no_fewer(settings: RunConfig, given: Given) -> None:
    epochs = given["epochs"].value(int) if "epochs" in given else settings.epochs
    if epochs < settings.epochs:
        raise DsslError(
            f"--epochs is {epochs}, and the run in --out has {settings.epochs}: give it more, or choose another --out"
        )


def _require_recipe(name: str) -> None:
    if name in RECIPES:
        return
    if Path(name).expanduser().exists():
        images = shlex.quote(name)
        raise DsslError(
            f"{name} is not a recipe: expected dssl train folder {images}, or, from ImageNet weights, dssl train adapt {images}"
        )
    if name in METHODS:
        raise DsslError(f"{name} is a method: expected a recipe, as in dssl train folder IMAGES --method {name}")
    raise choices("recipe", name, RECIPES)
