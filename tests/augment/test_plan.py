"""Distributions of the drawn parameters: probabilities, uniformity and independence."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision.transforms import RandomResizedCrop

from dssl.augment import TABLES, ViewMaker
from dssl.augment import kernels as code
from dssl.augment.kernels.resample import crop_box
from dssl.augment.maker import Program
from dssl.augment.policy import Chain, parse

COUNT = 20_000
UNLIKELY = 1e-4


class Drawn:
    """The plan of one view of many images, step by step."""

    def __init__(self, policy: str, *, seed: int = 0, epoch: int = 0, name: str = "v", count: int = COUNT):
        self.program = Program([name], [parse(policy)], [-1], size=32)
        plan = self.program.plan(np.arange(count), seed=seed, epoch=epoch)
        self.codes, self.values = plan.codes, plan.values

    def numbers(self, step: int) -> np.ndarray:
        return self.values[:, self.program.offsets[step] : self.program.offsets[step + 1]]


def assert_rate(happened: np.ndarray, probability: float) -> None:
    assert stats.binomtest(int(happened.sum()), happened.size, probability).pvalue > UNLIKELY


def assert_uniform(values: np.ndarray, low: float, high: float) -> None:
    assert values.min() >= low
    assert values.max() <= high
    assert stats.kstest(values, "uniform", (low, high - low)).pvalue > UNLIKELY


def assert_equally_often(items: np.ndarray, kinds: int) -> None:
    counts = np.unique(items, return_counts=True, axis=0)[1]
    assert len(counts) == kinds
    assert stats.chisquare(counts).pvalue > UNLIKELY


def assert_independent(a: np.ndarray, b: np.ndarray) -> None:
    table = np.zeros((a.max() + 1, b.max() + 1))
    np.add.at(table, (a, b), 1)
    assert stats.chi2_contingency(table).pvalue > UNLIKELY


def test_probabilities_of_the_standard_policy():
    drawn = Drawn("standard")
    assert (drawn.codes[:, 0] == code.CROP).all()
    flips, grays, blurs = (drawn.codes[:, step] != code.SKIP for step in (1, 6, 7))
    jitters = drawn.codes[:, 2] != code.SKIP
    for happened, probability in ((flips, 0.5), (jitters, 0.8), (grays, 0.2), (blurs, 0.5)):
        assert_rate(happened, probability)
    assert (jitters[:, None] == (drawn.codes[:, 2:6] != code.SKIP)).all()
    for a, b in itertools.combinations((flips, jitters, grays, blurs), 2):
        assert_independent(a.astype(int), b.astype(int))


def test_jitter_has_uniform_factors_in_a_uniform_order():
    drawn = Drawn("jitter(0.4,0.3,1.5,0.1)")
    order = drawn.codes[:, :4]
    assert_equally_often(order, 24)
    values = np.concatenate([drawn.numbers(step) for step in range(4)], axis=1)
    for kernel, low, high in ((code.BRIGHTNESS, 0.6, 1.4), (code.CONTRAST, 0.7, 1.3), (code.COLOR, 0, 2.5)):
        assert_uniform(values[order == kernel], low, high)
    shift = values[order == code.HUE]
    signed = np.where(shift > 128, shift - 256, shift)
    assert (signed == np.round(signed)).all()
    assert (np.abs(signed).max(), len(np.unique(signed))) == (25, 51)
    assert Drawn("jitter(0.4,0,0,0)").codes[:, :4].max() == code.BRIGHTNESS


def test_crops_are_distributed_as_torchvisions():
    drawn = Drawn("crop(0.2,1)", count=3000)
    for height, width in ((32, 32), (400, 500), (64, 200)):
        ours = np.array([crop_box.py_func(height, width, row) for row in drawn.numbers(0)])
        torch.manual_seed(0)
        image = torch.empty(3, height, width)
        theirs = np.array([RandomResizedCrop.get_params(image, (0.2, 1.0), (3 / 4, 4 / 3)) for _ in range(3000)])
        for column in range(4):
            assert stats.ks_2samp(ours[:, column], theirs[:, column]).pvalue > UNLIKELY
        area = (ours[:, 2] * ours[:, 3], theirs[:, 2] * theirs[:, 3])
        assert stats.ks_2samp(*area).pvalue > UNLIKELY


def test_blur_sigma_is_uniform():
    # the radius of a box is a monotone function of sigma: its median is that of sigma = 1.05
    radius = Drawn("blur(0.1,2)").numbers(0)[:, 0]
    middle = Drawn("blur(1.05,1.05)", count=1).numbers(0)[0, 0]
    assert_rate(radius < middle, 0.5)


@pytest.mark.parametrize("table", sorted(TABLES))
def test_randaugment_draws_each_operation_per_image_with_replacement(table: str):
    rows = TABLES[table]
    drawn = Drawn(f"ra(2,7,{table})")
    kinds = [np.unique(np.concatenate([part[:, None], drawn.numbers(step)], axis=1).round(9), axis=0, return_inverse=True)[1]
             for step, part in enumerate(drawn.codes.T.astype(float))]  # fmt: skip
    assert max(kinds[0]) >= len(rows) - 1 - sum(row.operation in ("identity", "color") for row in rows)
    assert_independent(kinds[0] % 7, kinds[1] % 7)  # two steps
    assert_independent(kinds[0][:-1] % 7, kinds[0][1:] % 7)  # neighbours in the data set
    chosen = Drawn(f"ra(1,7,{table})").codes[:, 0]
    for kernel in np.unique(chosen):
        from_table = sum(OPERATION_KERNELS[row.operation] == kernel for row in rows)
        assert_rate(chosen == kernel, from_table / len(rows))


OPERATION_KERNELS = {
    "identity": code.SKIP, "autocontrast": code.AUTOCONTRAST, "equalize": code.EQUALIZE, "invert": code.INVERT,
    "rotate": code.AFFINE, "posterize": code.POSTERIZE, "solarize": code.SOLARIZE, "solarize-add": code.SOLARIZE_ADD,
    "color": code.COLOR, "contrast": code.CONTRAST, "brightness": code.BRIGHTNESS, "sharpness": code.SHARPNESS,
    "shear-x": code.AFFINE, "shear-y": code.AFFINE, "translate-x": code.AFFINE, "translate-y": code.AFFINE,
    "translate-x-pixels": code.AFFINE, "translate-y-pixels": code.AFFINE, "cutout-pixels": code.CUTOUT,
}  # fmt: skip


def test_signs_are_drawn_per_image():
    for operation, column, size in (("shear-x", 1, 0.09), ("shear-y", 3, 0.09), ("translate-x-pixels", 2, 30)):
        value = Drawn(f"op({operation},9)").numbers(0)[:, column]
        np.testing.assert_allclose(np.abs(value), size)
        assert_rate(value > 0, 0.5)
    drawn = Drawn("ra(1,9)")
    sheared = drawn.numbers(0)[(drawn.codes[:, 0] == code.AFFINE) & (np.abs(drawn.numbers(0)[:, 3]) == 0.09), 3]
    assert_rate(sheared > 0, 0.5)
    factor = Drawn("op(contrast,10,monotone14)").numbers(0)[:, 0]
    np.testing.assert_allclose(np.unique(factor), [0.7, 1.3])
    assert_rate(factor > 1, 0.5)


def test_cutout_lies_anywhere():
    corners = Drawn("op(cutout-pixels,9)").numbers(0)[:, :4]  # 12 pixels
    assert (corners[:, 2:] - corners[:, :2] <= 12).all()
    near = np.maximum(0, np.arange(32) - 5)  # a centre in pixel k gives this corner, or one less
    for column in range(2):
        assert corners[:, column].min() == 0
        assert corners[:, column].max() == near[-1] - 1
        assert_rate(corners[:, column] == 0, 7 / 32)


def test_choices_weigh():
    codes = Drawn("0.9*invert | 0.1*gray").codes[:, 0]
    assert_rate(codes == code.GRAY, 0.1)
    assert set(codes) == {code.GRAY, code.INVERT}
    assert_rate(Drawn("3*invert | 1*gray").codes[:, 0] == code.GRAY, 0.25)
    assert_rate(Drawn("(gray?0.5)?0.5").codes[:, 0] == code.GRAY, 0.25)


def test_uniformaugment_has_no_parameters():
    drawn = Drawn("ua")
    happened = drawn.codes != code.SKIP
    assert_rate(happened, 0.5)
    assert_independent(happened[:, 0].astype(int), happened[:, 1].astype(int))
    solarize = drawn.codes[:, 0] == code.SOLARIZE
    threshold = drawn.numbers(0)[solarize, 0]
    assert stats.kstest(threshold, "uniform", (0, 257)).pvalue > UNLIKELY
    for kernel, members in ((code.AFFINE, 5), (code.EQUALIZE, 1), (code.SHARPNESS, 1)):
        assert_rate(drawn.codes[:, 0][happened[:, 0]] == kernel, members / 13)


def test_trivialaugment_draws_one_of_31_magnitudes():
    drawn = Drawn("ta", count=4 * COUNT)
    bright = drawn.numbers(0)[drawn.codes[:, 0] == code.BRIGHTNESS, 0]
    magnitudes = np.round(np.abs(bright - 1) / 0.99 * 30).astype(int)
    assert_equally_often(magnitudes, 31)


def test_jigsaw_puts_every_tile_everywhere():
    order = Drawn("jigsaw(3)").numbers(0)[:, 1:].astype(int)
    assert (np.sort(order, axis=1) == np.arange(9)).all()
    for place in range(9):
        assert_equally_often(order[:, place], 9)
    assert_independent(order[:, 0], (order[:, 1] - order[:, 0]) % 9 - 1)


def test_views_epochs_and_seeds_are_independent():
    base = (Drawn("ra(1,5)").codes[:, 0]) % 5
    for other in (
        Drawn("ra(1,5)", name="w"), Drawn("ra(1,5)", epoch=1), Drawn("ra(1,5)", seed=1), Drawn("flip > ra(1,5)"),
    ):  # fmt: skip
        assert_independent(base, other.codes[:, -1] % 5)


def test_a_policy_after_another_does_not_change_it():
    alone, longer = Drawn("standard"), Drawn("standard > ra(2,5)")
    np.testing.assert_array_equal(alone.codes, longer.codes[:, : alone.codes.shape[1]])
    np.testing.assert_array_equal(alone.values, longer.values[:, : alone.values.shape[1]])


def test_a_heavy_policy_on_the_image_comes_after_the_standard_one():
    from dssl.graph import View

    views = [
        View(name="h", policy="heavy"),
        View(name="r", policy="resize > ra(2,5)"),
        View(name="d", policy="heavy", source="h"),
    ]
    maker = ViewMaker(views, size=32, seed=0, policies={"standard": "standard-cifar", "heavy": "ra(2,5)"})
    assert maker.policies["h"] == Chain((parse("standard-cifar"), parse("ra(2,5)")))
    assert maker.policies["r"] == parse("resize > ra(2,5)")
    assert maker.policies["d"] == parse("ra(2,5)")
