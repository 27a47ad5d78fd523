"""Outlines: derived edges, equality, refusals."""

from __future__ import annotations

import pytest

from scheduler_plugin.outline import Outline, Step, chain
from st2i_dask.errors import PolicyError


def step(*deps, callbacks=()):
    return Step("Fn", "m", "1", deps=deps, callback_deps=callbacks)


def test_successors_and_consumers_are_the_edges_reversed():
    outline = Outline("w", (step(), step(0), step(0, callbacks=(1,)), step(1, 2)))
    assert outline.successors == ((1, 2), (3,), (3,), ())
    assert outline.consumers == ((), (2,), (), ())
    assert outline.downstream(1) == {2, 3}
    assert outline.downstream(3) == set()


def test_equal_outlines_are_one_key():
    assert hash(chain("w", [("F", "m", "1")])) == hash(chain("w", [("F", "m", "1")]))
    assert chain("w", [("F", "m", "1")]) == chain("w", [("F", "m", "1")])
    assert chain("w", [("F", "m", "1")]) != chain("w", [("F", "m", "2")])


@pytest.mark.parametrize(
    ("workflow", "steps", "message"),
    [
        ("", (step(),), "non-empty"),
        ("w", (), "0 positions"),
        ("w", (step(0),), "depends on 0"),
        ("w", (step(), step(1)), "depends on 1"),
        ("w", (step(), step(callbacks=(2,))), "callback from 2"),
        ("w", (step(), step(-1)), "depends on -1"),
        ("w", (step(), step("x")), "depends on 'x'"),
    ],
)
def test_nonsense_is_refused(workflow, steps, message):
    with pytest.raises(PolicyError, match=message):
        Outline(workflow, steps)
