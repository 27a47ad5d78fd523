"""What is loaded, where to, and what goes for it."""

from __future__ import annotations

import pytest

from worker_plugin.weight_cache import Load

# ---------------------------------------------------------------- what is loaded, in which order


def test_one_load_at_a_time_in_order_of_execution(driver):
    d = driver(100, a=[10] * 4)
    d.hold = True
    d.tell("begin", 1, ["a"])
    assert d.log == [Load("a", 0, "framework")]
    assert d.cache.outstanding() == ("a", 0)
    for layer in range(4):
        assert d.seen() == [f"+a{layer}"]
        d.report("loaded")
    assert d.seen() == []
    assert d.cache.outstanding() is None
    d.tell("end", 1)


def test_loads_go_on_from_the_cursor_round_and_round(driver):
    d = driver(100, a=[10] * 4)
    d.hold = True
    d.tell("begin", 1, ["a"])
    d.tell("enter", 1, "a", 2)
    assert d.cache.waiting(1)
    d.hold = False
    d.report("loaded")
    assert d.seen() == ["+a0", "+a2", "+a3", "+a1"]
    assert not d.cache.waiting(1)
    d.tell("leave", 1, "a", 2)
    d.tell("end", 1)


def test_then_the_weights_that_the_run_has_not_begun(driver):
    d = driver(100, a=[10] * 2, b=[10] * 2)
    d.tell("begin", 1, ["a", "b"])
    assert d.seen() == ["+a0", "+a1", "+b0", "+b1"]
    d.tell("end", 1)


def test_the_learned_order_is_the_order_of_loads_and_the_rest_is_loaded_when_entered(driver):
    d = driver(100, a=[10] * 4)
    d.cache.set_order("a", [3, 1, 3])
    d.tell("begin", 1, ["a"])
    assert d.seen() == ["+a3", "+a1"]
    d.execute(1, "a", [3, 1, 0])
    assert d.seen() == ["+a0"]
    assert d.cache.missing("a") == [2]
    d.tell("end", 1)


def test_roots_come_first_and_are_pinned_to_the_end(driver):
    d = driver(30)
    d.cache.add("a", [10] * 4, roots=[2])
    d.hold = True
    d.tell("begin", 1, ["a"])
    d.tell("enter", 1, "a", 0)
    assert d.seen() == ["+a2"]
    d.report("loaded")
    assert d.seen() == ["+a0"]
    d.report("loaded")
    assert d.cache.is_pinned("a", 2)
    d.tell("leave", 1, "a", 0)
    d.hold = False
    d.report("loaded")
    d.execute(1, "a", [1, 3, 0, 1, 3])
    assert "-a2" not in d.seen()
    d.tell("end", 1)
    assert not d.cache.is_pinned("a", 2)


def test_a_layer_waits_for_the_roots_too(driver):
    d = driver(30)
    d.cache.add("a", [10] * 2)
    d.run(1, "a")
    d.cache.remove("a")
    d.cache.add("b", [10, 10], roots=[0])
    d.hold = True
    d.tell("begin", 1, ["b"])
    d.tell("enter", 1, "b", 1)
    assert not d.cache.ready(1)
    d.report("loaded")
    assert d.cache.ready(1)
    assert d.cache.waiting(1)
    d.report("loaded")
    assert not d.cache.waiting(1)
    d.tell("end", 1)


def test_a_run_that_waits_comes_before_one_ahead_of_need(driver):
    d = driver(200, a=[10] * 6, b=[10] * 3)
    d.hold = True
    d.tell("begin", 1, ["a"])
    d.tell("begin", 2, ["b"])
    d.report("loaded")
    d.report("loaded")
    assert d.seen() == ["+a0", "+b0", "+a1"]
    d.tell("enter", 1, "a", 5)
    d.report("loaded")
    assert d.seen() == ["+a5"], "it is the other's turn, but that one does not wait"
    d.tell("end", 1)
    d.tell("end", 2)


def test_among_equals_the_runs_take_turns(driver):
    d = driver(200, a=[10] * 3, b=[10] * 3)
    d.hold = True
    d.tell("begin", 1, ["a"])
    d.tell("begin", 2, ["b"])
    d.hold = False
    d.report("loaded")
    assert d.seen() == ["+a0", "+b0", "+a1", "+b1", "+a2", "+b2"]
    d.tell("end", 1)
    d.tell("end", 2)


def test_two_runs_share_weights_and_pins_count(driver):
    d = driver(100, a=[10] * 2)
    d.tell("begin", 1, ["a"])
    d.tell("begin", 2, ["a"])
    assert d.seen() == ["+a0", "+a1"]
    d.tell("enter", 1, "a", 0)
    d.tell("enter", 2, "a", 0)
    d.tell("leave", 1, "a", 0)
    assert d.cache.is_pinned("a", 0)
    d.tell("end", 2)
    assert not d.cache.is_pinned("a", 0)
    d.tell("end", 1)


# ---------------------------------------------------------------- where to


def test_framework_first_then_arena_then_over_something(driver):
    d = driver(20, 20, a=[10] * 3, b=[10] * 3)
    d.tell("begin", 1, ["a"])
    assert [i.region for i in d.log] == ["framework", "framework", "arena"]
    assert d.cache.region_of("a", 2) == "arena"
    d.tell("end", 1)
    d.seen()
    d.cache.set_prefix("a", 1)
    d.tell("begin", 2, ["b"])
    assert d.seen() == ["+b0", "-a2", "+b1", "-a1", "+b2"]
    d.tell("end", 2)


