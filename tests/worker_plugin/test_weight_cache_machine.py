"""Any legal sequence of events, in every mode: the books stay right, and nobody waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from worker_plugin.weight_cache import MODES, REGIONS, Evict, Load, WeightCache

NAMES = "abcd"
UNITS = {"a": "x", "b": "x", "c": "y", "d": None}
SIZE = st.integers(1, 9)
ROOM = st.integers(0, 40)


class Machine(RuleBasedStateMachine):
    """A driver with a memory of its own: it sees only instructions and questions."""

    mode = "elastic"

    @initialize(framework=ROOM, arena=ROOM)
    def start(self, framework, arena):
        self.capacity = {"framework": framework, "arena": arena}
        self.cache = WeightCache(self.capacity, self.mode)
        self.sizes, self.roots, self.memory = {}, {}, {}
        self.load = None
        self.runs = {}  # number -> (weights, entered or None)
        self.holding = set()  # runs that have pinned all of theirs
        self.serial, self.now = 0, 0.0

    # What the driver does

    def pinned(self, weights, layer):
        """By what the runs know: they hold this."""
        for number, (names, entered) in self.runs.items():
            if weights not in names:
                continue
            executes = entered == (weights, layer) and not self.cache.waiting(number)
            if executes or number in self.holding:
                return True
            everything = self.mode in ("mcache", "wcache", "nocache")
            if self.cache.ready(number) and (everything or layer in self.roots[weights]):
                return True
        return False

    def carry_out(self, instructions):
        # Asked after the event, which only unpins on `leave` and `end`: those have left `runs` by now.
        held = {key for key in self.memory if self.pinned(*key)}
        loads = 0
        for instruction in instructions:
            key = (instruction.weights, instruction.layer)
            if isinstance(instruction, Evict):
                assert loads == 0, "evict first"
                assert key not in held
                assert key != (self.load and self.load[0])
                del self.memory[key]
            else:
                assert isinstance(instruction, Load)
                assert self.load is None
                assert key not in self.memory
                loads += 1
                self.load = key, instruction.region
                used = self.used(instruction.region)
                assert used <= self.capacity[instruction.region]

    def used(self, region):
        loading = [self.load[0]] if self.load and self.load[1] == region else []
        resident = [key for key, there in self.memory.items() if there == region]
        return sum(self.sizes[name][layer] for name, layer in resident + loading)

    def event(self, name, *args):
        self.now += 1
        self.carry_out(getattr(self.cache, name)(*args, now=self.now))

    # Rules

    @precondition(lambda self: len(self.sizes) < len(NAMES))
    @rule(sizes=st.lists(SIZE, min_size=1, max_size=6), root=st.integers(0, 12))
    def add(self, sizes, root):
        name = next(name for name in NAMES if name not in self.sizes)
        self.sizes[name] = sizes
        self.roots[name] = [root] if root < len(sizes) else []
        self.cache.add(name, sizes, self.roots[name], UNITS[name])

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def describe(self, data):
        name = data.draw(st.sampled_from(sorted(self.sizes)))
        layers = len(self.sizes[name])
        self.cache.set_prefix(name, data.draw(st.none() | st.integers(0, layers)))
        self.cache.set_order(name, data.draw(st.lists(st.integers(0, layers - 1), max_size=8)))

    def unused(self):
        used = {name for names, _ in self.runs.values() for name in names}
        return [name for name in sorted(self.sizes) if name not in used]

    def idle(self):
        return [name for name in self.unused() if not self.load or self.load[0][0] != name]

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def remove(self, data):
        name = data.draw(st.sampled_from(self.idle()))
        self.carry_out(self.cache.remove(name))
        assert not any(key[0] == name for key in self.memory)
        del self.sizes[name], self.roots[name]

    @precondition(lambda self: self.sizes and len(self.runs) < 4)
    @rule(data=st.data())
    def begin(self, data):
        names = data.draw(
            st.lists(st.sampled_from(sorted(self.sizes)), min_size=1, max_size=3, unique=True)
        )
        self.serial += 1
        self.runs[self.serial] = (names, None)
        self.event("begin", self.serial, names)

    @precondition(lambda self: any(entered is None for _, entered in self.runs.values()))
    @rule(data=st.data())
    def enter(self, data):
        ready = sorted(n for n, (_, entered) in self.runs.items() if entered is None)
        number = data.draw(st.sampled_from(ready))
        name = data.draw(st.sampled_from(self.runs[number][0]))
        layer = data.draw(st.integers(0, len(self.sizes[name]) - 1))
        self.step_in(number, name, layer)

    def step_in(self, number, name, layer):
        self.runs[number] = (self.runs[number][0], (name, layer))
        self.event("enter", number, name, layer)

    @precondition(lambda self: any(entered for _, entered in self.runs.values()))
    @rule(data=st.data())
    def leave(self, data):
        number = data.draw(st.sampled_from(sorted(n for n, (_, e) in self.runs.items() if e)))
        self.step_out(number)

    def step_out(self, number):
        names, entered = self.runs[number]
        self.runs[number] = (names, None)
        self.event("leave", number, *entered)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def end(self, data):
        self.finish(data.draw(st.sampled_from(sorted(self.runs))))

    def finish(self, number):
        del self.runs[number]
        self.holding.discard(number)
        self.event("end", number)

    @precondition(lambda self: any(entered is None for _, entered in self.runs.values()))
    @rule(data=st.data())
    def hold(self, data):
        number = data.draw(st.sampled_from(sorted(n for n, (_, e) in self.runs.items() if not e)))
        layers = {(name, i) for name in self.runs[number][0] for i in range(len(self.sizes[name]))}
        there = self.cache.ready(number) and layers <= set(self.memory)
        assert self.cache.hold(number, now=self.now) == there
        if there:
            self.holding.add(number)

    @precondition(lambda self: self.sizes)
    @rule(data=st.data(), layers=st.integers(0, 6))
    def trim(self, data, layers):
        name = data.draw(st.sampled_from(sorted(self.sizes)))
        before = set(self.memory)
        self.event("trim", name, layers)
        gone = before - set(self.memory)
        assert all(key[0] == name for key in gone)
        assert not gone or name in self.unused()

    @precondition(lambda self: self.load)
    @rule(outcome=st.sampled_from(["loaded", "loaded", "loaded", "no_room", "failed"]))
    def outcome(self, outcome):
        (key, region), self.load = self.load, None
        if outcome == "loaded":
            self.memory[key] = region
        self.event(outcome, *key)

    @rule(region=st.sampled_from(REGIONS), nbytes=ROOM)
    def set_capacity(self, region, nbytes):
        self.capacity[region] = nbytes
        self.event("set_capacity", region, nbytes)

    @rule(region=st.sampled_from(REGIONS), nbytes=st.integers(1, 40))
    def demand(self, region, nbytes):
        before = len(self.memory)
        self.event("demand", region, nbytes)
        freed = before - len(self.memory)
        assert not freed or self.capacity[region] - self.used(region) >= nbytes

    # What holds

    @invariant()
    def consistent(self):
        self.cache._check()
        for region in REGIONS:
            assert self.cache.used(region) == self.used(region)
        for name, sizes in self.sizes.items():
            there = tuple((name, layer) in self.memory for layer in range(len(sizes)))
            assert self.cache.resident(name) == there
            assert self.cache.missing(name) == [
                i for i, is_there in enumerate(there) if not is_there
            ]
        for number, (_, entered) in self.runs.items():
            if entered is None:
                assert not self.cache.waiting(number)
            elif not self.cache.waiting(number):
                assert entered in self.memory
                assert self.cache.is_pinned(*entered)

    def teardown(self):
        """With memory for everything of the run that fits least, all that fit run to their end."""
        if not hasattr(self, "cache"):
            return
        for region in REGIONS:
            self.set_capacity(region, max(self.capacity[region], 20))
        for number in [n for n, (names, _) in self.runs.items() if self.cache.fits(*names)]:
            self.finish(number)
        program = {}
        for number, (names, entered) in self.runs.items():
            layers = [(n, i) for n in names for i in range(len(self.sizes[n]))]
            program[number] = layers * 2
            if entered is not None and self.cache.waiting(number):
                self.step_out(number)  # a failed copy is tried again when it is entered anew
        steps = 0
        while self.runs:
            steps += 1
            assert steps < 2000, "somebody waits for ever"
            self.consistent()
            if self.load:
                self.outcome("loaded")
            moved = False
            for number in list(self.runs):
                if self.runs[number][1] is None and program[number]:
                    self.step_in(number, *program[number].pop(0))
                    moved = True
                elif self.runs[number][1] is None:
                    self.finish(number)
                    moved = True
                elif not self.cache.waiting(number):
                    self.step_out(number)
                    moved = True
            assert moved or self.load, "nothing is being loaded for those who wait"
        while self.load:
            self.outcome("loaded")
        for name in list(self.sizes):
            self.carry_out(self.cache.remove(name))
        assert not self.memory
        for region in REGIONS:
            assert self.cache.used(region) == 0
        self.cache._check()


def machine(mode):
    return type(f"Machine_{mode}", (Machine,), {"mode": mode})


@pytest.mark.parametrize("mode", MODES)
def test_any_sequence(mode):
    case = machine(mode).TestCase
    case.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
    case("runTest").runTest()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_any_long_sequence(mode):
    case = machine(mode).TestCase
    case.settings = settings(max_examples=1000, stateful_step_count=100, deadline=None)
    case("runTest").runTest()
