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
from dssl.errors import DsslError

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
    ("text", "part"),
    [
        ("standrad", "did you mean 'standard'?"),
        ("jigsw(4)", "did you mean 'jigsaw'?"),
        ("rotat(3)", "did you mean 'rotate'?"),
        ("ra(2,5,dssl61)", "did you mean 'dssl16'?"),
        ("op(rotat,5)", "did you mean 'rotate'?"),
        ("ra(2,-1)", "the magnitude is -1"),
        ("ra(2,31)", "between 0 and 30"),
        ("ra(2,nan)", "the magnitude is nan"),
        ("ra(nan,2)", "whole number"),
        ("ra(1.5,2)", "whole number"),
        ("ra(2)", "ra takes 2 to 3 arguments, not 1"),
        ("gray?nan", "a probability is nan"),
        ("gray?1.5", "a probability is 1.5"),
        ("gray?", "expected a probability"),
        ("flip(-0.5)", "between 0 and 1"),
        ("jigsaw(0)", "between 1 and"),
        ("jigsaw(2.5)", "whole number"),
        ("jigsaw(four)", "must be a number, not 'four'"),
        ("crop(0,1)", "the smallest area of crop is 0"),
        ("crop(0.5,0.2)", "the largest area of crop is 0.2"),
        ("blur(3,2)", "the largest sigma of blur"),
        ("posterize(9)", "between 0 and 8"),
        ("posterize", "posterize takes 1 to 2 arguments, not 0"),
        ("rotate(20,10)", "the largest value of rotate is 10: expected a number between 20 and 360"),
        ("corruption(snow,3)", "unknown kind of corruption 'snow'"),
        ("corruption(fog,6)", "expected 1, 2, 3, 4 or 5"),
        ("corruption(fog,2.5)", "must be a whole number"),
        ("standard(3)", "standard takes no arguments"),
        ("gray(1)", "gray takes 0 arguments"),
        ("0.9*ra(2,5) | jigsaw(4)", "every alternative needs a weight"),
        ("0.9*ra(2,5)", "has no alternative"),
        ("0*ua | 0*ta", "all zero"),
        ("-1*ua | 2*ta", "a weight is -1"),
        ("ra(2,5) >", "expected a policy, found 'the end'"),
        ("ra(2,5) gray", "'gray' is unexpected"),
        ("ra(2,5", "expected ')'"),
        ("ra[2]", "'['"),
        ("", "a policy is a string"),
    ],
)
def test_a_mistake_is_named(text, part):
    with pytest.raises(DsslError) as caught:
        parse(text)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_of_the_run_take_precedence():
    assert parse("standard > gray", names={"standard": Flip(1.0)}) == Chain((Flip(1.0), Single("gray", 0)))


def test_numbers_print_short_and_exactly():
    assert show(Maybe(Flip(1 / 3), 0.1)) == f"flip({1 / 3!r})?0.1"
    assert show(RandAugment(2, 5.0)) == "ra(2,5)"
    assert math.isclose(parse(f"flip({math.pi / 4!r})").probability, math.pi / 4, rel_tol=0)
