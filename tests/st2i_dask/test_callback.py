"""Callback inputs fetch what is touched, once, and as items where the producer hands over items."""

from __future__ import annotations

import pytest

from st2i_dask.callback import CallbackFuture


class Letters:
    """Items that note when they are asked for."""

    def __init__(self, text):
        self.text = text
        self.asked = []

    def length(self):
        self.asked.append("length")
        return None if self.text is None else len(self.text)

    def item(self, index):
        self.asked.append(index)
        return self.text[index]


def never():
    raise AssertionError("the whole was fetched")


@pytest.fixture
def letters():
    return Letters("abcd")


def test_nothing_is_fetched_before_it_is_touched(letters):
    future = CallbackFuture(never, letters)
    assert "not fetched" in repr(future)
    assert letters.asked == []


def test_items_are_fetched_when_touched_and_once(letters):
    future = CallbackFuture(never, letters)
    assert (future[2], future[-1], future[2], len(future)) == ("c", "d", "c", 4)
    assert letters.asked == ["length", 2, 3]
    assert list(future) == list("abcd")
    assert letters.asked == ["length", 2, 3, 0, 1]


@pytest.mark.parametrize("index", [4, -5])
def test_an_index_beyond_the_length_is_an_index_error(letters, index):
    with pytest.raises(IndexError, match="4 items"):
        CallbackFuture(never, letters)[index]
    assert letters.asked == ["length"]


def test_slices_results_and_membership_take_the_whole(letters):
    future = CallbackFuture(lambda: "wxyz", letters)
    assert future[1:3] == "xy"
    assert future.result() == "wxyz"
    assert "w" in future
    assert future[0] == "w", "what is here whole is not fetched again"
    assert letters.asked == []


def test_a_producer_without_items_gives_the_whole():
    calls = []
    future = CallbackFuture(lambda: calls.append(1) or {0: "a", 7: "b"}, Letters(None))
    assert future[7] == "b"
    assert 7 in future
    assert len(future) == 2
    assert calls == [1]


def test_then_maps_items_and_whole(letters):
    future = CallbackFuture(lambda: "abcd", letters).then(str.upper)
    assert future[1] == "B"
    assert letters.asked == ["length", 1]
    assert len(future) == 4
    assert future.result() == "ABCD"
    whole = CallbackFuture(lambda: ["x"], Letters(None)).then(lambda value: value * 2)
    assert (len(whole), whole[1]) == (2, "x")


def test_a_value_that_is_here():
    assert list(CallbackFuture.of([1, 2])) == [1, 2]
