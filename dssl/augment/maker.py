"""ViewMaker: all views of an image, from the plan, which is drawn as arrays before any pixel is touched, to the buffers."""

import threading
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dssl import rng
from dssl.augment.operations import Floats
from dssl.augment.policy import Chain, Policy, check_channels, meanings_of, parse, run_custom, show, sizing
from dssl.augment.primitives import Script
from dssl.errors import DsslError

if TYPE_CHECKING:
    from dssl.augment.kernels.program import Kernels
    from dssl.graph import View

DEFAULT_POLICIES: Mapping[str, str] = {"standard": "standard", "heavy": "0.9*ra(2,5) | 0.1*jigsaw(4)"}
"""What the symbolic names of a graph mean unless a run says otherwise: the policies of the paper's main table."""


RawImages = Sequence[NDArray[np.uint8]] | NDArray[np.uint8]
"""Several images: of any sizes, or of one size as an array N x H x W x C."""

_LINE = 1024  # pixels that are normalised at a time


@dataclass(frozen=True, slots=True)
class Normalization:
    """Mean and standard deviation of each channel, in units of 0 .. 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean:
            raise DsslError(
                f"a normalisation needs as many means as deviations, not {len(self.mean)} and {len(self.std)}"
            )
        if not all(np.isfinite(self.mean)) or not all(0 < value < np.inf for value in self.std):
            raise DsslError(
                f"a normalisation needs finite means and positive deviations, not {self.mean} and {self.std}"
            )

    @classmethod
    def of(cls, plain: Mapping[str, Sequence[float]]) -> "Normalization":
        """The inverse of ``plain``."""
        return cls(tuple(plain["mean"]), tuple(plain["std"]))

    def plain(self) -> dict[str, list[float]]:
        """As JSON holds it."""
        return {"mean": list(self.mean), "std": list(self.std)}

    def gray(self) -> "Normalization":
        """For the gray value, a weighted sum of the channels: their plain mean is close enough."""
        return Normalization((float(np.mean(self.mean)),), (float(np.mean(self.std)),))

    def scale_and_offset(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The factor for a byte and the offset added afterwards, for each channel."""
        mean, std = np.array(self.mean), np.array(self.std)
        return (1.0 / (255.0 * std)).astype(np.float32), (-mean / std).astype(np.float32)


