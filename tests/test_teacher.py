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
    expected = -F.cosine_similarity(method_again.teacher.map(prediction), features).mean()
    assert report.edges["s1->teacher(s1)"].item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.equal(report.targets["teacher(s1)"], features)
    assert set(report.spread) == {"s1", "s2"}  # a teacher is not judged


def test_it_stays_as_it_is_and_is_neither_trained_nor_saved() -> None:
    method = taught("simclr", GRAPH)
    (frozen,) = method.teacher._frozen
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
    pixels = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))

    def normalised(by: object) -> torch.Tensor:
        return (pixels - torch.tensor(by.mean).view(1, 3, 1, 1)) / torch.tensor(by.std).view(1, 3, 1, 1)  # type: ignore[attr-defined]

    teacher = Teacher(nn.Flatten(), width=48, features=48, normalization=IMAGENET)
    teacher.expect(CIFAR10)
    torch.testing.assert_close(teacher(normalised(CIFAR10)), normalised(IMAGENET).flatten(1), rtol=1e-5, atol=1e-5)


def test_a_graph_and_a_method_must_agree_on_a_teacher() -> None:
    with pytest.raises(DsslError, match=r"the edge s1->teacher\(s1\) needs a teacher: --teacher WEIGHTS"):
        Objective(build("simsiam"), GRAPH)
    with pytest.raises(DsslError, match="there is a teacher and no edge of the graph ends at it"):
        Objective(taught("simsiam", GRAPH), named_graph("dssl"))
    assert isinstance(build("simsiam"), SimSiam)
