"""torchvision's Mask R-CNN around an encoder, with proof that the encoder is the one in the file."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dssl import rng
from dssl.augment import IMAGENET, Normalization
from dssl.errors import DsslError
from dssl.models import build_encoder
from dssl.state import Loss
from dssl.weights.encoder import Encoder
from dssl.weights.load import open_weights
from dssl_coco import SCRATCH, CocoConfig
from dssl_coco.data import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the detector's first weights come from."""

    text: str
    """One line for people."""
    encoder: str
    sha256: str | None
    normalization: Normalization
    verified_tensors: int
    """Tensors of the detector's backbone that were compared with a second reading of the file and are bit-identical."""

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Origin":
        """The inverse of ``plain``."""
        return cls(**{**plain, "normalization": Normalization.of(plain["normalization"])})

    def plain(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "normalization": self.normalization.plain()}


class Detector(nn.Module):
    """``detector(samples) -> Loss``; ``detect`` gives boxes, masks and scores.

    Which anchors and proposals it trains on is drawn by torchvision from torch's generator, which the loop seeds by the step.
    """

    network: Any  # torchvision's parts have no types

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, samples: Sequence[Sample]) -> Loss:
        targets = [{"boxes": one.boxes, "labels": one.labels, "masks": one.masks} for one in samples]
        losses = self.network([one.pixels.float() / 255 for one in samples], targets)
        first, *others = losses.values()
        return Loss(sum(others, first), {name.removeprefix("loss_"): part.detach() for name, part in losses.items()})

    @torch.no_grad()
    def detect(self, image: Tensor, *, size: tuple[int, int]) -> dict[str, Tensor]:
        """Detections in a scaled image (uint8), in pixels of the original, whose height and width are ``size``."""
        from torchvision.models.detection.image_list import ImageList

        network = self.network
        scaled = network.transform.normalize(image.float() / 255)
        batch = ImageList(network.transform.batch_images([scaled]), [tuple(scaled.shape[1:])])
        features = network.backbone(batch.tensors)
        proposals, _ = network.rpn(batch, features)
        found, _ = network.roi_heads(features, proposals, batch.image_sizes)
        detections: list[dict[str, Tensor]] = network.transform.postprocess(found, batch.image_sizes, [size])
        return detections[0]


def build_detector(config: CocoConfig, *, classes: int, origin: Origin | None = None) -> tuple[Detector, Origin]:
    """Mask R-CNN with a feature pyramid on the encoder; given the ``origin`` of a resumed run, no weights are read."""
    from torchvision.models.detection import MaskRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.backbone_utils import BackboneWithFPN

    torch.manual_seed(rng.key(config.seed, "weights") % 2**63)
    read = None
    encoder: Any
    if origin is not None:
        encoder = build_encoder(origin.encoder, image_size=config.test_size)
    elif config.weights == SCRATCH:
        name = _resnet(config.encoder or "resnet50", "--encoder")
        encoder = build_encoder(name, image_size=config.test_size)
        text = f"{name} from scratch"
        origin = Origin(text=text, encoder=name, sha256=None, normalization=IMAGENET, verified_tensors=0)
    else:
        read = _open(config)
        encoder = read.network
    if config.frozen:
        freeze_batchnorm(encoder)
    width = encoder.layer4[-1].conv1.in_channels
    stages = {f"layer{number}": str(number - 1) for number in range(1, 5)}
    body = BackboneWithFPN(encoder, stages, [width // 8, width // 4, width // 2, width], out_channels=256)
    if read is not None:
        verified = verify_backbone(body.body, config)
        text = f"{read.report}; {verified} of {verified} tensors of the backbone are the file's, bit for bit"
        origin = Origin(
            text=text, encoder=read.name, sha256=read.sha256, normalization=read.normalization, verified_tensors=verified
        )  # fmt: skip
    assert origin is not None
    train, test = config.proposals, max(1, config.proposals // 2)
    network = MaskRCNN(
        body, num_classes=classes + 1, _skip_resize=True,
        image_mean=list(origin.normalization.mean), image_std=list(origin.normalization.std),
        rpn_anchor_generator=AnchorGenerator(tuple((side,) for side in config.anchors), ((0.5, 1.0, 2.0),) * 5),
        rpn_pre_nms_top_n_train=train, rpn_post_nms_top_n_train=train,
        rpn_pre_nms_top_n_test=test, rpn_post_nms_top_n_test=test, box_batch_size_per_image=config.samples,
    )  # fmt: skip
    keep_boxes_wide(network)
    return Detector(network), origin


def keep_boxes_wide(network: Any) -> None:
    """Let autocast halve the convolutions and nothing about boxes, scores and masks.

    torchvision computes boxes in the type of its heads' outputs. bf16 places a corner to 4 pixels at 1,000, and its
    suppression of duplicates, which moves the classes apart by adding thousands, loses them.
    """
    network.rpn.anchor_generator.register_forward_pre_hook(_in_wide_maps)
    for head in (network.rpn.head, network.roi_heads.box_predictor, network.roi_heads.mask_predictor):
        head.register_forward_hook(lambda module, inputs, output: tree_map(Tensor.float, output))


def _in_wide_maps(module: nn.Module, inputs: tuple[Any, Sequence[Tensor]]) -> tuple[Any, list[Tensor]]:
    """Anchors take their type, and but for the shape nothing else, from the feature maps."""
    images, maps = inputs
    return images, [one.new_empty((), dtype=torch.float32).expand(one.shape) for one in maps]


def verify_backbone(body: nn.Module, config: CocoConfig) -> int:
    """Read the file again, compare it with the detector's encoder, and return the number of tensors; a difference is an error."""
    here, there = (
        {name: value for name, value in network.state_dict().items() if not name.endswith("num_batches_tracked")}
        for network in (body, _open(config).network)
    )
    wrong = [name for name, value in here.items() if name not in there or not torch.equal(value, there[name])]
    if wrong or here.keys() != there.keys():
        names = wrong or sorted(there.keys() - here.keys())
        raise RuntimeError(f"{len(names)} tensors of the backbone differ from {config.weights}, for example {names[0]}")
    return len(here)


def freeze_batchnorm(module: nn.Module) -> None:
    """Turn every BatchNorm into a fixed scale and shift with its statistics; names in the state dict stay."""
    from torchvision.ops import FrozenBatchNorm2d

    for name, child in list(module.named_children()):
        if isinstance(child, nn.BatchNorm2d):
            frozen = FrozenBatchNorm2d(child.num_features, eps=child.eps)
            frozen.load_state_dict(child.state_dict())
            setattr(module, name, frozen)
        else:
            freeze_batchnorm(child)


def _open(config: CocoConfig) -> Encoder:
    weights = config.weights
    loaded = open_weights(Path(weights), encoder=config.encoder)
    _resnet(loaded.name, weights)
    if loaded.channels != 3:
        raise DsslError(
            f"{weights} is an encoder for gray images, but COCO's are in colour: pretrain with --channels 3"
        )
    loaded.network.train()
    return loaded


def _resnet(name: str, where: str) -> str:
    if not re.fullmatch(r"resnet(18|34|50|101|152)", name):
        raise DsslError(
            f"{where} is the encoder {name}: Mask R-CNN's feature pyramid needs a plain ResNet of torchvision, "
            "such as resnet50 or resnet18"
        )
    return name
