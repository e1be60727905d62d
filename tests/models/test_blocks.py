"""Blocks from input to output: every parameter once, and the last ones are those that a person would name."""

import pytest

from dssl.models import build_encoder
from dssl.models.blocks import blocks

LAST_TWO = {
    "mobilenet_v2": ("features.17.", "features.18."),
    "resnet18": ("layer4.0.", "layer4.1."),
    "efficientnet_b0": ("features.7.0.", "features.8."),  # squeeze-and-excitation is part of its block
    "convnext_tiny": ("features.7.1.", "features.7.2."),
    "vit_b_32": ("encoder.layers.encoder_layer_10.", "encoder.layers.encoder_layer_11."),
    "small": ("blocks.2.", "blocks.3."),
    "whitened": ("groups.4.", "groups.8."),
    "timm:mobilenetv2_050": ("blocks.6.0.", "conv_head."),
    "timm:vit_tiny_patch16_224": ("blocks.10.", "blocks.11."),
    "timm:convnext_atto": ("stages.3.blocks.0.", "stages.3.blocks.1."),  # blocks, not the stages that hold them
}


@pytest.mark.parametrize("name", LAST_TWO)
def test_the_last_blocks_are_the_last_blocks(name: str) -> None:
    encoder = build_encoder(name, image_size=32 if name in ("small", "whitened") else 224)
    found = blocks(encoder)
    assert [parameter for names in found for parameter in names] == [
        parameter for parameter, _ in encoder.named_parameters()
    ]
    assert tuple(names[0].startswith(start) for names, start in zip(found[-2:], LAST_TWO[name], strict=True)) == (
        True,
        True,
    )
    # a norm behind a layer is part of that layer's block
    assert all(any(encoder.get_parameter(one).squeeze().dim() > 1 for one in names) for names in found[1:])
