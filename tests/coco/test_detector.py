"""The detector: its encoder is the file's, BatchNorm is what was asked for, and its draws follow the step's seed."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from dssl.errors import DsslError
from dssl.precision import autocast
from dssl_coco import CocoConfig
from dssl_coco.data import make_sample, read_split
from dssl_coco.detector import Detector, Origin, build_detector, verify_backbone
from tests.coco.drawing import draw, pretrained, tiny


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrained(tmp_path_factory.mktemp("weights") / "step-000000007.safetensors")


@pytest.fixture(scope="module")
def built(file: Path) -> dict[str, tuple[Detector, Origin]]:
    """Detectors from the checkpoint, by what happens to their BatchNorm."""
    return {norm: build_detector(_config(file, norm=norm), classes=3) for norm in ("frozen", "sync")}


def _config(file: Path, **changes: object) -> CocoConfig:
    return tiny(file.parent, weights=str(file), encoder=None, **changes)


def body(detector: Detector) -> dict[str, Tensor]:
    state: dict[str, Tensor] = detector.network.backbone.body.state_dict()
    return {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}


@pytest.mark.parametrize("norm", ["frozen", "sync"])
def test_every_backbone_tensor_comes_from_the_checkpoint(
    file: Path, built: dict[str, tuple[Detector, Origin]], norm: str
) -> None:
    detector, origin = built[norm]
    stored = {
        name.removeprefix("method.encoder."): value
        for name, value in load_file(file).items()
        if name.startswith("method.encoder.") and not name.endswith("num_batches_tracked")
    }
    ours = body(detector)
    assert ours.keys() == stored.keys()
    assert all(torch.equal(value, stored[name]) for name, value in ours.items())
    assert len(ours) == origin.verified_tensors == 100  # 20 convolutions, and 4 tensors of each of their BatchNorms
    assert "100 of 100 tensors" in origin.text
    assert (origin.encoder, origin.normalization.mean) == ("resnet18", (0.1, 0.2, 0.3))
    assert detector.network.transform.image_mean == [0.1, 0.2, 0.3]
    assert detector.network.transform.image_std == [0.4, 0.5, 0.6]


def test_one_changed_tensor_is_noticed(file: Path, built: dict[str, tuple[Detector, Origin]]) -> None:
    config = _config(file)
    network = copy.deepcopy(built["frozen"][0].network.backbone.body)
    assert verify_backbone(network, config) == 100
    network.layer3[1].bn2.running_var[5] += 1e-6
    with pytest.raises(RuntimeError, match=r"layer3\.1\.bn2\.running_var"):
        verify_backbone(network, config)


def test_torchvisions_weights_file(tmp_path: Path) -> None:
    """As it is downloaded: a state dict with the classifier in it."""
    torch.manual_seed(5)
    stored = torchvision.models.resnet18().state_dict()
    torch.save(stored, tmp_path / "resnet18.pth")
    detector, origin = build_detector(_config(tmp_path / "resnet18.pth"), classes=3)
    assert all(torch.equal(value, stored[name]) for name, value in body(detector).items())
    assert origin.verified_tensors == 100
    assert detector.network.transform.image_mean == pytest.approx([0.485, 0.456, 0.406])


def test_the_first_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    def head(seed: int) -> Tensor:
        detector, _ = build_detector(tiny(tmp_path, seed=seed), classes=3)
        weight: Tensor = detector.network.roi_heads.mask_predictor.conv5_mask.weight
        return weight

    first = head(1)
    torch.manual_seed(99)
    assert torch.equal(head(1), first)
    assert not torch.equal(head(2), first)


def test_frozen_batchnorm_computes_what_evaluation_mode_does_and_learns_nothing(
    file: Path, built: dict[str, tuple[Detector, Origin]]
) -> None:
    assert _config(file).frozen, "the default with weights"
    frozen, trained = built["frozen"][0], built["sync"][0]
    kinds = {type(module) for module in frozen.modules()}
    assert FrozenBatchNorm2d in kinds
    assert nn.BatchNorm2d not in kinds
    assert not any("bn" in name for name, _ in frozen.named_parameters())
    assert any("bn1.weight" in name for name, _ in trained.named_parameters())
    images = torch.rand(1, 3, 64, 64)
    one = frozen.train().network.backbone.body(images)["3"]
    other = trained.eval().network.backbone.body(images)["3"]
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_the_whole_network_is_trained_end_to_end_by_draws_that_follow_the_seed(tmp_path: Path) -> None:
    """Every parameter that is not a frozen norm gets a gradient, the first convolution included.

    Anchors and proposals to train on are drawn from the generator that the loop seeds in every step.
    """
    images = read_split(draw(tmp_path), "all").trainable()
    detector, _ = build_detector(tiny(tmp_path), classes=3)
    samples = [make_sample(images[at], shorter=64, longest=96, mirror=False) for at in (0, 2)]
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(detector.train()(samples))
    first, again, other = losses
    assert first.total.item() == again.total.item()
    assert first.total.item() != other.total.item()
    assert set(first.parts) == {"classifier", "box_reg", "mask", "objectness", "rpn_box_reg"}
    assert first.total.item() == pytest.approx(sum(map(float, first.parts.values())))
    first.total.backward()
    without = [name for name, parameter in detector.named_parameters() if parameter.grad is None]
    assert without == []
    assert float(detector.network.backbone.body.conv1.weight.grad.abs().sum()) > 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_for_convolutions_and_not_for_boxes(tmp_path: Path, precision: str) -> None:
    """A corner at 1,000 pixels would be placed to 4 in bf16, and duplicates of a high label would not be suppressed."""
    detector, _ = build_detector(tiny(tmp_path), classes=90)
    network, seen = detector.network, {}

    def see(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: seen.setdefault(name, output)

    network.backbone.register_forward_hook(see("features"))
    network.rpn.anchor_generator.register_forward_hook(see("anchors"))
    network.rpn.register_forward_hook(see("proposals"))
    image = torch.randint(256, (3, 64, 1088), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = {}
    for kind in ("fp32", precision):
        seen.clear()
        with autocast(torch.device("cpu"), kind):
            found[kind] = detector.eval().detect(image, size=(64, 1088)) | {"anchors": seen["anchors"][0]}
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert seen["features"]["0"].dtype == half
    assert torch.equal(found[precision]["anchors"], found["fp32"]["anchors"])
    assert seen["proposals"][0][0].dtype == torch.float32
    assert {found[precision][name].dtype for name in ("boxes", "scores", "masks")} == {torch.float32}

    # one object, proposed 20 times, and its neighbour: two detections, whatever the label
    generator = torch.Generator().manual_seed(1)
    boxes = torch.tensor([[605.6, 7.3, 645.6, 47.3]]) + 2 * torch.randn(20, 4, generator=generator)
    proposals = torch.cat([boxes, torch.tensor([[695.6, 7.3, 735.6, 47.3]])])
    logits = torch.zeros(21, 91)
    logits[:, 85] = 10 - 0.05 * torch.arange(21)
    predictor = network.roi_heads.box_predictor
    predictor.forward = lambda features: (logits.to(half), torch.zeros(21, 4 * 91, dtype=half))
    with autocast(torch.device("cpu"), precision), torch.no_grad():
        answer = network.roi_heads.postprocess_detections(*predictor(None), [proposals], [(64, 1088)])
    assert len(answer[0][0]) == 2


def test_targets_of_training_are_not_rounded(tmp_path: Path) -> None:
    images = read_split(draw(tmp_path), "all").trainable()
    detector, _ = build_detector(tiny(tmp_path), classes=3)
    sample = make_sample(images[0], shorter=64, longest=96, mirror=False)
    heads, seen = detector.network.roi_heads, []
    real = heads.select_training_samples
    heads.select_training_samples = lambda *given: seen.append(real(*given)) or seen[-1]
    with autocast(torch.device("cpu"), "bf16"):
        loss = detector.train()([sample])
    proposals, _, _, targets = seen[0]
    assert {one.dtype for one in (*proposals, *targets, loss.total)} == {torch.float32}
    truth = sample.boxes[0]
    assert min(float((truth - one).abs().max()) for one in proposals[0]) == 0  # the objects are among the proposals


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"encoder": "small"}, "encoder small"),
        ({"encoder": "resnet18-cifar"}, "encoder resnet18-cifar"),
        ({"channels": 1}, "--channels 3"),
    ],
)
def test_encoders_without_a_pyramid_are_refused(tmp_path: Path, changes: dict[str, object], part: str) -> None:
    file = pretrained(tmp_path / "step-000000007.safetensors", **changes)
    with pytest.raises(DsslError, match=part):
        build_detector(_config(file), classes=3)


def test_scratch_needs_a_resnet_and_no_frozen_norm(tmp_path: Path) -> None:
    with pytest.raises(DsslError, match=r"--encoder .*vgg16"):
        build_detector(tiny(tmp_path, encoder="vgg16"), classes=3)
    with pytest.raises(DsslError, match="--norm sync"):
        tiny(tmp_path, norm="frozen")
    with pytest.raises((DsslError, OSError), match="nowhere"):
        build_detector(tiny(tmp_path, weights="nowhere.safetensors"), classes=3)
