"""Weights from files of other programs: tensors by name, never any code, and the ResNet that their names and shapes show."""

import io
import pickle
import re
import stat
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dssl.config_io import flat
from dssl.errors import DsslError, one_line

# what NumPy's arrays are made of inside a pickle; each of these only builds an array
_HARMLESS = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "scalar"),
    ("_codecs", "encode"),
    ("collections", "OrderedDict"),
}

_BLOCKS: dict[tuple[bool, tuple[int, ...]], str] = {
    (False, (2, 2, 2, 2)): "resnet18",
    (False, (3, 4, 6, 3)): "resnet34",
    (True, (3, 4, 6, 3)): "resnet50",
    (True, (3, 4, 23, 3)): "resnet101",
    (True, (3, 8, 36, 3)): "resnet152",
}
_BLOCK = re.compile(r"^(.*?)(layer|res|)(\d)\.(\d+)\.conv([123])\.weight$")


class _ArraysOnly(pickle.Unpickler):
    """Detectron2's files are pickles of NumPy arrays: anything else that a pickle asks for is refused by name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor of a file under its dotted name, and the file's metadata (safetensors only).

    Reads safetensors, what torch.save writes, and Detectron2's pickles of arrays. A file that would run code is refused.
    """
    if path.is_dir():
        raise DsslError(f"{path} is a folder: expected a file of weights, or the folder of a run")
    if not path.exists():
        raise DsslError(f"{path} does not exist: expected weights (.safetensors, .pt, .pth, .ckpt, .pkl)")
    if not path.is_file():
        kind = "a FIFO" if stat.S_ISFIFO(path.stat().st_mode) else "a device or a socket"
        raise DsslError(f"{path} is {kind}: expected a regular file of weights; write the weights to a file first")
    with path.open("rb") as file:
        start = file.read(16)
    metadata: dict[str, str] = {}
    content: Any
    if path.suffix == ".safetensors":
        content, metadata = _safetensors(path)
    elif start.startswith(b"PK\x03\x04") or b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19" in start:
        content = _torch(path)
    elif start[:1] == b"\x80":
        content = _pickle(path)
    else:
        raise DsslError(
            f"{path} is not a file of weights: expected safetensors, a file of torch.save, or Detectron2's .pkl"
        )
    tensors = _tensors(content)
    if not tensors:
        raise DsslError(f"{path} holds no tensors: expected a state dict, alone or inside a checkpoint")
    return tensors, metadata


def infer_encoder(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a ResNet of torchvision, with ``-cifar`` where the stem is a 3x3 one; None for any other network."""
    families: dict[str, dict[int, set[int]]] = {}
    kinds: dict[str, set[int]] = {}
    widths: dict[str, int] = {}
    for key, value in tensors.items():
        if found := _BLOCK.match(key):
            family = found[1] + found[2]
            families.setdefault(family, {}).setdefault(int(found[3]), set()).add(int(found[4]))
            kinds.setdefault(family, set()).add(int(found[5]))
            if (found[4], found[5]) == ("0", "1"):
                widths[f"{family}{found[3]}"] = value.shape[0]
    for family, stages in families.items():
        if len(stages) != 4:
            continue
        name: str | None = _BLOCKS.get((3 in kinds[family], tuple(len(stages[stage]) for stage in sorted(stages))))
        width = widths.get(f"{family}{min(stages)}")
        stem = _stem(tensors, family)
        if name is not None and stem is not None and width == 64:  # others are wide ResNets or ResNeXts
            return f"{name}-cifar" if stem.shape[-1] == 3 else name
    return None


def _stem(tensors: Mapping[str, Tensor], family: str) -> Tensor | None:
    prefix = re.sub(r"(layer|res)$", "", family)
    for name in ("conv1.weight", "0.weight", "stem.conv1.weight"):
        if (value := tensors.get(prefix + name)) is not None:
            return value
    return None


def _safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118 not a dict
    except (SafetensorError, ValueError, RuntimeError, TypeError) as error:
        raise DsslError(f"{path} is damaged or not a safetensors file: {one_line(error)}; obtain it again") from None


def _torch(path: Path) -> Any:
    if zipfile.is_zipfile(path):
        _check_archive(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)|class ([\w.]+)", str(error))
        asks = f"it asks for {found[1] or found[2]}" if found else "it holds more than tensors and plain data"
        raise DsslError(
            f"{path} is refused, since reading it could run code ({asks}): if you trust it, save only its tensors with "
            "the packages that wrote it: import torch; "
            f"torch.save(torch.load({str(path)!r}, weights_only=False)['state_dict'], 'weights.pth')"
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError, OSError, AttributeError, TypeError) as error:
        raise DsslError(f"{path} is damaged: {one_line(error)}; obtain it again") from None


def _check_archive(path: Path) -> None:
    """Compare every record with its CRC-32, which torch.load does not; refuse archives that are programs."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            names = [record.filename.partition("/")[2] for record in records]
            # torch can be told to write no CRC, and then writes the same value everywhere: nothing to compare with
            checked = len(records) < 2 or len({record.CRC for record in records}) > 1
            bad = archive.testzip() if checked else None
    except (zipfile.BadZipFile, zlib.error, RuntimeError, OSError, EOFError, ValueError) as error:
        raise DsslError(f"{path} is damaged: {one_line(error)}; obtain it again") from None
    if bad is not None:
        raise DsslError(f"{path} is damaged: {bad} does not match its CRC-32; obtain it again")
    if "constants.pkl" in names:
        raise DsslError(
            f"{path} is a TorchScript program, not a file of weights: if you trust it, save only its tensors: "
            f"import torch; torch.save(torch.jit.load({str(path)!r}).state_dict(), 'weights.pth')"
        )
    if "models/model.json" in names:
        raise DsslError(
            f"{path} is a program of torch.export, not a file of weights: if you trust it, save only its tensors: "
            f"import torch; torch.save(torch.export.load({str(path)!r}).state_dict, 'weights.pth')"
        )


def _pickle(path: Path) -> Any:
    try:
        return _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="latin1").load()
    except pickle.UnpicklingError as error:
        raise DsslError(f"{path} is refused, since reading it could run code ({one_line(error)})") from None
    except Exception as error:  # a pickle can fail in every way that exists
        raise DsslError(f"{path} is damaged: {type(error).__name__}: {one_line(error)}; obtain it again") from None


def _tensors(content: Any) -> dict[str, Tensor]:
    """The tensors inside nested dicts; everything else (epochs, names, settings) is left out."""
    found = flat(content) if isinstance(content, Mapping) else {}
    numbers = {
        name: torch.from_numpy(np.array(one)) if isinstance(one, np.ndarray) and one.dtype.kind in "fiu" else one
        for name, one in found.items()
    }
    return {name: one for name, one in numbers.items() if isinstance(one, Tensor)}
