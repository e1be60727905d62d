"""The lines of code that build an encoder again in another program, and whether that program has it at all."""

from dssl.errors import DsslError
from dssl.models import FOR_CPUS, size_arguments, split_name
from dssl.weights.encoder import Encoder


def base_name(loaded: Encoder) -> str:
    """The name without dssl's own prefix and suffix."""
    return split_name(loaded.name.removeprefix("timm:"))[0]


def refuse_unless_held(loaded: Encoder, client: str) -> None:
    """Raise, with the lines that rebuild the encoder, where a client has no such model."""
    lines = "; ".join(line for line in rebuild_lines(loaded, "FILE") if not line.startswith("import"))
    if loaded.name in FOR_CPUS:
        raise DsslError(
            f"{client} has no {loaded.name} encoder: only dssl has it; use --formats safetensors, onnx or torch and: {lines}"
        )
    if split_name(loaded.name)[1] is not None:
        raise DsslError(
            f"{client} has no {base_name(loaded)} with a CIFAR stem: it cannot load these weights strictly; "
            f"use --formats safetensors and rebuild it with: {lines}"
        )
    if loaded.channels != 3 and client != "timm":
        raise DsslError(
            f"{client} has no {base_name(loaded)} for {loaded.channels} channel: use --formats safetensors and: {lines}"
        )


def rebuild_lines(loaded: Encoder, file: str) -> list[str]:
    """Python that gives the encoder from a file of its state dict, with torchvision or timm where they have it."""
    if loaded.name in FOR_CPUS or (loaded.channels != 3 and not loaded.name.startswith("timm:")):
        return ["import dssl", f"encoder = dssl.load_encoder({file!r})"]
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
    change = f"encoder.{_indexed(classifier_path(loaded))} = torch.nn.Identity()"
    if stem is not None:
        conv = f"encoder.conv1 = torch.nn.Conv2d(3, 64, 3, padding={2 if stem == 'padding2' else 1}, bias=False)"
        removed = "encoder.relu = " if stem == "norelu" else ""
        change = f"{conv}; {removed}encoder.maxpool = encoder.fc = torch.nn.Identity()"
    return ["import safetensors.torch, torch, torchvision", build, change, load, "encoder.eval()"]


def classifier_path(loaded: Encoder) -> str:
    """Where torchvision has its classifier: the last Linear layer, which is an Identity in the encoder."""
    import torch
    import torchvision

    try:
        with torch.device("meta"):
            original = torchvision.models.get_model(base_name(loaded), weights=None)
    except NotImplementedError:  # RegNet computes its widths with tensors, which must have values
        original = torchvision.models.get_model(base_name(loaded), weights=None)
    *_, last = (path for path, module in original.named_modules() if isinstance(module, torch.nn.Linear))
    return str(last)


def _indexed(path: str) -> str:
    """``classifier.2`` as Python writes it: ``classifier[2]``."""
    parts = path.split(".")
    return parts[0] + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts[1:])
