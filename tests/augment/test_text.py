"""The text form of policies."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dssl.augment import KINDS, NAMED, OPERATIONS, SEVERITIES, TABLES, parse, show
from dssl.augment.policy import (
    AtMagnitude,
    Blur,
    Chain,
    Choose,
    Corruption,
    Crop,
    Flip,
    Jigsaw,
    Jitter,
    Maybe,
    RandAugment,
    Resize,
    Single,
    TrivialAugment,
    UniformAugment,
)
from tests.rejecting import rejects

shares = st.floats(0, 1)
tables = st.sampled_from(sorted(TABLES))
singles = st.sampled_from(sorted(OPERATIONS)).flatmap(
    lambda name: st.floats(OPERATIONS[name].low, OPERATIONS[name].high).map(lambda value: Single(name, value))
)
at_magnitudes = tables.flatmap(
    lambda name: st.builds(
        AtMagnitude, st.sampled_from([row.operation for row in TABLES[name]]), st.floats(0, 30), st.just(name)
    )
)
leaves = st.one_of(
    st.builds(lambda low, extra: Crop(low, low + (1 - low) * extra), st.floats(0.01, 1), st.just(1.0) | st.just(0.0)),
    st.builds(Resize, st.booleans()),
    st.builds(Flip, shares),
    st.builds(Jitter, shares, shares, shares, st.floats(0, 0.5)),
    st.builds(lambda low, extra: Blur(low, low + extra), st.floats(0, 5), st.floats(0, 5)),
    st.builds(Jigsaw, st.integers(1, 9)),
    st.builds(RandAugment, st.integers(0, 9), st.floats(0, 30), tables),
    st.builds(UniformAugment, st.integers(0, 9), tables),
    st.builds(TrivialAugment, tables),
    st.sampled_from(list(NAMED.values())),
    st.builds(Corruption, st.sampled_from(sorted(KINDS)), st.sampled_from(SEVERITIES)),
    st.builds(lambda low, extra: Single("rotate", low, low + extra), st.floats(-180, 90), st.floats(0, 90)),
    singles,
    at_magnitudes,
)
policies = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(Maybe, inner, shares),
        st.lists(inner, min_size=2, max_size=3).map(lambda steps: Chain(tuple(steps))),
        st.lists(st.tuples(st.floats(1e-6, 1e3), inner), min_size=2, max_size=3).map(
            lambda parts: Choose(tuple(weight for weight, _ in parts), tuple(policy for _, policy in parts))
        ),
    ),
    max_leaves=8,
)


@given(policies)
@settings(max_examples=400)
def test_printing_and_parsing_are_inverse(policy):
    assert parse(show(policy)) == policy
    assert show(parse(show(policy))) == show(policy)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("ra(2,5)", RandAugment(2, 5.0, "dssl16")),
        ("ra(2, 5, monotone14)", RandAugment(2, 5.0, "monotone14")),
        ("ra(2,5) > jigsaw(4)", Chain((RandAugment(2, 5.0), Jigsaw(4)))),
        ("0.9*ra(2,5) | 0.1*jigsaw(4)", Choose((0.9, 0.1), (RandAugment(2, 5.0), Jigsaw(4)))),
        ("ua | ta", Choose((1.0, 1.0), (UniformAugment(), TrivialAugment()))),
        ("0.5*resize > gray | 0.5*center", Choose((0.5, 0.5), (Chain((Resize(False), Single("gray", 0))), Resize(True)))),
        ("gray?0.2", Maybe(Single("gray", 0), 0.2)),
        ("(flip > gray)?.5", Maybe(Chain((Flip(0.5), Single("gray", 0))), 0.5)),
        ("rotate(-12.5)", Single("rotate", -12.5)),
        ("rotate(-12.5,30)", Single("rotate", -12.5, 30)),
        ("corruption(gaussian-noise,3)", Corruption("gaussian-noise", 3)),
        ("equalize", Single("equalize", 1)),
        ("op(solarize,9)", AtMagnitude("solarize", 9.0, "dssl16")),
        ("crop", Crop(0.2, 1.0)),
        (
            "standard",
            Chain((Crop(0.2, 1), Flip(0.5), Maybe(Jitter(0.4, 0.4, 0.4, 0.1), 0.8), Maybe(Single("gray", 0), 0.2),
                   Maybe(Blur(0.1, 2), 0.5))),
        ),
        (
            "standard-cifar",
            Chain((Crop(0.2, 1), Flip(0.5), Maybe(Jitter(0.4, 0.4, 0.4, 0.1), 0.8), Maybe(Single("gray", 0), 0.2))),
        ),
        ("standard-ablation", Chain((Crop(0.2, 1), Flip(0.5), Maybe(Jitter(0.4, 0.4, 0.4, 0.1), 0.8)))),
    ],
)  # fmt: skip
def test_text_means(text, policy):
    assert parse(text) == policy


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("standrad", ["'standrad'", "'standard'"]),
        ("jigsw(4)", ["'jigsw'", "'jigsaw'"]),
        ("rotat(3)", ["'rotat'", "'rotate'"]),
        ("ra(2,5,dssl61)", ["'dssl61'", "'dssl16'"]),
        ("op(rotat,5)", ["dssl16", "'rotat'", "'rotate'"]),
        ("ra(2,-1)", ["magnitude", -1, 30]),
        ("ra(2,31)", ["magnitude", 31, 30]),
        ("ra(2,nan)", ["magnitude", "nan", 30]),
        ("ra(nan,2)", ["ra", "nan", "whole"]),
        ("ra(1.5,2)", ["ra", 1.5, "whole"]),
        ("ra(2)", ["'ra(2)'", "2 to 3", "not 1"]),
        ("gray?nan", ["probability", "nan"]),
        ("gray?1.5", ["probability", 1.5]),
        ("gray?", ["'gray?'", "probability", "'?'"]),
        ("flip(-0.5)", ["flip", -0.5, "0 and 1"]),
        ("jigsaw(0)", ["jigsaw", 0, 1, 1024]),
        ("jigsaw(2.5)", ["jigsaw", 2.5, "whole"]),
        ("jigsaw(four)", ["argument 1", "'four'"]),
        ("crop(0,1)", ["smallest", "crop", 0, 1e-06]),
        ("crop(0.5,0.2)", ["largest", "crop", 0.2, "0.5 and 1"]),
        ("blur(3,2)", ["largest", "blur", 2, "3 and 100"]),
        ("posterize(9)", ["posterize", 9, "0 and 8"]),
        ("posterize", ["'posterize'", "1 to 2", "not 0"]),
        ("rotate(20,10)", ["largest", "rotate", 10, "20 and 360"]),
        ("corruption(snow,3)", ["'snow'", "fog"]),
        ("corruption(fog,6)", ["corruption(fog,6)", "1, 2, 3, 4 or 5"]),
        ("corruption(fog,2.5)", ["corruption", 2.5, "whole"]),
        ("standard(3)", ["'standard(3)'", "no arguments"]),
        ("gray(1)", ["'gray(1)'", "0 arguments", "not 1"]),
        ("0.9*ra(2,5) | jigsaw(4)", ["'0.9*ra(2,5) | jigsaw(4)'", "weight"]),
        ("0.9*ra(2,5)", ["'0.9*ra(2,5)'", "'?0.9'"]),
        ("0*ua | 0*ta", ["weights", "positive"]),
        ("-1*ua | 2*ta", ["weight", -1]),
        ("ra(2,5) >", ["'ra(2,5) >'", "'the end'"]),
        ("ra(2,5) gray", ["'ra(2,5) gray'", "'gray'"]),
        ("ra(2,5", ["'ra(2,5'", "')'"]),
        ("ra[2]", ["'ra[2]'", "'['"]),
        ("", ["string", "''"]),
    ],
)
def test_a_mistake_is_named(text, facts):
    with rejects(*facts):
        parse(text)


def test_names_of_the_run_take_precedence():
    assert parse("standard > gray", names={"standard": Flip(1.0)}) == Chain((Flip(1.0), Single("gray", 0)))


def test_numbers_print_short_and_exactly():
    assert show(Maybe(Flip(1 / 3), 0.1)) == f"flip({1 / 3!r})?0.1"
    assert show(RandAugment(2, 5.0)) == "ra(2,5)"
    assert math.isclose(parse(f"flip({math.pi / 4!r})").probability, math.pi / 4, rel_tol=0)
