"""No room, failures, changes of capacity; and nobody waits for ever."""

from __future__ import annotations

import pytest

from worker_plugin.weight_cache import Load
from worker_plugin.weight_fit import divides, packs

# ---------------------------------------------------------------- no room, failures, capacity


def test_no_gap_goes_to_the_other_region_first(driver):
    d = driver(20, 20, a=[10])
    d.hold = True
    d.tell("begin", 1, ["a"])
    d.report("no_room")
    assert d.log == [Load("a", 0, "framework"), Load("a", 0, "arena")]
    d.tell("end", 1)


def test_no_gap_goes_over_victims_in_the_other_region_before_more_in_that_one(driver):
    d = driver(20, 20, a=[10, 10], b=[20], c=[10])
    d.run(1, "a")
    d.run(2, "b")
    d.seen()
    d.hold = True
    d.tell("begin", 3, ["c"])
    d.report("no_room")
    d.report("no_room")
    assert d.seen() == ["-a1", "+c0", "-b0", "+c0", "-a0", "+c0"]
    d.tell("end", 3)


def test_no_gap_evicts_the_next_victim_each_time_and_ends(driver):
    d = driver(40, a=[10] * 3, b=[10])
    d.run(1, "a")
    d.seen()
    d.hold = True
    d.tell("begin", 2, ["b"])
    for _ in range(4):
        d.report("no_room")
    assert d.seen() == ["+b0", "-a2", "+b0", "-a1", "+b0", "-a0", "+b0"]
    assert d.load is None, "nothing is left to evict"
    d.tell("enter", 2, "b", 0)
    assert d.seen() == ["+b0"], "now it is urgent"
    d.report("no_room")
    assert d.load is None
    d.tell("set_capacity", "framework", 50)
    assert d.seen() == ["+b0"], "something was freed"
    d.tell("end", 2)


def test_others_load_while_one_finds_no_room(driver):
    d = driver(40, a=[20, 10], b=[10])
    d.hold = True
    d.tell("begin", 1, ["a"])
    d.tell("begin", 2, ["b"])
    d.report("no_room")
    assert d.seen() == ["+a0", "+b0"]
    d.report("loaded")
    assert d.seen() == []
    d.tell("end", 1)
    d.tell("end", 2)


def test_a_failed_copy_is_tried_again_when_somebody_must_wait_for_it(driver):
    d = driver(40, a=[10] * 3)
    d.hold = True
    d.tell("begin", 1, ["a"])
    d.report("failed")
    assert d.seen() == ["+a0", "+a1"]
    d.hold = False
    d.report("loaded")
    assert d.seen() == ["+a2"]
    d.tell("enter", 1, "a", 0)
    assert d.seen() == ["+a0"]
    assert not d.cache.waiting(1)
    d.tell("end", 1)


def test_a_failed_copy_is_tried_again_by_the_next_run(driver):
    d = driver(40, a=[10])
    d.hold = True
    d.tell("begin", 1, ["a"])
    d.tell("enter", 1, "a", 0)
    d.report("failed")
    assert d.load is None
    assert d.cache.waiting(1)
    d.tell("end", 1)
    d.tell("begin", 2, ["a"])
    assert d.seen() == ["+a0", "+a0"]
    d.tell("end", 2)


def test_less_capacity_evicts_just_enough_and_the_rest_when_it_is_released(driver):
    d = driver(40, a=[10] * 2, b=[10] * 2)
    d.run(1, "b")
    d.tell("begin", 2, ["a"])
    d.tell("enter", 2, "a", 0)
    d.seen()
    d.tell("set_capacity", "framework", 30)
    assert d.seen() == ["-b1"]
    d.tell("set_capacity", "framework", 5)
    assert d.seen() == ["-b0", "-a1"]
    assert d.cache.used("framework") == 10
    d.tell("leave", 2, "a", 0)
    assert d.seen() == ["-a0"]
    d.tell("set_capacity", "framework", 10)
    assert d.seen() == ["+a1"]
    d.tell("end", 2)


def test_less_capacity_evicts_what_was_being_loaded_once_it_is_there(driver):
    d = driver(40, a=[10] * 2)
    d.hold = True
    d.tell("begin", 1, ["a"])
    d.tell("set_capacity", "framework", 5)
    assert d.cache.used("framework") == 10
    d.report("loaded")
    assert d.seen() == ["+a0", "-a0"]
    d.tell("end", 1)


def test_demand_evicts_just_enough_and_loads_nothing(driver):
    d = driver(40, a=[10] * 4, b=[10] * 2)
    d.run(1, "a")
    d.tell("begin", 2, ["b"])
    d.tell("enter", 2, "b", 0)
    d.seen()
    d.tell("demand", "framework", 20)
    assert d.seen() == ["-a1", "-a0"]
    d.tell("demand", "framework", 20)
    assert d.seen() == ["-b1"], "there was room, but no gap"
    d.tell("demand", "framework", 40)
    assert d.seen() == [], "out of reach: nothing goes in vain"
    d.tell("demand", "arena", 1)
    assert d.seen() == []
    d.tell("end", 2)


