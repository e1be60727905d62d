"""A method of your own in one file, trained by dssl with resuming, health and reports as any other.

python examples/own_method.py --out runs/coding-rate

The method: unit vectors of two views agree, and those of each view fill as large a volume as they can (the total coding rate of
Tong et al., EMP-SSL, 2023). Nothing in it knows of graphs: run it with --graph dssl, standard2 or any other.
"""

import argparse
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dssl import Method, MethodSettings, Prediction, recipe
from dssl.distributed import gather_rows
from dssl.methods.method import mlp
from dssl.training.pretrain import train


@dataclass(frozen=True, kw_only=True)
class CodingRateConfig(MethodSettings):
    name = "codingrate"
    output: int = 128
    """Width of the projection."""
    precision: float = 0.2
    """The squared distance below which two vectors count as one."""


class CodingRate(Method, settings=CodingRateConfig):
    settings: CodingRateConfig

    def build_heads(self, width: int) -> None:
        self.projector = mlp(width, self.settings.output, self.settings.output)

    def similarity(self, prediction: Prediction, target: Tensor) -> Tensor:
        return -F.cosine_similarity(prediction.projection.float(), target.float()).mean()

    def regularize(self, prediction: Prediction) -> Tensor:
        """Minus the coding rate of one view, as a share of the largest possible; on the global batch, whatever the processes."""
        with torch.autocast(prediction.projection.device.type, enabled=False):
            rows = gather_rows(F.normalize(prediction.projection.float(), dim=1))
            (count, width), precision = rows.shape, self.settings.precision
            volume = torch.eye(width, device=rows.device) + width / (count * precision) * rows.T @ rows
            return -torch.logdet(volume) / (min(count, width) * math.log1p(max(count, width) / (count * precision)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="shapes")
    parser.add_argument("--graph", default="dssl")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", default="runs/coding-rate")
    options = parser.parse_args()

    config = recipe("shapes", method="codingrate", data=options.data, graph=options.graph, epochs=options.epochs)
    result = train(config, options.out)
    accuracy = "" if result.knn is None else f", kNN {result.knn:.1f} %"  # if the data has labels and a test split
    print(f"{result.verdict.status}{accuracy}: {result.checkpoint}")