CIFAR10 = Normalization((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
IMAGENET = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What happens to some images in one epoch, a row each: a kernel and its numbers for each step of each view."""

    codes: NDArray[np.int32]
    values: Floats
    custom: bool
    """Whether a custom operation is among the steps."""

    def __len__(self) -> int:
        return len(self.codes)


class Program:
    """The steps of several views, in the order in which they run, without any numbers yet."""

    def __init__(self, names: Sequence[str], policies: Sequence[Policy], origins: Sequence[int], *, size: int) -> None:
        """``origins``: for each view the position of the view that it is derived from, or -1 for the image."""
        self.names, self.size = tuple(names), size
        script, bounds, stops = Script(size=size), [0], [0]
        for policy in policies:
            script.slot = 0
            policy.write(script)
            bounds.append(len(script))
            stops.append(script.step)
        self.offsets = np.cumsum([0, *script.widths])
        # first step, step after the last, and origin of each view
        self.views = np.array([stops[:-1], stops[1:], origins], np.int64).T.copy()
        self.script, self.numbers, self.operations = script.arrays()
        # where the script of each view begins, then where the last one ends
        self.bounds = np.array(bounds, np.int64)

    def plan(self, indices: NDArray[np.int64], *, seed: int, epoch: int) -> Plan:
        """Draw every number that these images need; the numbers of an image do not depend on the others."""
        codes = np.zeros((len(indices), len(self.offsets) - 1), np.int32)
        values = np.zeros((len(indices), max(1, int(self.offsets[-1]))))
        streams = np.array([rng.key(seed, "view", epoch, name) for name in self.names], np.uint64)
        own = np.array(indices, np.int64)  # the kernel is compiled for a writable array
        custom = _kernels().draw(own, streams, self.script, self.numbers, self.operations, self.bounds, self.offsets,
                                 self.size, codes, values)  # fmt: skip
        return Plan(codes=codes, values=values, custom=custom)


class Buffers(dict[str, NDArray[Any]]):
    """One array N x H x W x C per view; all of them are parts of one block, which a kernel fills in one call."""

    def __init__(self, names: Sequence[str], block: NDArray[Any]) -> None:
        super().__init__(zip(names, block, strict=True))
        self.block = block


class _Scratch(threading.local):
    """The working memory of a thread: planes for the views and a spare, and room for a half-resized image."""

    def __init__(self, views: int, channels: int, size: int) -> None:
        self.planes = np.zeros((views + 1, channels, size, size), np.uint8)
        self.slots = np.arange(views + 1, dtype=np.int64)
        self.workspace = np.empty(0, np.uint8)


class BaseViewMaker(ABC):
    """What makes the views of images."""

    names: tuple[str, ...]

    @abstractmethod
    def allocate(self, count: int, *, pinned: bool = False) -> Any:
        """Buffers for ``count`` images, N x H x W x C, one for each view; CUDA copies directly from ``pinned`` memory."""

    @abstractmethod
    def plan(self, indices: NDArray[np.int64], *, epoch: int) -> Any:
        """Draw the parameters of every view of these images."""

    @abstractmethod
    def apply_many(self, plan: Any, row: int, images: RawImages, out: Any, out_row: int) -> None:
        """Write all views of some images, of any sizes: rows of the plan from ``row`` on into rows from ``out_row`` on.

        Several threads may do so at once.
        """


class ViewMaker(BaseViewMaker):
    """Makes the views of a graph: the same bytes for the same seed, epoch, image index and view name."""

    def __init__(
        self, views: Sequence["View"], *, size: int, seed: int, channels: int = 3,
        policies: Mapping[str, str] | None = None, normalization: Normalization | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(size, int) or not 1 <= size <= 4096:
            raise DsslError(f"views of {size!r} pixels: expected a whole number from 1 to 4096")
        if normalization is not None and len(normalization.mean) != channels:
            raise DsslError(f"the normalisation has {len(normalization.mean)} channels, but the images have {channels}")
        self.names = tuple(view.name for view in views)
        for view in views:
            if view.size not in (None, size):
                raise DsslError(
                    f"view {view.name} has {view.size} px and this maker makes {size}: use a SizedViewMaker of one for each size"
                )
        self.size, self.seed, self.channels, self.normalization = size, seed, channels, normalization
        meanings = meanings_of({**DEFAULT_POLICIES, **(policies or {})})
        self.policies: Mapping[str, Policy] = {
            view.name: _complete(parse(view.policy, names=meanings), view, meanings["standard"]) for view in views
        }
        for number, view in enumerate(views):
            if view.source not in (None, *self.names[:number]):
                raise DsslError(
                    f"view {view.name} is derived from {view.source}, which is no view before it: put that first"
                )
        origins = [-1 if view.source is None else self.names.index(view.source) for view in views]
        self._program = Program(self.names, [*self.policies.values()], origins, size=size)
        for policy in self.policies.values():
            check_channels(policy, channels)
        usual = normalization or Normalization((0.0,) * channels, (1.0,) * channels)
        self._scale, self._offset = (np.tile(numbers, _LINE) for numbers in usual.scale_and_offset())
        self._scratch = _Scratch(len(views), channels, size)
        self._no_bytes = np.empty((1, 1, 1, 1, channels), np.uint8)
        self._no_floats = np.empty((1, 1, 1, 1, channels), np.float32)

    def allocate(self, count: int, *, pinned: bool = False) -> Buffers:
        """As the base class says: float32 where a normalisation is set, else uint8."""
        as_bytes = self.normalization is None
        shape = (len(self.names), count, self.size, self.size, self.channels)
        if pinned:
            import torch

            block = torch.empty(shape, dtype=torch.uint8 if as_bytes else torch.float32, pin_memory=True).numpy()
        else:
            block = np.empty(shape, np.uint8 if as_bytes else np.float32)
        return Buffers(self.names, block)

    def plan(self, indices: NDArray[np.int64], *, epoch: int) -> Plan:
        return self._program.plan(np.ascontiguousarray(indices, np.int64), seed=self.seed, epoch=epoch)

    def apply_many(self, plan: Plan, row: int, images: RawImages, out: Buffers, out_row: int) -> None:
        if not 0 <= row < row + len(images) <= len(plan):
            raise DsslError(
                f"{len(images)} images from row {row} on: expected at least one, within the {len(plan)} of the plan"
            )
        if isinstance(images, np.ndarray):
            self._check(images[0])
            whole = np.ascontiguousarray(images)
            places = np.empty((len(whole), 3), np.int64)
            places[:, 0] = whole.ctypes.data + whole.strides[0] * np.arange(len(whole))
            places[:, 1:] = whole.shape[1:3]
        else:
            for image in images:
                self._check(image)
            each = [np.ascontiguousarray(image) for image in images]  # alive until the kernel has read them
            places = np.array([(image.ctypes.data, *image.shape[:2]) for image in each], np.int64)
        self._run(plan, row, places, out, out_row)

    def _check(self, image: NDArray[np.uint8]) -> None:
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8:
            kind = image.dtype if isinstance(image, np.ndarray) else type(image).__name__
            raise DsslError(f"an image must be a uint8 array of values 0 to 255, not {kind}; convert it first")
        if image.ndim != 3 or image.shape[2] != self.channels:
            expected = f"height x width x {self.channels}"
            raise DsslError(f"an image must be {expected}, not of shape {image.shape}; convert its channels first")
        if image.shape[0] == 0 or image.shape[1] == 0 or max(image.shape) > 32767:
            raise DsslError(
                f"an image of {image.shape[0]} x {image.shape[1]} pixels cannot be used; each side must have 1 to 32767"
            )

    def _run(self, plan: Plan, row: int, places: NDArray[np.int64], out: Buffers, out_row: int) -> None:
        """Views of the images at these addresses, with their heights and widths."""
        count = len(places)
        as_float = self.normalization is not None
        if (
            not isinstance(out, Buffers)
            or out.block.dtype != (np.float32 if as_float else np.uint8)
            or (len(out.block), *out.block.shape[2:]) != (len(self.names), self.size, self.size, self.channels)
            or not 0 <= out_row <= out.block.shape[1] - count
        ):
            raise DsslError(f"row {out_row} and {count} images do not fit these buffers; make them with allocate()")
        kernel, program, scratch = _kernels().run, self._program, self._scratch
        # a second crop works on a view, which may be larger than its image
        needed = self.channels * self.size * max(self.size, int(places[:, 1:].max()))
        if scratch.workspace.size < needed:
            scratch.workspace = np.empty(needed, np.uint8)
        bytes_out, floats_out = (self._no_bytes, out.block) if as_float else (out.block, self._no_floats)
        # a custom operation stops the kernel, so such programs go image by image
        for first in range(0, count, 1 if plan.custom else count):
            part = places[first : first + 1] if plan.custom else places
            step = -1
            while True:
                step = kernel(part, plan.codes, plan.values, program.offsets, program.views, row + first, step,
                              scratch.planes, scratch.workspace, scratch.slots, bytes_out, floats_out, as_float,
                              out_row + first, self._scale, self._offset)  # fmt: skip
                if step < 0:
                    break
                self._custom_step(plan, row + first, step)

    def _custom_step(self, plan: Plan, row: int, step: int) -> None:
        program, scratch = self._program, self._scratch
        view = int(np.searchsorted(program.views[:, 1], step, side="right"))
        source, spare = scratch.slots[view], scratch.slots[-1]
        numbers = plan.values[row, program.offsets[step] : program.offsets[step + 1]]
        run_custom(numbers, scratch.planes[source], scratch.planes[spare])
        scratch.slots[view], scratch.slots[-1] = spare, source


class SizedViewMaker(BaseViewMaker):
    """Makes views of several sizes: a ``ViewMaker`` for each size, behind the same methods.

    A view's bytes do not depend on the others, so that each is what its own maker alone would make.
    """

    def __init__(self, makers: Sequence[ViewMaker], names: Sequence[str]) -> None:
        self.makers, self.names = tuple(makers), tuple(names)

    def allocate(self, count: int, *, pinned: bool = False) -> ChainMap[str, NDArray[Any]]:
        return ChainMap(*(maker.allocate(count, pinned=pinned) for maker in self.makers))

    def plan(self, indices: NDArray[np.int64], *, epoch: int) -> list[Plan]:
        return [maker.plan(indices, epoch=epoch) for maker in self.makers]

    def apply_many(self, plan: Sequence[Plan], row: int, images: RawImages, out: Any, out_row: int) -> None:
        for maker, part, buffers in zip(self.makers, plan, out.maps, strict=True):
            maker.apply_many(part, row, images, buffers, out_row)


def _kernels() -> "Kernels":
    from dssl.augment.kernels.program import load_kernels  # imports numba, which reading policies does not need

    return load_kernels()


def _complete(policy: Policy, view: "View", standard: Policy) -> Policy:
    """A policy on the image that never crops or resizes follows the standard policy, as in the paper."""
    if view.source is not None:
        return policy
    kind = sizing(policy)
    if kind == "never":
        if sizing(standard) != "first":
            raise DsslError(f"the standard policy {show(standard)!r} must start with crop, center or resize")
        return Chain((standard, policy))
    if kind == "unsure":
        raise DsslError(
            f"policy {show(policy)!r} of view {view.name} does not always start with crop, center or resize; "
            f"start it with one of them, or leave them out so that it follows the standard policy"
        )
    return policy
