"""The linear probe: multinomial logistic regression on features that are kept, solved to its optimum.

The objective is that of scikit-learn's LogisticRegression: mean cross-entropy + strength / 2 * |W|², the bias free, on features
that are centred and divided by one number (so that their mean squared norm is 1). It is strictly convex in W: there is
one optimum, and nothing about the result depends on a learning rate, a batch size or a number of epochs.

Features may be more than a GPU holds: they stay where they are, and every pass over them is made of blocks of rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dssl import rng
from dssl.errors import DsslError

STRENGTHS = tuple(10.0**-power for power in range(2, 9))
"""Candidates for the strength of the regularisation, strong to weak."""
DEFAULT_STRENGTH = 1e-5
"""Where the training set is too small to choose on a part of it."""
HELD_OUT = 0.1
_BLOCK = 2**26
"""Numbers in the largest tensor of a pass over the features: 268 MB in float32."""


def _blocks(rows: int, widest: int) -> Iterator[slice]:
    """Slices of rows such that a tensor of ``widest`` columns is no larger than a block."""
    size = max(1, _BLOCK // widest)
    return (slice(start, start + size) for start in range(0, rows, size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """What is done to features before the probe sees them."""

    mean: Tensor
    scale: float

    def __call__(self, features: Tensor) -> Tensor:
        return (features.to(self.mean.dtype) - self.mean) / self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A solved probe."""

    weight: Tensor
    """Classes x features."""
    bias: Tensor
    scaling: Scaling
    strength: float
    objective: float
    gradient: float
    """The largest entry of the objective's gradient where the solver stopped."""

    def predict(self, features: Tensor) -> Tensor:
        """The most likely class of each row, beside the features."""
        parts = [
            F.linear(self.scaling(features[rows].to(self.weight.device)), self.weight, self.bias).argmax(dim=1)
            for rows in _blocks(len(features), max(self.weight.shape))
        ]
        return torch.cat(parts).to(features.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How the strength was chosen: accuracy of each on the held-out part of the training set."""

    strength: float
    accuracies: tuple[tuple[float, float], ...]
    held_out: int
    """0 if there were too few images and the default was used."""


def scaling_of(features: Tensor, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Scaling:
    """Centre, and one scale for all dimensions, so that a rotation of the features changes nothing."""
    count, width = features.shape
    mean = torch.zeros(width, dtype=torch.float64, device=device or features.device)
    for rows in _blocks(count, 2 * width):  # doubles
        part = features[rows].to(mean.device)
        if not bool(torch.isfinite(part).all()):
            raise DsslError("the features contain NaN or infinite values: the encoder is broken; check its training")
        mean += part.double().sum(dim=0) / count
    squares = sum(
        float((features[rows].to(mean.device).double() - mean).square().sum()) for rows in _blocks(count, 2 * width)
    )
    scale = (squares / count) ** 0.5
    return Scaling(mean=mean.to(dtype), scale=scale if scale > 0 else 1.0)


class Problem:
    """Scaled features and their covariance, to solve for many strengths.

    It computes on the ``device``, by default that of the features. The scaled features stay there where half of its free memory
    holds them, else on the CPU, from where each pass moves them block by block.
    """

    def __init__(
        self,
        features: Tensor,
        labels: Tensor,
        *,
        classes: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        device = device or features.device
        count, width = features.shape
        self.scaling = scaling_of(features, dtype=dtype, device=device)
        self._rows = list(_blocks(count, max(width, classes)))
        self._span: Tensor | None = None
        if count < width:
            # few labels: the optimum is a sum of the images, so that the coordinates in their span are enough
            self._span = torch.linalg.qr(self.scaling(features.to(device)).T).Q
            width = count
        covariance = torch.zeros(width, width, dtype=torch.float64, device=device)
        memory = device if _holds(device, count * width * dtype.itemsize) else torch.device("cpu")
        self._scaled = torch.empty(count, width, dtype=dtype, device=memory)
        for rows in self._rows:
            scaled = self.scaling(features[rows].to(device))
            scaled = scaled if self._span is None else scaled @ self._span
            covariance += scaled.T @ scaled
            self._scaled[rows] = scaled
        self._covariance = covariance.div_(count)
        self._labels = labels.long().to(device)
        self.classes = classes

    def objective(self, weight: Tensor, bias: Tensor, strength: float) -> tuple[float, Tensor, Tensor]:
        """Value and gradient at a weight for the scaled features."""
        count = len(self._scaled)
        value = 0.5 * strength * weight.square().sum(dtype=torch.float64)
        to_weight, to_bias = strength * weight, torch.zeros_like(bias)
        for rows in self._rows:
            part, labels = self._scaled[rows].to(weight.device, non_blocking=True), self._labels[None, rows]
            # classes x images: the layout in which both products and the softmax are fastest (13 times for the gradient)
            log_probability = F.log_softmax(weight @ part.T + bias[:, None], dim=0)
            value -= log_probability.gather(0, labels).sum(dtype=torch.float64) / count
            error = log_probability.exp_()
            error.scatter_add_(0, labels, error.new_full((), -1.0).expand_as(labels))
            error /= count
            to_weight.addmm_(error, part)
            to_bias += error.sum(dim=1)
        return float(value), to_weight, to_bias

    def solve(self, strength: float, *, start: Probe | None = None, tolerance: float = 1e-6, most: int = 1000) -> Probe:
        """L-BFGS to the optimum, from another solution where there is one."""
        # coordinates in which the Hessian is near the identity: its blocks are about share * covariance + strength
        share = (1 - 1 / self.classes) / self.classes
        ridge, failed = strength, True
        while failed:  # rounded in float32, a covariance of low rank may have eigenvalues slightly below zero
            hessian = share * self._covariance
            hessian.diagonal().add_(ridge)
            factor, info = torch.linalg.cholesky_ex(hessian)
            ridge, failed = 10 * ridge, bool(info)
        root = factor.to(self._scaled.dtype)
        # a constant column belongs to the bias; its curvature is the share alone
        unit = share**-0.5
        weight, bias = root.new_zeros(self.classes, len(root)), root.new_zeros(self.classes)
        if start is not None:
            weight, bias = start.weight if self._span is None else start.weight @ self._span, start.bias
        variable = torch.cat([weight @ root, bias[:, None] / unit], dim=1).requires_grad_()
        solver = torch.optim.LBFGS(
            [variable], max_iter=most, max_eval=2 * most, history_size=20, tolerance_grad=tolerance,
            tolerance_change=1e-12, line_search_fn="strong_wolfe",
        )  # fmt: skip

        def plain() -> tuple[Tensor, Tensor]:
            weight = torch.linalg.solve_triangular(root, variable[:, :-1], upper=False, left=False)
            return weight.contiguous(), unit * variable[:, -1]

        @torch.no_grad()
        def closure() -> float:
            value, to_weight, to_bias = self.objective(*plain(), strength)
            to_weight = torch.linalg.solve_triangular(root.T, to_weight, upper=True, left=False)
            variable.grad = torch.cat([to_weight, unit * to_bias[:, None]], dim=1)
            return value

        solver.step(closure)  # type: ignore[no-untyped-call]  # of torch, as it is
        with torch.no_grad():
            weight, bias = plain()
        value, to_weight, to_bias = self.objective(weight, bias, strength)
        return Probe(
            weight=weight if self._span is None else weight @ self._span.T,
            bias=bias,
            scaling=self.scaling,
            strength=strength,
            objective=value,
            gradient=max(float(to_weight.abs().max()), float(to_bias.abs().max())),
        )


def share_of_classes(labels: NDArray[np.int64], share: float, *, stream: int, fewest: int = 1) -> NDArray[np.int64]:
    """Rows of this share of each class with ``fewest`` images or more, at least one of each; the stream draws them."""
    order = rng.permutation(stream, len(labels))
    members = (order[labels[order] == label] for label in np.unique(labels))
    chosen = [rows[: max(1, round(share * len(rows)))] for rows in members if len(rows) >= fewest]
    return np.sort(np.concatenate([*chosen, order[:0]]))


def split(labels: NDArray[np.int64], *, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows to fit and rows to judge on: the same share of every class, at least one image of each in both where it has two."""
    judge = share_of_classes(labels, HELD_OUT, stream=rng.key(seed, "probe", "split"), fewest=2)
    return np.setdiff1d(np.arange(len(labels)), judge), judge


def _holds(device: torch.device, size: int) -> bool:
    """Whether half of a device's free memory is enough for so many bytes."""
    return device.type != "cuda" or size <= torch.cuda.mem_get_info(device)[0] // 2


def choose_strength(
    features: Tensor, labels: Tensor, *, classes: int, seed: int, device: torch.device | None = None
) -> Choice:
    """The strength with the best accuracy on a held-out part of the training set; the stronger one in a tie."""
    fit, judge = split(labels.numpy(), seed=seed)
    if len(judge) < 10:
        return Choice(strength=DEFAULT_STRENGTH, accuracies=(), held_out=0)
    problem = Problem(features[fit], labels[fit], classes=classes, device=device)
    accuracies: list[tuple[float, float]] = []
    solved: Probe | None = None
    for strength in STRENGTHS:
        # a coarse optimum is enough to choose by, and each starts from the last
        solved = problem.solve(strength, start=solved, tolerance=1e-5, most=200)
        right = (solved.predict(features[judge]) == labels[judge]).double().mean()
        accuracies.append((strength, float(right)))
    best = max(accuracies, key=lambda pair: pair[1])
    return Choice(strength=best[0], accuracies=tuple(accuracies), held_out=len(judge))


def fit(
    features: Tensor, labels: Tensor, *, classes: int, seed: int, device: torch.device | None = None
) -> tuple[Probe, Choice]:
    """The probe of all features with the strength that a held-out part of them chose, and how it was chosen."""
    choice = choose_strength(features, labels, classes=classes, seed=seed, device=device)
    return Problem(features, labels, classes=classes, device=device).solve(choice.strength), choice
