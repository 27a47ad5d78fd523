"""Symbols: everything that would need a value is refused, with the workflow, the node and a cure."""

from __future__ import annotations

import copy
import math
import operator
import os
import pickle

import numpy as np
import pytest

import st2i_dask as st2i
from st2i_dask.symbol import Outputs, ParamRef, Ref, Symbol
from st2i_dask.trace import Trace


@pytest.fixture
def symbol():
    return Symbol(Trace("portrait"), ParamRef("seed"), "parameter 'seed'")


def match(symbol):
    match symbol:
        case [first, *_]:
            return first


def statement_if(symbol):
    if symbol:
        pass


def statement_for(symbol):
    for _ in symbol:
        pass


def unpacking(symbol):
    _first, _second = symbol


def index_assignment(symbol):
    symbol[0] = 1


def index_deletion(symbol):
    del symbol[0]


def in_place(symbol):
    symbol += 1


OPERATIONS = [
    statement_if,
    statement_for,
    unpacking,
    index_assignment,
    index_deletion,
    in_place,
    bool,
    len,
    range,
    int,
    float,
    complex,
    str,
    list,
    tuple,
    set,
    sorted,
    sum,
    iter,
    reversed,
    round,
    math.sqrt,
    math.floor,
    np.asarray,
    np.sqrt,
    os.fspath,
    open,
    pickle.dumps,
    copy.copy,
    copy.deepcopy,
    operator.neg,
    operator.pos,
    operator.abs,
    operator.invert,
    operator.not_,
    lambda s: s and 1,
    lambda s: 1 if s else 2,
    lambda s: [0, 1][s],
    lambda s: s[0],
    lambda s: s(),
    lambda s: s.shape,
    lambda s: s.strip(),
    lambda s: getattr(s, "_private"),  # noqa: B009
    lambda s: f"{s}",
    lambda s: f"{s:.2f}",
    lambda s: f"{s!s}",
    lambda s: "{}".format(s),  # noqa: UP032
    lambda s: "%s" % s,  # noqa: UP031
    lambda s: "%d" % s,  # noqa: UP031
    lambda s: 1 in s,
    lambda s: s in [1],
    lambda s: s in {1: 2}.values(),
    lambda s: max(s, 1),
    lambda s: range(1, s),
    lambda s: np.float32(2) * s,
    lambda s: [0] * s,
    lambda s: "x" * s,
]
BINARY = [
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv),
    *(operator.mod, operator.pow, operator.matmul, divmod),
    *(operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift),
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_needs_a_value_is_refused(symbol, operation):
    with pytest.raises(st2i.ComposeError) as caught:
        operation(symbol)
    assert "workflow 'portrait'" in str(caught.value)
    assert "parameter 'seed'" in str(caught.value)


@pytest.mark.parametrize("operation", BINARY)
@pytest.mark.parametrize("other", [1, 0.5, "itself"])
def test_operators_are_refused_on_both_sides(symbol, operation, other):
    other = symbol if other == "itself" else other
    for arguments in ((symbol, other), (other, symbol)):
        with pytest.raises(st2i.ComposeError) as caught:
            operation(*arguments)
        message = str(caught.value)
        assert "workflow 'portrait'" in message
        assert "the value of parameter 'seed', which does not exist while composing" in message
        assert "@st2i.glue" in message
        assert "st2i.Static" in message


def test_a_match_statement_does_not_look_inside(symbol):
    assert match(symbol) is None


def test_a_symbol_can_be_shown_compared_by_identity_and_kept_in_a_dict(symbol):
    assert repr(symbol) == f"{symbol!r}" == "<symbolic parameter 'seed'>"
    assert symbol is not None
    assert {symbol: 1}[symbol] == 1
    assert not hasattr(symbol, "__array_interface__")


def test_pickling_says_that_it_is_outside_its_workflow(symbol):
    with pytest.raises(st2i.ComposeError, match="outside its workflow; only what the workflow"):
        pickle.dumps(symbol)


# ---------------------------------------------------------------- several outputs


@pytest.fixture
def outputs():
    trace = Trace("portrait")
    symbols = {name: Symbol(trace, Ref(0, name), f"clip#1.{name}") for name in ("text", "pooled")}
    return Outputs("workflow 'portrait': clip#1", symbols)


def test_outputs_are_read_by_attribute_by_name_or_unpacked_in_order(outputs):
    text, pooled = outputs
    assert outputs.text is outputs["text"] is text
    assert outputs.pooled is outputs["pooled"] is pooled


@pytest.mark.parametrize("read", [lambda o: o.texts, lambda o: o["texts"]])
def test_an_undeclared_output_is_refused_with_those_declared(outputs, read):
    with pytest.raises(st2i.ComposeError) as caught:
        read(outputs)
    assert str(caught.value) == (
        "workflow 'portrait': clip#1 declares no output 'texts'; it declares: text, pooled"
    )


def test_control_flow_on_outputs_is_refused(outputs):
    with pytest.raises(st2i.ComposeError, match="'portrait': clip#1: Python control flow"):
        bool(outputs)


def test_outputs_do_not_pickle_and_probes_find_nothing(outputs):
    with pytest.raises(st2i.ComposeError, match="outside its workflow"):
        pickle.dumps(outputs)
    assert not hasattr(outputs, "__array__")
    assert not hasattr(outputs, "_repr_html_")