def test_the_region_that_reaches_less_far_down_the_order(driver):
    d = driver(20, 20, a=[20], b=[10, 10], c=[20])
    d.run(1, "a")
    d.run(2, "b")
    assert d.cache.region_of("b", 0) == "arena"
    d.run(3, "a")  # b is now used longest ago
    d.seen()
    d.tell("begin", 4, ["c"])
    assert d.seen() == ["-b1", "-b0", "+c0"]
    d.tell("end", 4)


def test_a_smaller_victim_is_spared_where_a_larger_one_does(driver):
    d = driver(40, a=[30, 10], b=[30])
    d.run(1, "a")
    d.seen()
    d.tell("begin", 2, ["b"])
    assert d.seen() == ["-a0", "+b0"]
    d.tell("end", 2)


# ---------------------------------------------------------------- what goes


def test_idle_layers_beyond_their_prefix_go_before_any_prefix(driver):
    d = driver(60, a=[10] * 3, b=[10] * 3, c=[10] * 6)
    d.cache.set_prefix("a", 1)
    d.cache.set_prefix("b", 2)
    d.run(1, "a")
    d.run(2, "b")
    d.seen()
    d.tell("begin", 3, ["c"])
    evicted = [seen for seen in d.seen() if seen.startswith("-")]
    assert evicted == ["-a2", "-a1", "-b2", "-a0", "-b1", "-b0"]
    d.tell("end", 3)


def test_an_unknown_prefix_is_worth_keeping(driver):
    d = driver(40, a=[10] * 2, b=[10] * 2, c=[10])
    d.run(1, "a")
    d.run(2, "b")
    d.cache.set_prefix("b", 0)
    d.seen()
    d.run(3, "c")
    assert d.seen() == ["-b1", "+c0"]


def test_a_streaming_run_keeps_its_prefix_and_two_layers(driver):
    d = driver(50, a=[10] * 9)
    d.cache.set_prefix("a", 3)
    d.tell("begin", 1, ["a"])
    d.execute(1, "a", range(9))
    for _ in range(3):
        d.seen()
        d.execute(1, "a", range(9))
        loads = [seen for seen in d.seen() if seen.startswith("+")]
        assert sorted(loads) == ["+a3", "+a4", "+a5", "+a6", "+a7", "+a8"]
    d.tell("end", 1)
    assert d.resident("a").startswith("xxx")


@pytest.mark.parametrize(("layers", "prefix", "capacity"), [(57, 40, 42), (20, 18, 8), (12, 0, 2)])
def test_with_less_memory_as_much_of_the_prefix_stays_as_fits(driver, layers, prefix, capacity):
    d = driver(10 * capacity, a=[10] * layers)
    d.cache.set_prefix("a", prefix)
    d.tell("begin", 1, ["a"])
    d.execute(1, "a", range(layers))
    d.seen()
    d.execute(1, "a", range(layers))
    loads = [seen for seen in d.seen() if seen.startswith("+")]
    assert len(loads) == layers - (capacity - 2)
    d.tell("end", 1)


def test_a_load_ahead_of_need_goes_over_own_layers_at_most_two_ahead(driver):
    d = driver(40, a=[10] * 8)
    d.cache.set_prefix("a", 0)
    d.tell("begin", 1, ["a"])
    assert d.seen() == ["+a0", "+a1", "+a2", "+a3"]
    d.tell("enter", 1, "a", 0)
    d.tell("leave", 1, "a", 0)
    assert d.seen() == []  # a4 is three ahead of a1
    d.tell("enter", 1, "a", 1)
    d.tell("leave", 1, "a", 1)
    assert d.seen() == ["-a1", "+a4"]  # a1 is needed last of all
    d.tell("end", 1)


def test_layers_of_others_go_only_for_a_run_that_waits(driver):
    d = driver(40, a=[10] * 4, b=[10] * 3)
    d.tell("begin", 1, ["a"])
    d.seen()
    d.tell("begin", 2, ["b"])
    assert d.seen() == []
    d.tell("enter", 1, "a", 0)
    d.tell("enter", 2, "b", 0)
    assert d.seen()[:2] == ["-a3", "+b0"]
    assert d.cache.is_pinned("b", 0)
    d.tell("end", 1)
    d.tell("end", 2)


def test_a_second_run_grows_to_its_share(driver):
    d = driver(120, a=[10] * 12, b=[10] * 12)
    d.tell("begin", 1, ["a"])
    d.tell("begin", 2, ["b"])
    for layer in range(12):
        d.execute(2, "b", [layer])
        d.execute(1, "a", [layer])
    shares = [sum(d.cache.resident(name)) for name in "ab"]
    assert min(shares) >= 5
    d.tell("end", 1)
    d.tell("end", 2)


def test_weights_that_a_run_has_done_with_make_room_for_the_next(driver):
    d = driver(60, a=[10] * 4, b=[10] * 6)
    d.tell("begin", 1, ["a", "b"])
    d.execute(1, "a", range(4))
    d.seen()
    d.execute(1, "b", range(6))
    assert {s for s in d.seen() if s.startswith("-")} >= {"-a3", "-a2"}
    assert d.resident("b") == "xxxxxx"
    d.tell("end", 1)


def test_pinned_and_loading_layers_never_go(driver):
    d = driver(20, a=[10] * 2, b=[10])
    d.tell("begin", 1, ["a"])
    d.tell("begin", 2, ["a"])
    d.tell("enter", 1, "a", 0)
    d.tell("enter", 2, "a", 1)
    d.tell("begin", 3, ["b"])
    d.tell("enter", 3, "b", 0)
    assert d.cache.waiting(3)
    assert "+b0" not in d.seen()
    d.tell("leave", 1, "a", 0)
    assert d.seen() == ["-a0", "+b0"]
    assert not d.cache.waiting(3)
    for run in (1, 2, 3):
        d.tell("end", run)
