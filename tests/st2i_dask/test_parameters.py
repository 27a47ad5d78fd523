"""Parameters: which are static, what is converted, and every refusal at registration and submit."""

from __future__ import annotations

import decimal
import fractions
import math
import threading
from typing import Annotated, Any, Literal, Optional

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from st2i_dask.errors import ComposeError, ParameterError
from st2i_dask.parameters import Data, Kind, Parameter, Static, bind, declared
from st2i_dask.rules import Multiple, Prompt, Range


def bound(function, **values):
    static, data = bind(declared(function, "w"), values, "w")
    assert not set(static) & set(data)
    return {**static, **data}


def refused(function, **values):
    with pytest.raises(ParameterError) as caught:
        bound(function, **values)
    assert str(caught.value).startswith("workflow 'w'")
    return str(caught.value)


def registration(function):
    with pytest.raises(ComposeError) as caught:
        declared(function, "w")
    assert str(caught.value).startswith("workflow 'w'")
    return str(caught.value)


# ---------------------------------------------------------------- kinds


def test_integers_flags_and_literals_are_static_and_everything_else_is_data():
    def f(
        prompt: str,
        image: Any,
        anything,
        scale: float,
        steps: int,
        fast: bool,
        kind: Literal["a", "b"],
        maybe: int | None,
        mixed: int | str,
        steered: Static[str],
        free: Data[int],
        limited: Annotated[int, Range(0, 9)],
        seed: int = 0,
    ): ...

    kinds = {p.name: p.kind for p in declared(f, "w")}
    static = {name for name, kind in kinds.items() if kind is Kind.STATIC}
    assert static == {"steps", "fast", "kind", "steered", "limited"}


def test_a_marker_and_rules_go_together_in_any_nesting():
    def f(a: Static[Annotated[float, Range(0, 1)]], b: Annotated[Data[int], Range(0, 1)]): ...

    a, b = declared(f, "w")
    assert (a.kind, a.rules) == (Kind.STATIC, (Range(0, 1),))
    assert (b.kind, b.rules) == (Kind.DATA, (Range(0, 1),))


def test_annotations_written_as_text_are_resolved():
    def f(n: "Annotated[int, Range(1, 2)]" = 1): ...  # noqa: UP037

    assert declared(f, "w")[0].rules == (Range(1, 2),)


# ---------------------------------------------------------------- registration


def test_a_parameter_without_a_fixed_name_is_refused():
    assert "'values' cannot be passed by its name" in registration(lambda *values: 0)
    assert "'options' cannot be passed by its name" in registration(lambda **options: 0)
    assert "declare it without" in registration(lambda prompt, /: 0)


@pytest.mark.parametrize("name", ["tenant", "client", "prompts", "self"])
def test_a_name_that_submit_needs_itself_is_refused(name):
    function = eval(f"lambda {name}: 0")
    assert f"{name!r} has the name of an argument of submit or map; rename" in registration(
        function
    )


def test_an_annotation_that_cannot_be_resolved_is_refused():
    def f(prompt: "Nowhere"): ...  # noqa: F821, UP037

    assert "cannot be resolved" in registration(f)
    assert "use types that are visible" in registration(f)


def test_a_default_outside_its_own_limits_is_refused():
    def wrong_rule(n: Annotated[int, Range(1, 4)] = 5): ...
    def wrong_type(n: int = 0.5): ...

    assert "the default is refused: n=5 is out of range" in registration(wrong_rule)
    assert "the default is refused: n=0.5 has type float" in registration(wrong_type)


def test_rules_inside_a_union_would_be_ignored_and_are_refused():
    def f(n: Annotated[int, Range(1, 4)] | None = None): ...
    def g(n: Optional[Annotated[int, Range(1, 4)]] = None): ...  # noqa: UP045
    def h(n: Annotated[int | None, Range(1, 4)] = None): ...

    assert "Annotated[int | None, Range(1, 4)]" in registration(f)
    assert "put them around it" in registration(g)
    assert bound(h) == {"n": None}
    assert bound(h, n=None) == {"n": None}
    assert "out of range" in refused(h, n=9)


def test_a_default_is_carried_like_a_given_value():
    def f(scale: float = 3): ...

    assert type(bound(f)["scale"]) is float
    assert type(bound(f, scale=3)["scale"]) is float


