"""Checkpointed activations: the same gradients, buffers and random numbers from less memory."""

import copy

import pytest
import torch
from torch import Tensor, nn

from dssl import DsslError, Objective, SimSiam, SimSiamConfig, named_graph
from dssl.models import build_encoder
from dssl.models.blocks import checkpoint_activations


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.3)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.dropout(torch.relu(self.norm(self.convolution(values))))


def build(momentum: float | None = 0.1) -> SimSiam:
    torch.manual_seed(0)
    stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block()))
    encoder = nn.Sequential(nn.Conv2d(3, 4, 3), stages, nn.AdaptiveAvgPool2d(2), nn.Flatten())
    for module in encoder.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = momentum
    return SimSiam(encoder, feature_dim=16, settings=SimSiamConfig(hidden=16, output=16, bottleneck=8)).double()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_nothing_changes_but_the_memory(momentum: float | None) -> None:
    graph = named_graph("dssl")
    views = {view.name: torch.randn(5, 3, 8, 8, dtype=torch.float64) for view in graph.views}
    plain = build(momentum)
    light = build(momentum)
    checkpoint_activations(light.encoder)
    saved: list[int] = []
    for method in (plain, light):
        torch.manual_seed(1)
        held: dict[int, int] = {}

        def hold(tensor: Tensor, held: dict[int, int] = held) -> Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            method.encoder(views["s1"])  # what a forward keeps until its backward
        saved.append(sum(held.values()))
        Objective(method, graph).backward(views)
    assert saved[1] < 0.5 * saved[0]
    assert plain.state_dict().keys() == light.state_dict().keys()
    for (name, ours), theirs in zip(light.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad), name
    for (name, one), two in zip(light.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(one, two[1]), name
    copied = copy.deepcopy(light.encoder)
    with torch.no_grad():
        assert torch.equal(copied.eval()(views["s1"]), light.encoder.eval()(views["s1"]))


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("resnet18", 8),
        ("resnet50", 16),
        ("convnext_tiny", 18),
        ("vit_b_32", 12),
        ("mobilenet_v3_small", 11),
        ("timm:convnext_atto", 12),  # its blocks, not the four stages that hold them
    ],
)
def test_blocks_of_known_encoders(name: str, blocks: int) -> None:
    with torch.device("meta"):
        encoder = build_encoder(name, image_size=64)
    checkpoint_activations(encoder)
    assert sum(type(module).__name__.startswith("Checkpointed") for module in encoder.modules()) == blocks


@pytest.mark.parametrize("name", ["timm:beit_base_patch16_224", "timm:eva02_tiny_patch14_224"])
def test_blocks_that_take_options_keep_them(name: str) -> None:
    """BEiT's blocks share a bias of positions, and EVA's rotate theirs."""
    size = 28 if "14" in name else 32
    encoder = build_encoder(name, image_size=size)
    encoder.blocks = encoder.blocks[:2]
    images = torch.randn(2, 3, size, size)
    expected = encoder.eval()(images)
    checkpoint_activations(encoder)
    found = encoder(images)
    assert torch.equal(found, expected)
    found.sum().backward()
    assert all(block.attn.proj.weight.grad is not None for block in encoder.blocks)


def test_an_encoder_without_blocks_is_refused() -> None:
    with pytest.raises(DsslError, match="Sequential"):
        checkpoint_activations(nn.Sequential(nn.Flatten(), nn.Linear(12, 4)))
