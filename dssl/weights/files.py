"""Weights from files of other programs: tensors by name, never any code, and the ResNet that their names and shapes show."""

import io
import math
import pickle
import pickletools
import re
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from dssl.errors import DsslError, one_line

_BLOCKS: dict[tuple[bool, tuple[int, ...]], str] = {
    (False, (2, 2, 2, 2)): "resnet18",
    (False, (3, 4, 6, 3)): "resnet34",
    (True, (3, 4, 6, 3)): "resnet50",
    (True, (3, 4, 23, 3)): "resnet101",
    (True, (3, 8, 36, 3)): "resnet152",
}
_MAX_DEPTH, _MAX_ENTRIES = 32, 1_000_000
_BLOCK = re.compile(r"^(.*?)(layer|res|)(\d)\.(\d+)\.conv([123])\.weight$")


class _Type:
    """In place of ``numpy.dtype``: the code of a plain number and its byte order."""

    def __init__(self, code: object, *_flags: object) -> None:
        if code not in _NUMBERS:
            raise ValueError(f"it holds an array of {code!r}, expected numbers")
        self._code, self._order = str(code), "="

    def __setstate__(self, state: tuple[object, ...]) -> None:
        version, order, *rest = state
        if version != 3 or order not in ("<", ">", "|", "=") or rest != [None, None, None, -1, -1, 0]:
            raise ValueError(f"the type of an array is described by {state!r}, expected a plain number")
        self._order = str(order)

    def to_numpy(self) -> np.dtype[Any]:
        return np.dtype(self._order + self._code)


class _Array:
    """In place of ``numpy.ndarray`` and of the function that pickles make an empty one with, for BUILD to fill."""

    def __init__(self, *_empty: object) -> None:
        self._parts: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[object, ...]) -> None:
        _version, shape, kind, fortran, content = state
        self._parts = content, kind, shape, "F" if fortran else "C"

    def to_tensor(self) -> Tensor:
        content, kind, shape, order = self._parts
        if isinstance(content, str):
            content = content.encode("latin1")  # what Python 2 wrote
        if not (isinstance(content, bytes | bytearray) and isinstance(kind, _Type) and order in ("C", "F")):
            raise ValueError("an array is not made of bytes, a type and a shape")
        if not (isinstance(shape, tuple) and all(isinstance(side, int) and side >= 0 for side in shape)):
            raise ValueError(f"an array has the shape {shape!r}")
        stored = kind.to_numpy()
        if len(content) != math.prod(shape) * stored.itemsize:
            raise ValueError(f"an array of {shape} has {len(content)} bytes")
        numbers = np.frombuffer(content, stored).reshape(shape, order=order)
        return torch.from_numpy(numbers.astype(stored.newbyteorder("="), order="C"))


class _Buffer(_Array):
    """In place of the function that pickles of protocol 5 make an array with."""

    def __init__(self, *parts: object) -> None:
        self._parts = parts


class _Stateless:
    """Of which a pickle may set the state, and nothing happens."""

    def __setstate__(self, _state: object) -> None:
        pass


class _Scalar(_Stateless):
    """In place of NumPy's scalars (an epoch, a loss): no weight is one."""

    def __init__(self, *_parts: object) -> None:
        pass


class _Bytes(_Stateless):
    """In place of ``_codecs.encode``, with which pickles of protocol 2 write bytes."""

    def __new__(cls, text: str, encoding: str) -> bytes:  # type: ignore[misc]  # a class, so that BUILD cannot change it
        if encoding != "latin1":
            raise ValueError(f"bytes are written in {encoding!r}, expected 'latin1'")
        return text.encode("latin1")


class _Table(dict[Any, Any], _Stateless):
    """In place of ``collections.OrderedDict``, without the attributes that PyTorch's have."""


_NUMBERS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")
# NumPy's own types and functions trust a pickle with addresses: none of them is ever given to one
_IN_PLACE: dict[tuple[str, str], type] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _Buffer,
    ("numpy.core.multiarray", "scalar"): _Scalar,
    ("_codecs", "encode"): _Bytes,
    ("collections", "OrderedDict"): _Table,
}


class _ArraysOnly(pickle.Unpickler):
    """Detectron2's files are pickles of NumPy arrays: whatever else a pickle asks for is an error that names it."""

    def find_class(self, module: str, name: str) -> Any:
        key = module.replace("numpy._core.", "numpy.core."), name  # NumPy 2 has moved them
        if key not in _IN_PLACE:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _IN_PLACE[key]


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor of a file under its dotted name, and the file's metadata (safetensors only).

    Reads safetensors, what torch.save writes, and Detectron2's pickles of arrays. Never runs code of a file.
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
    try:
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
    except DsslError:
        raise
    except Exception as error:  # each of the formats can fail in every way that exists
        raise DsslError(f"{path} is damaged: {type(error).__name__}: {one_line(error)}; obtain it again") from None
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
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118 not a dict


def _torch(path: Path) -> Any:
    if zipfile.is_zipfile(path):
        _check_archive(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)|class ([\w.]+)", str(error))
        asks = f"it asks for {found[1] or found[2]}" if found else "it holds more than tensors and plain data"
        raise DsslError(
            f"{path} was not read, since reading it could run code ({asks}): if you trust it, save only its tensors with "
            "the packages that wrote it: import torch; "
            f"torch.save(torch.load({str(path)!r}, weights_only=False)['state_dict'], 'weights.pth')"
        ) from None


def _check_archive(path: Path) -> None:
    """Compare every record with its CRC-32, which torch.load does not; refuse archives that are programs."""
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        names = [record.filename.partition("/")[2] for record in records]
        # torch can be told to write no CRC, and then writes the same value everywhere: nothing to compare with
        checked = len(records) < 2 or len({record.CRC for record in records}) > 1
        bad = archive.testzip() if checked else None
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
    content = path.read_bytes()
    for opcode, argument, _ in pickletools.genops(content):
        # the unpickler makes and clears a table of as many places as the highest number says
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(str(argument)) > len(content):
            raise ValueError(f"it numbers an object {argument}")
    try:
        return _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
    except pickle.UnpicklingError as error:
        raise DsslError(f"{path} was not read, since reading it could run code ({one_line(error)})") from None


def _tensors(content: Any) -> dict[str, Tensor]:
    """The tensors inside nested dicts; everything else (epochs, names, settings) is left out."""
    tensors: dict[str, Tensor] = {}
    tables = [("", iter(content.items()))] if isinstance(content, Mapping) else []
    for _ in range(_MAX_ENTRIES):  # a table may be within itself, or a hundred times within each of a hundred others
        if not tables:
            return tensors
        prefix, entries = tables[-1]
        if (entry := next(entries, None)) is None:
            tables.pop()
            continue
        key, value = entry
        if isinstance(value, Mapping):
            if len(tables) == _MAX_DEPTH:
                raise ValueError(f"tables within tables, more than {_MAX_DEPTH} deep")
            tables.append((f"{prefix}{key}.", iter(value.items())))
        elif isinstance(value, Tensor | _Array):
            tensors[f"{prefix}{key}"] = value if isinstance(value, Tensor) else value.to_tensor()
    raise ValueError(f"more than {_MAX_ENTRIES:,} entries")