# ---------------------------------------------------------------- names


def test_a_wrong_name_is_refused_with_the_right_one():
    def f(prompt: str, num_steps: int = 4): ...

    assert refused(f, prompt="a", num_step=5) == (
        "workflow 'w' has no parameter 'num_step'; did you mean 'num_steps'? "
        "it takes: prompt, num_steps"
    )
    assert "did you mean" not in refused(f, prompt="a", zzz=5)


def test_a_missing_parameter_is_named():
    def f(prompt: str, n: int): ...

    assert "parameter 'n' is missing; it takes: prompt, n" in refused(f, prompt="a")


# ---------------------------------------------------------------- what travels


class Doubled:
    """A rule that sends twice the value, once it is allowed; `limit` is another parameter."""

    def check(self, name, value, values):
        if value > values.get("limit", math.inf):
            raise ParameterError(f"{name}={value} is over {values['limit']}")

    def carry(self, name, value, values):
        if value == 3:
            raise ParameterError(f"{name}={value} cannot be doubled under {values['limit']}")
        return 2 * value

    def describe(self):
        return "a number to double"


def test_a_rule_may_give_the_form_that_is_sent():
    def f(
        n: Annotated[Any, Doubled()], limit: Data[int] = 9, m: Annotated[Any, Doubled()] = None
    ): ...

    assert bound(f, n=4) == {"n": 8, "limit": 9, "m": None}
    assert bound(f, n=4, m=5) == {"n": 8, "limit": 9, "m": 10}
    assert "n=4 is over 3" in refused(f, n=4, limit=3)  # rules see what was given
    assert "n=3 cannot be doubled under 9" in refused(f, n=3)


class Counted(Doubled):
    """A rule that sends how many there are."""

    def check(self, name, value, values): ...
    def carry(self, name, value, values):
        return len(value)


class Locked(list):
    def __reduce__(self):
        raise TypeError("locked")


def test_only_the_form_that_is_sent_must_be_sendable():
    def f(n: Annotated[Any, Counted()]): ...
    def g(n: Any): ...

    assert bound(f, n=Locked([1, 2])) == {"n": 2}
    assert "cannot be sent to workers" in refused(g, n=Locked([1, 2]))


# ---------------------------------------------------------------- types


@pytest.mark.parametrize(
    "value", [0.5, 3.0, "3", True, None, [3], decimal.Decimal(3), np.float32(3), np.True_, 3j]
)
def test_what_is_no_integer(value):
    def f(n: int): ...

    message = refused(f, n=value)
    assert f"has type {type(value).__name__}, wanted int" in message


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3)])
def test_integers_become_plain(value):
    def f(n: int): ...

    assert type(bound(f, n=value)["n"]) is int


@pytest.mark.parametrize("value", ["3", b"3", bytearray(b"3"), True, None, 3j, [3.0], 10**400])
def test_what_is_no_float(value):
    def f(x: float): ...

    assert "wanted float" in refused(f, x=value)


@pytest.mark.parametrize("value", [3, 3.0, np.float64(3), np.int32(3), fractions.Fraction(3)])
def test_floats_become_plain(value):
    def f(x: float): ...

    assert type(bound(f, x=value)["x"]) is float


@pytest.mark.parametrize("value", [1.0, True, "1", 3, np.int64(1), [1]])
def test_a_literal_takes_only_what_it_lists(value):
    def f(x: Literal[1, 2]): ...

    assert bound(f, x=1) == {"x": 1}
    assert "wanted 1 | 2" in refused(f, x=value)


def test_a_literal_compares_arrays_without_asking_for_their_truth():
    def f(x: Literal["a"]): ...

    assert "wanted 'a'" in refused(f, x=np.zeros(3))


def test_other_types_are_checked_too():
    def f(prompt: str, tags: list[str], either: int | str | None, flag: bool): ...

    good = dict(prompt="a", tags=["b"], either=None, flag=False)
    assert bound(f, **good) == good
    assert "wanted str" in refused(f, **{**good, "prompt": 5})
    assert "wanted str" in refused(f, **{**good, "prompt": None})
    assert "wanted list" in refused(f, **{**good, "tags": "b"})
    assert "wanted int or str or None" in refused(f, **{**good, "either": 0.5})
    assert "wanted bool" in refused(f, **{**good, "flag": 1})


