"""Which tensor of a file is which of an encoder: by prefix and by the names that other programs use; and which ResNet it is."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dssl.errors import DsslError

_COUNTER = "num_batches_tracked"
_SECOND = re.compile(r"momentum|target|teacher|ema|encoder_k|_k\b|key|old|optimizer", re.IGNORECASE)
_RESNETS: dict[tuple[bool, tuple[int, ...]], str] = {
    (False, (2, 2, 2, 2)): "resnet18",
    (False, (3, 4, 6, 3)): "resnet34",
    (True, (3, 4, 6, 3)): "resnet50",
    (True, (3, 4, 23, 3)): "resnet101",
    (True, (3, 8, 36, 3)): "resnet152",
}
"""By whether a block has three convolutions, and the blocks of each stage."""
_BLOCK = re.compile(r"^(.*?)(layer|res|)(\d)\.(\d+)\.conv1\.weight$")
_STAGES = ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4")


def _numbered(positions: Mapping[str, str]) -> Callable[[str], str]:
    def rename(name: str) -> str:
        first, dot, rest = name.partition(".")
        return f"{positions[first]}{dot}{rest}" if first in positions else name

    return rename


def from_detectron2(name: str) -> str:
    """``res2.0.conv1.norm.weight`` is torchvision's ``layer1.0.bn1.weight``."""
    name = name.removeprefix("backbone.").removeprefix("bottom_up.").removeprefix("stem.")
    name = re.sub(r"^res(\d)\.", lambda match: f"layer{int(match[1]) - 1}.", name)
    name = name.replace("shortcut.norm.", "downsample.1.").replace("shortcut.weight", "downsample.0.weight")
    return re.sub(r"conv(\d)\.norm\.", r"bn\1.", name)


def to_detectron2(name: str) -> str:
    """torchvision's ``layer1.0.bn1.weight`` is ``res2.0.conv1.norm.weight``."""
    name = re.sub(r"bn(\d)\.", r"conv\1.norm.", name)
    name = name.replace("downsample.0.", "shortcut.").replace("downsample.1.", "shortcut.norm.")
    if name.startswith("layer"):
        return f"res{int(name[5]) + 1}{name[6:]}"
    return f"stem.{name}"


