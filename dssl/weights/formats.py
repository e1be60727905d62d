"""Writers of every format; each file is read back (by its real client, except Detectron2) and must give equal features.

Also the lines of code that build an encoder again in another program, and the model card: what the weights are, what they were
made from, how, and what was measured.
"""

import dataclasses
import functools
import importlib.util
import json
import pickle
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dssl import rng
from dssl.data.loader import CROP_RATIO
from dssl.errors import DsslError, choices
from dssl.files import replacing, write_text
from dssl.models import FOR_CPUS, PYTHON, build_encoder, evaluating, size_arguments, split_name
from dssl.text import markdown
from dssl.version import VERSION
from dssl.weights.checkpoint import content_hash
from dssl.weights.encoder import Encoder
from dssl.weights.load import ENCODER_KEY, HUB_PREFIX, open_weights
from dssl.weights.match import from_detectron2, to_detectron2

_RESNET = re.compile(r"resnet(18|34|50|101|152)")
"""Those of torchvision: timm's relatives have other stems, names or blocks."""

TOLERANCE = {"onnx": 1e-4, "torch": 1e-6}
"""How far features may differ; all other formats must give the same bits."""

CARD_FILE = "README.md"
HUB_FOLDER = "hub"
"""The folder that holds what a repository of the Hugging Face Hub does."""
_SOURCE = re.compile(r"^\| SHA-256 of the source \| ([0-9a-f]{64}) \|$", re.MULTILINE)
_FILE = re.compile(r"^`([^`]+)`: every tensor was loaded by .*?^```python$.*?^```$\n*", re.MULTILINE | re.DOTALL)
_SAME = ("sha256", "image_size", "normalization")
"""What must be equal for a number to be about the exported model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A file, and what its client said when it loaded it."""

    path: Path
    client: str
    """What loaded it, with its version."""
    tensors: int
    difference: float
    """Largest difference between the client's features and the encoder's, relative to the largest feature."""
    code: tuple[str, ...]
    """How to load it."""
    note: str = ""

    @property
    def name(self) -> str:
        """Within the folder of the export."""
        return f"{HUB_FOLDER}/{self.path.name}" if self.path.parent.name == HUB_FOLDER else self.path.name

    def text(self) -> str:
        """One line for people."""
        difference = f"{self.difference:.3g}" if self.difference else "0.0"  # where the features are the same bits
        line = f"{self.path}: every tensor loaded ({self.tensors}) by {self.client}, largest difference {difference}"
        return f"{line}; {self.note}" if self.note else line


def probe_images(loaded: Encoder, count: int = 3) -> Tensor:
    """Images of noise, always the same, to compare features on."""
    size, channels = loaded.image_size, loaded.channels
    values = rng.uniforms(rng.key(0, "export"), np.arange(count), channels * size * size)
    return torch.from_numpy(4 * values - 2).float().reshape(count, channels, size, size)


def _difference(expected: Tensor, features: Tensor) -> float:
    if expected.shape != features.shape or not bool(torch.isfinite(features).all()):
        return float("inf")
    return float((expected - features).abs().max() / expected.abs().max().clamp(min=1e-12))


def _torchvision(loaded: Encoder, path: Path) -> Exported:
    with replacing(path) as temporary:
        torch.save(loaded.network.state_dict(), temporary)
    client = build_encoder(base_name(loaded), image_size=loaded.image_size)  # torchvision's, without its last layer
    state = torch.load(path, weights_only=True)
    client.load_state_dict(state, strict=True)
    code = [line.replace("safetensors.torch.load_file", "torch.load") for line in rebuild_lines(loaded, path.name)]
    code[0] = "import torch, torchvision"
    return _compared(loaded, client, path, f"torchvision {torchvision.__version__}", len(state), code)


def in_timm(loaded: Encoder) -> bool:
    """Whether timm builds this encoder, with the same names of tensors."""
    import timm

    name, stem = split_name(loaded.name.removeprefix("timm:"))
    if stem is not None or not timm.is_model(name):
        return False
    return _timm_client(loaded).state_dict().keys() == loaded.network.state_dict().keys()


