"""Each mode, each question, each refusal."""

from __future__ import annotations

import pytest

from st2i_dask.errors import PolicyError
from worker_plugin.weight_cache import MODES, Evict, WeightCache

from .cache_driver import WHOLE

# ---------------------------------------------------------------- modes


def test_pipelined_keeps_nothing_of_a_run(driver):
    d = driver(60, mode="pipelined", a=[10] * 3, b=[10] * 2)
    d.cache.set_prefix("a", 2)
    d.tell("begin", 1, ["a", "b"])
    d.tell("begin", 2, ["b"])
    d.tell("end", 1)
    assert (d.resident("a"), d.resident("b")) == ("...", "xx")
    d.hold = True
    d.tell("begin", 3, ["a"])
    d.tell("end", 3)
    d.report("loaded")
    assert d.resident("a") == "..."
    d.tell("end", 2)
    assert d.resident("b") == ".."


@pytest.mark.parametrize("mode", WHOLE)
def test_whole_models_execute_once_all_layers_are_there(driver, mode):
    d = driver(60, mode=mode, a=[10, 20, 10], b=[10])
    d.hold = True
    d.tell("begin", 1, ["a", "b"])
    d.tell("enter", 1, "a", 1)
    for _ in range(4):
        assert d.cache.waiting(1)
        assert not d.cache.ready(1)
        d.report("loaded")
    assert not d.cache.waiting(1)
    assert all(d.cache.is_pinned("a", layer) for layer in range(3))
    d.tell("end", 1)
    assert not d.cache.is_pinned("a", 0)


def test_mcache_evicts_whole_models_least_recently_used_first(driver):
    d = driver(60, mode="mcache", a=[10, 10], b=[10, 10], c=[10, 10], e=[10])
    for run, name in enumerate("abca"):
        d.run(run, name)
    d.seen()
    d.run(9, "e")
    assert sorted(d.seen()) == ["+e0", "-b0", "-b1"]


def test_wcache_evicts_whole_workflows(driver):
    d = driver(60, mode="wcache")
    for name, unit in (("a", "x"), ("b", "x"), ("c", "y"), ("e", "z")):
        d.cache.add(name, [10, 10], unit=unit)
    for run, name in enumerate("abca"):
        d.run(run, name)
    d.seen()
    d.tell("begin", 9, ["e"])
    assert sorted(s for s in d.seen() if s[0] == "-") == ["-c0", "-c1"]
    d.tell("end", 9)
    d.run(10, "c")
    assert (d.resident("a"), d.resident("b")) == ("..", "..")


def test_wcache_takes_from_the_same_workflow_when_nothing_else_is_left(driver):
    d = driver(20, mode="wcache")
    for name in "ab":
        d.cache.add(name, [10, 10], unit="x")
    d.run(1, "a")
    d.run(2, "b")
    assert (d.resident("a"), d.resident("b")) == ("..", "xx")


def test_nocache_begins_with_nothing_of_other_requests(driver):
    d = driver(60, mode="nocache")
    for name, unit in (("a", "r1"), ("b", "r1"), ("c", "r2")):
        d.cache.add(name, [10, 10], unit=unit)
    d.run(1, "a")
    d.run(2, "b")
    assert d.resident("a") == "xx"
    d.run(3, "c")
    assert (d.resident("a"), d.resident("b"), d.resident("c")) == ("..", "..", "xx")


@pytest.mark.parametrize("mode", WHOLE)
def test_two_whole_models_do_not_block_each_other(driver, mode):
    d = driver(60, mode=mode, a=[10] * 4, b=[10] * 4)
    d.hold = True
    d.tell("begin", 1, ["a"])
    d.tell("begin", 2, ["b"])
    d.tell("enter", 1, "a", 0)
    d.tell("enter", 2, "b", 0)
    d.hold = False
    d.report("loaded")
    assert not d.cache.waiting(1)
    assert d.cache.waiting(2)
    d.tell("end", 1)
    assert not d.cache.waiting(2)
    d.tell("end", 2)


def test_a_whole_model_whose_layers_lie_in_the_way_of_its_own_is_packed_anew(driver):
    d = driver(20, 20, mode="mcache", a=[3], b=[5, 7, 7, 9, 9])
    d.tell("begin", 1, ["a"])
    d.tell("begin", 2, ["b"])
    d.tell("enter", 2, "b", 0)
    assert d.cache.waiting(2)
    d.seen()
    d.tell("end", 1)
    assert not d.cache.waiting(2)
    assert d.resident("b") == "xxxxx"
    assert sorted(s for s in d.seen() if s[0] == "-") == ["-a0", "-b1", "-b2", "-b3", "-b4"]
    d.tell("end", 2)


# ---------------------------------------------------------------- questions and refusals


