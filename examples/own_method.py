"""A method of your own, in one file: dssl train shapes --plugin examples/own_method.py --method codingrate.

Unit vectors of two views agree, and those of each view fill as large a volume as they can (the total coding rate of Tong et al.,
EMP-SSL, 2023). Nothing in it knows of graphs: run it with --graph dssl, standard2 or any other.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dssl import Method, MethodSettings, Prediction
from dssl.distributed import gather_rows
from dssl.methods.method import mlp


@dataclass(frozen=True, kw_only=True)
class CodingRateConfig(MethodSettings):
    name = "codingrate"
    output: int = 128
    """Width of the projection."""


class CodingRate(Method, settings=CodingRateConfig):
    settings: CodingRateConfig

    def build_heads(self, width: int) -> None:
        self.projector = mlp(width, self.settings.output, self.settings.output)

    def similarity(self, prediction: Prediction, target: Tensor) -> Tensor:
        return -F.cosine_similarity(prediction.projection.float(), target.float()).mean()

    def regularize(self, prediction: Prediction) -> Tensor:  # minus the coding rate, as a share of the largest possible
        with torch.autocast(prediction.projection.device.type, enabled=False):
            rows = gather_rows(F.normalize(prediction.projection.float(), dim=1))  # of all processes
            count, width = rows.shape
            volume = torch.eye(width, device=rows.device) + 5 * width / count * rows.T @ rows
            return -torch.logdet(volume) / (min(count, width) * math.log1p(5 * max(count, width) / count))