def infer_encoder(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a ResNet of torchvision, with ``-cifar`` where the stem is a 3x3 one; None for any other network."""
    networks: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for key in tensors:
        if block := _BLOCK.match(key):
            networks.setdefault((block[1], block[2]), []).append((int(block[3]), int(block[4])))
    for (prefix, word), blocks in networks.items():
        depths = tuple(Counter(stage for stage, _ in sorted(blocks)).values())
        first = "{}{}{}.{}.conv".format(prefix, word, *min(blocks))
        name = _RESNETS.get((f"{first}3.weight" in tensors, depths))
        stems = [tensors.get(prefix + stem) for stem in ("conv1.weight", "0.weight", "stem.conv1.weight")]
        stem = next((weight for weight in stems if weight is not None), None)
        # wider ones are wide ResNets or ResNeXts
        if name is not None and stem is not None and len(tensors[f"{first}1.weight"]) == 64:
            return f"{name}-cifar" if stem.shape[-1] == 3 else name
    return None


_WITHOUT_RELU = "numbered children of a ResNet without ReLU and max-pool"
_DIALECTS: dict[str, Callable[[str], str]] = {
    "the encoder's own names": lambda name: name,
    "numbered children of a torchvision ResNet": _numbered(dict(zip("014567", _STAGES, strict=True))),
    _WITHOUT_RELU: _numbered(dict(zip("012345", _STAGES, strict=True))),
    "Detectron2's names": from_detectron2,
}
_AS_EXPORTED = (
    "taken as RGB, with strides in the 3x3 convolutions, as dssl exports it: "
    "Detectron2's own models see BGR, and most have the strides in the 1x1"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchReport:
    """What of a file became which part of an encoder."""

    path: Path
    prefix: str
    """The prefix of the names in the file."""
    names: str
    """Whose names they are."""
    loaded: int
    total: int
    """Tensors that were loaded, and that the encoder has; they differ only by counters of BatchNorm."""
    ignored: tuple[str, ...]
    """What else is in the file: heads, a second network, an optimiser."""
    other_prefixes: tuple[str, ...] = ()
    """Where the file holds the encoder once more: a momentum encoder."""
    stem: str | None = None
    """Which of the 3x3 stems the file's names show; None where they do not show it."""
    notes: tuple[str, ...] = ()
    """What was changed to fit, and what the file does not show and the user stated."""

    def text(self) -> str:
        """One line for people."""
        where = f" under {self.prefix!r}" if self.prefix else ""
        line = f"{self.path}: {self.loaded} of {self.total} tensors loaded{where} ({self.names})"
        if self.loaded < self.total:
            line += f"; the {self.total - self.loaded} counters {_COUNTER} are not in the file and do not matter"
        if self.other_prefixes:
            line += f"; also there, not used: {', '.join(prefix or 'the top level' for prefix in self.other_prefixes)}"
        if self.ignored:
            groups = sorted({_group(name, self.prefix) for name in self.ignored})
            shown = ", ".join(groups[:6]) + (", ..." if len(groups) > 6 else "")
            line += f"; {len(self.ignored)} others ignored ({shown})"
        return "; ".join((line, *self.notes))


def _group(name: str, prefix: str) -> str:
    """The first part of a name in which it differs from the prefix: ``projector`` of ``state_dict.projector.0.weight``."""
    parts, own = name.split("."), prefix.split(".")
    return next(part for number, part in enumerate(parts) if number >= len(own) or part != own[number])


@dataclass(frozen=True, slots=True)
class _Candidate:
    prefix: str
    dialect: str
    names: dict[str, str]
    """The encoder's name to the file's."""
    fitting: int

    @property
    def rank(self) -> tuple[int, bool, bool, int]:
        """More tensors that fit in shape, then more in name, then the network that is trained, then the shortest prefix."""
        return self.fitting, not _SECOND.search(self.prefix), self.dialect == next(iter(_DIALECTS)), -len(self.prefix)


def match(encoder: nn.Module, tensors: Mapping[str, Tensor], *, path: Path) -> tuple[dict[str, Tensor], MatchReport]:
    """The encoder's state dict out of a file's tensors; raises unless every tensor of the encoder is there and fits."""
    wanted = encoder.state_dict()
    first, colour = _first_layer(encoder, wanted)
    candidates = _candidates(wanted, tensors, {first: colour})
    if not candidates:
        raise DsslError(
            f"{path} contains no weights of this encoder: none of its {len(tensors)} tensors (such as {next(iter(tensors))!r}) "
            f"has a name like {next(iter(wanted))!r}; choose the encoder that the file was made with"
        )
    best = max(candidates, key=lambda candidate: candidate.rank)
    summed = ""
    if (name := best.names.get(first, "")) and tensors[name].shape == colour:
        # on an image whose three channels are equal the sum gives what the colour weights give
        tensors = {**tensors, name: tensors[name].sum(dim=1, keepdim=True)}
        summed = f"{name} is summed over its 3 channels, since the images are gray"
    tensors, resized = _positions(wanted, tensors, best)
    _refuse_misfit(encoder, wanted, tensors, best, path)
    chosen = {name: tensors[best.names[name]] for name in wanted if name in best.names}
    broken = [
        name for name, value in chosen.items() if value.is_floating_point() and not bool(torch.isfinite(value).all())
    ]
    if broken:
        raise DsslError(
            f"{path}: {broken[0]} contains NaN or infinite values: the weights are broken; use an older checkpoint"
        )
    used = set(best.names.values())
    twins = {
        one.prefix: set(one.names.values()) for one in candidates
        if one.fitting == best.fitting and "optimizer" not in one.prefix and used.isdisjoint(one.names.values())
    }  # fmt: skip
    under = tuple(prefix for prefix in twins if prefix) or ("\0",)
    known = used.union(*twins.values())
    ignored = tuple(name for name in tensors if name not in known and not name.startswith(under))
    notes = (summed, resized, _AS_EXPORTED if "Detectron2" in best.dialect else "")
    report = MatchReport(
        path=path, prefix=best.prefix, names=best.dialect, loaded=len(chosen), total=len(wanted), ignored=ignored,
        other_prefixes=tuple(twins), stem=_stem(best, tensors), notes=tuple(filter(None, notes)),
    )  # fmt: skip
    return {**{name: value for name, value in wanted.items() if name.endswith(_COUNTER)}, **chosen}, report


def _first_layer(encoder: nn.Module, wanted: Mapping[str, Tensor]) -> tuple[str, torch.Size | None]:
    """The name of the first layer's weights, and their shape in a network for colour images if this one is for gray images."""
    path = next((path for path, module in encoder.named_modules() if isinstance(module, nn.Conv2d)), "")
    name = f"{path}.weight"
    own = wanted.get(name)
    if own is None or own.shape[1] != 1 or encoder.get_submodule(path).groups != 1:
        return name, None
    return name, torch.Size((own.shape[0], 3, *own.shape[2:]))


def _positions(
    wanted: Mapping[str, Tensor], tensors: Mapping[str, Tensor], best: _Candidate
) -> tuple[Mapping[str, Tensor], str]:
    """The tensors with a transformer's positions resized to the encoder's grid of patches, and a note that says so.

    Interpolated as timm does. Tokens of class and registers come first and are kept; what is not a square grid is left as it is.
    """
    changed, note = dict(tensors), ""
    for own, there in best.names.items():
        old, new = tensors[there], wanted[own]
        if own.rpartition(".")[2] not in ("pos_embed", "pos_embedding") or old.shape == new.shape:
            continue
        if old.dim() != 3 or new.dim() != 3 or (1, new.shape[2]) != (old.shape[0], old.shape[2]):
            continue
        for first in range(min(old.shape[1], new.shape[1])):
            before, after = math.isqrt(old.shape[1] - first), math.isqrt(new.shape[1] - first)
            if before**2 == old.shape[1] - first and after**2 == new.shape[1] - first:
                grid = old[:, first:].float().reshape(1, before, before, -1).permute(0, 3, 1, 2)
                grid = F.interpolate(grid, size=(after, after), mode="bicubic", antialias=True)
                patches = grid.permute(0, 2, 3, 1).flatten(1, 2).to(old.dtype)
                changed[there] = torch.cat([old[:, :first], patches], dim=1)
                note = f"{there} is resized from {before} x {before} patches to {after} x {after}"
                break
    return changed, note


def _stem(best: _Candidate, tensors: Mapping[str, Tensor]) -> str | None:
    """Which 3x3 stem the names show: all stems have the same tensors, so that most names show none."""
    if best.dialect == _WITHOUT_RELU:
        return "norelu"  # layer1 comes right after conv1 and bn1
    first = best.names.get("conv1.weight")
    shortcuts = any(".shortcut." in name for name in best.names.values())  # only the CIFAR ResNet that lightly has too
    own = best.dialect == next(iter(_DIALECTS))
    return "cifar" if own and shortcuts and first is not None and tensors[first].shape[-1] == 3 else None


def _candidates(
    wanted: Mapping[str, Tensor], tensors: Mapping[str, Tensor], also: Mapping[str, torch.Size | None]
) -> list[_Candidate]:
    """Every prefix of the file under which some name of the encoder stands, in each dialect.

    A tensor fits in the encoder's shape, or in the one that it may have ``also``.
    """
    prefixes = {""}
    for name in tensors:
        parts = name.split(".")
        prefixes |= {".".join(parts[:count]) + "." for count in range(1, min(len(parts), 7))}
    found = []
    for prefix in sorted(prefixes, key=len):
        inside = [name for name in tensors if name.startswith(prefix)]
        for dialect, rename in _DIALECTS.items():
            names: dict[str, str] = {}
            for name in inside:
                own = rename(name.removeprefix(prefix))
                own = own if own in wanted else own.replace(".shortcut.", ".downsample.")
                if own in wanted:
                    names[own] = name
            fitting = sum(tensors[name].shape in (wanted[own].shape, also.get(own)) for own, name in names.items())
            if fitting:
                found.append(_Candidate(prefix, dialect, names, fitting))
    return found


def _refuse_misfit(
    encoder: nn.Module, wanted: Mapping[str, Tensor], tensors: Mapping[str, Tensor], best: _Candidate, path: Path
) -> None:
    missing = [name for name in wanted if name not in best.names and not name.endswith(_COUNTER)]
    shaped = [name for name, there in best.names.items() if tensors[there].shape != wanted[name].shape]
    rest = [name.removeprefix(best.prefix) for name in tensors if name.startswith(best.prefix)]
    used = set(best.names.values())
    surplus = [
        name
        for name in rest
        if best.prefix + name not in used and _belongs(encoder, wanted, _DIALECTS[best.dialect](name))
    ]
    problems = []
    if missing:
        problems.append(f"{len(missing)} of {len(wanted)} tensors are missing, such as {missing[0]!r}")
    if shaped:
        name = shaped[0]
        there, here = tuple(tensors[best.names[name]].shape), tuple(wanted[name].shape)
        problems.append(f"{len(shaped)} have another shape, such as {name!r} {there} instead of {here}")
    if surplus:
        problems.append(f"{len(surplus)} are more than the encoder has, such as {surplus[0]!r}")
    if problems:
        raise DsslError(
            f"{path} does not fit the encoder: {'; '.join(problems)}; choose the encoder that the file was made with"
        )


def _belongs(encoder: nn.Module, wanted: Mapping[str, Tensor], name: str) -> bool:
    """Whether a tensor that the encoder lacks would be part of it: ``layer1.2.…`` is, a classifier that was removed is not."""
    first = name.partition(".")[0]
    if not any(own.partition(".")[0] == first for own in wanted):
        return False
    removed = [path for path, module in encoder.named_modules() if isinstance(module, nn.Identity) and path]
    return not any(name.startswith(f"{path}.") for path in removed)
