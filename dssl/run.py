"""A run's folder (it rejects what is not ours, holds the lock, keeps what a person reads), and how a run opens."""

import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dssl import config_io
from dssl.distributed import World, join_world
from dssl.errors import DsslError
from dssl.files import is_partial, printable, write_text
from dssl.version import VERSION
from dssl.weights import checkpoint
from dssl.weights.checkpoint import Checkpoint

_OURS = "config.json"
_OF_THE_SYSTEM = (".DS_Store", "Thumbs.db", "desktop.ini")
"""What file managers leave in any folder that they show."""
EVALUATION_FILE, EVALUATION_PAGE = "evaluation.json", "evaluation.html"
"""What `dssl evaluate` and `dssl evaluate-coco` write."""
Resumed = tuple[Path, Checkpoint, list[str]]
"""A checkpoint to resume from, its path, and a complaint about each newer one that is damaged."""


class RunFolder:
    """``config.json``, ``metrics.jsonl``, ``checkpoints/``, ``quarantine.txt``, ``views.png``, ``tensorboard/``, ``trackers/``.

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
        self.trackers = path / "trackers"
        self.start_file = path / "start.safetensors"

    @property
    def has_run(self) -> bool:
        return self.config_file.is_file()

    def check(self, changes: Callable[[dict[str, Any]], list[str]]) -> None:
        """An error if the folder has other things in it, or a run that was started with another configuration.

        ``changes`` gets what config.json says and returns what is asked for now that differs from it.
        """
        try:
            str(self.path).encode()
        except UnicodeEncodeError:
            raise DsslError(
                f"--out is {printable(str(self.path))}, whose name is not UTF-8, and safetensors could not read its checkpoints: "
                "name another folder"
            ) from None
        if self.path.exists() and not self.path.is_dir():
            raise DsslError(f"--out is {self.path}, which is a file; choose a new or empty folder")
        if self.has_run:
            if changed := changes(self.read_config()):
                raise DsslError(
                    f"{self.path} contains a run with another configuration ({'; '.join(changed)}): "
                    "use the old values to resume it, or choose another --out"
                )
            return
        # what a run that was rejected or killed before it began may have left
        left = (".lock", self.quarantine_file.name, self.checkpoints.name, *_OF_THE_SYSTEM)
        entries = [entry for folder in (self.path, self.checkpoints) if folder.is_dir() for entry in folder.iterdir()]
        others = [
            str(entry.relative_to(self.path))
            for entry in entries
            if entry.parent != self.path or (entry.name not in left and not is_partial(entry, of=_OURS))
        ]
        if others:
            raise DsslError(
                f"--out is {self.path}, which has other files ({len(others)}, such as {min(others)!r}) and no run: "
                "choose a new or empty folder"
            )

    def read_config(self) -> dict[str, Any]:
        try:
            plain = json.loads(self.config_file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            problem = f"{self.config_file} cannot be read: {error}"
            raise DsslError(f"{problem}; restore it from a checkpoint's header") from None
        if not isinstance(plain, dict) or not isinstance(plain.get("config"), dict):
            raise DsslError(f"{self.config_file} is not the configuration of a dssl run; choose another --out")
        return plain

    def write_config(self, plain: dict[str, Any]) -> None:
        """From then on the folder is a run."""
        with naming(self.config_file):
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
        if self.metrics_file.is_file():
            lines = [line + "\n" for line, record in self._lines() if record["step"] <= step]
            with naming(self.metrics_file):
                write_text(self.metrics_file, "".join(lines))

    def set_metrics_aside(self) -> Path | None:
        """A run that starts again begins a new file; the old one, if it has lines, gets the first free name of a number."""
        if not self.metrics():
            return None
        numbers = itertools.count(1)
        path = next(path for number in numbers if not (path := self.path / f"metrics.{number}.jsonl").exists())
        return self.metrics_file.rename(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process per folder. The system releases the lock when the process dies, so locks are never stale.

        A run that is rejected before it begins leaves nothing behind.
        """
        new = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        lock = self.path / ".lock"
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free = os.fstat(handle).st_nlink > 0  # else its last holder has just deleted it
            except OSError as error:
                free = False
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    problem = f"{self.path} cannot be locked ({error.strerror})"
                    raise DsslError(f"{problem}: choose an --out on a disk that supports locks") from None
            if not free:
                raise DsslError(
                    f"{self.path} is in use by another dssl process; wait for it, stop it, or choose another --out"
                )
            try:
                yield
            finally:
                if not self.has_run:
                    with suppress(OSError):
                        lock.unlink()
                        for folder in new:
                            folder.rmdir()
        finally:
            os.close(handle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that may start or resume: its processes have met, its folder is checked and locked."""

    world: World
    folder: RunFolder | None = None
    """None for a training that leaves no files."""
    kept: dict[str, Any] | None = None
    """What config.json says; None in a new run."""
    resumed: Resumed | None = None
    """The newest checkpoint that can be trusted."""
    by_content: tuple[str, ...] = ()
    """Settings that name files: a resumed run may give them another name, and compares what they hold."""

    @classmethod
    @contextmanager
    def open(
        cls, out: Path, config: config_io.Settings, *, task: str | None = None, by_content: tuple[str, ...] = ()
    ) -> Iterator["Run"]:
        """Join the other processes; the first one checks and locks the folder before any of them reads it.

        ``task`` is None for pretraining, whose config.json names none.
        """
        folder = RunFolder(out)

        def changes(kept: dict[str, Any]) -> list[str]:
            if kept.get("task") != task:
                other = kept.get("task", "pretraining")
                raise DsslError(f"{folder.path} contains a run of another kind ({other}); choose another --out")
            return config_io.difference(kept["config"], config, ignoring=by_content)

        with join_world(config.device, batch_size=config.batch_size) as world, ExitStack() as held:

            def take() -> None:
                folder.check(changes)  # before the lock, which creates the folder
                held.enter_context(folder.locked())
                folder.check(changes)  # what another process did before it let the lock go

            world.all_or_error(lambda: take() if world.first else None)
            yield cls.find(folder, world, by_content=by_content)

    @classmethod
    def find(cls, folder: RunFolder, world: World, *, by_content: tuple[str, ...] = ()) -> "Run":
        """What an earlier start left, the same on all processes: if a node sees another disk, all of them stop with a line."""
        kept = world.all_or_error(lambda: folder.read_config() if folder.has_run else None)
        resumed = world.all_or_error(lambda: None if kept is None else checkpoint.newest_good(folder.checkpoints))
        newest, started, name = "no checkpoint", "no run", folder.path.name
        if resumed is not None:
            header = resumed[1].header
            newest = f"step {header.get('step')} ({header['sha256'][:12]})"
        if kept is not None:
            started = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]
        world.agree({"dssl": VERSION, f"in {name} the run": started, f"in {name}": newest})
        return cls(world=world, folder=folder, kept=kept, resumed=resumed, by_content=by_content)

    @property
    def first_step(self) -> int:
        """A header without a step is rejected when the state is restored."""
        return 0 if self.resumed is None else int(self.resumed[1].header.get("step", 0))

    def describe(self, plain: dict[str, Any], *, earlier_fingerprints: Sequence[str] = ()) -> None:
        """The first process writes config.json, again only if the images have moved; the others wait for it.

        The fingerprint decides whether the images are those of the run: earlier versions may have had another for them.
        """
        folder, world, kept = self.folder, self.world, self.kept
        assert folder is not None
        if kept is not None and kept["fingerprint"] not in (plain["fingerprint"], *earlier_fingerprints):
            raise DsslError(
                f"the images of {plain['config']['data']} are not the ones {folder.path} was trained on (fingerprint "
                f"{plain['fingerprint'][:12]}, then {kept['fingerprint'][:12]}): restore them, or choose another --out"
            )
        world.agree({"images with the fingerprint": str(plain["fingerprint"])[:12]})

        def write() -> None:
            with naming(folder.checkpoints):
                folder.checkpoints.mkdir(parents=True, exist_ok=True)  # also if somebody moved it away
            if kept is None:
                folder.write_config(plain)
            elif any(kept["config"].get(name) != plain["config"][name] for name in self.by_content):
                folder.write_config(kept | {"config": plain["config"]})

        world.all_or_error(lambda: write() if world.first else None)


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _numbers(entry) for name, entry in value.items()}
    return math.nan if value is None else value


@contextmanager
def naming(path: Path, *, note: str = "") -> Iterator[None]:
    """The system's error for a full disk names no file; ours does."""
    try:
        yield
    except OSError as error:
        problem = f"{path} could not be written ({error.strerror})"
        raise DsslError(f"{problem}: {note}free disk space or fix the disk, and rerun the command") from error
