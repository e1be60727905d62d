"""``dssl tune``: find the heavy policy for your own images, without labels, in bounded time."""

import dataclasses
import json
import shlex
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from dssl import plugins
from dssl.commands.arguments import check_counts, command_line, recipe_of
from dssl.errors import DsslError, Stopped, memory_for
from dssl.files import write_text

if TYPE_CHECKING:
    from dssl.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Find the heavy policy for your images: short runs from one shared start, judged without labels, within --minutes.

    Rerunning the command resumes the search: finished trials are kept, and more --minutes add more.
    """

    source: Annotated[str, tyro.conf.arg(metavar="IMAGES")]
    """Images: a folder, a text file that lists them, shards, cifar10:FOLDER, shapes, or shapes:2000. Labels are not used."""
    minutes: float = 30.0
    """How long the search may take."""
    out: Path = Path("runs/tune")
    """The folder of the search: tune.html, tune.json, trials.jsonl and the shared start."""
    policies: tuple[str, ...] = ()
    """Try these policies instead of searching a grid; "none" is two standard pairs."""
    steps: int | None = None
    """Steps of a trial; the start has twice as many. By default chosen to fit the minutes."""
    method: str = "simclr"
    """A name that dssl train takes, such as simsiam."""
    encoder: str = "whitened"
    """The network that is trained in the search: whitened or small (for CPUs), or any other that dssl train takes."""
    image_size: int = 32
    """Width and height of a view in the search, in pixels; small, because time is short."""
    channels: Literal[1, 3] = 3
    """1 for gray images, 3 for colour."""
    graph: str = "dssl"
    """The view graph; it must have a heavy view."""
    standard: str | None = None
    """The policy of standard views; by default that of dssl train for these images."""
    batch_size: int | None = None
    """Images per step."""
    rate: float | None = None
    """Base learning rate; the peak rate is this times batch size / 256."""
    limit: int | None = None
    """Use only N of the images, chosen by the seed."""
    seed: int = 0
    """Determines the images, their views and the first weights."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """auto measures whether bf16 is faster here."""
    threads: int | None = None
    """Threads that decode images and make views; by default one per core."""
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"


def run(arguments: Arguments) -> int:
    if not arguments.minutes > 0:
        raise DsslError(f"--minutes is {arguments.minutes:g}: expected a number above 0")
    if set(arguments.policies) == {"none"}:
        raise DsslError("--policies none leaves no heavy policy to try: name some, or leave it out")
    check_counts(arguments, ("steps", "image_size", "batch_size", "threads"))
    began = time.perf_counter()
    from dssl.recipes import recipe
    from dssl.report import tune as report
    from dssl.training.tune import tune

    config = configuration(arguments)
    trained = recipe(recipe_of(arguments.source)).image_size
    if arguments.image_size == Arguments.image_size != trained:
        print(f"views of {config.image_size} px, because time is short; dssl train has {trained} px: see --image-size")
    if config.graph == "dssl":
        print(
            "graph dssl: in runs this short its direction protects the encoder from a bad policy, so that most policies are "
            "inconclusive; --graph heavy tells more of them apart"
        )
    needed = f"batch_size {config.batch_size}, image_size {config.image_size} and the encoder {config.encoder}"
    try:
        with memory_for(needed, "lower one of them; finished trials are kept"):
            search = tune(
                config, arguments.out, minutes=arguments.minutes, policies=arguments.policies, steps=arguments.steps,
                say=lambda line: print(line, flush=True),
            )  # fmt: skip
    except KeyboardInterrupt:  # between two trainings: finished trials are kept there too
        raise Stopped(signal.SIGINT) from None
    line = None if search.best is None else train_line(arguments, search.best.policy)
    file, html = arguments.out / "tune.json", arguments.out / "tune.html"
    write_text(file, json.dumps(search.plain() | {"command": line}, indent=2) + "\n")
    write_text(html, report.html(search, line=line, command=command_line("tune", arguments)))
    print(f"\n{file}\n{html}\n{time.perf_counter() - began:.0f} s\n\n{report.summary(search, line=line)}")
    tried = [trial for trial in search.trials if trial is not search.control]
    return 3 if tried and search.best is None else 0  # as a run that collapsed


def configuration(arguments: Arguments) -> "RunConfig":
    """The built-in recipe's heads, which are narrow, with the encoder and the normalisation for images from anywhere."""
    from dssl.methods import MethodSettings, SimCLRConfig
    from dssl.recipes import recipe

    base, usual = recipe("shapes", method=arguments.method), recipe(recipe_of(arguments.source))
    method: MethodSettings = base.method
    batch_size, rate = base.batch_size, base.optimizer.rate
    if isinstance(method, SimCLRConfig):  # tuned on CIFAR-10: docs/results/encoder-search.md
        method, batch_size, rate = dataclasses.replace(method, temperature=0.2), 128, 0.2
    if arguments.rate is not None:
        rate = arguments.rate
    same = ("limit", "image_size", "channels", "encoder", "graph", "seed", "precision", "threads", "device")
    return dataclasses.replace(
        base, data=arguments.source, normalization="measure", method=method,
        standard=arguments.standard or _standard_in(arguments.out) or usual.standard,
        batch_size=arguments.batch_size or batch_size,
        optimizer=dataclasses.replace(base.optimizer, rate=rate, warmup_epochs=0),
        knn_every=0,  # labels are not used
        **{name: vars(arguments)[name] for name in same},
    )  # fmt: skip


def _standard_in(out: Path) -> str | None:
    """The standard policy of the search in this folder: unless another is asked for it stays, whatever the recipe's is now."""
    from dssl.run import RunFolder

    folder = RunFolder(out)
    return folder.read_config()["config"].get("standard") if folder.has_run else None


def train_line(arguments: Arguments, policy: str) -> str:
    """The command that trains with the policy: the recipe for these images, with what was asked of the search."""
    words = ["dssl", "train", recipe_of(arguments.source), "--data", arguments.source, "--method", arguments.method]
    words += ["--graph", arguments.graph, "--heavy", policy]
    default = Arguments(source=arguments.source)
    for name in ("encoder", "image_size", "channels", "standard", "batch_size", "limit", "seed", "device"):
        if (value := vars(arguments)[name]) != vars(default)[name]:
            words += [f"--{name.replace('_', '-')}", str(value)]
    if arguments.rate is not None:
        words += ["--optimizer.rate", str(arguments.rate)]
    return shlex.join([*words, *plugins.words()])
