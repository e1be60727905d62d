"""ViewMaker: the same bytes whatever the batch, thread, order or process; buffers, normalisation, bad input."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional

from dssl.augment import (
    CIFAR10,
    IMAGENET,
    TABLES,
    Normalization,
    SizedViewMaker,
    ViewMaker,
    show,
)
from dssl.errors import DsslError
from dssl.graph import View
from tests.augment.made import FOUR, digest, images, make
from tests.rejecting import rejects

WHOLE = """
import sys; sys.path.insert(0, {folder!r})
from made import FOUR, ViewMaker, digest, images, make
import numpy as np
print(digest(make(ViewMaker(FOUR, size=32, seed=3), images(2500), np.arange(2500))))
"""


def test_ten_thousand_views_are_the_same_for_any_batch_thread_order_and_process():
    pictures = images(2500)
    maker = ViewMaker(FOUR, size=32, seed=3)
    whole = make(maker, pictures, np.arange(2500))
    expected = digest(whole)

    shuffled = np.random.default_rng(1).permutation(2500)
    parts = maker.allocate(2500)

    def batch(indices: np.ndarray) -> None:
        plan = maker.plan(indices, epoch=2)
        for row, index in enumerate(indices):
            maker.apply_many(plan, row, [pictures[index]], parts, int(index))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(batch, np.array_split(shuffled, 350)))
    assert digest(parts) == expected

    many = maker.allocate(2500)
    for first in range(0, 2500, 100):
        plan = maker.plan(np.arange(first, first + 100), epoch=2)
        maker.apply_many(plan, 0, pictures[first : first + 100], many, first)
    assert digest(many) == expected

    fewer = ViewMaker(FOUR[2:], size=32, seed=3)  # another set of views
    apart = make(fewer, pictures, np.arange(500))
    for name in ("s2", "h2"):
        np.testing.assert_array_equal(apart[name], whole[name][:500])

    code = WHOLE.format(folder=str(Path(__file__).parent))
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert other.stdout.strip() == expected


def test_seed_epoch_index_and_view_all_matter():
    pictures = np.repeat(images(1), 2, axis=0)
    maker = ViewMaker([View(name="a", policy="standard"), View(name="b", policy="standard")], size=32, seed=0)
    first = make(maker, pictures, np.array([0, 1]))
    again = make(maker, pictures, np.array([0, 1]), epoch=3)
    other = make(ViewMaker([View(name="a", policy="standard")], size=32, seed=1), pictures, np.array([0, 1]))
    variants = [first["a"][0], first["a"][1], first["b"][0], again["a"][0], other["a"][0]]
    assert len({variant.tobytes() for variant in variants}) == len(variants)


def test_a_derived_view_starts_from_the_pixels_of_its_source():
    views = [
        View(name="s", policy="standard"),
        View(name="h", policy="invert", source="s"),
        View(name="g", policy="gray", source="h"),
    ]
    out = make(ViewMaker(views, size=24, seed=0), images(20), np.arange(20))
    np.testing.assert_array_equal(out["h"], 255 - out["s"])
    np.testing.assert_array_equal(out["g"][..., 0], out["g"][..., 2])
    assert list(out) == ["s", "h", "g"]


def test_standard_in_a_heavy_policy_is_the_standard_of_the_run():
    """As it is in the text of a graph: h1 by name and h2 by the same words are one policy."""
    policies = {"standard": "crop(0.5,1) > flip", "heavy": "standard > ra(2,5)"}
    views = [View(name="h1", policy="heavy"), View(name="h2", policy="standard > ra(2,5)")]
    maker = ViewMaker(views, size=24, seed=0, policies=policies)
    assert maker.policies["h1"] == maker.policies["h2"]
    assert show(maker.policies["h1"]) == "(crop(0.5,1) > flip) > ra(2,5)"


def test_a_second_crop_crops_the_view():
    both = ViewMaker([View(name="s", policy="standard"), View(name="c", policy="center", source="s")], size=24, seed=0)
    out = make(both, images(8), np.arange(8))
    np.testing.assert_array_equal(out["c"], out["s"])
    zoomed = ViewMaker([View(name="z", policy="center > crop(0.3,0.3)")], size=24, seed=0)
    assert not np.array_equal(make(zoomed, images(8), np.arange(8))["z"], out["s"])


@pytest.mark.parametrize(
    ("channels", "normalization"), [(3, CIFAR10), (3, IMAGENET), (1, Normalization((0.5,), (0.25,)))]
)
def test_normalised_is_torchvisions(channels: int, normalization: Normalization):
    # one multiplication and one addition instead of two divisions: at most a few units of float32 apart
    pictures = images(6, 50, 40, channels)
    views = [View(name="v", policy="standard")]
    codes = make(ViewMaker(views, size=40, seed=0, channels=channels), pictures, np.arange(6))["v"]
    floats = make(
        ViewMaker(views, size=40, seed=0, channels=channels, normalization=normalization), pictures, np.arange(6)
    )["v"]
    assert floats.dtype == np.float32
    tensor = torch.from_numpy(codes).permute(0, 3, 1, 2).float() / 255
    expected = functional.normalize(tensor, list(normalization.mean), list(normalization.std)).permute(0, 2, 3, 1)
    np.testing.assert_allclose(floats, expected.numpy(), atol=1e-6, rtol=0)


def test_images_that_may_not_be_written_to():
    maker = ViewMaker(FOUR, size=32, seed=3)
    pictures = images(3)
    pictures.flags.writeable = False
    expected = make(maker, pictures, np.arange(3))
    out, plan = maker.allocate(5), maker.plan(np.arange(3), epoch=2)
    for name in maker.names:
        out[name][:] = 77
    for row in range(3):
        maker.apply_many(plan, row, [np.asfortranarray(pictures[row])], out, row + 2)
    for name in maker.names:
        np.testing.assert_array_equal(out[name][2:], expected[name])
        assert (out[name][:2] == 77).all()


@pytest.mark.parametrize("normalization", [None, IMAGENET])
def test_images_of_any_sizes_in_one_call(normalization):
    generator = np.random.default_rng(4)
    shapes = [(40, 30), (8, 90), (1, 1), (33, 32), (90, 8)]
    pictures = [generator.integers(0, 256, (*shape, 3), np.uint8) for shape in shapes]
    pictures[1] = np.asfortranarray(pictures[1])
    pictures[3] = generator.integers(0, 256, (66, 64, 3), np.uint8)[::-2, ::2]
    pictures[4].flags.writeable = False
    maker = ViewMaker(FOUR, size=32, seed=3, normalization=normalization)
    plan, one_by_one, together = maker.plan(np.arange(7), epoch=2), maker.allocate(9), maker.allocate(9)
    for name in maker.names:
        one_by_one[name][:] = together[name][:] = 77
    for row, picture in enumerate(pictures):
        maker.apply_many(plan, row + 2, [picture], one_by_one, row + 3)
    maker.apply_many(plan, 2, pictures, together, 3)
    for name in maker.names:
        assert (one_by_one[name][3:8] != 77).any()
        np.testing.assert_array_equal(together[name], one_by_one[name])
    for images_, row, fact in (
        (pictures, 3, "5 images from row 3"),
        ([], 0, "0 images from row 0"),
        (pictures[:1], 7, "1 images from row 7"),
    ):
        with rejects(fact, len(plan)):
            maker.apply_many(plan, row, images_, together, 0)
    with rejects("row 5", "5 images"):
        maker.apply_many(plan, 0, pictures, together, 5)


def test_memory_does_not_grow():
    maker = ViewMaker([View(name="v", policy="standard > ra(2,9)")], size=16, seed=0)
    picture, out = images(1)[0], maker.allocate(1)
    pages = []
    for batch in range(20_000):
        plan = maker.plan(np.array([batch]), epoch=0)
        maker.apply_many(plan, 0, [picture], out, 0)
        if batch in (1_000, 19_999):
            pages.append(int(Path("/proc/self/statm").read_text().split()[1]))
    assert (pages[1] - pages[0]) * os.sysconf("SC_PAGE_SIZE") < 2_000_000


@pytest.mark.parametrize(
    ("image", "fact"),
    [
        (np.zeros((0, 5, 3), np.uint8), "0 x 5"),
        (np.zeros((5, 0, 3), np.uint8), "5 x 0"),
        (np.zeros((1, 40_000, 3), np.uint8), "1 x 40000"),
        (np.zeros((8, 8, 4), np.uint8), "(8, 8, 4)"),
        (np.zeros((8, 8, 1), np.uint8), "(8, 8, 1)"),
        (np.zeros((8, 8), np.uint8), "(8, 8)"),
        (np.zeros((8, 8, 3), np.float32), "float32"),
        ([[1]], "list"),
    ],
)
def test_a_bad_image_is_refused_before_a_pixel_is_touched(image, fact: str):
    maker = ViewMaker([View(name="v", policy="standard")], size=8, seed=0)
    out = maker.allocate(1)
    out["v"][:] = 77
    with rejects(fact):
        maker.apply_many(maker.plan(np.arange(1), epoch=0), 0, [image], out, 0)
    assert (out["v"] == 77).all()


@pytest.mark.parametrize("shape", [(1, 1), (1, 3000), (3000, 1), (2, 2), (1, 2)])
def test_thin_images_have_views(shape: tuple[int, int]):
    maker = ViewMaker(FOUR, size=16, seed=0)
    picture = np.full((*shape, 3), 200, np.uint8)
    flat = ViewMaker([View(name="v", policy="crop > flip > blur")], size=16, seed=0)
    assert (make(flat, picture[None], np.zeros(20, np.int64))["v"] == 200).all()
    make(maker, picture[None], np.zeros(20, np.int64))


def test_views_of_one_and_two_pixels():
    for size in (1, 2, 3):
        for operation in ("sharpness(2)", "blur(2,2)", "jigsaw(1)", "rotate(45)", "equalize", "cutout(1)", "ra(8,16)"):
            maker = ViewMaker([View(name="v", policy=f"crop > {operation}")], size=size, seed=0)
            assert make(maker, images(4), np.arange(4))["v"].shape == (4, size, size, 3)


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"size": 0}, ["0 pixels", 1, 4096]),
        ({"size": 8.5}, [8.5, 1, 4096]),
        ({"channels": 4}, ["4 channels", "'standard-channels'"]),
        ({"normalization": Normalization((0.5,), (0.5,))}, ["normalisation", "1 channels", 3]),
        ({"views": [View(name="a", policy="standard", source="b")]}, ["view a", "b"]),
        ({"views": [View(name="a", policy="ua", source="b"), View(name="b", policy="ua")]}, ["view a", "b", "first"]),
        ({"views": [View(name="a", policy="jigsaw(9)")]}, ["jigsaw(9)", "9 pixels", 8]),
        ({"views": [View(name="a", policy="crop?0.5")]}, ["'crop(0.2,1)?0.5'", "view a", "resize"]),
        ({"views": [View(name="a", policy="ua > crop")]}, ["'ua > crop(0.2,1)'", "view a", "resize"]),
        ({"views": [View(name="a", policy="hevy")]}, ["'hevy'", "'heavy'"]),
        ({"policies": {"standard": "flip"}, "views": [View(name="a", policy="ua")]}, ["'flip'", "resize"]),
    ],
)
def test_a_bad_maker_is_refused(arguments: dict, facts: list[object]):
    settings = {"views": [View(name="v", policy="standard")], "size": 8, "seed": 0} | arguments
    with rejects(*facts):
        ViewMaker(settings.pop("views"), **settings)


@pytest.mark.parametrize(("mean", "std"), [((0.5,), (0.0,)), ((float("nan"),), (1.0,)), ((0.5, 0.5), (1.0,)), ((), ())])
def test_a_bad_normalisation_is_refused(mean, std):
    with pytest.raises(DsslError, match="normalisation"):
        Normalization(mean, std)


def test_rows_and_buffers_that_do_not_exist_are_refused():
    maker = ViewMaker([View(name="v", policy="standard")], size=8, seed=0)
    plan, picture = maker.plan(np.arange(2), epoch=0), images(1)[0]
    for row, buffers, out_row in (
        (2, maker.allocate(2), 0),
        (-1, maker.allocate(2), 0),
        (0, maker.allocate(2), 2),
        (0, maker.allocate(2), -1),
        (0, {"v": np.zeros((2, 8, 8, 3), np.uint8)}, 0),
        (0, ViewMaker([View(name="v", policy="standard")], size=9, seed=0).allocate(2), 0),
        (0, ViewMaker([View(name="v", policy="standard")], size=8, seed=0, normalization=IMAGENET).allocate(2), 0),
        (0, ViewMaker([View(name=name, policy="standard") for name in "vw"], size=8, seed=0).allocate(2), 0),
    ):
        with pytest.raises(DsslError):
            maker.apply_many(plan, row, [picture], buffers, out_row)
    for pictures in (images(3), images(1)[0], images(2)[:, :, :, :2]):
        with pytest.raises(DsslError):
            maker.apply_many(plan, 0, pictures, maker.allocate(5), 0)


@pytest.mark.parametrize("operation", [row.operation for row in TABLES["monotone14"]])
def test_monotone14_changes_nothing_at_first_and_then_more_and_more(operation: str):
    noise = images(48, 12, 12)
    pictures = np.stack(
        [np.asarray(Image.fromarray(picture).resize((32, 32), Image.Resampling.BICUBIC)) for picture in noise]
    )
    changes = []
    for magnitude in range(0, 31, 6):
        maker = ViewMaker([View(name="v", policy=f"resize > op({operation},{magnitude},monotone14)")], size=32, seed=0)
        views = make(maker, pictures, np.arange(48))["v"]
        changes.append(float(np.abs(views.astype(int) - pictures).mean()))
    assert changes[0] == 0
    if operation != "identity":
        assert changes == sorted(changes)
        assert changes[-1] > changes[1] > 0


def test_views_of_several_sizes_are_those_of_makers_for_each_size() -> None:
    """And they are drawn by name: a view has the same bytes whatever views are made beside it."""
    large = [View(name="s1", policy="standard"), View(name="h1", policy="heavy", source="s1")]
    small = [View(name="l1", policy="crop(0.05,0.3)")]
    alone = [ViewMaker(large, size=32, seed=3), ViewMaker(small, size=16, seed=3)]
    maker = SizedViewMaker(alone, ["s1", "l1", "h1"])
    images = np.random.Generator(np.random.Philox(1)).integers(0, 256, (5, 40, 36, 3), dtype=np.uint8)
    rows = np.arange(5)
    out, plan = maker.allocate(5), maker.plan(rows, epoch=2)
    maker.apply_many(plan, 0, images[:3], out, 0)
    for row in (3, 4):
        maker.apply_many(plan, row, [images[row]], out, row)
    assert maker.names == ("s1", "l1", "h1")
    assert set(out) == set(maker.names)
    assert out["l1"].shape == (5, 16, 16, 3)
    for one in alone:
        expected = one.allocate(5)
        one.apply_many(one.plan(rows, epoch=2), 0, images, expected, 0)
        assert all(np.array_equal(out[name], expected[name]) for name in one.names)


def test_a_maker_refuses_a_view_of_another_size() -> None:
    with pytest.raises(DsslError, match=r"l1.*16.*32"):
        ViewMaker([View(name="l1", policy="standard", size=16)], size=32, seed=0)


def test_a_second_crop_of_an_image_smaller_than_the_view():
    maker = ViewMaker([View(name="s1", policy="crop > rotate(5) > crop")], size=32, seed=0, channels=3)
    out = maker.allocate(1)
    maker.apply_many(maker.plan(np.arange(1), epoch=0), 0, [np.full((16, 16, 3), 90, np.uint8)], out, 0)
    assert out["s1"].shape[1:] == (32, 32, 3)
