"""Encoders that a CPU can train: ``whitened``, pooled as a whole or by quadrants, and the older, residual ``small``."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

PATCH, STRIDE, KEPT = 4, 2, 24
WIDTHS = (48, 96, 256)
_FLOOR = 1e-3
"""Variances below this (in normalised pixels) are noise: dividing by their root would only amplify it."""
_BLOCK = 256


class SmallEncoder(nn.Module):
    """Four residual blocks behind a stem of stride 2: widths 32, 64, 128, 256; about 1.2 million parameters; a feature of 256."""

    def __init__(self, *, channels: int = 3) -> None:
        super().__init__()
        width = 32
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        blocks: list[nn.Module] = []
        before = width
        for after, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            shortcut = None
            if stride != 1:
                shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after))
            blocks.append(BasicBlock(before, after, stride, shortcut))
            before = after
        self.blocks = nn.Sequential(*blocks)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(self.blocks(self.stem(images)), 1).flatten(1)


class WhitenedEncoder(nn.Module):
    """A feature of 256, or of 256 for each quadrant of the image; about 0.3 million weights.

    The first layer gives the principal components of 4x4 patches at unit variance, and their negatives, at half the image's
    resolution. Its filters are buffers: never trained, but saved and exported like weights.
    """

    filters: Tensor
    shift: Tensor

    def __init__(self, *, channels: int = 3, quadrants: bool = False) -> None:
        super().__init__()
        self.pooled = 2 if quadrants else 1
        """Rows and columns of the pooled map. Where a thing is in the image tells a linear classifier what it is."""
        filters = torch.tensor(fixed_filters(channels), dtype=torch.float32)
        self.register_buffer("filters", filters)
        self.register_buffer("shift", torch.zeros(len(filters)))
        groups: list[nn.Module] = []
        before = 2 * len(filters)
        for number, after in enumerate(WIDTHS, start=1):
            groups.append(nn.Conv2d(before, after, 3, padding=1, bias=False))
            if number < len(WIDTHS):  # before BatchNorm and ReLU, which then have a quarter of the work
                groups.append(nn.MaxPool2d(2))
            groups += [nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
            before = after
        self.groups = nn.Sequential(*groups)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        white = F.conv2d(images, self.filters, self.shift, stride=STRIDE, padding=1)
        return F.adaptive_avg_pool2d(self.groups(F.relu(torch.cat([white, -white], dim=1))), self.pooled).flatten(1)


@torch.no_grad()
def whiten(encoder: WhitenedEncoder, images: Tensor) -> None:
    """Measure the filters on normalised images (N x C x H x W): their patches then have mean 0 and covariance 1."""
    filters = encoder.filters
    size = filters[0].numel()
    total, products, count = torch.zeros(size).double(), torch.zeros(size, size).double(), 0
    for block in torch.split(images, _BLOCK):
        patches = F.unfold(block.double().cpu(), PATCH, stride=STRIDE).transpose(1, 2).reshape(-1, size)
        total += patches.sum(dim=0)
        products += patches.T @ patches
        count += len(patches)
    mean = total / count
    variances, axes = torch.linalg.eigh(products / count - torch.outer(mean, mean))
    axes = axes.T.flip(0)[: len(filters)]
    # an eigenvector's sign is arbitrary
    axes *= axes.gather(1, axes.abs().argmax(dim=1, keepdim=True)).sign()
    rows = axes / variances.flip(0)[: len(filters), None].clamp(min=_FLOOR).sqrt()
    encoder.filters.copy_(rows.view_as(filters))
    encoder.shift.copy_(-rows @ mean)


def fixed_filters(channels: int) -> NDArray[np.float64]:
    """The filters where there are no images to measure: N x channels x 4 x 4, a cosine transform of opponent colours.

    These are close to the principal components of natural images. Their variances are those of a model: the correlation of
    two pixels falls by a factor of e over 8 pixels, colours vary less than brightness.
    """
    place = np.arange(PATCH)
    waves = np.cos(math.pi * np.outer(place, place + 0.5) / PATCH)
    waves /= np.linalg.norm(waves, axis=1, keepdims=True)
    if channels == 3:
        colours = np.array([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0], [1.0, -2.0, 1.0]])
        shares = np.array([2.7, 0.25, 0.05])
    else:  # nothing is known of these channels: each for itself
        colours, shares = np.eye(channels), np.ones(channels)
    colours /= np.linalg.norm(colours, axis=1, keepdims=True)
    patterns = np.einsum("ui,vj->uvij", waves, waves).reshape(-1, PATCH**2)
    y, x = np.divmod(np.arange(PATCH**2), PATCH)
    correlation = np.exp(-np.hypot(y[:, None] - y, x[:, None] - x) / 8)
    variance = np.outer(shares, np.einsum("pi,ij,pj->p", patterns, correlation, patterns)).ravel()
    bank = np.einsum("ca,pi->cpai", colours, patterns).reshape(len(variance), channels, PATCH, PATCH)
    # rounded, so that equal variances stay in the order of the list whatever the last bit says
    first = np.argsort(-variance.round(9), kind="stable")[:KEPT]
    return np.asarray(bank[first] / np.sqrt(variance[first])[:, None, None, None])
