"""Which encoder a file of foreign weights was made with, read from the names and shapes of its tensors."""

import re
from collections.abc import Mapping

from torch import Tensor

_BLOCKS: dict[tuple[bool, tuple[int, ...]], str] = {
    (False, (2, 2, 2, 2)): "resnet18",
    (False, (3, 4, 6, 3)): "resnet34",
    (True, (3, 4, 6, 3)): "resnet50",
    (True, (3, 4, 23, 3)): "resnet101",
    (True, (3, 8, 36, 3)): "resnet152",
}
_BLOCK = re.compile(r"^(.*?)(layer|res|)(\d)\.(\d+)\.conv([123])\.weight$")


def infer_encoder(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a ResNet of torchvision, with ``-cifar`` where the stem is a 3x3 one; None where it is no such ResNet."""
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
