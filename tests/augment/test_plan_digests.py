"""Plans never change: digests for every policy there is, mostly of those that the first version of the program drew, in NumPy.

A run that was started then has to see the same views when it is resumed now.
"""

import hashlib

import numpy as np
import pytest

from dssl.augment import OPERATIONS, TABLES, add_kernel
from dssl.augment import kernels as code
from dssl.augment.kernels.draw import _fifteen_digits
from dssl.augment.maker import Program
from dssl.augment.policy import parse

DIGESTS = {
    "standard": "52b47e25afa9",
    "standard > ra(2,5)": "bcf2c3a81083",
    "0.9*ra(2,5) | 0.1*jigsaw(4)": "7f2c4f521f02",
    "crop(0.05,0.4)": "5f302f5dcd51",
    "center": "f96d099de97a",
    "resize > flip(0.3)": "dd21ff8ec741",
    "jitter(0.4,0.3,1.5,0.1)": "adc131dc5447",
    "jitter(0,0.5,0,0.5)": "6d88f4e58778",
    "blur(0,3)": "917d66763da3",
    "jigsaw(5)": "4ae1f0b99a50",
    "jigsaw(1)": "b30274620887",
    "ra(3,17.3)": "0e90a8736650",
    "ra(0,5)": "239fd6ef7871",
    "ua": "c3f59ea9d4f2",
    "ua(3,dssl16)": "14cdeb82d5d4",
    "ta": "9bd7389f8217",
    "ta(dssl16)": "1bd4e42e1e13",
    "1*gray | 1e-9*ua | 2*ra(1,30)": "600e6455ee51",
    "ra(2,9,randaugment14)": "a90dac0eb7c6",
    "ra(2,9,monotone14)": "cbd48b39c71f",
    "ra(2,9,uniform13)": "774288e4a05a",
    "ra(2,9,trivial14)": "80ae20943cf1",
    "ua(2,trivial14)": "06b10aa0be6c",
    "ua(2,monotone14)": "beca98b81b7b",
    "ua(2,randaugment14)": "4371872c37d0",
    "op(autocontrast,0.0)": "ce6695338dca",
    "op(equalize,2.0)": "ce66913803d6",
    "op(invert,4.0)": "76d52908d06c",
    "op(rotate,6.0)": "567f28d1d775",
    "op(posterize,8.0)": "91b749cf8e45",
    "op(solarize,10.0)": "c132d72ed4bf",
    "op(solarize-add,12.0)": "49fafdb58544",
    "op(color,14.0)": "1351c3f006ee",
    "op(contrast,16.0)": "f08731666809",
    "op(brightness,18.0)": "08300f9555a7",
    "op(sharpness,20.0)": "121c3c550f9e",
    "op(shear-x,22.0)": "7b619380918d",
    "op(shear-y,24.0)": "6b36a6682690",
    "op(cutout-pixels,26.0)": "66a605f3c081",
    "op(translate-x-pixels,28.0)": "1c0e340de722",
    "op(translate-y-pixels,30.0)": "fa6b387e3072",
    "op(autocontrast,11.5,monotone14)": "d30ed53ac78c",
    "op(equalize,11.5,monotone14)": "ff2acf4008c3",
    "op(rotate,11.5,monotone14)": "9568bea73154",
    "op(solarize,11.5,monotone14)": "9ea4a9081a45",
    "op(color,11.5,monotone14)": "2aa523dfa833",
    "op(posterize,11.5,monotone14)": "aff3f304326c",
    "op(contrast,11.5,monotone14)": "0c520091e466",
    "op(brightness,11.5,monotone14)": "6af3fe5613a2",
    "op(sharpness,11.5,monotone14)": "4af711b6f1a1",
    "op(shear-x,11.5,monotone14)": "b3ffb36f8fcf",
    "op(shear-y,11.5,monotone14)": "3f851fd2e592",
    "op(translate-x,11.5,monotone14)": "4b780c0b9145",
    "op(translate-y,11.5,monotone14)": "1a482660e5e8",
    "autocontrast(0)": "3124364e8d4b",
    "autocontrast(1)": "ce6695338dca",
    "autocontrast(0.63)": "b2b2c1f47f09",
    "equalize(0)": "9e92d5f78ff5",
    "equalize(1)": "ce66913803d6",
    "equalize(0.63)": "ffdccf3dbfa3",
    "rotate(-360)": "28ccc4661617",
    "rotate(360)": "28ccc4661617",
    "rotate(93.60000000000002)": "08451d727070",
    "posterize(0)": "91b749cf8e45",
    "posterize(8)": "3df8580eec62",
    "posterize(5.04)": "aff3f304326c",
    "solarize(0)": "59bbe920d9c4",
    "solarize(256)": "0549a8332e2e",
    "solarize(161.28)": "d93ebe8f6a72",
    "solarize-add(-255)": "3c61f25a664b",
    "solarize-add(255)": "17952f3bd30d",
    "solarize-add(66.30000000000001)": "fc677c9fb577",
    "color(0)": "a1280593589b",
    "color(10)": "b3b9e8149897",
    "color(6.3)": "f8a516135c71",
    "contrast(0)": "09a23afa3474",
    "contrast(10)": "c03568aa161d",
    "contrast(6.3)": "2373c133905e",
    "brightness(0)": "da7f8de8e9f6",
    "brightness(10)": "d2ac51b9eb7b",
    "brightness(6.3)": "441a7aa79ee5",
    "sharpness(0)": "99edcc04c6a6",
    "sharpness(10)": "c5e3b359ca2b",
    "sharpness(6.3)": "7d75aba2c9e9",
    "hue(-0.5)": "f26218e6e357",
    "hue(0.5)": "cb5322597f1b",
    "hue(0.13)": "696f8bf0c2e6",
    "shear-x(-10)": "5f402bc66227",
    "shear-x(10)": "5444f91887b6",
    "shear-x(2.5999999999999996)": "1854951e8df5",
    "shear-y(-10)": "9bb14bb63abb",
    "shear-y(10)": "5d996c34319c",
    "shear-y(2.5999999999999996)": "a5ce8b5d896f",
    "translate-x(-1)": "5421730c9f1b",
    "translate-x(1)": "ac91488c5bbf",
    "translate-x(0.26)": "691c6325f7fe",
    "translate-y(-1)": "5117f862ec36",
    "translate-y(1)": "c95701e00ab5",
    "translate-y(0.26)": "d865e7d472f2",
    "translate-x-pixels(-10000)": "9a8d804d80c9",
    "translate-x-pixels(10000)": "33101a10ef5a",
    "translate-x-pixels(2600.0)": "989a01138d86",
    "translate-y-pixels(-10000)": "2bb414651e69",
    "translate-y-pixels(10000)": "80726a288886",
    "translate-y-pixels(2600.0)": "c14f95a2e6a9",
    "cutout(0)": "47cc11096974",
    "cutout(2)": "6290d2fcd3fa",
    "cutout(1.26)": "1ad631ddedac",
    "cutout-pixels(0)": "47cc11096974",
    "cutout-pixels(10000)": "6290d2fcd3fa",
    "cutout-pixels(6300.0)": "6290d2fcd3fa",
    "rotate(-0.0)": "28ccc4661617",
    "translate-x-pixels(-0.0)": "dcdea5889bda",
    "hue(-0.001)": "ad3f1c875ed4",
    "standard-channels": "b492aa83b4ad",
    "ra(2,9,dssl15)": "9fd0c0dec9ce",
    "ra(2,9,randaugment13)": "c63f2c5af85f",
    "ra(2,9,monotone13)": "41790fa50182",
    "ua(2,uniform12)": "a04e4f7fe1f3",
    "ta(trivial13)": "34670909dd3f",
    "noise(0.08)": "8cd733f6f314",
    "noise(0.04,0.25)": "58c6954928e7",
    "soften(0.8,3)": "9ffd8b7a2df7",
    "jpeg(8,50)": "96d6d01fbb1a",
    "add(-0.1,0.3)": "bd8ec6d5a922",
    "translate(0.24)": "c1ae246d8dcc",
    "rotate(-30,30)": "bbd1c661ab0b",
    "corrupt": "6838f6be974a",
    "corruption(shot,3)": "49326ab1585a",
    "corruption(elastic,2)": "d5d26fcba7c6",
    "corruption(rotation,4)": "90baf54e2406",
    "corruption(motion,1)": "c76cc9d04a19",
}


