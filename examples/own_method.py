"""A method of your own in one file, trained by dssl with resuming, health and reports as any other.

python examples/own_method.py --out runs/coding-rate

The method: unit vectors of two views agree, and those of each view fill as large a volume as they can (the total coding rate of
Tong et al., EMP-SSL, 2023). Nothing in it knows of graphs: run it with --graph dssl, standard2 or any other.
"""

import argparse
import contextlib
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dssl import recipe
from dssl.distributed import gather_rows
from dssl.methods import METHODS, Declaration, MethodSettings, Prediction
from dssl.methods.method import attached_cost
from dssl.training import train


@dataclass(frozen=True, kw_only=True)
class CodingRateConfig(MethodSettings):
    """Its settings are flags where the method is listed in dssl/methods/__init__.py: --method.output, --method.precision."""

    output: int = 128
    """Width of the projection."""
    precision: float = 0.2
    """The squared distance below which two vectors count as one."""


class CodingRate(nn.Module):
    def __init__(self, encoder: nn.Module, *, feature_dim: int, output: int = 128, precision: float = 0.2) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = nn.Sequential(
            nn.Linear(feature_dim, output), nn.BatchNorm1d(output), nn.ReLU(inplace=True), nn.Linear(output, output)
        )
        self.precision = precision

    def predict(self, images: Tensor) -> Prediction:
        feature = self.encoder(images)
        projection = self.projector(feature)
        return Prediction(feature, projection, projection)

    def target(self, images: Tensor, prediction: Prediction | None, *, gradient: bool) -> Tensor:
        if prediction is not None:
            return prediction.projection
        with contextlib.nullcontext() if gradient else torch.no_grad():
            projection: Tensor = self.projector(self.encoder(images))
            return projection

    def similarity(self, prediction: Prediction, target: Tensor) -> Tensor:
        return -F.cosine_similarity(prediction.projection.float(), target.float()).mean()

    def regularise(self, prediction: Prediction) -> Tensor:
        """Minus the coding rate of one view, as a share of the largest possible; on the global batch, whatever the processes."""
        with torch.autocast(prediction.projection.device.type, enabled=False):
            rows = gather_rows(F.normalize(prediction.projection.float(), dim=1))
            count, width = rows.shape
            volume = torch.eye(width, device=rows.device) + width / (count * self.precision) * rows.T @ rows
            return -torch.logdet(volume) / (
                min(count, width) * math.log1p(max(count, width) / (count * self.precision))
            )

    def after_step(self, step: int, total: int) -> None:
        pass


METHOD = Declaration(
    name="codingrate", build=CodingRate, settings=CodingRateConfig, cost=attached_cost(quadratic=False)
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="shapes")
    parser.add_argument("--graph", default="dssl")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", default="runs/coding-rate")
    options = parser.parse_args()

    METHODS[METHOD.name] = METHOD
    base = recipe("shapes", method=METHOD.name)
    result = train(replace(base, data=options.data, graph=options.graph, epochs=options.epochs), options.out)
    accuracy = "" if result.knn is None else f", kNN {result.knn:.1f} %"  # where the data has labels and a test split
    print(f"{result.verdict.status}{accuracy}: {result.checkpoint}")


if __name__ == "__main__":
    main()
