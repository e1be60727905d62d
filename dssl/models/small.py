"""An encoder that two CPU cores can train: four residual blocks behind a stem of stride 2."""

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock


class SmallEncoder(nn.Module):
    """Widths 32, 64, 128, 256; about 1.2 million parameters; a feature of 256."""

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
