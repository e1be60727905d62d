"""Continued pretraining that keeps what is there: what is frozen, how fast the rest learns, and how far the result goes."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from dssl.config import AdaptConfig
from dssl.methods.method import Method
from dssl.models.blocks import blocks

SHARES = (0.5, 0.35, 0.25, 0.18, 0.12)
"""How far from the start to the average of the last weights the result may lie, tried from far to near."""


def keep_most(method: Method, config: AdaptConfig) -> None:
    """Freeze all but the last blocks of the encoder, and keep it in evaluation mode, without dropout.

    BatchNorm then normalises by the statistics that came with the weights. Those of a small batch of crops would be worse, and
    the frozen layers behind would see other inputs than those that they were trained on.
    """
    encoder = method.encoder
    trained = {name for names in trained_blocks(encoder, config) for name in names}
    for name, parameter in encoder.named_parameters():
        parameter.requires_grad_(name in trained)
    for part in method.children():
        if type(part) is type(encoder):  # BYOL's second one, too
            part.eval()


def trained_blocks(encoder: nn.Module, config: AdaptConfig) -> tuple[tuple[str, ...], ...]:
    """The names of the parameters that learn, by block."""
    found = blocks(encoder)
    return found if config.trained_blocks is None else found[-config.trained_blocks :]


def rate_shares(encoder: nn.Module, config: AdaptConfig) -> dict[str, float]:
    """The rate of every trained parameter of the encoder as a share of the heads', by its name in the method."""
    shares: dict[str, float] = {}
    for depth, names in enumerate(reversed(trained_blocks(encoder, config))):
        shares |= {f"encoder.{name}": config.encoder_rate * config.layer_decay**depth for name in names}
    return shares


@torch.no_grad()
def add_to_average(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], *, count: int) -> None:
    """Take the weights into a running mean, as the ``count``-th: it is kept, saved and restored with the optimiser's state."""
    for parameter in parameters:
        state = optimizer.state[parameter]
        if count == 1 or "average" not in state:
            state["average"] = parameter.detach().clone()
        else:
            state["average"].lerp_(parameter, 1 / count)


@torch.no_grad()
def interpolate(
    encoder: nn.Module,
    *,
    start: Mapping[str, Tensor],
    end: Mapping[str, Tensor],
    drift: Callable[[], float],
    most: float,
) -> tuple[float, float]:
    """Set the weights to start + share (end - start), for the largest share whose drift is at most ``most``.

    Returns the share and the drift; both are 0, and the weights those of the start, where every share drifts further.
    """
    parameters = dict(encoder.named_parameters())
    for share in (*SHARES, 0.0):
        for name, value in end.items():
            parameters[name].copy_(torch.lerp(start[name].to(value), value, share))
        found = drift() if share else 0.0
        if found <= most:
            return share, found
    raise AssertionError("not moving at all is always possible")