def test_long_values_are_cut_in_messages():
    def f(n: int): ...

    assert len(refused(f, n="x" * 10_000)) < 250


# ---------------------------------------------------------------- values


def test_nan_and_wrong_types_for_a_rule_are_refused():
    def f(x: Annotated[float, Range(0, 1)], y: Annotated[Any, Range(0, 1)] = 0): ...

    assert "x=nan is out of range; allowed: 0 to 1" in refused(f, x=math.nan)
    assert "y='a' has type str, wanted 0 to 1" in refused(f, x=0.5, y="a")


def test_a_size_that_is_not_allowed_is_refused():
    def f(height: Annotated[int, Multiple(16, 16, 4096)] = 1024): ...

    assert "height=1000 is not an allowed size" in refused(f, height=1000)
    assert "nearest: 4096" in refused(f, height=10**400)


@pytest.mark.parametrize("value", [1.0, True, "1", None, 2**64, -(2**63) - 1, math.nan])
@pytest.mark.parametrize("annotated", [True, False])
def test_a_seed_is_an_integer_that_the_generator_takes(value, annotated):
    def with_type(seed: int = 0): ...
    def without(seed=0): ...

    assert "seed=" in refused(with_type if annotated else without, seed=value)


def test_the_whole_range_of_seeds_is_taken():
    torch = pytest.importorskip("torch")

    def f(seed: int): ...

    for seed in (-(2**63), -1, 0, 2**64 - 1):
        torch.Generator().manual_seed(bound(f, seed=seed)["seed"])


def test_an_absent_seed_can_be_the_default():
    def f(seed=None): ...

    assert bound(f) == {"seed": None}
    assert bound(f, seed=5) == {"seed": 5}
    assert "seed=0.5" in refused(f, seed=0.5)


def test_a_prompt_without_rules_must_still_say_something():
    def f(prompt: str, negative_prompt: str = ""): ...

    assert "prompt='' is empty" in refused(f, prompt="")
    assert "10001 characters, limit 10000" in refused(f, prompt="x" * 10_001)
    assert bound(f, prompt="a") == {"prompt": "a", "negative_prompt": ""}


def test_none_is_no_value_for_a_required_parameter_of_any_type():
    def f(image: Annotated[Any, Range(0, 1)], other: Annotated[Any, Range(0, 1)] = None): ...

    bind(declared(f, "w"), {"image": 1, "other": None}, "w")
    with pytest.raises(ParameterError, match="image=None, wanted 0 to 1"):
        bind(declared(f, "w"), {"image": None}, "w")


def test_a_rule_may_look_at_another_parameter_also_at_a_later_one():
    def f(prompt: Annotated[str, Prompt(max_tokens="length", count=len)], length: int = 3): ...

    assert bound(f, prompt="abc")
    assert bound(f, prompt="abcd", length=4)
    assert "4 tokens, limit 3" in refused(f, prompt="abcd")


def test_what_cannot_be_sent_to_a_worker_is_refused():
    def f(image: Any, mask=None): ...

    message = refused(f, image=threading.Lock())
    assert "image=<unlocked _thread.lock" in message
    assert "cannot be sent to workers" in message
    assert "pass plain values" in message
    assert bound(f, image=np.zeros((3, 8, 8)), mask=lambda: 0)["image"].shape == (3, 8, 8)


def test_describe_says_type_default_and_limits():
    def f(n: Annotated[int | None, Range(1, 9)] = 4, kind: Literal["a", "b"] = "a", x=None): ...

    assert [p.describe() for p in declared(f, "w")] == [
        "int | None, default 4, 1 to 9",
        "'a' | 'b', default 'a'",
        "any, default None",
    ]


@given(
    value=st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.lists(st.integers()),
    annotation=st.sampled_from([int, float, str, bool, int | None, float | str, Literal[1, "a"]]),
)
def test_a_checked_value_is_of_its_type_and_checking_again_changes_nothing(value, annotation):
    parameter = Parameter("p", Kind.DATA, annotation, 0)
    try:
        checked = parameter.check(value)
    except ParameterError:
        return
    again = parameter.check(checked)
    assert type(again) is type(checked)
    assert again == checked or (math.isnan(again) and math.isnan(checked))
    assert checked == value or math.isnan(value) or type(checked) is float
