"""The paper's D (Eq. 4) and the methods' S in the paper's letters, and the measures of a collapse: spread and effective rank."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dssl import distributed
from dssl.types import Embedding, Scalar


def wide(values: Tensor) -> Tensor:
    """Losses are computed in float32 at least, whatever autocast did before."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def negative_cosine(z: Embedding, y: Embedding) -> Scalar:
    """D(z, y) = -<z, y> / (|z| |y|), averaged over the batch (Eq. 4). Where to stop the gradient is the edge's business."""
    return -(F.normalize(wide(z), dim=1) * F.normalize(wide(y), dim=1)).sum(dim=1).mean()


def squared_distance(z: Embedding, y: Embedding) -> Scalar:
    """BYOL's S: the squared distance of the normalised vectors, which is 2 + 2 D(z, y)."""
    return (F.normalize(wide(z), dim=1) - F.normalize(wide(y), dim=1)).square().sum(dim=1).mean()


def nt_xent(z: Embedding, y: Embedding, *, temperature: float, decoupled: bool = False) -> Scalar:
    """One direction of NT-Xent: row i of z must pick row i of y among all other rows of y and z in the global batch.

    The mean of ``nt_xent(z, y)`` and ``nt_xent(y, z)`` is NT-Xent over the 2N views. ``decoupled`` leaves row i of y out of the
    denominator (DCL, Yeh et al., ECCV 2022).
    """
    with torch.autocast(z.device.type, enabled=False):
        z = F.normalize(wide(z), dim=1)
        y = F.normalize(wide(y), dim=1)
        all_z, all_y = distributed.gather_rows(z), distributed.gather_rows(y)
        row = torch.arange(len(z), device=z.device)
        positive = row + distributed.rank() * len(z)
        with_y = z @ all_y.T / temperature
        with_z = z @ all_z.T / temperature
        itself = torch.zeros_like(with_z, dtype=torch.bool).scatter_(1, positive[:, None], True)
        others = with_z.masked_fill(itself, -torch.inf)
        if decoupled:
            negatives = torch.cat([with_y.masked_fill(itself, -torch.inf), others], dim=1)
            return (negatives.logsumexp(dim=1) - with_y.gather(1, positive[:, None])[:, 0]).mean()
        return F.cross_entropy(torch.cat([with_y, others], dim=1), positive)


def info_nce(z: Embedding, y: Embedding, *, temperature: float) -> Scalar:
    """MoCo v3's S: row i of z must pick row i of y among all rows of y in the global batch; times 2 temperature, as there."""
    with torch.autocast(z.device.type, enabled=False):
        z, y = F.normalize(wide(z), dim=1), F.normalize(wide(y), dim=1)
        positive = torch.arange(len(z), device=z.device) + distributed.rank() * len(z)
        return 2 * temperature * F.cross_entropy(z @ distributed.gather_rows(y).T / temperature, positive)


@torch.no_grad()
def sinkhorn(scores: Tensor, *, temperature: float, iterations: int = 3) -> Tensor:
    """SwAV's targets: probabilities for each row in which all columns have about the same share of the global batch."""
    logits = distributed.gather_rows(wide(scores)) / temperature
    for _ in range(iterations):
        logits = logits - logits.logsumexp(dim=0, keepdim=True)
        logits = logits - logits.logsumexp(dim=1, keepdim=True)
    return logits.chunk(distributed.world_size())[distributed.rank()].exp()


def invariance(z: Embedding, y: Embedding) -> Scalar:
    """VICReg's s(z, y): the mean squared difference over rows and dimensions."""
    return (wide(z) - wide(y)).square().mean()


def deviation(z: Embedding, y: Embedding) -> Scalar:
    """``invariance`` with the mean over the global batch taken from z and from y: a shift of either changes nothing."""
    difference = distributed.gather_rows(wide(z) - wide(y))
    return (difference - difference.mean(dim=0)).square().mean()


def variance(z: Embedding) -> Scalar:
    """VICReg's v(z): what each dimension's standard deviation over the global batch lacks to 1, averaged over the dimensions."""
    rows = distributed.gather_rows(wide(z))
    return F.relu(1 - (rows.var(dim=0) + 1e-4).sqrt()).mean()


