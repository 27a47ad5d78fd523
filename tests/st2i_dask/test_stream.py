"""Streams publish to the sink of the invocation that runs, and collect the items as stored."""

from __future__ import annotations

import pytest

import st2i_dask as st2i
from st2i_dask.stream import streaming


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