def test_trim_keeps_the_first_layers_of_an_idle_model(driver):
    d = driver(40, a=[10] * 4)
    d.tell("begin", 1, ["a"])
    d.tell("trim", "a", 1)
    assert d.resident("a") == "xxxx"
    d.tell("end", 1)
    d.tell("trim", "a", 1)
    assert d.resident("a") == "x..."


def test_hold_pins_everything_of_a_run_that_needs_no_load(driver):
    d = driver(40, a=[10] * 2)
    d.hold = True
    d.tell("begin", 1, ["a"])
    assert not d.cache.hold(1, now=0)
    d.hold = False
    d.report("loaded")
    assert d.cache.hold(1, now=0)
    d.tell("set_capacity", "framework", 0)
    assert d.resident("a") == "xx"
    d.tell("end", 1)
    assert d.resident("a") == ".."


# ---------------------------------------------------------------- nobody waits for ever


def test_fits_says_what_is_needed_and_what_there_is(driver):
    d = driver(20, 10)
    d.cache.add("a", [10, 15, 4], roots=[0])
    d.cache.add("b", [10, 11, 4], roots=[0, 2])
    d.cache.add("c", [21])
    assert d.cache.fits("a") is None
    assert d.cache.fits("b") is None
    why = d.cache.fits("a", "b")
    assert "24 bytes" in why
    assert "15 bytes" in why
    assert "20 in framework, 10 in arena" in why
    assert "21 bytes" in d.cache.fits("c")


@pytest.mark.parametrize(
    ("room", "fixed", "largest", "fits"),
    [
        ((10, 10), [], 10, True),
        ((10, 10), [], 11, False),
        ((10, 10), [3, 3], 10, True),
        ((10, 10), [6, 6], 4, True),
        ((10, 10), [6, 6], 5, False),
        ((10, 0), [4], 6, True),
        ((10, 5), [4, 6, 5], 1, False),
        ((3, 10), [4], 6, True),
        ((3, 10), [4], 7, False),
    ],
)
def test_divides(room, fixed, largest, fits):
    assert divides(dict(zip(("framework", "arena"), room, strict=True)), fixed, largest) == fits


def test_packs_takes_the_first_region_with_room():
    room = {"framework": 10, "arena": 10}
    assert packs(room, [6, 4, 6, 4])
    assert not packs(room, [6, 6, 6])
    assert room == {"framework": 10, "arena": 10}


def test_roots_leave_room_for_the_largest_layer(driver):
    """Placed in the first region with room they would lie one in each, and nothing else fits."""
    d = driver(6, 10)
    d.cache.add("a", [5, 4, 6], roots=[0, 1])
    d.tell("begin", 1, ["a"])
    assert d.cache.ready(1)
    d.execute(1, "a", [2])
    d.tell("end", 1)


def test_roots_that_lie_in_the_way_are_moved(driver):
    d = driver(10, 10)
    d.cache.add("a", [2, 1], roots=[0])
    d.cache.add("b", [9, 1], roots=[])
    d.run(1, "b")
    d.tell("set_capacity", "framework", 8)
    d.run(2, "a")
    d.tell("set_capacity", "framework", 2)
    d.cache.add("c", [2, 10], roots=[0])
    d.tell("set_capacity", "framework", 1)
    d.run(3, "a")
    assert d.cache.region_of("a", 0) == "arena"
    d.tell("set_capacity", "framework", 2)
    d.tell("begin", 4, ["a"])
    d.tell("end", 4)
    d.cache.add("e", [10])
    d.seen()
    d.tell("begin", 5, ["a", "e"])
    assert "-a0" in d.seen()
    assert d.cache.region_of("a", 0) == "framework"
    d.execute(5, "e", [0])
    d.tell("end", 5)


def test_a_run_whose_roots_leave_no_room_waits_for_the_end_of_another(driver):
    d = driver(20)
    d.cache.add("a", [8, 10], roots=[0])
    d.cache.add("b", [8, 10], roots=[0])
    d.tell("begin", 1, ["a"])
    d.tell("begin", 2, ["b"])
    d.tell("enter", 2, "b", 1)
    d.execute(1, "a", [1, 1])
    assert d.cache.waiting(2)
    assert not d.cache.ready(2)
    d.tell("end", 1)
    assert not d.cache.waiting(2)
    d.tell("end", 2)


def test_a_run_that_cannot_fit_does_not_stop_others(driver):
    d = driver(20, a=[21], b=[10])
    d.tell("begin", 1, ["a"])
    d.tell("enter", 1, "a", 0)
    d.run(2, "b")
    assert d.cache.waiting(1)
    d.tell("set_capacity", "framework", 21)
    assert not d.cache.waiting(1)
    d.tell("end", 1)
