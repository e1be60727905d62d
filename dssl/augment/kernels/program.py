"""The entries into the kernels: the plan of a batch, and all views of one or more images by its numbers, a call each."""

import hashlib
import logging
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit, types
from numba.core import event
from numba.core.cgutils import voidptr_t
from numba.extending import intrinsic

from dssl.augment import kernels as code
from dssl.augment.kernels import color, geometry, resample
from dssl.augment.kernels.corrupt import corrupt
from dssl.augment.kernels.draw import draw_all
from dssl.augment.kernels.geometry import copy
from dssl.augment.kernels.vectors import interleave
from dssl.files import first_alone, forget_kernels

_logger = logging.getLogger("dssl")
_lock = threading.Lock()


@intrinsic
def _pointer(typing, address):
    """What numba has no name for: an integer as a pointer."""
    return types.voidptr(address), lambda context, builder, signature, values: builder.inttoptr(values[0], voidptr_t)


@njit(nogil=True)
def _resize(image, kind, values, workspace, target):
    height, width = image.shape[0], image.shape[1]
    top, left, h, w = 0, 0, height, width
    if kind == code.CROP:
        top, left, h, w = resample.crop_box(height, width, values)
    elif values[0] == 1.0:
        h = w = min(height, width)
        top, left = (height - h) // 2, (width - w) // 2
    resample.resized_crop(image, top, left, h, w, workspace, target)


@njit(nogil=True)
def _in_place(kind, flat, values):
    """An operation that looks at one pixel (and the image's statistics) at a time; False for any other kind."""
    line = flat.reshape(flat.size)
    if kind == code.BRIGHTNESS:
        color.brightness(line, np.float32(values[0]))
    elif kind == code.CONTRAST:
        color.contrast(flat, np.float32(values[0]))
    elif kind == code.COLOR:
        color.color(flat, np.float32(values[0]))
    elif kind == code.HUE:
        color.hue(flat, values[0])
    elif kind == code.GRAY:
        color.grayscale(flat)
    elif kind == code.AUTOCONTRAST:
        color.autocontrast(flat, values[0])
    elif kind == code.EQUALIZE:
        color.equalize(flat, values[0])
    elif kind == code.INVERT:
        color.invert(line)
    elif kind == code.POSTERIZE:
        color.posterize(line, int(values[0]))
    elif kind == code.SOLARIZE:
        color.solarize(line, np.int32(values[0]))
    elif kind == code.SOLARIZE_ADD:
        color.solarize_add(line, np.int32(values[0]))
    else:
        return False
    return True


@njit(nogil=True)
def _moved(kind, source, target, values):
    """An operation whose result is written to ``target``; False for any other kind."""
    if kind == code.FLIP:
        geometry.flip(source, target)
    elif kind == code.AFFINE:
        geometry.affine(source, target, values)
    elif kind == code.SHARPNESS:
        if source.shape[1] > 2 and source.shape[2] > 2:
            geometry.sharpness(source, target, np.float32(values[0]))
        else:
            copy(source.reshape(source.size), target.reshape(target.size))
    elif kind == code.JIGSAW:
        geometry.jigsaw(source, target, int(values[0]), values[1:])
    else:
        return corrupt(kind, source, target, values)
    return True


@njit(nogil=True)
def _interleave(planes, channels, start, count, out):
    """So many pixels from ``start`` on, channels x pixels, as pixels x channels into the beginning of ``out``."""
    pixels = planes.size // channels
    if channels == 3 and count >= 16:
        red, green, blue = np.uint64(start), np.uint64(start + pixels), np.uint64(start + 2 * pixels)
        for part in range(0, count, 16):
            x = np.uint64(min(part, count - 16))  # the last sixteen may be done twice
            interleave(planes, red + x, green + x, blue + x, out, np.uint64(3) * x)
    else:
        for i in range(count):
            for c in range(channels):
                out[i * channels + c] = planes[c * pixels + start + i]


@njit(nogil=True)
def _emit_floats(planes, channels, out, scale, offset):
    """Normalised, in two steps through a short line: interleaved bytes first, since interleaving floats is slow."""
    pixels, length = planes.size // channels, scale.size // channels
    line = np.empty(scale.size, np.uint8)
    for start in range(0, pixels, length):
        count = min(length, pixels - start)
        _interleave(planes, channels, start, count, line)
        place = np.uint64(start * channels)
        for i in range(np.uint64(count * channels)):
            out[place + i] = np.float32(line[i]) * scale[i] + offset[i]


def _sources_digest() -> int:
    """A number that changes when the source of any kernel does."""
    digest = hashlib.blake2b(digest_size=7)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest(), "little")


class Kernels(NamedTuple):
    """The two entries: one draws a plan, the other makes the views by it."""

    draw: Any
    run: Any


