"""Your own training loop: dssl makes the views and the loss, and everything else is plain PyTorch.

python examples/own_loop.py --steps 200

DSSL with a heavy edge whose weight rises over the run, on built-in images; a minute on a CPU.
"""

import argparse

import torch

from dssl import Objective, SimSiam, SimSiamConfig, ViewGraph, build_encoder, feature_dim
from dssl.augment import CIFAR10, ViewMaker
from dssl.data import open_source
from dssl.data.loader import Batches
from dssl.methods.losses import spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="shapes:2000", help="a folder of images, cifar10:FOLDER, or shapes:COUNT")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()

    torch.manual_seed(0)
    graph = ViewGraph.parse("s1<->s2, h1->mean(s1,s2):0..1, h2->mean(s1,s2):0..1")
    encoder = build_encoder("small", image_size=32)
    width = feature_dim(encoder, image_size=32)
    method = SimSiam(
        encoder, feature_dim=width, settings=SimSiamConfig(hidden=256, output=128, bottleneck=64, guard=1.0)
    )
    objective = Objective(method, graph)
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.06, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

    maker = ViewMaker(
        graph.made, size=32, seed=0, policies={"standard": "standard-cifar", "heavy": "ra(2,5)"}, normalization=CIFAR10
    )
    source = open_source(options.data)
    with Batches(source, maker, batch_size=options.batch, seed=0, steps=options.steps) as batches:
        for batch in batches:
            optimizer.zero_grad(set_to_none=True)
            # forward and backward view by view: the gradients of objective(views).total.backward() in half the memory
            report = objective.backward(batch.views, progress=batch.step / max(options.steps - 1, 1))
            optimizer.step()
            schedule.step()
            method.after_step(batch.step, options.steps)  # BYOL's moving average; nothing to do for SimSiam
            if batch.step % 20 == 0 or batch.step == options.steps - 1:
                # of the predictions: SimSiam's last BatchNorm keeps projections (report.spread) apart even in a collapse
                lowest = min(float(spread(prediction)) for prediction in report.predictions.values())
                print(
                    f"step {batch.step}: loss {float(report.total):.3f}, lowest spread of a view's predictions {lowest:.2f}"
                )


if __name__ == "__main__":
    main()
