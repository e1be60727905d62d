"""Encoders from files: dssl's checkpoints and exports with everything they record, other programs' weights with a report.

Also the ImageNet weights of torchvision and timm, through their own downloaders and from their own caches.
"""

import dataclasses
import hashlib
import json
import logging
import pickle
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, overload

import torch
import torchvision
from safetensors import safe_open
from torch import Tensor, nn

from dssl.augment import CIFAR10, IMAGENET, Normalization
from dssl.data.scale import as_range
from dssl.errors import DsslError, choices, one_line
from dssl.models import (
    FOR_CPUS,
    STEMS,
    build_encoder,
    cifar_name,
    encoder_names,
    named_encoder,
    size_arguments,
    split_name,
    stem_of,
)
from dssl.weights.checkpoint import FOLDER, Checkpoint, content_hash, newest_good, read
from dssl.weights.encoder import Encoder, Origin, Preprocessing
from dssl.weights.match import MatchReport, infer_encoder, match

logger = logging.getLogger("dssl")
ENCODER_KEY = "dssl_encoder"
"""The entry of an exported file's metadata that says how to build the encoder."""
_TORCH_MAGIC = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
"""Of files that torch.save wrote before it wrote zip archives."""
HUB_PREFIX = "hf:"
"""What begins the name of a repository of the Hugging Face Hub."""
WORD = "imagenet"
"""What stands for these weights where a file of weights could be named."""


@overload
def load_encoder(
    path: str | Path, *, encoder: str | nn.Module | None = None, stem: str | None = None, image_size: int | None = None,
    transform: Literal[False] = False,
) -> nn.Module: ...  # fmt: skip
@overload
def load_encoder(
    path: str | Path, *, encoder: str | nn.Module | None = None, stem: str | None = None, image_size: int | None = None,
    transform: Literal[True],
) -> tuple[nn.Module, Preprocessing]: ...  # fmt: skip
def load_encoder(
    path: str | Path, *, encoder: str | nn.Module | None = None, stem: str | None = None, image_size: int | None = None,
    transform: bool = False,
) -> nn.Module | tuple[nn.Module, Preprocessing]:  # fmt: skip
    """The encoder of a run's folder, a checkpoint, an export, foreign weights or ``hf:USER/NAME``; in evaluation mode.

    Args:
        path: The folder of a run, a checkpoint, an export, or weights of torchvision, timm, lightly, solo-learn or MoCo.
        encoder: Its name, where the file does not say it (foreign weights that are not a ResNet), or a module for an encoder of
            your own: the result is a copy of it with the weights of the file.
        stem: ``cifar``, ``padding2`` or ``norelu``, only for CIFAR ResNets whose file does not show it.
        image_size: In pixels, where the file does not say it or another one is wanted.
        transform: Also return what turns a picture of Pillow into the tensor that the encoder takes.
    """
    with named_encoder(encoder) as name:
        loaded = open_weights(Path(path), encoder=name, stem=stem, image_size=image_size)
    return (loaded.network, loaded.preprocessing) if transform else loaded.network


def load_weights_into(encoder: nn.Module, path: Path) -> MatchReport:
    """Load weights from anywhere into an encoder that exists; every tensor must fit, or nothing is changed."""
    tensors, header, _ = _content(path)
    chosen, report = match(encoder, tensors, path=path)
    made = (header.get("config") or {}).get("encoder") or header.get("encoder")
    report = _with_stem(report, stem_of(encoder), known=split_name(made)[1] if made else report.stem)
    encoder.load_state_dict(chosen, strict=True)
    return report


def _with_stem(report: MatchReport, stem: str | None, *, known: str | None) -> MatchReport:
    """Refuse an encoder whose stem is known to be another than the file's; note it where the file shows none."""
    if known is not None and known != stem:
        raise DsslError(
            f"{report.path} does not fit the encoder: the tensors fit, but the file's stem is {known!r} ({STEMS[known]}) "
            f"and the encoder's is {stem or 'torchvision'!r}; choose an encoder whose name ends in {cifar_name('', known)}"
        )
    if stem is None or known is not None:
        return report
    note = f"the file does not show how its 3x3 stem runs: taken as {stem!r} ({STEMS[stem]}), as given"
    return dataclasses.replace(report, notes=(*report.notes, note))


