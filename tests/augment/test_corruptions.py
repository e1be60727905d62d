"""Corrupted test images, and which kinds of corruption a policy shows."""

import numpy as np
import pytest

from dssl.augment import KINDS, SEVERITIES, ViewMaker, corrupt_images, kinds_seen, parse, show
from dssl.errors import DsslError
from dssl.graph import View
from tests.augment.made import images, make


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_corrupted_by_its_own_index_and_the_seed(kind: str) -> None:
    pictures = np.repeat(images(1), 70, axis=0)
    indices = np.arange(70)
    whole = corrupt_images(pictures, kind, 3, seed=4, indices=indices, threads=3)
    part = corrupt_images(pictures[:5], kind, 3, seed=4, indices=indices[[69, 3, 20, 3, 66]], threads=1)
    assert np.array_equal(part, whole[[69, 3, 20, 3, 66]])
    random = kind not in ("gaussian-blur", "defocus", "zoom", "brightness", "contrast", "saturate", "pixelate", "jpeg")
    other = corrupt_images(pictures, kind, 3, seed=5, indices=indices, threads=1)
    assert np.array_equal(whole, other) != random
    assert (len({image.tobytes() for image in whole}) > 1) == random
    assert not np.array_equal(whole, pictures)


@pytest.mark.parametrize("kind", KINDS)
def test_gray_images_and_small_ones_can_be_corrupted(kind: str) -> None:
    for size in (1, 2, 3, 17):
        for channels in (1, 3):
            pictures = images(2, size, size, channels)
            for severity in SEVERITIES:
                result = corrupt_images(pictures, kind, severity, seed=0, indices=np.arange(2), threads=1)
                assert result.shape == pictures.shape


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("saturate", "elastic")])
def test_a_higher_severity_changes_more(kind: str) -> None:
    """But for saturate, which takes colour first and adds it then, and elastic, which moves less and warps more."""
    noise = images(40, 9, 9)
    for size in (32, 96):
        smooth = ViewMaker([View(name="v", policy="resize")], size=size, seed=0)
        pictures = make(smooth, noise, np.arange(40))["v"]
        changes = [
            np.abs(
                corrupt_images(pictures, kind, severity, seed=0, indices=np.arange(40), threads=2)
                - pictures.astype(int)
            ).mean()
            for severity in SEVERITIES
        ]
        assert changes == sorted(changes)


def test_lengths_grow_with_the_image() -> None:
    assert KINDS["gaussian-blur"].constants(3, size=32) == (0.7,)
    assert KINDS["gaussian-blur"].constants(3, size=64) == (1.4,)
    assert KINDS["gaussian-blur"].constants(3, size=224) == (3,)
    assert KINDS["defocus"].constants(2, size=112) == (2, 0.5)
    assert KINDS["jpeg"].constants(2, size=112) == (18,)


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"images": np.zeros((2, 8, 8, 3), np.uint16)}, "uint16"),
        ({"images": np.zeros((2, 8, 9, 3), np.uint8)}, "(2, 8, 9, 3)"),
        ({"images": np.zeros((2, 8, 8), np.uint8)}, "(2, 8, 8)"),
        ({"kind": "snow"}, "'snow'"),
        ({"severity": 0}, "expected 1, 2, 3, 4 or 5"),
        ({"images": np.zeros((2, 8, 8, 5), np.uint8)}, "corruption(fog,2)"),
    ],
)
def test_what_cannot_be_corrupted_is_an_error(changed: dict, part: str) -> None:
    given = {
        "images": np.zeros((2, 8, 8, 3), np.uint8),
        "kind": "fog",
        "severity": 2,
        "indices": np.arange(2),
    } | changed
    with pytest.raises(DsslError) as caught:
        corrupt_images(**given, seed=0, threads=1)
    assert part in str(caught.value)


def test_kinds_that_a_policy_shows() -> None:
    def those(state: str, *policies: str) -> set[str]:
        return {kind for kind, found in kinds_seen(policies).items() if found == state}

    assert those("seen", "corrupt") == {"gaussian-noise", "gaussian-blur", "jpeg", "contrast", "brightness"}
    assert those("unseen", "corrupt") == {"elastic", "pixelate", "rotation", "shift", "occlusion"}
    assert those("similar", "corrupt") == {
        "shot", "impulse", "speckle", "defocus", "motion", "zoom", "fog", "saturate",
    }  # fmt: skip
    assert those("similar", "jpeg(40)") == those("similar", "rotate(-9,9)") == set()
    assert those("seen", "crop > flip") == those("similar", "crop > flip") == set()
    assert those("seen", "standard > corruption(fog,2)") == {
        "brightness", "contrast", "saturate", "gaussian-blur", "fog",
    }  # fmt: skip
    assert those("unseen", "standard", "ra(2,5)") == {
        "gaussian-noise", "shot", "impulse", "speckle", "elastic", "pixelate", "jpeg",
    }  # fmt: skip
    assert those("seen", "(noise(0.1) | rotate(-9,9))?0.5") == {"gaussian-noise", "rotation"}
    assert those("seen", "jitter(0.4,0,0,0.1)") == {"brightness"}
    assert list(kinds_seen("flip")) == list(KINDS)


def test_the_training_set_of_corrupt() -> None:
    written = "noise(0.04,0.25) | soften(0.8,3) | jpeg(8,50) | contrast(0.2,0.8) | brightness(0.3,0.9) > add(-0.1,0.3)"
    assert parse("corrupt") == parse(written)
    assert show(parse(written)) == "corrupt"
    maker = ViewMaker([View(name="v", policy="resize > corrupt")], size=32, seed=0)
    pictures = np.repeat(images(1), 200, axis=0)
    changed = make(maker, pictures, np.arange(200))["v"]
    assert len({image.tobytes() for image in changed}) > 180  # the same quality of JPEG comes up again
    np.testing.assert_array_equal(changed[50:60], make(maker, pictures, np.arange(50, 60))["v"])
