"""A frozen teacher: it is seen by nobody, learns nothing, and sees pixels as it was trained on them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dssl import DsslError, Objective, SimSiam, Teacher, ViewGraph, named_graph
from dssl.augment import CIFAR10, IMAGENET
from tests.test_objective import build, taught, views_of

GRAPH = ViewGraph.parse("s1<->s2, s1->teacher(s1)")


def test_the_loss_is_the_cosine_between_the_mapped_prediction_and_its_features() -> None:
    method = taught("simsiam", GRAPH)
    views = views_of(GRAPH)
    report = Objective(method, GRAPH)(views)
    method_again = taught("simsiam", GRAPH)
    prediction = method_again.predict(views["s1"]).prediction
    features = method_again.teacher(views["s1"])
    raw = method_again.teacher.encoder(views["s1"])
    # by hand: each dimension over the batch
    deviation = (raw - raw.mean(dim=0)).square().mean(dim=0).add(1e-5).sqrt()
    torch.testing.assert_close(features, (raw - raw.mean(dim=0)) / deviation, rtol=1e-12, atol=1e-12)
    expected = -F.cosine_similarity(method_again.teacher.map(prediction), features).mean()
    assert report.edges["s1->teacher(s1)"].item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.equal(report.targets["teacher(s1)"], features)
    assert set(report.spread) == {"s1", "s2"}  # a teacher is not judged


def test_it_stays_as_it_is_and_is_neither_trained_nor_saved() -> None:
    method = taught("simclr", GRAPH)
    frozen = method.teacher.encoder
    before = copy.deepcopy(frozen.state_dict())
    optimizer = torch.optim.SGD(method.parameters(), lr=0.5)
    method.train()
    for _ in range(2):
        Objective(method, GRAPH).backward(views_of(GRAPH))
        optimizer.step()
    assert all(torch.equal(value, before[key]) for key, value in frozen.state_dict().items())  # BatchNorm's buffers too
    assert not frozen.training
    assert {name for name in method.state_dict() if "teacher" in name} == {"teacher.map.weight", "teacher.map.bias"}
    assert method.teacher.map.weight.grad is not None
    method.float()
    assert next(frozen.parameters()).dtype == torch.float32


def test_equal_widths_need_no_map() -> None:
    assert isinstance(Teacher(nn.Flatten(), width=8, features=8).map, nn.Identity)


def test_it_sees_pixels_in_its_own_normalisation() -> None:
    pixels = torch.rand(16, 3, 4, 4, generator=torch.Generator().manual_seed(0))

    def normalised(by: object) -> torch.Tensor:
        return (pixels - torch.tensor(by.mean).view(1, 3, 1, 1)) / torch.tensor(by.std).view(1, 3, 1, 1)  # type: ignore[attr-defined]

    network = nn.Sequential(nn.Flatten(), nn.ReLU())  # what is straight, standardised, forgets how it was normalised
    unaware = Teacher(network, width=48, features=48)
    teacher = Teacher(network, width=48, features=48, normalization=IMAGENET)
    teacher.expect(CIFAR10)
    torch.testing.assert_close(teacher(normalised(CIFAR10)), unaware(normalised(IMAGENET)), rtol=1e-4, atol=1e-4)
    assert (teacher(normalised(CIFAR10)) - unaware(normalised(CIFAR10))).abs().max() > 0.1


def test_a_mean_that_all_features_share_is_no_target() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 8))
    torch.manual_seed(0)
    images = torch.randn(32, 3, 4, 4)
    plain = Teacher(network, width=8, features=8)(images)
    with torch.no_grad():
        network[1].bias += 100
    torch.testing.assert_close(Teacher(network, width=8, features=8)(images), plain, rtol=1e-3, atol=1e-3)


def test_a_graph_and_a_method_must_agree_on_a_teacher() -> None:
    with pytest.raises(DsslError, match=r"s1->teacher\(s1\).*--teacher"):
        Objective(build("simsiam"), GRAPH)
    with pytest.raises(DsslError, match="s1->teacher"):
        Objective(taught("simsiam", GRAPH), named_graph("dssl"))
    assert isinstance(build("simsiam"), SimSiam)
