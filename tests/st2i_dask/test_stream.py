"""Streams publish to the sink of the invocation that runs, and collect the items as stored."""

from __future__ import annotations

import pytest

import st2i_dask as st2i
from st2i_dask.dag import build
from st2i_dask.fusion import fuse
from st2i_dask.invocation import BoundTask
from st2i_dask.plan import pack
from st2i_dask.stream import streaming
from st2i_dask.trace import Trace, tracing


class Sink:
    def __init__(self):
        self.got = []

    def put(self, index, item):
        self.got.append((index, item))
        return f"stored {item}"


def test_items_go_to_the_sink_in_order_and_come_back_as_stored():
    sink, opened = Sink(), []

    def opener(output, length):
        opened.append((output, length))
        return sink

    with streaming(opener):
        samples = st2i.stream("samples", 2)
        samples.append("a")
        assert sink.got == [(0, "a")]
        samples.append("b")
    assert opened == [("samples", 2)]
    assert sink.got == [(0, "a"), (1, "b")]
    assert samples.items == ["stored a", "stored b"]


@pytest.mark.parametrize("opener", [None, lambda output, length: None])
def test_where_nobody_listens_it_collects(opener):
    def body():
        samples = st2i.stream("samples", 1)
        samples.append("a")
        return samples.items

    if opener is None:
        assert body() == ["a"]
    else:
        with streaming(opener):
            assert body() == ["a"]


def test_more_items_than_announced_are_refused():
    samples = st2i.stream("samples", 1)
    samples.append(1)
    with pytest.raises(st2i.OutputError, match="announced with 1 items"):
        samples.append(2)


@pytest.mark.parametrize("length", [0, -1, True, 1.0, None])
def test_a_length_must_be_a_whole_number(length):
    with pytest.raises(st2i.OutputError, match="whole number"):
        st2i.stream("samples", length)


def test_the_opener_holds_for_its_body_only():
    with streaming(lambda output, length: Sink()):
        pass
    samples = st2i.stream("samples", 1)
    samples.append("a")
    assert samples.items == ["a"]


def test_an_output_is_streamed_once():
    with streaming(lambda output, length: None):
        st2i.stream("samples", 1)
        with pytest.raises(st2i.OutputError, match="'samples' is streamed twice"):
            st2i.stream("samples", 2)


class Streams(st2i.ModelFn):
    """Streams two items; `how` says what goes wrong."""

    def setup_io(self):
        self.add_input("x")
        self.add_output("items")

    def execute(self, model_components, x):
        how = self.options["how"]
        made = st2i.stream("items", 3 if how == "short" else 2)
        made.append([x])
        made.append([x])
        return {
            "items": {
                "right": made.items,
                "a tuple": tuple(made.items),
                "short": made.items,
                "other": [[x], [x]],
                "longer": [*made.items, made.items[0]],
                "none": None,
            }[how]
        }


def evaluate(how):
    with tracing(Trace("portrait")) as trace:
        result = Streams(how=how)(trace.parameter("x"))
    dag = build(trace, result)
    (task,) = pack(dag, fuse(dag))
    return BoundTask(task, {"x": 1}, None, ()).evaluate({})


@pytest.mark.parametrize("how", ["right", "a tuple"])
def test_what_was_streamed_is_returned(how):
    assert list(evaluate(how)) == [[1], [1]]


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("short", "announced with 3 items and got 2"),
        ("other", "something else was returned"),
        ("longer", "something else was returned"),
        ("none", "something else was returned"),
    ],
)
def test_a_stream_that_is_not_the_output_is_refused(how, what):
    with pytest.raises(st2i.OutputError, match=rf"workflow 'portrait': Streams#1: .*{what}"):
        evaluate(how)