def open_weights(
    path: Path, *, encoder: str | None = None, stem: str | None = None, image_size: int | None = None,
    normalization: Normalization | None = None, fallback: Encoder | None = None,
) -> Encoder:  # fmt: skip
    """Build the encoder that a file describes and load it; arguments given here override the file.

    What neither says is as in ``fallback``.
    """
    tensors, header, digest = _content(path)
    config = header.get("config") or {}
    made = header.get("encoder") or config.get("encoder")
    by_name = None if (name := encoder or made or infer_encoder(tensors)) else _named_by_file(path, tensors)
    name = name or by_name or (None if fallback is None else fallback.name)
    if name is None:
        raise DsslError(
            f"{path} does not say which encoder it contains: name it, as in --encoder resnet50 or timm:NAME"
        )
    if stem is not None:
        if stem not in STEMS:
            raise choices("stem", stem, STEMS)
        if split_name(name)[1] is None:
            raise DsslError(f"{path} contains {name}, which has no 3x3 stem: leave out the stem {stem!r}")
        name = cifar_name(split_name(name)[0], stem)
    small = _for_small_images(name)
    size = image_size or header.get("image_size") or config.get("image_size") or (32 if small else 224)
    channels = int(header.get("channels") or config.get("channels") or (fallback.channels if fallback else 3))
    built = build_encoder(name, image_size=size, channels=channels)
    if normalization is None and (known := header.get("normalization")):
        normalization = Normalization.of(known)
    assumed = [f"taken for {by_name} by the file's name and the shapes of its tensors"] if by_name else []
    if normalization is None:
        normalization = _usual_normalization(name)
        if normalization not in (CIFAR10, IMAGENET):
            mean, std = (
                ", ".join(f"{value:g}" for value in values) for values in (normalization.mean, normalization.std)
            )
            assumed.append(
                f"the file states no normalisation: that of the published weights (mean {mean}, deviation {std})"
            )
        # what a file of dssl says of its own images does not hold for other weights; what its user said does
        if fallback is not None and (channels != 3 or _told_normalization(fallback)):
            normalization = fallback.normalization
    if len(normalization.mean) != channels and channels == 1:
        normalization = normalization.gray()
    if len(normalization.mean) != channels:
        raise DsslError(
            f"{path} takes images of {channels} channels, and --normalization has {len(normalization.mean)}: leave it out"
        )
    chosen, report = match(built, tensors, path=path)
    if (stem or encoder or made) is None and stem_of(built) not in (None, report.stem):
        if report.stem is None:
            possible = ", ".join(f"--stem {stem} ({what})" for stem, what in STEMS.items())
            raise DsslError(
                f"{path} contains a CIFAR ResNet and does not show which 3x3 stem it has, and the features depend on it: "
                f"give {possible}, or the encoder's full name, such as --encoder resnet18-cifar-padding2"
            )
        name = cifar_name(split_name(name)[0], report.stem)
        built = build_encoder(name, image_size=size, channels=channels)
    shown = None if stem else report.stem  # a stem that was stated overrides what names show
    report = _with_stem(report, stem_of(built), known=split_name(made)[1] if made else shown)
    report = dataclasses.replace(report, notes=(*report.notes, *assumed))
    built.load_state_dict(chosen, strict=True)
    origin = Origin(path=path, sha256=digest, report=report.text(), header=header)
    return Encoder(network=built.eval(), name=name, image_size=size, channels=channels, normalization=normalization,
                   value_range=as_range(header.get("range")), origin=origin)  # fmt: skip


