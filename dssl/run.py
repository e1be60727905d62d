"""A run's folder (it refuses what is not ours, holds the lock, keeps what a person looks at), and how a run opens."""

import errno
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dssl import config_io
from dssl.distributed import World, join_world
from dssl.errors import DsslError
from dssl.files import is_partial, write_text
from dssl.version import VERSION
from dssl.weights import checkpoint
from dssl.weights.checkpoint import Checkpoint

_OURS = "config.json"
EVALUATION_FILE, EVALUATION_PAGE = "evaluation.json", "evaluation.html"
"""What `dssl evaluate` and `dssl evaluate-coco` write."""
Resumed = tuple[Path, Checkpoint, list[str]]
"""A checkpoint to resume from, its path, and a complaint about each newer one that is damaged."""
T = TypeVar("T", bound=config_io.Settings)


class RunFolder:
    """``config.json``, ``metrics.jsonl``, ``checkpoints/``, ``quarantine.txt``, ``views.png``, ``tensorboard/``.

    ``start.safetensors`` is the encoder that a run with ``init`` started from.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / _OURS
        self.metrics_file = path / "metrics.jsonl"
        self.checkpoints = path / checkpoint.FOLDER
        self.quarantine_file = path / "quarantine.txt"
        self.views_file = path / "views.png"
        self.tensorboard = path / "tensorboard"
        self.start_file = path / "start.safetensors"

    @property
    def has_run(self) -> bool:
        return self.config_file.is_file()

    def check(self, changes: Callable[[dict[str, Any]], list[str]]) -> None:
        """Refuse a folder with other things in it, and a run that was started with another configuration.

        ``changes`` gets what config.json says and returns what is asked for now that differs from it.
        """
        if self.path.exists() and not self.path.is_dir():
            raise DsslError(f"--out is {self.path}, which is a file; name a new or empty folder")
        if not self.has_run:
            entries = self.path.iterdir() if self.path.is_dir() else ()
            # what a run that was refused or killed before it began may have left
            left = (
                ".lock",
                self.quarantine_file.name,
                self.checkpoints.name,
                "config.tmp",
            )  # the last: earlier versions
            others = [entry.name for entry in entries if entry.name not in left and not is_partial(entry, of=_OURS)]
            if self.checkpoints.is_dir():
                others += [f"{self.checkpoints.name}/{entry.name}" for entry in self.checkpoints.iterdir()]
            if others:
                raise DsslError(
                    f"--out is {self.path}, which has other files ({len(others)}, such as {sorted(others)[0]!r}) and no run: "
                    "name a new or empty folder"
                )
            return
        changed = changes(self.read_config())
        if changed:
            raise DsslError(
                f"{self.path} holds a run with another configuration ({'; '.join(changed)}): "
                "use the old values to resume it, or name another --out"
            )

    def read_config(self) -> dict[str, Any]:
        try:
            plain = json.loads(self.config_file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise DsslError(
                f"{self.config_file} cannot be read: {error}; restore it from a checkpoint's header"
            ) from None
        if not isinstance(plain, dict) or "config" not in plain:
            raise DsslError(f"{self.config_file} is not the configuration of a dssl run; name another --out")
        return plain

    def write_config(self, plain: dict[str, Any]) -> None:
        """Written once, whole or not at all: from then on the folder is a run."""
        with _naming(self.config_file):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            for leftover in self.path.glob(f".{_OURS}.*"):  # of a start that was killed; we hold the lock
                leftover.unlink()
            write_text(self.config_file, json.dumps(plain, indent=2) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl; a null, which the log writes for what is not a number, is NaN."""
        return [_numbers(record) for _, record in self._lines()]

    def _lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Whole lines of metrics.jsonl and their records; a line that was cut short by a kill is skipped."""
        if not self.metrics_file.is_file():
            return
        for line in self.metrics_file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield line, record

    def drop_metrics_after(self, step: int) -> None:
        """A resumed run repeats the steps after its checkpoint, so their old lines are dropped."""
        if not self.metrics_file.is_file():
            return
        kept = [line + "\n" for line, record in self._lines() if record["step"] <= step]
        with _naming(self.metrics_file):
            write_text(self.metrics_file, "".join(kept))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process per folder. The system releases the lock when the process dies, so locks are never stale."""
        self.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise DsslError(
                        f"{self.path} cannot be locked ({error.strerror}): name an --out on a disk that supports locks"
                    ) from None
                raise DsslError(
                    f"{self.path} is in use by another dssl process; wait for it, stop it, or name another --out"
                ) from None
            yield
        finally:
            os.close(handle)


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run that may start or resume: its folder is checked and locked, its processes have met."""

    folder: RunFolder
    world: World
    kept: dict[str, Any] | None
    """What config.json says; None in a new run."""
    resumed: Resumed | None
    """The newest checkpoint that can be trusted."""

    def describe(self, plain: dict[str, Any]) -> None:
        """The first process writes config.json, once; the others wait for it."""
        folder, world = self.folder, self.world
        world.agree({"images with the fingerprint": str(plain["fingerprint"])[:12]})
        world.all_or_error(lambda: folder.write_config(plain) if world.first and not folder.has_run else None)


@contextmanager
def open_run(
    folder: RunFolder, config: T, *, default: Callable[[], T], task: str | None = None, device: str, batch_size: int
) -> Iterator[OpenRun]:
    """Join the other processes; the first one checks and locks the folder before any of them reads it.

    ``default()`` has the settings that the configuration of an earlier start may lack. ``task`` is None for pretraining, whose
    config.json names none.
    """

    def changes(kept: dict[str, Any]) -> list[str]:
        if kept.get("task") != task:
            other = kept.get("task", "pretraining")
            raise DsslError(f"{folder.path} holds a run of another kind ({other}); name another --out")
        return config_io.difference(
            config_io.read(kept["config"], default=default(), where=str(folder.config_file)), config
        )

    with join_world(device, batch_size=batch_size) as world, ExitStack() as held:

        def take() -> None:
            folder.check(changes)  # before the lock, which creates the folder
            held.enter_context(folder.locked())
            folder.check(changes)  # what another process did before it let the lock go

        world.all_or_error(lambda: take() if world.first else None)
        yield found_run(folder, world)


def found_run(folder: RunFolder, world: World) -> OpenRun:
    """What an earlier start left, the same on all processes: where a node sees another disk, all of them stop with a line."""
    kept = world.all_or_error(lambda: folder.read_config() if folder.has_run else None)
    resumed = world.all_or_error(lambda: None if kept is None else checkpoint.newest_good(folder.checkpoints))
    found, started = "no checkpoint", "no run"
    if resumed is not None:
        header = resumed[1].header
        found = f"step {header.get('step')} ({header['sha256'][:12]})"
    if kept is not None:
        started = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]
    world.agree({"dssl": VERSION, f"in {folder.path.name} the run": started, f"in {folder.path.name}": found})
    return OpenRun(folder, world, kept, resumed)


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _numbers(one) for name, one in value.items()}
    return math.nan if value is None else value


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """The system's error for a full disk names no file; ours does."""
    try:
        yield
    except OSError as error:
        raise DsslError(
            f"{path} could not be written ({error.strerror}): free disk space or fix the disk, and rerun the command"
        ) from error