def covariance(z: Embedding) -> Scalar:
    """VICReg's c(z): the squared covariances of different dimensions over the global batch, divided by their number."""
    with torch.autocast(z.device.type, enabled=False):
        rows = distributed.gather_rows(wide(z))
        rows = rows - rows.mean(dim=0)
        matrix = rows.T @ rows / (len(rows) - 1)
        return (matrix - matrix.diagonal().diag()).square().sum() / rows.shape[1]


def correlation(z: Embedding, y: Embedding) -> Tensor:
    """Barlow Twins' C: the correlation over the global batch of every dimension of z with every dimension of y."""
    with torch.autocast(z.device.type, enabled=False):
        z, y = (F.batch_norm(distributed.gather_rows(wide(rows)), None, None, training=True) for rows in (z, y))
        return z.T @ y / len(z)


def non_gaussianity(z: Embedding, slices: Tensor) -> Scalar:
    """LeJEPA's SIGReg: the Epps-Pulley statistic of z along unit vectors (the columns of slices), averaged over them.

    N times the integral of |phi(t) - exp(-t^2 / 2)|^2 exp(-t^2 / 2) over t, with phi the characteristic function of the global
    batch: by the trapezoidal rule with 17 points on [0, 3], doubled because the integrand is even, as in the authors' code.
    """
    with torch.autocast(z.device.type, enabled=False):
        t = torch.linspace(0, 3, 17, dtype=slices.dtype, device=z.device)
        gaussian = (-t.square() / 2).exp()
        angles = (wide(z) @ slices)[:, :, None] * t
        # the processes have as many rows each, so that the mean of their means is that of the global batch
        parts = torch.stack([angles.cos().mean(dim=0), angles.sin().mean(dim=0)])
        cosine, sine = distributed.gather_rows(parts[None]).mean(dim=0)
        error = (cosine - gaussian).square() + sine.square()
        return 2 * len(z) * distributed.world_size() * torch.trapezoid(error * gaussian, t, dim=1).mean()


def sketched_distance(z: Embedding, slices: Tensor) -> Scalar:
    """VISReg: the squared mean, how far deviations are from 1, and along slices the distance to a Gaussian's quantiles."""
    with torch.autocast(z.device.type, enabled=False):
        rows = distributed.gather_rows(wide(z))
        mean, deviation = rows.mean(dim=0), rows.std(dim=0, unbiased=False)
        # a shape has no scale: no gradient through the deviation
        along = ((rows - mean) / (deviation.detach() + 1e-4) @ slices).sort(dim=0).values
        place = torch.arange(1, len(rows) + 1, dtype=rows.dtype, device=rows.device) / (len(rows) + 1)
        shape = (along - torch.special.ndtri(place)[:, None]).square().mean()
        total: Scalar = mean.square().mean() + (1 - deviation).square().mean() + shape
        return total


def narrowness(z: Embedding) -> Scalar:
    """The guard against collapse: ``variance`` of the unit vectors times sqrt(d), which no scale of z can satisfy."""
    return variance(F.normalize(wide(z), dim=1) * math.sqrt(z.shape[1]))


@torch.no_grad()
def spread(embedding: Embedding) -> Scalar:
    """Standard deviation of the normalised embedding over the batch, times sqrt(d): 1 when healthy, 0 when collapsed."""
    rows = F.normalize(wide(embedding), dim=1)
    return rows.std(dim=0, unbiased=False).mean() * math.sqrt(rows.shape[1])


@torch.no_grad()
def effective_rank(rows: Tensor) -> float:
    """RankMe: exp of the entropy of the singular values; from 1 to min(rows.shape), 0 for zeros, NaN unless all are finite."""
    values = rows.cpu().double()
    # the smaller Gram matrix, so that memory does not grow with the images
    gram = values @ values.T if values.shape[0] <= values.shape[1] else values.T @ values
    if not bool(torch.isfinite(gram).all()):
        return math.nan
    singular = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
    # below this a value cannot be told from rounding of the largest
    singular = singular[singular > 1e-7 * singular.max()]
    if len(singular) == 0:
        return 0.0
    shares = singular / singular.sum()
    return float((-(shares * shares.log()).sum()).exp())
