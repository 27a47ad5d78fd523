"""The backlog: order, removal from the middle, and no tombstones left behind."""

from __future__ import annotations

import random

import pytest

from scheduler_plugin.backlog import Backlog
from scheduler_plugin.candidates import Candidate
from scheduler_plugin.outline import chain

OUTLINE = chain("w", [("Fn", "m", "1")])


def candidate(key):
    return Candidate(key, "t", "r", OUTLINE, 0, 0.0)


def test_the_smallest_rank_comes_first_then_the_smallest_key():
    backlog = Backlog()
    for key, rank in (("b", 1.0), ("a", 1.0), ("c", 0.5)):
        backlog.push((rank,), candidate(key))
    order = []
    while backlog:
        order.append(backlog.first().key)
        backlog.remove(order[-1])
        backlog._check()
    assert order == ["c", "a", "b"]


def test_a_key_that_is_not_there_is_a_key_error():
    with pytest.raises(KeyError):
        Backlog().remove("x")


def test_removed_and_pushed_again_it_stands_at_its_new_rank():
    backlog = Backlog()
    backlog.push((1.0,), candidate("a"))
    backlog.push((2.0,), candidate("b"))
    backlog.push((3.0,), candidate("c"))
    backlog.remove("b")
    backlog.push((0.0,), candidate("b"))
    assert backlog.first().key == "b"
    backlog._check()


def test_the_same_object_may_come_back_beside_its_tombstone():
    backlog, again = Backlog(), candidate("b")
    backlog.push((1.0,), candidate("a"))
    backlog.push((2.0,), again)
    backlog.remove("b")
    backlog.push((2.0,), again)
    backlog._check()
    backlog.remove("a")
    backlog.remove("b")
    backlog._check()
    assert not backlog


def test_random_operations_agree_with_a_sorted_list():
    rng = random.Random(1)
    backlog, model = Backlog(), {}
    for step in range(4000):
        if model and rng.random() < 0.5:
            key = rng.choice(sorted(model)) if rng.random() < 0.7 else backlog.first().key
            backlog.remove(key)
            del model[key]
        else:
            key = f"k{step}"
            model[key] = ((float(rng.randrange(50)),), key)
            backlog.push(model[key][0], candidate(key))
        assert len(backlog) == len(model)
        if model:
            assert backlog.first().key == min(model.values())[1]
        if step % 50 == 0:
            backlog._check()
