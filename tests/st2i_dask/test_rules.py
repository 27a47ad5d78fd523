"""Rules: what each lets through, what it refuses, and what the refusal says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from st2i_dask.errors import ParameterError
from st2i_dask.rules import Multiple, OneOf, Prompt, Range


def refusal(rule, value, values=None):
    with pytest.raises(ParameterError) as caught:
        rule.check("p", value, *([] if values is None else [values]))
    return str(caught.value)


@pytest.mark.parametrize("value", [1, 1000, 4.5])
def test_a_range_includes_its_limits(value):
    Range(1, 1000).check("p", value)


@pytest.mark.parametrize("value", [0, 1001, math.nan, math.inf, -math.inf])
def test_a_range_refuses_what_is_outside_and_nan(value):
    assert refusal(Range(1, 1000), value) == f"p={value!r} is out of range; allowed: 1 to 1000"


def test_a_range_shows_every_digit_of_whole_limits():
    assert Range(-(2**63), 2**64 - 1).describe() == "-9223372036854775808 to 18446744073709551615"
    assert Range(0, 0.5).describe() == "0 to 0.5"


def test_a_multiple_refuses_and_names_the_nearest_size():
    sizes = Multiple(16, 64, 4096)
    sizes.check("p", 64)
    sizes.check("p", 4096)
    assert refusal(sizes, 100) == (
        "p=100 is not an allowed size; allowed: multiples of 16 from 64 to 4096; nearest: 96"
    )
    assert refusal(sizes, 0).endswith("nearest: 64")
    assert refusal(sizes, -16).endswith("nearest: 64")
    assert refusal(sizes, 5000).endswith("nearest: 4096")


@given(
    of=st.integers(1, 64),
    multiples=st.tuples(st.integers(1, 9), st.integers(10, 99)),
    spill=st.tuples(st.integers(0, 63), st.integers(0, 63)),
    value=st.integers(-(10**400), 10**400) | st.integers(0, 7000),
)
def test_the_nearest_size_is_itself_allowed_and_none_is_nearer(of, multiples, spill, value):
    sizes = Multiple(of, multiples[0] * of - spill[0] % of, multiples[1] * of + spill[1] % of)
    try:
        sizes.check("p", value)
    except ParameterError as error:
        nearest = int(str(error).rpartition("nearest: ")[2])
        sizes.check("p", nearest)
        assert abs(nearest - value) == min(
            abs(of * n - value) for n in range(multiples[0], multiples[1] + 1)
        )


def test_one_of_lists_what_there_is():
    OneOf((64, 128)).check("p", 64)
    assert refusal(OneOf((64, 128)), 65) == "p=65 is not one of [64, 128]"
    assert OneOf((64, 128)).describe() == "one of 64, 128"


@pytest.mark.parametrize("value", ["", "   ", "\n\t", "\u2003"])
def test_an_empty_prompt_is_refused(value):
    assert refusal(Prompt(), value) == f"p={value!r} is empty; say what the picture shows"
    Prompt(may_be_empty=True).check("p", value)


def test_a_prompt_too_long_in_characters_is_refused_before_tokens_are_counted():
    rule = Prompt(max_chars=10, max_tokens=2, count=lambda text: pytest.fail("counted"))
    assert refusal(rule, "x" * 11) == "p is too long: 11 characters, limit 10; shorten it"


def test_a_prompt_too_long_in_tokens_shows_the_end_that_would_be_lost():
    rule = Prompt(max_tokens=3, count=lambda text: len(text.split()))
    rule.check("p", "a b c")
    message = refusal(rule, "a b c the lost end")
    assert message.startswith("p is too long: 6 tokens, limit 3; shorten it")
    assert "...'a b c the lost end'" in message


def test_the_token_limit_can_be_another_parameter():
    rule = Prompt(max_tokens="length", count=len)
    rule.check("p", "abc", {"length": 3})
    assert "4 tokens, limit 3" in refusal(rule, "abcd", {"length": 3})
    rule.check("p", "abcd", {})
    assert rule.describe() == "at most length tokens"


def test_half_a_surrogate_pair_is_refused():
    message = refusal(Prompt(), "a cat \ud83d")
    assert "'\\ud83d' at position 6" in message
    Prompt().check("p", "a cat \U0001f408")


def test_a_prompt_that_is_not_text_is_refused():
    assert refusal(Prompt(), 5) == "p=5 is not text; give a string"