def test_rows_for_display_least_recently_used_first(driver):
    d = driver(60, a=[10, 20], b=[10])
    d.run(1, "a")
    d.tell("begin", 2, ["b"])
    rows = d.cache.models()
    assert [row.weights for row in rows] == ["a", "b"]
    assert rows[0][1:7] == (30, 30, 2, 2, None, 0)
    assert (rows[1].runs, rows[1].resident_bytes) == (1, 10)
    assert rows[0].last_used < rows[1].last_used
    assert "a" in d.cache
    assert "z" not in d.cache
    assert d.cache.capacity("framework") == 60
    d.tell("end", 2)


def test_weights_come_again_after_they_were_removed(driver):
    d = driver(20, a=[10, 10])
    d.run(1, "a")
    assert d.cache.remove("a") == [Evict("a", 1), Evict("a", 0)]
    d.cache.add("a", [5])
    assert d.resident("a") == "."


REFUSED = {
    "unknown mode": (lambda c: WeightCache({}, "none"), "mode 'none'"),
    "unknown region of a cache": (lambda c: WeightCache({"disk": 1}), "region 'disk'"),
    "negative capacity": (lambda c: WeightCache({"arena": -1}), "-1 bytes"),
    "added twice": (lambda c: c.add("a", [1]), "known already"),
    "size 0": (lambda c: c.add("n", [5, 0]), "0 bytes"),
    "size True": (lambda c: c.add("n", [True]), "True bytes"),
    "size 1.5": (lambda c: c.add("n", [1.5]), "1.5 bytes"),
    "root outside": (lambda c: c.add("n", [5], roots=[1]), "layer 1"),
    "remove unknown": (lambda c: c.remove("n"), "'n' are not known"),
    "remove in use": (lambda c: c.remove("a"), "used by 1 runs"),
    "remove loading": (lambda c: c.remove("idle"), "being copied in"),
    "prefix unknown": (lambda c: c.set_prefix("n", 0), "'n' are not known"),
    "prefix too long": (lambda c: c.set_prefix("a", 4), "prefix 4"),
    "prefix negative": (lambda c: c.set_prefix("a", -1), "prefix -1"),
    "order outside": (lambda c: c.set_order("a", [0, 3]), "layer 3"),
    "capacity of no region": (lambda c: c.set_capacity("disk", 1, 0), "region 'disk'"),
    "capacity negative": (lambda c: c.set_capacity("arena", -1, 0), "-1 bytes"),
    "demand of nothing": (lambda c: c.demand("arena", 0, 0), "0 bytes"),
    "demand of no region": (lambda c: c.demand("disk", 1, 0), "region 'disk'"),
    "begin twice": (lambda c: c.begin(1, ["a"], 0), "run 1 has already begun"),
    "begin of unknown weights": (lambda c: c.begin(2, ["a", "n"], 0), "'n' are not known"),
    "enter of no run": (lambda c: c.enter(2, "a", 0, 0), "run 2 has not begun"),
    "enter of other weights": (lambda c: c.enter(1, "b", 0, 0), "did not name"),
    "enter outside": (lambda c: c.enter(1, "a", 3, 0), "layer 3"),
    "enter before the first": (lambda c: c.enter(1, "a", -1, 0), "layer -1"),
    "leave unentered": (lambda c: c.leave(1, "a", 2, 0), "unentered"),
    "end of no run": (lambda c: c.end(2, 0), "run 2 has not begun"),
    "loaded, not outstanding": (lambda c: c.loaded("a", 1, 0), "outstanding load is"),
    "no room, not outstanding": (lambda c: c.no_room("a", 1, 0), "outstanding load is"),
    "failed, not outstanding": (lambda c: c.failed("b", 0, 0), "outstanding load is"),
    "resident outside": (lambda c: c.is_resident("a", 3), "layer 3"),
    "used of no region": (lambda c: c.used("disk"), "region 'disk'"),
    "waiting of no run": (lambda c: c.waiting(2), "run 2 has not begun"),
    "hold of no run": (lambda c: c.hold(2, 0), "run 2 has not begun"),
    "trim unknown": (lambda c: c.trim("n", 0, 0), "'n' are not known"),
    "trim to less than nothing": (lambda c: c.trim("b", -1, 0), "-1 layers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_legal_is_refused_and_changes_nothing(driver, name):
    call, message = REFUSED[name]
    d = driver(60, a=[10] * 3, b=[10], idle=[10])
    d.hold = True
    d.tell("begin", 9, ["idle"])  # its load is outstanding after its end
    d.tell("begin", 1, ["a"])
    d.tell("end", 9)
    d.tell("enter", 1, "a", 0)

    def state():
        rows = d.cache.models()
        return (
            rows,
            d.cache.outstanding(),
            d.cache.waiting(1),
            [d.resident(r.weights) for r in rows],
        )

    before = state()
    with pytest.raises(PolicyError, match=message):
        call(d.cache)
    assert state() == before
    d.cache._check()
    d.tell("end", 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_without_weights_needs_nothing(driver, mode):
    d = driver(0, mode=mode)
    d.tell("begin", 1, [])
    assert d.cache.ready(1)
    assert d.cache.fits() is None
    d.tell("end", 1)
