"""Each rule of residency: what is loaded, what goes, where to, who waits; each mode; each refusal."""

from __future__ import annotations

import itertools

import pytest

from st2i_dask.errors import PolicyError
from worker_plugin.weight_cache import MODES, Evict, Load, WeightCache
from worker_plugin.weight_fit import divides, packs

WHOLE = ("mcache", "wcache", "nocache")


class Driver:
    """Carries out what the cache says; copies at once unless `hold` is set. Time is a counter."""

    def __init__(self, framework, arena=0, mode="elastic", **models):
        self.cache = WeightCache({"framework": framework, "arena": arena}, mode)
        for name, sizes in models.items():
            self.cache.add(name, sizes)
        self.hold, self.log, self.load = False, [], None
        self.clock = itertools.count()

    def tell(self, event, *args):
        self.obey(getattr(self.cache, event)(*args, now=next(self.clock)))

    def obey(self, instructions):
        for instruction in instructions:
            self.log.append(instruction)
            if isinstance(instruction, Load):
                assert self.load is None
                self.load = instruction
        self.cache._check()
        while self.load is not None and not self.hold:
            self.report("loaded")

    def report(self, outcome):
        load, self.load = self.load, None
        self.tell(outcome, load.weights, load.layer)

    def seen(self):
        """Since last asked, such as '+a0' for a load and '-a0' for an eviction."""
        log, self.log = self.log, []
        return [f"{'+' if isinstance(i, Load) else '-'}{i.weights}{i.layer}" for i in log]

    def execute(self, run, weights, layers):
        for layer in layers:
            self.tell("enter", run, weights, layer)
            assert not self.cache.waiting(run)
            self.tell("leave", run, weights, layer)

    def run(self, run, *weights):
        self.tell("begin", run, weights)
        for name in weights:
            self.execute(run, name, range(len(self.cache.resident(name))))
        self.tell("end", run)

    def resident(self, name):
        return "".join("x" if there else "." for there in self.cache.resident(name))


@pytest.fixture
def driver():
    """Makes drivers; the caches are consistent at the end, and empty once all runs have ended."""
    made = []

    def make(*args, **kwargs):
        made.append(Driver(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.hold = False
        if one.load is not None:
            one.report("loaded")
        one.cache._check()
        for row in one.cache.models():
            if row.runs == 0:
                one.cache.remove(row.weights)
        if not one.cache.models():
            assert one.cache.used("framework") == one.cache.used("arena") == 0


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
