"""Glue: plain outside a workflow, recorded inside, checked when it is called."""

from __future__ import annotations

import pickle

import cloudpickle
import pytest

import st2i_dask as st2i
from st2i_dask.symbol import Symbol
from st2i_dask.trace import GlueNode, Trace, tracing


@st2i.glue
def add(a, b=1):
    """Adds."""
    return a + b


@st2i.glue(outputs=2)
def halves(value):
    return value // 2, value - value // 2


@pytest.fixture
def trace():
    with tracing(Trace("portrait")) as trace:
        yield trace


def test_outside_a_workflow_it_is_the_function():
    assert add(1, b=2) == 3
    assert halves(5) == (2, 3)
    assert add.__name__ == "add"
    assert add.__doc__ == "Adds."


def test_inside_a_workflow_it_is_recorded_and_does_not_run(trace):
    def explode(*args):
        pytest.fail("ran while composing")

    result = st2i.glue(explode)(1, trace.parameter("seed"))
    assert isinstance(result, Symbol)
    (node,) = trace.nodes
    assert isinstance(node, GlueNode)
    assert (node.label, node.outputs) == ("explode#1", None)


def test_several_outputs_unpack(trace):
    left, right = halves(trace.parameter("seed"))
    assert repr(left) == "<symbolic halves#1[0]>"
    assert repr(right) == "<symbolic halves#1[1]>"


def test_calls_are_numbered(trace):
    assert [repr(add(1)), repr(halves(1)[0]), repr(add(1))] == [
        "<symbolic add#1>",
        "<symbolic halves#1[0]>",
        "<symbolic add#2>",
    ]


@pytest.mark.parametrize("outputs", [0, -1, 1.5, "2"])
def test_a_wrong_number_of_outputs_is_refused(outputs):
    with pytest.raises(st2i.ComposeError, match=r"glue outputs=.*; give the number of returned"):
        st2i.glue(outputs=outputs)


@pytest.mark.parametrize(
    "call", [lambda: add(), lambda: add(1, 2, 3), lambda: add(1, c=2), lambda: add(1, a=2)]
)
def test_a_call_that_does_not_fit_is_refused_while_composing(trace, call):
    with pytest.raises(st2i.ComposeError) as caught:
        call()
    assert "workflow 'portrait': glue add#1 cannot be called like this" in str(caught.value)
    assert "it takes (a, b=1)" in str(caught.value)
    assert not trace.nodes


def test_builtins_that_do_not_tell_their_arguments_are_taken(trace):
    assert isinstance(st2i.glue(max)(1, trace.parameter("seed")), Symbol)


@pytest.mark.parametrize("function", [add, halves, st2i.glue(lambda value: value + 1)])
def test_glue_travels_to_workers(function):
    again = pickle.loads(cloudpickle.dumps(function))
    assert again(5) == function(5)