def _timm_client(loaded: Encoder) -> nn.Module:
    return build_encoder(f"timm:{base_name(loaded)}", image_size=loaded.image_size, channels=loaded.channels)


def _timm(loaded: Encoder, path: Path) -> Exported:
    import timm

    state = {key: value.contiguous() for key, value in loaded.network.state_dict().items()}
    with replacing(path) as temporary:
        save_file(state, temporary)
    client = _timm_client(loaded)
    client.load_state_dict(load_file(path), strict=True)
    code = rebuild_lines(dataclasses.replace(loaded, name=f"timm:{base_name(loaded)}"), path.name)
    return _compared(loaded, client, path, f"timm {timm.__version__}", len(state), code)


def _detectron2(loaded: Encoder, path: Path) -> Exported:
    arrays = {
        to_detectron2(key): value.numpy()
        for key, value in loaded.network.state_dict().items()
        if not key.endswith("num_batches_tracked")
    }
    with replacing(path) as temporary:
        content = {"model": arrays, "__author__": "dssl", "matching_heuristics": True}
        temporary.write_bytes(pickle.dumps(content, protocol=4))
    model = np.load(path, allow_pickle=True)["model"]  # a pickle, which is our own
    state = {from_detectron2(key): torch.from_numpy(array) for key, array in model.items()}
    client = build_encoder(loaded.name, image_size=loaded.image_size)
    counters = {key: value for key, value in client.state_dict().items() if key.endswith("num_batches_tracked")}
    client.load_state_dict(state | counters, strict=True)
    mean, std = ([round(255 * value, 3) for value in values] for values in loaded.normalization.plain().values())
    code = [
        f'cfg.MODEL.WEIGHTS = "{path.name}"; cfg.MODEL.RESNETS.DEPTH = {base_name(loaded).removeprefix("resnet")}',
        f'cfg.INPUT.FORMAT = "RGB"; cfg.MODEL.PIXEL_MEAN = {mean}; cfg.MODEL.PIXEL_STD = {std}',
        "cfg.MODEL.RESNETS.STRIDE_IN_1X1 = False",
    ]
    note = "read back by dssl under Detectron2's names, without Detectron2"
    return _compared(loaded, client, path, "dssl", len(arrays), code, note)


class _FromPixels(nn.Module):
    """The network behind the normalisation: it takes bytes, N x height x width x channels."""

    scale: Tensor
    offset: Tensor

    def __init__(self, loaded: Encoder) -> None:
        super().__init__()
        self.network = loaded.network
        for name, values in zip(("scale", "offset"), loaded.normalization.scale_and_offset(), strict=True):
            self.register_buffer(name, torch.from_numpy(values))

    def forward(self, pixels: Tensor) -> Tensor:
        features: Tensor = self.network((pixels.float() * self.scale + self.offset).permute(0, 3, 1, 2))
        return features


def _onnx(loaded: Encoder, path: Path, *, preprocessing: bool = False) -> Exported:
    import onnx
    import onnxruntime

    inputs = images = probe_images(loaded)
    network, name = loaded.network, "images"
    if preprocessing:
        inputs = (images * 64 + 128).clamp(0, 255).byte().permute(0, 2, 3, 1).contiguous()
        scale, offset = (torch.from_numpy(values) for values in loaded.normalization.scale_and_offset())
        images = (inputs * scale + offset).permute(0, 3, 1, 2)  # as evaluation does it
        network, name = _FromPixels(loaded).eval(), "pixels"
    with warnings.catch_warnings(), replacing(path) as temporary:
        warnings.simplefilter("ignore")  # of torch's own exporter
        torch.onnx.export(
            network, (inputs,), temporary, input_names=[name], output_names=["features"], dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},), external_data=False, verbose=False,
        )  # fmt: skip
    model = onnx.load(path)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(part: Tensor) -> Tensor:  # the first so many of the images
        return torch.from_numpy(session.run(None, {name: inputs[: len(part)].numpy()})[0])

    code = (
        "import onnxruntime",
        f'session = onnxruntime.InferenceSession("{path.name}")',
        f'session.run(None, {{"{name}": {name}}})',
    )
    note = "tensors after BatchNorm was folded in; any batch size"
    if preprocessing:
        note += f"; takes uint8 pixels, N x {loaded.image_size} x {loaded.image_size} x {loaded.channels}, and normalises them"
    version = f"ONNX Runtime {onnxruntime.__version__}"
    return _compared(loaded, run, path, version, len(model.graph.initializer), code, note, images=images)


