"""Placement: hand-computed choices, and the table against a plain model of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from scheduler_plugin.placement import Place, Placement
from st2i_dask.errors import PolicyError


def table(**executors):
    """name=(missing, free_bytes), all idle."""
    placement = Placement()
    for name, (missing, free_bytes) in executors.items():
        placement.join(name, missing, free_bytes)
        placement.set_idle(name, True)
    placement._check()
    return placement


def test_the_executor_that_holds_the_model_wins():
    placement = table(a=({}, 99), b=({"flux": 0.0}, 1))
    assert placement.place("flux", 5.0) == Place("b", 0.0, 0)


def test_load_still_missing_against_bytes_to_pull():
    # a: 1 s of load, nothing to pull; b: no load, 3 s of pull.
    placement = table(a=({"flux": 0.2}, 1), b=({"flux": 0.0}, 1))
    inputs = {"input_bytes": 300, "input_at": {"a": 300}, "bandwidth": 100.0}
    assert placement.place("flux", 5.0, **inputs) == Place("a", 0.2, 0)
    assert placement.place("flux", 50.0, **inputs) == Place("b", 0.0, 300)


def test_among_equals_the_one_with_most_free_memory():
    placement = table(a=({}, 10), b=({}, 30), c=({}, 20))
    assert placement.place("flux", 5.0) == Place("b", 1.0, 0)


def test_among_full_equals_the_first():
    assert table(a=({}, 10), b=({}, 10)).place("flux", 5.0) == Place("a", 1.0, 0)


def test_only_idle_executors_are_chosen():
    placement = table(a=({"flux": 0.0}, 10), b=({}, 10), c=({}, 5))
    placement.set_idle("a", False)
    assert placement.place("flux", 5.0) == Place("b", 1.0, 0)
    placement.set_idle("b", False)
    placement.set_idle("c", False)
    assert placement.place("flux", 5.0) is None


@pytest.mark.parametrize(
    ("flux_at_b", "flux_load_s", "placed"),
    [
        (1.0, 3.0, "b"),  # on a the base model would have to be loaded elsewhere: 3 s for 1 s
        (0.0, 3.0, "a"),  # it has another place
        (0.8, 3.0, "b"),  # 2.4 s
        (0.2, 3.0, "a"),  # 0.6 s
        (1.0, 0.5, "a"),
    ],
)
def test_a_producer_leaves_its_consumer_the_executor_with_its_model(flux_at_b, flux_load_s, placed):
    """The ControlNet is on a, and takes a second to load on b or c."""
    placement = table(a=({"canny": 0.0, "flux": 0.0}, 10), b=({"flux": flux_at_b}, 10), c=({}, 5))
    assert placement.place("canny", 1.0).executor == "a"
    found = placement.place("canny", 1.0, lets_in=[("flux", flux_load_s), ("nowhere", 9.0)])
    assert found.executor == placed


def test_a_running_producer_is_kept_apart():
    placement = table(a=({"flux": 0.0}, 10), b=({}, 10))
    assert placement.place("flux", 5.0, apart_from=["a"]) == Place("b", 1.0, 0)
    assert placement.place("flux", 5.0, apart_from=["a", "b"]) is None
    placement.set_idle("b", False)
    assert placement.place("flux", 5.0, apart_from=["a"]) is None


def test_inputs_on_unknown_or_busy_executors_are_no_reason():
    placement = table(a=({}, 10), b=({}, 20))
    placement.set_idle("b", False)
    at = {"gone": 100, "b": 100}
    assert placement.place("m", 1.0, 100, at, 10.0) == Place("a", 1.0, 100)


def test_least_missing_follows_idleness_and_reports():
    placement = table(a=({"flux": 0.5}, 1), b=({"flux": 0.1}, 1), c=({}, 1))
    assert placement.least_missing("flux") == 0.1
    placement.take_moved()
    placement.set_idle("b", False)
    assert placement.take_moved() == {"flux"}
    assert placement.least_missing("flux") == 0.5
    placement.report("a", {}, 1)
    assert placement.least_missing("flux") == 1.0
    placement.set_idle("b", True)
    placement.set_idle("a", False)
    placement.set_idle("c", False)
    assert placement.least_missing("flux") == 0.1


def test_what_ran_is_resident_when_nothing_else_is_known():
    placement = table(a=({"vae": 0.0}, 1))
    placement.loaded("a", "flux")
    assert placement.missing_on("a", "flux") == placement.missing_on("a", "vae") == 0.0


def test_an_executor_that_comes_back_starts_anew():
    placement = table(a=({"flux": 0.0}, 1))
    with pytest.raises(PolicyError, match="already there"):
        placement.join("a", {}, 1)
    placement.leave("a")
    placement.join("a", {}, 1)
    assert placement.missing_on("a", "flux") == 1.0
    assert not placement.is_idle("a")


def test_more_executors_than_the_first_table_holds():
    placement = table(**{f"w{n}": ({f"m{n}": 0.0}, n) for n in range(200)})
    assert placement.idle == 200
    assert placement.place("m150", 5.0) == Place("w150", 0.0, 0)
    assert placement.place("nowhere", 5.0).executor == "w199"


NAMES = st.sampled_from([f"w{n}" for n in range(5)])
SHARES = st.dictionaries(st.sampled_from("xyz"), st.sampled_from([0.0, 0.25, 0.5, 1.0]))


class PlacementMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.placement = Placement()
        self.model: dict[str, tuple[dict[str, float], int, bool]] = {}

    @rule(name=NAMES, missing=SHARES, free=st.integers(0, 3))
    def join_or_report(self, name, missing, free):
        if name in self.model:
            self.placement.report(name, missing, free)
            self.model[name] = (missing, free, self.model[name][2])
        else:
            self.placement.join(name, missing, free)
            self.model[name] = (missing, free, False)

    @rule(name=NAMES)
    def leave(self, name):
        if self.model.pop(name, None) is not None:
            self.placement.leave(name)

    @rule(name=NAMES, idle=st.booleans())
    def idle(self, name, idle):
        if name in self.model:
            self.placement.set_idle(name, idle)
            self.model[name] = (*self.model[name][:2], idle)

    @rule(
        model=st.sampled_from("xyz"),
        load=st.sampled_from([0.0, 1.0, 4.0]),
        at=st.dictionaries(NAMES, st.integers(0, 100)),
        apart=st.sets(NAMES, max_size=2),
    )
    def place(self, model, load, at, apart):
        place = self.placement.place(model, load, 100, at, 50.0, apart)
        allowed = {
            n: (m.get(model, 1.0) * load + (100 - at.get(n, 0)) / 50.0, -free)
            for n, (m, free, idle) in self.model.items()
            if idle and n not in apart
        }
        if not allowed:
            assert place is None
        else:
            assert allowed[place.executor] == min(allowed.values())
            assert place.missing == self.model[place.executor][0].get(model, 1.0)
            assert place.pull_bytes == 100 - at.get(place.executor, 0)

    @invariant()
    def consistent(self):
        self.placement._check()


TestPlacementMachine = PlacementMachine.TestCase
TestPlacementMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
