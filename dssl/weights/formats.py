"""Writers of every format; each file is read back (by its real client, except Detectron2) and must give equal features."""

import dataclasses
import json
import pickle
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dssl import rng
from dssl.errors import DsslError, choices
from dssl.files import replacing
from dssl.models import build_encoder, evaluating, size_arguments
from dssl.weights.checkpoint import content_hash
from dssl.weights.encoder import Encoder
from dssl.weights.load import ENCODER_KEY, open_weights
from dssl.weights.match import from_detectron2, to_detectron2
from dssl.weights.rebuild import base_name, classifier_path, rebuild_lines, refuse_unless_held

_RESNET = re.compile(r"resnet(18|34|50|101|152)")
"""Those of torchvision: timm's relatives have other stems, names or blocks."""

TOLERANCE = {"onnx": 1e-4, "torch": 1e-6}
"""How far features may differ; all other formats must give the same bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A file, and what its client said when it loaded it."""

    format: str
    path: Path
    client: str
    """What loaded it, with its version."""
    tensors: int
    difference: float
    """Largest difference between the client's features and the encoder's, relative to the largest feature."""
    code: tuple[str, ...]
    """How to load it."""
    note: str = ""

    def text(self) -> str:
        """One line for people."""
        line = f"{self.path}: every tensor loaded ({self.tensors}) by {self.client}, {self.agreement}"
        return f"{line}; {self.note}" if self.note else line

    @property
    def agreement(self) -> str:
        """``largest difference 0.0`` where the features are the same bits."""
        return f"largest difference {self.difference:.3g}" if self.difference else "largest difference 0.0"


def probe_images(loaded: Encoder, count: int = 3) -> Tensor:
    """Images of noise, always the same, to compare features on."""
    size, channels = loaded.image_size, loaded.channels
    values = rng.uniforms(rng.key(0, "export"), np.arange(count), channels * size * size)
    return torch.from_numpy(4 * values - 2).float().reshape(count, channels, size, size)


def _difference(expected: Tensor, found: Tensor) -> float:
    if expected.shape != found.shape or not bool(torch.isfinite(found).all()):
        return float("inf")
    return float((expected - found).abs().max() / expected.abs().max().clamp(min=1e-12))


def _features(encoder: nn.Module, images: Tensor) -> Tensor:
    with evaluating(encoder):
        values: Tensor = encoder(images)
    return values


def _torchvision(loaded: Encoder, path: Path) -> Exported:
    import torchvision

    if loaded.name.startswith("timm:"):
        raise DsslError(f"torchvision has no {loaded.name}: use --formats timm or safetensors")
    refuse_unless_held(loaded, "torchvision")
    with replacing(path) as temporary:
        torch.save(loaded.network.state_dict(), temporary)
    client = torchvision.models.get_model(
        base_name(loaded), weights=None, **size_arguments(loaded.name, loaded.image_size)
    )
    parent, _, child = classifier_path(loaded).rpartition(".")
    setattr(client.get_submodule(parent), child, nn.Identity())
    state = torch.load(path, weights_only=True)
    client.load_state_dict(state, strict=True)
    code = [line.replace("safetensors.torch.load_file", "torch.load") for line in rebuild_lines(loaded, path.name)]
    code[0] = "import torch, torchvision"
    return _compared(loaded, client, "torchvision", path, f"torchvision {torchvision.__version__}", len(state), code)


def _timm(loaded: Encoder, path: Path) -> Exported:
    try:
        import timm
    except ImportError:
        raise DsslError("--formats timm needs timm to verify the file: pip install 'dssl[timm]'") from None
    refuse_unless_held(loaded, "timm")
    name = base_name(loaded)
    state = {key: value.contiguous() for key, value in loaded.network.state_dict().items()}
    client = None
    if timm.is_model(name):
        client = build_encoder(f"timm:{name}", image_size=loaded.image_size, channels=loaded.channels)
    if client is None or client.state_dict().keys() != state.keys():
        lines = "; ".join(rebuild_lines(loaded, "FILE")[1:])
        raise DsslError(f"timm has no {name} with these names: use --formats torchvision or safetensors and: {lines}")
    with replacing(path) as temporary:
        save_file(state, temporary)
    client.load_state_dict(load_file(path), strict=True)
    code = rebuild_lines(dataclasses.replace(loaded, name=f"timm:{name}"), path.name)
    note = _features_only(loaded, path, name)
    return _compared(loaded, client, "timm", path, f"timm {timm.__version__}", len(state), code, note)


def _features_only(loaded: Encoder, path: Path, name: str) -> str:
    """timm's pyramid of feature maps, for detection and segmentation; only ResNets have the same names there."""
    if not _RESNET.fullmatch(name):
        return ""
    import timm

    pyramid = timm.create_model(name, pretrained=False, features_only=True, in_chans=loaded.channels)
    pyramid.load_state_dict(load_file(path), strict=True)
    images = probe_images(loaded)
    with evaluating(pyramid):
        last: Tensor = pyramid(images)[-1]
    difference = _difference(_features(loaded.network, images), last.mean(dim=(2, 3)))
    if difference > 1e-5:
        raise DsslError(f"{path}: timm's features_only differs by {difference:.3g}: the file is not usable there")
    return "features_only loads it strictly too"


