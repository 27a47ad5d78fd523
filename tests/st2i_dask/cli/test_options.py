"""Options, JSONL fields and --param to parameters."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest

import st2i_dask as st2i
from st2i_dask.cli.options import checked, convert, parameter_values, parse_assignments, parse_size


class Nothing(st2i.ModelFn):
    def setup_io(self):
        self.add_input("value")
        self.add_output("out")


@pytest.fixture
def workflow(fresh_registry):
    def drawing(
        prompt: str,
        seed: int = 0,
        num_steps: int = 4,
        width: int = 64,
        height: int = 64,
        scale: float = 1.0,
        tiled: bool = False,
        medium: Literal["oil", 2] = "oil",
        note: str | None = None,
        tags: list | None = None,
        free=None,
    ):
        return Nothing()(prompt)

    return st2i.workflow(name="drawing", replace=True)(drawing)


def parameter(workflow, name):
    return next(p for p in workflow.parameters if p.name == name)


def test_steps_and_size_have_short_names(workflow):
    values = parameter_values(workflow, {"steps": 3, "size": "32x64"})
    assert values == {"num_steps": 3, "width": 32, "height": 64}


def test_a_workflow_may_have_such_parameters_itself(fresh_registry):
    @st2i.workflow(name="own-names", replace=True)
    def own(steps: int, size: str):
        return Nothing()(size)

    assert parameter_values(own, {"steps": 3, "size": "big"}) == {"steps": 3, "size": "big"}


def test_unknown_names_are_refused_with_all_parameters_listed(workflow):
    with pytest.raises(st2i.ParameterError, match=r"no parameter 'stepz'.*prompt, seed, num_steps"):
        parameter_values(workflow, {"stepz": 3})


def test_the_option_is_named_as_it_was_written(fresh_registry):
    @st2i.workflow(name="no-steps", replace=True)
    def plain(prompt: str):
        return Nothing()(prompt)

    with pytest.raises(st2i.ParameterError, match=r"'num_steps' \(for --steps\); it takes: prompt"):
        parameter_values(plain, {"steps": 3}, shown={"steps": "--steps"})
    with pytest.raises(st2i.ParameterError, match=r"'width' \(for size\)"):
        parameter_values(plain, {"size": "8x8"})


def test_one_parameter_under_two_names_is_refused(workflow):
    with pytest.raises(st2i.ParameterError, match="given twice, by steps and by num_steps"):
        parameter_values(workflow, {"steps": 3, "num_steps": 3})


@pytest.mark.parametrize("text", ["64", "64x", "x64", "64x64x64", "-1x5", "ax b", "", None, 64])
def test_sizes_that_are_none(text):
    with pytest.raises(st2i.ParameterError, match="not a size; write WIDTHxHEIGHT"):
        parse_size(text)


def test_sizes():
    assert parse_size(" 64 X 32 ") == (64, 32)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("seed", "7", 7),
        ("scale", "2", 2.0),
        ("scale", "1e-3", 1e-3),
        ("tiled", "yes", True),
        ("tiled", "False", False),
        ("medium", "oil", "oil"),
        ("medium", "2", 2),
        ("prompt", "007", "007"),
        ("note", "none", None),
        ("note", "hello = x", "hello = x"),
        ("tags", '["a", "b"]', ["a", "b"]),
        ("free", "3", 3),
        ("free", "three", "three"),
    ],
)
def test_texts_become_the_declared_type(workflow, name, text, expected):
    value = convert(parameter(workflow, name), text)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("name", "text"),
    [("seed", "1.5"), ("seed", ""), ("scale", "wide"), ("tiled", "maybe"), ("medium", "ink")],
)
def test_texts_of_another_type_are_refused(workflow, name, text):
    with pytest.raises(st2i.ParameterError, match=f"{name}='{text}' cannot be read; wanted: "):
        convert(parameter(workflow, name), text)


def test_assignments(workflow):
    assert parse_assignments(workflow, ["scale=2", "note=a=b"]) == {"scale": 2.0, "note": "a=b"}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["scale"], "not NAME=VALUE"),
        (["=3"], "not NAME=VALUE"),
        (["scale=1", "scale=2"], "'scale' is given twice"),
    ],
)
def test_assignments_that_are_none(workflow, texts, message):
    with pytest.raises(st2i.ParameterError, match=message):
        parse_assignments(workflow, texts)


def test_values_are_checked_by_their_parameter(workflow):
    assert checked(workflow, {"scale": 2}) == {"scale": 2.0}
    with pytest.raises(st2i.ParameterError, match=r"'drawing': seed='x' has type str"):
        checked(workflow, {"seed": "x"})


class AtMost:
    """A rule that depends on another parameter."""

    def check(self, name, value, values):
        limit = values.get("limit", 8)
        if value > limit:
            raise st2i.ParameterError(f"{name}={value} is over {limit}")

    def describe(self):
        return "at most limit"


def test_rules_are_checked_and_see_the_other_parameters(fresh_registry):
    @st2i.workflow(name="ruled", replace=True)
    def ruled(prompt: str, width: Annotated[int, AtMost()] = 4, limit: int = 8):
        return Nothing()(prompt)

    assert checked(ruled, {"width": 8}) == {"width": 8}
    assert checked(ruled, {"width": 9, "limit": 9}) == {"width": 9, "limit": 9}
    with pytest.raises(st2i.ParameterError, match="width=9 is over 8"):
        checked(ruled, {"width": 9})
