"""Relation edges: how much a target resembles other images teaches how much a prediction resembles them.

CLSA (Wang and Qi, TPAMI 2022) and ReSSL (Zheng et al., NeurIPS 2021) made this loss for strong views with weak targets.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dssl import distributed
from dssl.methods import RelationConfig
from dssl.methods.losses import wide
from dssl.types import Embedding, Scalar


class Relation(nn.Module):
    """R(z, y): cross entropy between softmax(cos(y, bank) / t) and softmax(cos(z, bank) / t').

    The bank of an image is the targets of all other images of the global batch and, with a queue, those of earlier steps.
    """

    queue: Tensor | None
    """Unit vectors, the newest first; rows that are still zero are left out."""

    def __init__(self, settings: RelationConfig | None = None, *, width: int = 0) -> None:
        """Without a queue, images are related to the others of the batch only.

        Args:
            settings: Temperatures, and the length of the queue.
            width: Of the method's targets; only a queue needs it.
        """
        super().__init__()
        self.settings = settings or RelationConfig()
        self.register_buffer("queue", torch.zeros(self.settings.queue, width) if self.settings.queue else None)

    def forward(self, z: Embedding, y: Embedding) -> Scalar:
        """The loss.

        Args:
            z: The predictions of this process's images.
            y: Their targets.
        """
        with torch.autocast(z.device.type, enabled=False):
            z, y = F.normalize(wide(z), dim=1), F.normalize(wide(y.detach()), dim=1)
            bank = distributed.gather_rows(y)
            row = torch.arange(len(z), device=z.device) + distributed.rank() * len(z)
            absent = F.one_hot(row, len(bank)).bool()
            if self.queue is not None:
                bank = torch.cat([bank, self.queue])  # a copy: what the backward needs is not what ``push`` overwrites
                empty = (self.queue == 0).all(dim=1)
                absent = torch.cat([absent, empty.expand(len(z), -1)], dim=1)
            taught = (y @ bank.T / self.settings.target_temperature).masked_fill(absent, -torch.inf).softmax(dim=1)
            logits = (z @ bank.T / self.settings.temperature).masked_fill(absent, -torch.inf)
            return -(taught * logits.log_softmax(dim=1).masked_fill(absent, 0.0)).sum(dim=1).mean()

    @torch.no_grad()
    def push(self, y: Embedding) -> None:
        """Put the targets of a step at the head of the queue.

        Args:
            y: The targets of this process's images.
        """
        if self.queue is not None:
            rows = distributed.gather_rows(F.normalize(wide(y), dim=1)).to(self.queue.dtype)
            self.queue.copy_(torch.cat([rows, self.queue])[: len(self.queue)])