def _torch(loaded: Encoder, path: Path) -> Exported:
    images = probe_images(loaded)
    with warnings.catch_warnings(), replacing(path) as temporary:
        warnings.simplefilter("ignore")  # of torch's own exporter
        program = torch.export.export(loaded.network, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        with temporary.open("wb") as file:
            torch.export.save(program, file)
        with temporary.open("rb") as file:
            again = torch.export.load(file).module()
    code = ("import torch", f'encoder = torch.export.load("{path.name}").module()')
    version = f"torch.export of torch {torch.__version__}"
    return _compared(loaded, again.__call__, path, version, len(program.state_dict), code, "any batch size")


def _safetensors(loaded: Encoder, path: Path) -> Exported:
    recorded = ("config", "step", "epoch", "dssl_version", "fingerprint", "verdict", "range")
    header: dict[str, Any] = {
        "encoder": loaded.name,
        "image_size": loaded.image_size,
        "channels": loaded.channels,
        "normalization": loaded.normalization.plain(),
        "exported_from": loaded.sha256,
        **{key: loaded.header[key] for key in recorded if key in loaded.header},
    }
    text = json.dumps(header, sort_keys=True)
    state = {key: value.contiguous() for key, value in loaded.network.state_dict().items()}
    with replacing(path) as temporary:
        save_file(state, temporary, metadata={ENCODER_KEY: text, "sha256": content_hash(text, state)})
    again = open_weights(path)
    return _compared(loaded, again.network, path, "dssl.load_encoder", len(state), _own_lines(loaded, path.name))


def _hub(loaded: Encoder, path: Path) -> Exported:
    """``config.json`` next to the weights makes the folder one that timm opens; dssl opens all of them by the weights alone."""
    path.parent.mkdir(exist_ok=True)
    exported = _safetensors(public(loaded), path)
    exported = dataclasses.replace(exported, code=("import dssl", f'encoder = dssl.load_encoder("{exported.name}")'))
    about: dict[str, Any] = {"library_name": "dssl", "encoder": loaded.name, "image_size": loaded.image_size}
    if not in_timm(loaded):
        write_text(path.with_name("config.json"), json.dumps(about, indent=2) + "\n")
        return dataclasses.replace(exported, note="timm does not have this encoder")
    import timm

    size, client = loaded.image_size, _timm_client(loaded)
    known: dict[str, Any] = client.pretrained_cfg  # type: ignore[assignment]  # a module's attribute, which timm sets
    side = round(size / CROP_RATIO)
    cropped = {
        "input_size": [loaded.channels, size, size], "interpolation": "bilinear", "crop_mode": "center",
        # timm rounds down
        "crop_pct": CROP_RATIO if int(size / CROP_RATIO) == side else size / (side + 0.5), **loaded.normalization.plain(),
    }  # fmt: skip
    # of another number of channels timm would sum the first layer again; the classifier is what a user adds
    layers = {"classifier": known.get("classifier")} | (
        {"first_conv": known.get("first_conv")} if loaded.channels == 3 else {}
    )
    arguments = size_arguments(f"timm:{base_name(loaded)}", size) | {"in_chans": loaded.channels}
    config = about | {
        "library_name": "timm", "architecture": base_name(loaded), "num_classes": 0, "num_features": loaded.dim,
        "model_args": arguments, "pretrained_cfg": {"num_classes": 0} | cropped | layers,
    }  # fmt: skip
    write_text(path.with_name("config.json"), json.dumps(config, indent=2) + "\n")
    code = ("import timm", f'encoder = timm.create_model("local-dir:{HUB_FOLDER}", pretrained=True).eval()')
    again = timm.create_model(f"local-dir:{path.parent}", pretrained=True)
    return _compared(loaded, again, path, f"timm {timm.__version__}", exported.tensors, code)


def public(loaded: Encoder) -> Encoder:
    """The same without the folders of this machine: files are only named in what its weights record."""
    if loaded.origin is None:
        return loaded
    config = dict(loaded.header.get("config") or {})
    for name in ("data", "init", "teacher"):
        if isinstance(value := config.get(name), str) and not value.startswith(HUB_PREFIX):
            kind, colon, place = value.rpartition(":")
            config[name] = f"{kind}{colon}{Path(place).name}"
    header = loaded.header | ({"config": config} if config else {})
    return dataclasses.replace(loaded, origin=dataclasses.replace(loaded.origin, header=header))


FORMATS: dict[str, tuple[str, Callable[[Encoder, Path], Exported]]] = {
    "safetensors": ("encoder.safetensors", _safetensors),
    "torchvision": ("encoder-torchvision.pth", _torchvision),
    "timm": ("encoder-timm.safetensors", _timm),
    "detectron2": ("encoder-detectron2.pkl", _detectron2),
    "onnx": ("encoder.onnx", _onnx),
    "torch": ("encoder.pt2", _torch),
    "hub": (f"{HUB_FOLDER}/model.safetensors", _hub),
}
_NEEDS = {"timm": ("timm",), "hub": ("timm",), "onnx": ("onnx", "onnxruntime", "onnxscript")}
"""The packages that write and verify a format; torch's exporter of ONNX needs the last one."""


def _check(loaded: Encoder, name: str) -> None:
    """Refuse a format that lacks its package, or whose program lacks the encoder, with the lines that rebuild it."""
    for module in _NEEDS.get(name, ()):
        if importlib.util.find_spec(module) is None:
            raise DsslError(f"--formats {name} needs {module}: pip install 'dssl[{name}]'")
    plain = loaded.channels == 3 and split_name(loaded.name)[1] is None
    held = True
    if name == "torchvision":
        held = plain and not _is_own(loaded) and not loaded.name.startswith("timm:")
    elif name == "timm":
        held = in_timm(loaded)
    elif name == "detectron2":
        held = plain and _RESNET.fullmatch(base_name(loaded)) is not None
    if not held:
        encoder = loaded.name if loaded.channels == 3 else f"{loaded.name} for {loaded.channels} channels"
        lines = "; ".join(line for line in rebuild_lines(loaded, "FILE") if not line.startswith("import"))
        raise DsslError(
            f"{name} has no {encoder}: use --formats safetensors, onnx or torch; this rebuilds it from safetensors: {lines}"
        )


def check_formats(loaded: Encoder, folder: Path, formats: Sequence[str]) -> None:
    """Refuse what cannot be written: an unknown format, one that lacks its extra or the encoder, a folder that is read-only."""
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise choices("format", unknown[0], FORMATS)
    for name in formats:
        _check(loaded, name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise DsslError(f"{folder} cannot be written to ({error.strerror}): name another --out") from None
    for path in (folder / FORMATS[name][0] for name in formats):
        if path.is_dir():
            raise DsslError(f"{path} is a folder and would have to be a file: name another --out")


def export(
    loaded: Encoder, folder: Path, *, formats: Sequence[str], onnx_preprocessing: bool = False
) -> list[Exported]:
    """Write and verify the formats, if all of them can be; a file that its client does not load exactly is removed and refused.

    With ``onnx_preprocessing`` the ONNX file takes uint8 pixels, N x height x width x channels, and normalises them itself.
    """
    check_formats(loaded, folder, formats)
    done = []
    for name in dict.fromkeys(formats):
        file, write = FORMATS[name]
        if name == "onnx":
            write = functools.partial(_onnx, preprocessing=onnx_preprocessing)
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
    loaded: Encoder, client: Callable[[Tensor], Tensor], path: Path, version: str, tensors: int, code: Sequence[str],
    note: str = "", images: Tensor | None = None,
) -> Exported:  # fmt: skip
    """What the client gives for several images and for one, as programs must take any number."""
    images = probe_images(loaded) if images is None else images
    if isinstance(client, nn.Module):
        client.eval()
    with evaluating(loaded.network):
        worst = max(_difference(loaded.network(batch), client(batch)) for batch in (images, images[:1]))
    return Exported(path=path, client=version, tensors=tensors, difference=worst, code=tuple(code), note=note)


def base_name(loaded: Encoder) -> str:
    """The name without dssl's own prefix and suffix."""
    return split_name(loaded.name.removeprefix("timm:"))[0]


def _is_own(loaded: Encoder) -> bool:
    """Whether no other program has the encoder."""
    return loaded.name in FOR_CPUS or loaded.name.startswith(PYTHON)


def rebuild_lines(loaded: Encoder, file: str) -> list[str]:
    """Python that gives the encoder from a file of its state dict, with torchvision or timm where they have it."""
    if _is_own(loaded) or (loaded.channels != 3 and not loaded.name.startswith("timm:")):
        return _own_lines(loaded, file)
    name, stem = split_name(loaded.name.removeprefix("timm:"))
    load = f"encoder.load_state_dict(safetensors.torch.load_file({file!r}), strict=True)"
    options = {**size_arguments(loaded.name, loaded.image_size)}
    if loaded.name.startswith("timm:"):
        options |= {"num_classes": 0} | ({"in_chans": loaded.channels} if loaded.channels != 3 else {})
    arguments = "".join(f", {option}={value!r}" for option, value in options.items())
    if loaded.name.startswith("timm:"):
        build = f'encoder = timm.create_model("{name}"{arguments})'
        return ["import safetensors.torch, timm", build, load, "encoder.eval()"]
    build = f'encoder = torchvision.models.get_model("{name}"{arguments})'
    *_, (classifier, _module) = (item for item in loaded.network.named_modules() if isinstance(item[1], nn.Identity))
    first, *parts = classifier.split(".")  # ``classifier.2`` is ``classifier[2]`` in Python
    place = first + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts)
    change = f"encoder.{place} = torch.nn.Identity()"
    if stem is not None:
        conv = f"encoder.conv1 = torch.nn.Conv2d(3, 64, 3, padding={2 if stem == 'padding2' else 1}, bias=False)"
        removed = "encoder.relu = " if stem == "norelu" else ""
        change = f"{conv}; {removed}encoder.maxpool = encoder.fc = torch.nn.Identity()"
    return ["import safetensors.torch, torch, torchvision", build, change, load, "encoder.eval()"]