def _usual_normalization(name: str) -> Normalization:
    """For weights whose file states none."""
    return CIFAR10 if _for_small_images(name) else imagenet_normalization(name)


def _told_normalization(encoder: Encoder) -> bool:
    """Whether its normalisation was stated by a person: not by its file, and not assumed."""
    return "normalization" not in encoder.header and encoder.normalization != _usual_normalization(encoder.name)


def _named_by_file(path: Path, tensors: Mapping[str, Tensor]) -> str | None:
    """The encoder after which a file is named as torchvision names its own (``mobilenet_v2-b0353104.pth``), if it fits."""
    squashed = re.sub(r"[^a-z0-9]", "", path.name.lower())
    names = [name for name in encoder_names() if squashed.startswith(re.sub(r"[^a-z0-9]", "", name))]
    for name in sorted(names, key=len, reverse=True):
        with suppress(DsslError), torch.device("meta"):
            match(build_encoder(name, image_size=224), tensors, path=path)
            return name
    return None


def stated_normalization(path: Path, *, channels: int) -> Normalization | None:
    """That of the images that the weights were trained on, where a file of dssl says it and it fits these channels."""
    if (known := _content(path)[1].get("normalization")) is None:
        return None
    stated = Normalization.of(known)
    stated = stated.gray() if channels == 1 else stated
    return stated if len(stated.mean) == channels else None


def hub_file(path: Path) -> Path:
    """The weights of ``hf:USER/NAME`` or ``hf:USER/NAME@REVISION`` in the Hub's own cache, downloaded unless they are there.

    Any other path is returned as it is.
    """
    if not str(path).startswith(HUB_PREFIX):
        return path
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise DsslError(f"{path} needs huggingface_hub: pip install 'dssl[hub]'") from None
    repository, _, revision = str(path).removeprefix(HUB_PREFIX).partition("@")
    try:
        return Path(hf_hub_download(repository, "model.safetensors", revision=revision or None))
    except Exception as error:  # whatever its version raises
        raise DsslError(
            f"{path} could not be downloaded ({_reason(error)}): expected hf:USER/NAME with a model.safetensors; "
            "check the name, the network and, for a private one, hf auth login"
        ) from None


