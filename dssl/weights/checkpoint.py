"""Checkpoints: written atomically, hashed, free of pickle.

A checkpoint is a safetensors file. Its metadata holds one JSON text, ``dssl``, with everything that is not a tensor, and the
SHA-256 of that text and of every tensor's name, type, shape and bytes. Reading checks it: any changed bit is an error.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dssl.errors import DsslError
from dssl.files import replacing

FORMAT_VERSION = 1
FOLDER = "checkpoints"
"""Of a run's folder."""
_NAME = re.compile(r"step-(\d{9,})\.safetensors")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a run is at one step: tensors by name (``method.…``, ``optimizer.…``) and everything else as plain data."""

    header: dict[str, Any]
    tensors: dict[str, Tensor]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose name starts with ``prefix.``, without it."""
        start = f"{prefix}."
        return {name.removeprefix(start): value for name, value in self.tensors.items() if name.startswith(start)}


def content_hash(text: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over everything in a checkpoint."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name].detach().contiguous().cpu()
        digest.update(f"\n{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write(path: Path, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Write a checkpoint so that the path holds the old content or the new, whatever happens; returns its hash."""
    text = json.dumps({**header, "format_version": FORMAT_VERSION}, sort_keys=True, allow_nan=False)
    # tensors that share memory (tied weights) are written once each, so they are cloned
    plain = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    digest = content_hash(text, plain)
    try:
        _sweep(path.parent)  # before the write, which may need their room
        with replacing(path) as temporary:
            save_file(plain, temporary, metadata={"dssl": text, "sha256": digest})
    except (OSError, SafetensorError) as error:
        size = sum(value.numel() * value.element_size() for value in plain.values())
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise CheckpointError(
            f"{path} could not be written ({reason}; it needs {size / 1e6:.1f} MB): earlier checkpoints are untouched; "
            "free disk space or fix the disk, and rerun the command"
        ) from error
    return digest


class CheckpointError(DsslError):
    """A checkpoint that cannot be written, or cannot be trusted."""


def read(path: Path) -> Checkpoint:
    """Read and verify a checkpoint; nothing in it is ever executed."""
    if path.exists() and not path.is_file():  # a FIFO would be waited for
        raise CheckpointError(f"{path} is not a regular file: expected a dssl checkpoint")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            text, digest = metadata.get("dssl"), metadata.get("sha256")
            if text is None or digest is None:
                raise CheckpointError(
                    f"{path} is a safetensors file but not a dssl checkpoint: its metadata has no 'dssl'"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a dict
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError) as error:
        if isinstance(error, CheckpointError | FileNotFoundError | PermissionError | IsADirectoryError):
            raise
        raise CheckpointError(f"{path} is damaged or not a dssl checkpoint: {' '.join(str(error).split())}") from None
    if content_hash(text, tensors) != digest:
        raise CheckpointError(f"{path} is damaged: its content does not match its SHA-256; use an older checkpoint")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a dssl checkpoint: its header is not a JSON object")
    version = header.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, this dssl reads version {FORMAT_VERSION}: use the dssl that wrote it"
        )
    return Checkpoint({**header, "sha256": digest}, tensors)


def path_at(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}.safetensors"


def steps_in(folder: Path) -> list[int]:
    """The steps for which a file is there, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for entry in folder.iterdir() if (match := _NAME.fullmatch(entry.name)))


def newest_good(folder: Path) -> tuple[Path, Checkpoint, list[str]] | None:
    """The newest checkpoint that can be trusted, with a line for every newer one that cannot."""
    warnings: list[str] = []
    for step in reversed(steps_in(folder)):
        path = path_at(folder, step)
        try:
            return path, read(path), warnings
        except CheckpointError as error:
            warnings.append(str(error))
        except OSError as error:  # gone since then, no permission, a loop of links
            warnings.append(f"{path} cannot be read: {error.strerror or error}")
    if warnings:
        raise CheckpointError(
            f"no checkpoint in {folder} can be trusted: {'; '.join(warnings)}; start over in another --out, or move them away"
        )
    return None


def prune(folder: Path, *, newest: int, keep: int, protected: Iterable[int]) -> None:
    """Delete all but the last ``keep`` up to the one just written, the protected ones, and what broken writes left behind.

    What comes after it is damaged, or the run would have resumed from there. It counts for nothing, and the run will replace it.
    """
    steps = [step for step in steps_in(folder) if step <= newest]
    safe = {*protected, *steps[-keep:]}
    for step in steps:
        if step not in safe:
            path_at(folder, step).unlink(missing_ok=True)
    _sweep(folder)


def _sweep(folder: Path) -> None:
    """Remove what killed writes left, ours and those of safetensors, each a checkpoint in size.

    Only the process that holds the run's lock writes here, so none of them is in use.
    """
    for leftover in (*folder.glob(".step-*.part"), *folder.glob(".tmp??????")):
        leftover.unlink(missing_ok=True)
