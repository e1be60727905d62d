"""A run's folder: refuses what is not ours, holds the lock, and keeps what a person looks at."""

import errno
import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dssl.errors import DsslError

_OURS, _NOT_YET_OURS = "config.json", "config.tmp"


class RunFolder:
    """``config.json``, ``metrics.jsonl``, ``checkpoints/``, ``quarantine.txt``, ``views.png``, ``tensorboard/``.

    ``start.safetensors`` is the encoder that a run with ``init`` started from.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / _OURS
        self.metrics_file = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
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
            left = (".lock", self.quarantine_file.name, self.checkpoints.name, _NOT_YET_OURS)
            others = [entry.name for entry in entries if entry.name not in left]
            if self.checkpoints.is_dir():
                others += [f"{self.checkpoints.name}/{entry.name}" for entry in self.checkpoints.iterdir()]
            if others:
                raise DsslError(
                    f"--out is {self.path}, which holds {len(others)} other things ({sorted(others)[0]!r} is one) and no run; "
                    "name a new or empty folder"
                )
            return
        changed = changes(self.read_config())
        if changed:
            raise DsslError(
                f"{self.path} holds a run with another configuration ({'; '.join(changed)}): "
                "give the old values to continue it, or another --out"
            )

    def read_config(self) -> dict[str, Any]:
        try:
            plain = json.loads(self.config_file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise DsslError(
                f"{self.config_file} cannot be read: {error}; restore it from a checkpoint's header"
            ) from None
        if not isinstance(plain, dict) or "config" not in plain:
            raise DsslError(f"{self.config_file} is no configuration of a dssl run; name another --out")
        return plain

    def write_config(self, plain: dict[str, Any]) -> None:
        """Written once, whole or not at all: from then on the folder is a run."""
        with _naming(self.config_file):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            temporary = self.config_file.with_name(_NOT_YET_OURS)
            with temporary.open("w", encoding="utf-8") as file:
                file.write(json.dumps(plain, indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())  # else a power cut could leave the name without the content
            temporary.replace(self.config_file)

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
        """A resumed run says again what comes after its checkpoint, so the old lines go."""
        if not self.metrics_file.is_file():
            return
        kept = [line + "\n" for line, record in self._lines() if record["step"] <= step]
        with _naming(self.metrics_file):
            temporary = self.metrics_file.with_suffix(".tmp")
            temporary.write_text("".join(kept), encoding="utf-8")
            temporary.replace(self.metrics_file)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process a folder. The system releases the lock when the process dies, so there is no stale one."""
        self.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise DsslError(
                        f"{self.path} cannot be locked ({error.strerror}): name an --out on a disk that knows locks"
                    ) from None
                raise DsslError(
                    f"{self.path} is in use by another dssl; wait for it, stop it, or name another --out"
                ) from None
            yield
        finally:
            os.close(handle)


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
            f"{path} could not be written ({error.strerror}): make room or mend the disk and run the same command again"
        ) from error