def _content(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """Tensors, header and hash of whatever the path names."""
    path = hub_file(path)
    if path.is_dir():
        folder = path / FOLDER if (path / FOLDER).is_dir() else path
        newest = newest_good(folder)
        if newest is None:
            raise DsslError(f"{path} contains no checkpoint: expected the folder of a run, or a file of weights")
        for complaint in newest[2]:
            logger.warning(f"{complaint}; using {newest[0].name} instead")
        return _of_checkpoint(newest[1])
    tensors, metadata = read_tensors(path)
    if "dssl" in metadata:
        return _of_checkpoint(read(path))
    if text := metadata.get(ENCODER_KEY):
        digest = content_hash(text, tensors)
        if digest != metadata.get("sha256"):
            raise DsslError(f"{path} is damaged: its content does not match its SHA-256; export it again")
        return tensors, json.loads(text), digest
    with path.open("rb") as file:
        return tensors, {}, hashlib.file_digest(file, "sha256").hexdigest()


def _of_checkpoint(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    # only the online encoder: a target network's twin and the optimiser are not what was asked for
    tensors = {f"method.encoder.{name}": value for name, value in checkpoint.part("method.encoder").items()}
    if not tensors:
        raise DsslError("the checkpoint contains no encoder: expected tensors named method.encoder.…")
    return tensors, checkpoint.header, str(checkpoint.header["sha256"])


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor of a file under its dotted name, and the file's metadata (safetensors only).

    Reads safetensors and what torch.save writes. Never runs code of a file.
    """
    if not path.exists():
        raise DsslError(f"{path} does not exist: expected weights (.safetensors, .pt, .pth, .ckpt)")
    if not path.is_file():  # a FIFO would be waited for
        raise DsslError(f"{path} is not a regular file: expected a file of weights; write the weights to a file first")
    with path.open("rb") as file:
        start = file.read(16)
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as content:
                tensors, metadata = {name: content.get_tensor(name) for name in content.keys()}, content.metadata()  # noqa: SIM118
        elif not start.startswith((b"PK\x03\x04", b"\x80")):
            raise DsslError(f"{path} is not a file of weights: expected safetensors or a file of torch.save")
        elif start.startswith(b"\x80") and _TORCH_MAGIC not in start:
            raise DsslError(
                f"{path} was not read, because reading a pickle could run code: if you trust it, save its arrays as tensors: "
                "import pathlib, pickle, torch; "
                f"arrays = pickle.loads(pathlib.Path({str(path)!r}).read_bytes(), encoding='latin1')['model']; "
                "torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, 'weights.pth')"
            )
        else:
            tensors, metadata = dict(_tensors(_torch(path), "", set())), None
    except DsslError:
        raise
    except Exception as error:  # each of the formats can fail in every way that exists
        raise DsslError(f"{path} is damaged: {type(error).__name__}: {one_line(error)}; get it again") from None
    if not tensors:
        raise DsslError(f"{path} contains no tensors: expected a state dict, alone or inside a checkpoint")
    return tensors, metadata or {}


def _torch(path: Path) -> Any:
    if zipfile.is_zipfile(path):
        _check_archive(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)|class ([\w.]+)", str(error))
        asks = f"it asks for {found[1] or found[2]}" if found else "it holds more than tensors and plain data"
        raise DsslError(
            f"{path} was not read, because reading it could run code ({asks}): if you trust it, save only its tensors with "
            "the packages that wrote it: import torch; "
            f"torch.save(torch.load({str(path)!r}, weights_only=False)['state_dict'], 'weights.pth')"
        ) from None


def _check_archive(path: Path) -> None:
    """Compare every record with its CRC-32, which torch.load does not; an error for archives that are programs."""
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        names = [record.filename.partition("/")[2] for record in records]
        # torch can be told to write no CRC, and then writes the same value everywhere: nothing to compare with
        checked = len(records) < 2 or len({record.CRC for record in records}) > 1
        bad = archive.testzip() if checked else None
    if bad is not None:
        raise DsslError(f"{path} is damaged: {bad} does not match its CRC-32; get it again")
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


def _tensors(content: Any, prefix: str, visited: set[int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors inside nested dicts; everything else (epochs, names, settings) is left out."""
    if not isinstance(content, Mapping) or id(content) in visited:  # a table may be within itself
        return
    visited.add(id(content))
    for key, value in content.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        else:
            yield from _tensors(value, f"{prefix}{key}.", visited)


def imagenet_normalization(name: str, *, channels: int = 3) -> Normalization:
    """How images were normalised for the published weights of this encoder: not by ImageNet's own constants for all of them."""
    stated: Any = None
    if name.startswith("timm:"):
        import timm

        stated = timm.get_pretrained_cfg(name.removeprefix("timm:"))
    elif name in torchvision.models.list_models():  # nobody has published any of the others
        stated = torchvision_version(name).transforms()
    constants = IMAGENET if stated is None else Normalization(tuple(stated.mean), tuple(stated.std))
    return constants.gray() if channels == 1 else constants


def torchvision_version(name: str) -> Any:
    """The ImageNet weights of a torchvision model that stand for it.

    The first version where there are several: the later ones score higher on ImageNet by label smoothing and long training,
    which makes their features transfer less well (Kornblith et al., NeurIPS 2021).
    """
    versions = torchvision.models.get_model_weights(name)
    return versions["IMAGENET1K_V1"] if "IMAGENET1K_V1" in versions.__members__ else next(iter(versions))


def _for_small_images(name: str) -> bool:
    return name in FOR_CPUS or split_name(name)[1] is not None


def is_imagenet(path: Path) -> bool:
    """Whether the word is meant, and no weights of this name; a folder of images may well be called so."""
    if str(path) != WORD or path.is_file():
        return False
    return not any(file for pattern in ("*", "checkpoints/*") for file in path.glob(f"{pattern}.safetensors"))


def load_imagenet(encoder: nn.Module, name: str, *, image_size: int, channels: int) -> str:
    """Load the ImageNet weights of the encoder of this name into it; the line says what was loaded."""
    if not name.startswith("timm:") and name not in torchvision.models.list_models():
        raise DsslError(
            f"there are no ImageNet weights for {name}: choose a torchvision encoder, such as mobilenet_v2, or timm:NAME"
        )
    if name.startswith("timm:"):
        return _load_timm(encoder, name, image_size=image_size, channels=channels)
    return load_weights_into(encoder, torchvision_file(name)).text()


def torchvision_file(name: str) -> Path:
    """The file of torchvision's ImageNet weights, downloaded into torch's cache unless it is there."""
    url = str(torchvision_version(name).url)
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[1]
    if path.exists():
        return path
    digest = re.search(r"-([0-9a-f]{8,})\.", path.name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(
            url, str(path), hash_prefix=digest[1] if digest else None, progress=sys.stderr.isatty()
        )
    except (OSError, RuntimeError) as error:  # RuntimeError: the hash is another
        raise DsslError(
            f"the ImageNet weights of {name} could not be downloaded ({_reason(error)}): "
            f"fetch {url} elsewhere and put it at {path}, or name the file instead of imagenet"
        ) from None
    return path


def _load_timm(encoder: nn.Module, name: str, *, image_size: int, channels: int) -> str:
    import timm  # build_encoder has found it

    model = name.removeprefix("timm:")
    known = timm.get_pretrained_cfg(model)
    if known is None or not known.has_weights:
        raise DsslError(f"timm has no weights for {model}: timm.list_pretrained() shows all that it has")
    file = known.hf_hub_filename or "model.safetensors"
    url = f"https://huggingface.co/{known.hf_hub_id}/resolve/main/{file}" if known.hf_hub_id else known.url
    client = logging.getLogger("huggingface_hub")
    level = client.level
    client.setLevel(logging.ERROR)  # it announces every attempt that fails; the last one is our error
    try:
        # timm renames tensors, resizes positions and sums the first layer of gray images where a model needs it
        made = timm.create_model(
            model, pretrained=True, num_classes=0, in_chans=channels, **size_arguments(name, image_size)
        )
    except Exception as error:  # whatever the hub's client raises, which depends on its version
        raise DsslError(
            f"the weights of {name} could not be downloaded ({_reason(error)}): fetch {url} elsewhere, "
            "and name the file instead of imagenet"
        ) from None
    finally:
        client.setLevel(level)
    encoder.load_state_dict(made.state_dict(), strict=True)
    gray = f"; the first layer is summed over its 3 channels, for images of {channels}" if channels != 3 else ""
    return f"{known.hf_hub_id or url}: timm's weights {known.tag or model} loaded{gray}"


def linear_head(init: Path, name: str, *, width: int) -> nn.Linear | None:
    """The classifier on features of this width that lies beside the encoder in a file of weights; None if there is not one."""
    if is_imagenet(init) and name.startswith("timm:"):  # they are loaded without it
        return None
    tensors = _content(torchvision_file(name) if is_imagenet(init) else init)[0]
    heads = [
        (value, tensors[bias])
        for key, value in tensors.items()
        if value.ndim == 2 and value.shape[1] == width and (bias := key.removesuffix("weight") + "bias") in tensors
    ]
    if len(heads) != 1 or heads[0][1].shape != heads[0][0].shape[:1]:
        return None
    head = nn.Linear(width, len(heads[0][0]))
    head.load_state_dict({"weight": heads[0][0], "bias": heads[0][1]})
    return head.requires_grad_(False)


def _reason(error: Exception) -> str:
    """What a network error says is in its reason."""
    return one_line(getattr(error, "reason", None) or error, longest=120)
