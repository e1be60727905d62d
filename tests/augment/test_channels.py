"""Views of images whose channels are not colours: each channel as if it were a gray image of its own."""

import numpy as np
import pytest

from dssl.augment import NAMED, OPERATIONS, ViewMaker, check_channels, parse, show, without_colour
from dssl.augment.operations import COLOURLESS, TABLES
from dssl.config import RunConfig
from dssl.graph import View
from dssl.recipes import RECIPES, recipe
from tests.rejecting import rejects

GENERATOR = np.random.default_rng(8)
POLICIES = [
    "standard-channels",
    "resize > ra(4,12,dssl15)",
    "crop(0.1,0.5) > ua(4,uniform12)",
    "center > ta(trivial13)",
    "resize > ra(3,20,monotone13) > ra(2,7,randaugment13)",
    "crop > jigsaw(3) > cutout(0.4) > crop(0.4,0.9)",
    "resize > jitter(0.9,0.9,0,0)",
    *(
        f"resize > {name}({operation.low + 0.7 * (operation.high - operation.low)})"
        for name, operation in OPERATIONS.items()
        if operation.unit
        and not operation.needs_colour
        and name not in ("posterize", "noise")  # noise differs between channels
    ),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("channels", [2, 5])
def test_each_channel_is_treated_as_a_gray_image(policy: str, channels: int) -> None:
    images = [
        GENERATOR.integers(0, 256, (*side, channels), np.uint8) for side in ((40, 33), (17, 60), (24, 24), (90, 70))
    ]
    images += images
    indices = np.arange(len(images))

    def views(channels: int, given: list[np.ndarray]) -> np.ndarray:
        maker = ViewMaker([View(name="v", policy=policy)], size=24, seed=5, channels=channels)
        out = maker.allocate(len(given))
        maker.apply_many(maker.plan(indices, epoch=1), 0, given, out, 0)
        return out["v"]

    together = views(channels, images)
    for channel in range(channels):
        alone = views(1, [np.ascontiguousarray(image[:, :, channel : channel + 1]) for image in images])
        assert np.array_equal(together[..., channel], alone[..., 0])


def test_normalised_views_use_the_numbers_of_each_channel() -> None:
    from dssl.augment import Normalization

    image = GENERATOR.integers(0, 256, (24, 24, 5), np.uint8)
    known = Normalization((0.1, 0.2, 0.3, 0.4, 0.5), (0.5, 0.4, 0.3, 0.2, 0.1))
    maker = ViewMaker([View(name="v", policy="resize")], size=24, seed=0, channels=5, normalization=known)
    out = maker.allocate(1)
    maker.apply_many(maker.plan(np.arange(1), epoch=0), 0, [image], out, 0)
    assert np.allclose(out["v"][0], (image / 255 - known.mean) / known.std, atol=1e-5)


@pytest.mark.parametrize(
    ("policy", "what", "instead"),
    [
        ("gray", "gray", "identity"),
        ("crop > hue(0.1)", "hue(0.1)", "crop(0.2,1)"),
        ("standard", "jitter(0.4,0.4,0.4,0.1)", "standard-channels"),
        ("jitter(0.4,0.4,0,0.1)", "jitter(0.4,0.4,0,0.1)", "jitter(0.4,0.4,0,0)"),
        ("ra(2,5)", "ra(2,5)", "ra(2,5,dssl15)"),
        ("0.9*ra(2,5) | 0.1*jigsaw(4)", "ra(2,5)", "0.9*ra(2,5,dssl15) | 0.1*jigsaw(4)"),
        ("ua", "ua", "ua(2,uniform12)"),
        ("ta", "ta", "ta(trivial13)"),
        ("(color(2) > gray)?0.5 | flip", "color(2)", "1*identity | 1*flip"),
        ("op(color,3)", "op(color,3)", "identity"),
        ("jpeg(30) | flip", "jpeg(30)", "1*identity | 1*flip"),
        ("corruption(fog,2) > flip", "corruption(fog,2)", "flip"),
    ],
)
def test_a_policy_that_needs_colour_is_refused_with_one_that_does_not(policy: str, what: str, instead: str) -> None:
    check_channels(parse(policy), 1)
    check_channels(parse(policy), 3)
    with rejects(what, "5 channels", repr(instead)):
        check_channels(parse(policy), 5)
    check_channels(parse(instead), 5)


def test_a_policy_without_colour_stays_as_it_is() -> None:
    for text in ("standard-channels", "crop > flip > blur?0.5", "op(rotate,9)", "rotate(30) | invert"):
        assert without_colour(parse(text)) == parse(text)
    assert show(parse("standard-channels")) == "standard-channels"
    assert NAMED["standard-channels"] == without_colour(NAMED["standard"])


def test_tables_without_colour_are_the_others_without_it() -> None:
    for name, other in COLOURLESS.items():
        assert [row for row in TABLES[name] if row.operation != "color"] == [*TABLES[other]]
        assert int(other[-2:]) == len(TABLES[other]) == len(TABLES[name]) - 1


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_for_other_channels_has_policies_without_colour(name: str) -> None:
    made = recipe(name, channels=5)
    assert (made.channels, made.normalization) == (5, "measure")
    with rejects("'standard-cifar'", "5 channels"):
        RunConfig(channels=5, normalization="measure")
    with rejects("normalization", "measure", "5 channels"):
        RunConfig(channels=5)
    assert recipe(name, channels=1).standard == recipe(name).standard