def _build(sources: int, *, cache: bool) -> Kernels:
    # ``sources`` is in the closure because numba keys a cached function by its own file and its closure only: without
    # it an edit in another kernel file would go on running the old machine code
    @njit(nogil=True, cache=cache)
    def draw(indices, streams, script, numbers, rows, bounds, offsets, size, codes, values):
        """See ``draw_all``."""
        if sources == 0:
            return False
        return draw_all(indices, streams, script, numbers, rows, bounds, offsets, size, codes, values)

    @njit(nogil=True, cache=cache)
    def run(
        places, codes, values, offsets, views, row, done, planes, workspace, slots,
        bytes_out, floats_out, as_float, out_row, scale, offset,
    ):  # fmt: skip
        """Makes the views of some images; stops at a custom operation and returns its step, else -1.

        ``places`` has the address, height and width of each image: one call for images of any sizes, since entering and
        leaving a call takes the interpreter's lock. ``scale`` and ``offset`` repeat the numbers of the channels over a
        line of pixels. ``slots`` says which of the planes holds each view, and last which one is spare; it carries over
        when a call resumes after a custom operation (``done`` is then that operation's step, otherwise -1).
        """
        if sources == 0:
            return -1
        number_of_views = views.shape[0]
        channels, pixels = planes.shape[1], planes.shape[2] * planes.shape[3]
        for item in range(places.shape[0]):
            whole = carray(_pointer(places[item, 0]), (places[item, 1], places[item, 2], channels), np.uint8)
            for view in range(number_of_views):
                first, stop, origin = views[view, 0], views[view, 1], views[view, 2]
                if done >= stop:
                    continue
                resumed = done >= first
                if origin >= 0 and not resumed:
                    copy(
                        planes[slots[origin]].reshape(channels * pixels), planes[slots[view]].reshape(channels * pixels)
                    )
                sized = resumed or origin >= 0
                for step in range(max(first, done + 1), stop):
                    kind = codes[row + item, step]
                    if kind == code.SKIP:
                        continue
                    if kind == code.CUSTOM:
                        return step
                    numbers = values[row + item, offsets[step] : offsets[step + 1]]
                    here = planes[slots[view]]
                    if kind == code.CROP or kind == code.RESIZE:
                        image = whole
                        if sized:
                            again = np.empty(here.size, np.uint8)
                            _interleave(here.reshape(here.size), channels, 0, pixels, again)
                            image = again.reshape(here.shape[1], here.shape[2], channels)
                        _resize(image, kind, numbers, workspace, here)
                        sized = True
                    elif kind == code.CUTOUT:
                        geometry.cutout(here, int(numbers[0]), int(numbers[1]), int(numbers[2]), int(numbers[3]))
                    elif kind == code.BLUR:
                        geometry.blur(here, planes[slots[number_of_views]], numbers[0])
                    elif not _in_place(kind, here.reshape(channels, pixels), numbers):
                        spare = slots[number_of_views]
                        if _moved(kind, here, planes[spare], numbers):
                            slots[number_of_views] = slots[view]
                            slots[view] = spare
                flat = planes[slots[view]].reshape(channels * pixels)
                if as_float:
                    out = floats_out[view, out_row + item].reshape(flat.size)
                    _emit_floats(flat, channels, out, scale, offset)
                else:
                    _interleave(flat, channels, 0, pixels, bytes_out[view, out_row + item].reshape(flat.size))
        return -1

    return Kernels(draw, run)


class Announce(event.Listener):  # type: ignore[misc]  # numba has no types
    """Tells the user why the first use takes so long."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.said = False

    def on_start(self, event: object) -> None:
        if not self.said:
            self.said = True
            _logger.warning("compiling the image kernels, about a minute; %s", self.where)

    def on_end(self, event: object) -> None:
        pass


def uncompiled_kernels() -> tuple[Kernels, str]:
    """The entries before they are compiled, and where their machine code will be cached."""
    sources = _sources_digest()
    try:
        kernels = _build(sources, cache=True)
    except RuntimeError:  # numba found no directory that it may write to, neither the package's nor the user's
        kernels = _build(sources, cache=False)
        return kernels, "at every start, because no cache directory is writable: set NUMBA_CACHE_DIR to one that is"
    return kernels, f"once: later starts read them from {kernels.run.stats.cache_path}"


def _array(kind: types.Type, dimensions: int) -> types.Type:
    return types.Array(kind, dimensions, "C")


# the one signature of each: every array is C-contiguous, every flag and count 64 bits wide
_DRAW = (
    _array(types.int64, 1), _array(types.uint64, 1), _array(types.int64, 2), _array(types.float64, 2),
    _array(types.float64, 2), _array(types.int64, 1), _array(types.int64, 1), types.int64, _array(types.int32, 2),
    _array(types.float64, 2),
)  # fmt: skip
_RUN = (
    _array(types.int64, 2), _array(types.int32, 2), _array(types.float64, 2), _array(types.int64, 1),
    _array(types.int64, 2), types.int64, types.int64, _array(types.uint8, 4), _array(types.uint8, 1),
    _array(types.int64, 1), _array(types.uint8, 5), _array(types.float32, 5), types.boolean, types.int64,
    _array(types.float32, 1), _array(types.float32, 1),
)  # fmt: skip
_compiled: Kernels | None = None


def _compile(kernels: Kernels) -> Kernels:
    kernels.draw.compile(_DRAW)
    kernels.run.compile(_RUN)
    for kernel in kernels:
        kernel.disable_compile()
    return kernels


def load_kernels() -> Kernels:
    """The compiled entries, from numba's cache or, with a message, compiled now."""
    global _compiled
    if _compiled is None:
        with _lock:
            if _compiled is None:
                kernels, where = uncompiled_kernels()
                folder, module = kernels.run.stats.cache_path, Path(__file__).stem
                with (
                    event.install_listener("numba:compile", Announce(where)),
                    first_alone(folder, kept=f"{module}.*.run-*.nbi"),
                ):
                    try:
                        _compiled = _compile(kernels)
                    except Exception:  # a damaged cache can fail in any way; a real error comes back without it
                        forget_kernels(folder, module=module)
                        _compiled = _compile(uncompiled_kernels()[0])
    return _compiled