@pytest.mark.parametrize("policy", DIGESTS)
def test_a_plan_is_what_it_always_was(policy):
    digest = hashlib.blake2b(digest_size=6)
    for size in (32, 224):
        program = Program(["s1", "h1"], [parse(policy), parse("flip")], [-1, 0], size=size)
        for seed in range(4):
            plan = program.plan(np.arange(150) * 7919 + seed, seed=seed, epoch=seed % 3)
            digest.update(plan.codes.astype("<i4").tobytes())
            digest.update(plan.values.astype("<f8").tobytes())
            assert not plan.custom
    assert digest.hexdigest() == DIGESTS[policy]


def test_every_table_and_operation_is_among_them():
    text = " ".join(DIGESTS)
    assert all(name in text for name in TABLES)
    assert all(name in text for name in OPERATIONS if OPERATIONS[name].encoding not in (code.PLAIN, code.NUMBERED))


def test_a_custom_operation_gets_its_number_value_and_draws():
    add_kernel("mine", None, low=0, high=1)
    number = OPERATIONS["mine"].number
    try:
        program = Program(["v"], [parse("gray > mine(0.25)?0.5")], [-1], size=32)
        plan = program.plan(np.arange(200), seed=3, epoch=1)
    finally:
        del OPERATIONS["mine"]
    from dssl import rng

    draws = rng.uniforms(rng.key(3, "view", 1, "v"), np.arange(200), 2 + 1 + 2)
    happens = draws[:, 2] < 0.5
    assert plan.custom
    assert np.array_equal(plan.codes[:, 1], np.where(happens, code.CUSTOM, code.SKIP))
    numbers = plan.values[:, program.offsets[1] : program.offsets[1] + 4]
    expected = np.concatenate([np.full((200, 1), number), np.full((200, 1), 0.25), draws[:, 3:]], axis=1)
    assert np.array_equal(numbers, expected * happens[:, None])


def test_fifteen_digits_are_rounded_as_python_rounds_them():
    generator = np.random.default_rng(0)
    values = np.concatenate([generator.uniform(-1, 1, 3000), generator.integers(-(2**16), 2**16, 3000) / 2**16,
                             generator.uniform(-1, 1, 500) * 1e-9, [0.0, -0.0, 1.0, -1.0, 0.5, 5e-16, 1.5e-15]])  # fmt: skip
    found = np.array([_fifteen_digits(value) for value in values])
    assert found.tobytes() == np.array([round(value, 15) for value in values.tolist()]).tobytes()