def _detectron2(loaded: Encoder, path: Path) -> Exported:
    refuse_unless_held(loaded, "Detectron2")
    name = base_name(loaded)
    if not _RESNET.fullmatch(name):
        raise DsslError(
            f"Detectron2 has names only for ResNets, not for {name}: use --formats torchvision, timm or onnx"
        )
    arrays = {
        to_detectron2(key): value.numpy()
        for key, value in loaded.network.state_dict().items()
        if not key.endswith("num_batches_tracked")
    }
    with replacing(path) as temporary:
        content = {"model": arrays, "__author__": "dssl", "matching_heuristics": True}
        temporary.write_bytes(pickle.dumps(content, protocol=4))
    again = open_weights(path, encoder=loaded.name, image_size=loaded.image_size)
    assert all(from_detectron2(key) in loaded.network.state_dict() for key in arrays)
    mean, std = (
        [round(255 * one, 3) for one in part] for part in (loaded.normalization.mean, loaded.normalization.std)
    )
    code = [
        f'cfg.MODEL.WEIGHTS = "{path.name}"; cfg.MODEL.RESNETS.DEPTH = {name.removeprefix("resnet")}',
        f'cfg.INPUT.FORMAT = "RGB"; cfg.MODEL.PIXEL_MEAN = {mean}; cfg.MODEL.PIXEL_STD = {std}',
        "cfg.MODEL.RESNETS.STRIDE_IN_1X1 = False",
    ]
    note = "read back by dssl under Detectron2's names, without Detectron2"
    return _compared(loaded, again.network, "detectron2", path, "dssl", len(arrays), code, note)


def _onnx(loaded: Encoder, path: Path) -> Exported:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 (torch's exporter needs it)
    except ImportError as error:
        raise DsslError(f"--formats onnx needs {error.name}: pip install 'dssl[onnx]'") from None
    images = probe_images(loaded)
    with warnings.catch_warnings(), replacing(path) as temporary:
        warnings.simplefilter("ignore")  # of torch's own exporter
        torch.onnx.export(
            loaded.network, (images,), temporary, input_names=["images"], output_names=["features"], dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},), external_data=False, verbose=False,
        )  # fmt: skip
    model = onnx.load(path)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    worst = 0.0
    for part in (images, images[:1]):  # the batch is free
        (found,) = session.run(None, {"images": part.numpy()})
        worst = max(worst, _difference(_features(loaded.network, part), torch.from_numpy(found)))
    return Exported(
        format="onnx",
        path=path,
        client=f"ONNX Runtime {onnxruntime.__version__}",
        tensors=len(model.graph.initializer),
        difference=worst,
        code=(
            "import onnxruntime",
            f'session = onnxruntime.InferenceSession("{path.name}")',
            'session.run(None, {"images": images})',
        ),
        note="tensors after BatchNorm was folded in; any batch size",
    )  # fmt: skip


def _torch(loaded: Encoder, path: Path) -> Exported:
    images = probe_images(loaded)
    with warnings.catch_warnings(), replacing(path) as temporary:
        warnings.simplefilter("ignore")  # of torch's own exporter
        program = torch.export.export(loaded.network, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        with temporary.open("wb") as file:
            torch.export.save(program, file)
        with temporary.open("rb") as file:
            again = torch.export.load(file).module()
    with torch.no_grad():
        worst = max(_difference(_features(loaded.network, part), again(part)) for part in (images, images[:1]))
    return Exported(
        format="torch",
        path=path,
        client=f"torch.export of torch {torch.__version__}",
        tensors=len(program.state_dict),
        difference=worst,
        code=("import torch", f'encoder = torch.export.load("{path.name}").module()'),
        note="any batch size",
    )


def _safetensors(loaded: Encoder, path: Path) -> Exported:
    kept = ("config", "step", "epoch", "dssl_version", "fingerprint", "verdict", "range")
    header: dict[str, Any] = {
        "encoder": loaded.name,
        "image_size": loaded.image_size,
        "channels": loaded.channels,
        "normalization": loaded.normalization.plain(),
        "exported_from": loaded.sha256,
        **{key: loaded.header[key] for key in kept if key in loaded.header},
    }
    text = json.dumps(header, sort_keys=True)
    state = {key: value.contiguous() for key, value in loaded.network.state_dict().items()}
    with replacing(path) as temporary:
        save_file(state, temporary, metadata={ENCODER_KEY: text, "sha256": content_hash(text, state)})
    again = open_weights(path)
    code = ("import dssl", f'encoder = dssl.load_encoder("{path.name}")')
    return _compared(loaded, again.network, "safetensors", path, "dssl.load_encoder", len(state), code)


FORMATS: dict[str, tuple[str, Callable[[Encoder, Path], Exported]]] = {
    "safetensors": ("encoder.safetensors", _safetensors),
    "torchvision": ("encoder-torchvision.pth", _torchvision),
    "timm": ("encoder-timm.safetensors", _timm),
    "detectron2": ("encoder-detectron2.pkl", _detectron2),
    "onnx": ("encoder.onnx", _onnx),
    "torch": ("encoder.pt2", _torch),
}


def export(loaded: Encoder, folder: Path, *, formats: Sequence[str]) -> list[Exported]:
    """Write and verify the formats; a file that its client does not load exactly is removed and refused."""
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise choices("format", unknown[0], FORMATS)
    folder.mkdir(parents=True, exist_ok=True)
    done = []
    for name in dict.fromkeys(formats):
        file, write = FORMATS[name]
        exported = write(loaded, folder / file)
        if exported.difference > TOLERANCE.get(name, 0.0):
            exported.path.unlink()
            raise DsslError(
                f"{exported.path}: {exported.client} gives features that differ by {exported.difference:.3g} "
                f"(at most {TOLERANCE.get(name, 0.0):g} is allowed): the file was removed"
            )
        done.append(exported)
    return done


def _compared(
    loaded: Encoder, client: nn.Module, name: str, path: Path, version: str, tensors: int, code: Sequence[str],
    note: str = "",
) -> Exported:  # fmt: skip
    images = probe_images(loaded)
    difference = _difference(_features(loaded.network, images), _features(client, images))
    return Exported(
        format=name, path=path, client=version, tensors=tensors, difference=difference, code=tuple(code), note=note
    )