def _own_lines(loaded: Encoder, file: str) -> list[str]:
    module = ", encoder=module" if loaded.name.startswith(PYTHON) else ""
    return ["import dssl", f'encoder = dssl.load_encoder("{file}"{module})']


def clear_other_weights(folder: Path, loaded: Encoder, *, own: bool) -> list[str]:
    """See to it that the folder holds nothing but files of these weights; the lines say what went.

    In the run's own folder of exports those of its earlier weights go. Elsewhere they may be all that there is of them, and
    the folder is refused, as it is where its README.md is not a model card.
    """
    try:
        source = _SOURCE.search((folder / CARD_FILE).read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return []
    if source is None:
        raise DsslError(f"{folder / CARD_FILE} is not a model card of dssl and would be replaced: name another --out")
    if source[1] == loaded.sha256:
        return []
    if not own:
        raise DsslError(
            f"{folder} holds an export of other weights (SHA-256 {source[1][:16]}): name another --out, or delete it"
        )
    files = [*(file for file, _ in FORMATS.values()), f"{HUB_FOLDER}/config.json", f"{HUB_FOLDER}/{CARD_FILE}"]
    old = [path for file in files if (path := folder / file).is_file()]
    for path in (*old, folder / CARD_FILE):
        path.unlink()
    return [f"{path}: of the run's earlier weights, removed" for path in old]


def earlier_files(path: Path, exported: Sequence[Exported]) -> list[str]:
    """The lines of an earlier card of these weights about files that are still there and were not written again."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    now = {file.name for file in exported}
    return [
        line
        for entry in _FILE.finditer(text)
        if entry[1] not in now and (path.parent / entry[1]).is_file()
        for line in entry[0].splitlines()
    ]


def card(
    loaded: Encoder, exported: Sequence[Exported], *, evaluation: Mapping[str, Any] | None,
    comparison: Mapping[str, Any] | None = None, earlier: Sequence[str] = (),
) -> str:  # fmt: skip
    """Markdown; ``evaluation`` and ``comparison`` are what `dssl evaluate`, also with --against, wrote for the same weights.

    ``earlier`` is of ``earlier_files``.
    """
    config = loaded.header.get("config") or {}
    init, teacher = config.get("init"), config.get("teacher")
    # whether the weights that a run started from or learned from knew labels, nobody here can say
    alone = loaded.header and init is None and teacher is None
    lines = [f"# {loaded.name}, pretrained without labels" if alone else f"# {loaded.name}", ""]
    lines += markdown(
        ("", ""),
        [
            ("encoder", loaded.name),
            ("input", loaded.preprocessing.text()),
            *([] if init is None else [("started from the weights", f"`{init}`")]),
            *([] if teacher is None else [("taught by", f"`{teacher}`")]),
            ("data", str(config.get("data", "unknown"))),
            ("data's fingerprint", str(loaded.header.get("fingerprint", "unknown"))),
            ("method", str((config.get("method") or {}).get("name", "unknown"))),
            ("view graph", f"`{config['graph']}`" if "graph" in config else "unknown"),
            ("standard policy", f"`{config['standard']}`" if "standard" in config else "unknown"),
            ("heavy policy", f"`{config['heavy']}`" if "heavy" in config else "unknown"),
            ("epoch", str(loaded.header.get("epoch", "unknown"))),
            ("seed", str(config.get("seed", "unknown"))),
            ("verdict of the run", str(loaded.header.get("verdict", "unknown"))),
            ("made with", f"dssl {loaded.header.get('dssl_version', 'unknown')}, exported by dssl {VERSION}"),
            ("SHA-256 of the source", loaded.sha256),
        ],
    )
    lines += ["", "## Files", "", *earlier]
    for file in exported:
        lines += [f"`{file.name}`: every tensor was loaded by {file.client}; largest difference {file.difference:.3g}."]
        lines += ["", "```python", *file.code, "```", ""]
    lines += ["## Numbers", ""]
    if evaluation is None:
        lines.append("None were measured. Run `dssl evaluate`, then export again to list them here.")
    else:
        rows = []
        for result in evaluation["results"]:
            protocol, interval = result["protocol"], "{:.2f} to {:.2f}".format(*result["interval_95"])
            images = f"{protocol['train_images']} / {protocol['test_images']}"
            rows.append((result["name"], f"{result['accuracy']:.2f}%", interval, images,
                         str(protocol.get("test_data", "unknown")), protocol["backbone"]))  # fmt: skip
        heads = ("protocol", "top-1", "95% interval", "train / test images", "test set", "backbone")
        lines += markdown(heads, rows)
    if comparison is not None:
        compared = []
        for other in comparison["against"]:
            for row in other["protocols"]:
                numbers = (f"{row['before']:.2f}%", f"{row['after']:.2f}%", f"{row['difference']:+.2f}")
                interval = "{:+.2f} to {:+.2f}".format(*row["interval"])
                compared.append((row["name"], f"`{other['against']}`", *numbers, interval, row["verdict"]))
        lines += ["", "## Compared image by image", ""]
        lines += markdown(("protocol", "against", "other", "this", "points", "95% interval", "this is"), compared)
    return "\n".join(lines) + "\n"


def evaluation_of(loaded: Encoder, path: Path) -> dict[str, Any] | None:
    """What `dssl evaluate` wrote (an evaluation or a comparison), if it is of these weights on images as prepared here."""
    here = loaded.protocol()
    try:
        evaluation = json.loads(path.read_text(encoding="utf-8"))
        measured = evaluation["checkpoint"]
        # JSON has no tuples
        same = all(json.dumps(measured.get(name)) == json.dumps(here[name]) for name in _SAME)
        return evaluation if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
