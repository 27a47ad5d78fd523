"""Who belongs to which generation of the world: whatever happens, all members or none."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from scheduler_plugin.world import Phase, World

UID = b"u" * 128


def world_of(*processes, **bounds):
    """A world that these are attaching to; process p on worker wp."""
    world = World(**{"gather_s": 5.0, "attach_s": 60.0, **bounds})
    for process in processes:
        world.offer(0.0, process, f"w{process}", 100)
    world.tick(5.0)
    world._check()
    return world


def up(*processes):
    world = world_of(*processes)
    assert world.minted(processes[0], 1, UID)
    for process in processes:
        assert world.attached(process, 1)
    world._check()
    return world


def phases(world, *processes):
    return [world.standing(process).phase for process in processes]


def test_offers_are_gathered_for_a_while():
    world = World(gather_s=5.0, attach_s=60.0)
    world.offer(0.0, "a", "wa", 300)
    assert world.deadline is None  # nobody to pull from
    world.offer(10.0, "b", "wb", 200)
    assert world.deadline == 15.0
    world.tick(14.9)
    assert phases(world, "a", "b") == [Phase.WAITING] * 2
    world.offer(14.95, "c", "wc", 400)
    world.tick(15.0)
    standings = [world.standing(process) for process in "abc"]
    assert [s.pe for s in standings] == [0, 1, 2]
    assert {s.n_pes for s in standings} == {3}
    assert {s.nbytes for s in standings} == {200}
    assert {s.generation for s in standings} == {1}
    assert [s.mints for s in standings] == [True, False, False]
    assert {s.phase for s in standings} == {Phase.ATTACHING}


def test_nobody_waits_when_all_have_offered():
    world = World(gather_s=5.0, attach_s=60.0)
    world.offer(0.0, "a", "wa", 1, expected=2)
    assert phases(world, "a") == [Phase.WAITING]
    world.offer(0.0, "b", "wb", 1, expected=2)
    assert phases(world, "a", "b") == [Phase.ATTACHING] * 2


def test_one_alone_forms_no_world():
    world = World(gather_s=5.0, attach_s=60.0)
    world.offer(0.0, "a", "wa", 1, expected=1)
    world.tick(100.0)
    assert phases(world, "a") == [Phase.WAITING]
    world.offer(200.0, "b", "wb", 1)
    world.leave(201.0, "wb")
    world.tick(300.0)
    assert phases(world, "a", "b") == [Phase.WAITING, Phase.UNKNOWN]
    world._check()


def test_the_unique_id_comes_from_pe_0_once():
    world = world_of("a", "b")
    assert not world.minted("b", 1, UID)
    assert not world.minted("a", 2, UID)
    assert world.standing("b").uid is None
    assert world.minted("a", 1, UID)
    assert not world.minted("a", 1, b"v" * 128)
    assert [world.standing(process).uid for process in "ab"] == [UID, UID]
    assert not world.standing("a").mints


def test_it_is_up_when_all_have_attached():
    world = world_of("a", "b")
    assert not world.attached("a", 1)  # without the unique id
    world.minted("a", 1, UID)
    assert world.attached("a", 1)
    assert phases(world, "a", "b") == [Phase.ATTACHING] * 2
    assert world.deadline == 65.0
    assert world.attached("b", 1)
    assert phases(world, "a", "b") == [Phase.UP] * 2
    assert world.deadline is None


def test_what_does_not_attach_in_time_is_given_up_for_all():
    world = world_of("a", "b", "c")
    world.minted("a", 1, UID)
    world.attached("b", 1)
    world.tick(64.9)
    assert phases(world, *"abc") == [Phase.ATTACHING] * 3
    world.tick(65.0)
    assert phases(world, *"abc") == [Phase.ENDED] * 3
    assert world.standing("b").why == "not attached within 60 s: wa, wc"
    assert not world.attached("a", 1)
    world._check()


@pytest.mark.parametrize("start", [world_of, up])
def test_a_lost_pe_ends_the_generation_for_all(start):
    world = start("a", "b", "c")
    world.leave(7.0, "wb")
    assert phases(world, *"abc") == [Phase.ENDED, Phase.UNKNOWN, Phase.ENDED]
    assert world.standing("a").why == "worker wb is gone"
    world._check()


def test_a_failure_ends_the_generation_and_says_whose_it_was():
    world = up("a", "b")
    world.failed(7.0, "b", 2, "stale")
    world.failed(7.0, "x", 1, "not a member")
    assert phases(world, "a", "b") == [Phase.UP] * 2
    world.failed(7.0, "b", 1, "a pull has not ended")
    assert phases(world, "a", "b") == [Phase.ENDED] * 2
    assert world.standing("a").why == "PE 1 on wb: a pull has not ended"


def test_a_late_process_waits_for_the_next_generation():
    world = up("a", "b")
    world.offer(10.0, "late", "wlate", 1)
    world.offer(10.0, "later", "wlater", 1, expected=2)
    world.tick(1000.0)
    assert phases(world, "late", "later") == [Phase.WAITING] * 2
    world.leave(2000.0, "wa")
    assert world.deadline == 2005.0
    world.tick(2005.0)
    assert phases(world, "b", "late", "later") == [Phase.ENDED, *[Phase.ATTACHING] * 2]
    assert world.standing("late").generation == 2
    assert world.standing("late").pe == 0
    world._check()


def test_a_process_is_in_one_generation_only():
    world = up("a", "b")
    world.leave(1.0, "wb")
    world.offer(2.0, "a", "wa", 1)
    assert phases(world, "a") == [Phase.ENDED]
    # a new process under the old address is another one
    world.leave(3.0, "wa")
    world.offer(4.0, "a2", "wa", 1)
    assert phases(world, "a", "a2") == [Phase.UNKNOWN, Phase.WAITING]
    world._check()


def test_an_offer_can_be_taken_back():
    world = World(gather_s=5.0, attach_s=60.0)
    world.offer(0.0, "a", "wa", 1)
    world.offer(0.0, "b", "wb", 1)
    world.failed(1.0, "b", 0, "gave up waiting")
    assert world.deadline is None
    assert phases(world, "a", "b") == [Phase.WAITING, Phase.UNKNOWN]
    world._check()


class WorldMachine(RuleBasedStateMachine):
    """Processes 0..19, process p on worker p % 4 of its time: a worker has one at a time."""

    def __init__(self):
        super().__init__()
        self.world = World(gather_s=5.0, attach_s=60.0)
        self.now = 0.0
        self.running = {}  # worker -> process
        self.count = 0
        self.member_of = {}  # process -> generation
        self.sets = {}  # generation -> processes
        self.ended = set()

    def pick(self, number):
        return sorted(self.running.values())[number % len(self.running)] if self.running else None

    @rule(worker=st.integers(0, 4), nbytes=st.integers(1, 9), expected=st.sampled_from([0, 3]))
    def offer(self, worker, nbytes, expected):
        if worker not in self.running:
            self.count += 1
            self.running[worker] = f"p{self.count:03}"
        self.world.offer(self.now, self.running[worker], str(worker), nbytes, expected)

    @rule(worker=st.integers(0, 4))
    def leave(self, worker):
        process = self.running.pop(worker, None)
        self.world.leave(self.now, str(worker))
        if process is not None:
            assert self.world.standing(process).phase is Phase.UNKNOWN

    @rule(number=st.integers(0, 9), off=st.sampled_from([0, 0, 0, 1]))
    def mint(self, number, off):
        process = self.pick(number)
        before = self.world.standing(process)
        made = self.world.minted(process, self.world.generation - off, UID)
        assert made == (before.mints and off == 0)

    @rule(number=st.integers(0, 9), off=st.sampled_from([0, 0, 0, 1]))
    def attach(self, number, off):
        process = self.pick(number)
        before = self.world.standing(process)
        done = self.world.attached(process, self.world.generation - off)
        assert done == (before.uid is not None and off == 0)

    @rule(number=st.integers(0, 9), off=st.sampled_from([0, 1]))
    def fail(self, number, off):
        process = self.pick(number)
        before = self.world.standing(process)
        self.world.failed(self.now, process, self.world.generation - off, "why")
        after = self.world.standing(process).phase
        if before.phase in (Phase.ATTACHING, Phase.UP):
            assert after is (before.phase if off else Phase.ENDED)

    @rule(seconds=st.sampled_from([1.0, 5.0, 60.0]))
    def wait(self, seconds):
        self.now += seconds
        self.world.tick(self.now)
        deadline = self.world.deadline
        if deadline is not None and self.now >= deadline:
            self.world.tick(self.now)

    @invariant()
    def all_or_none(self):
        world = self.world
        world._check()
        standings = {process: world.standing(process) for process in self.running.values()}
        members = {p: s for p, s in standings.items() if s.phase in (Phase.ATTACHING, Phase.UP)}
        assert len({s.phase for s in members.values()}) <= 1
        for process, standing in members.items():
            # a process never changes its generation, and a generation never its members
            assert self.member_of.setdefault(process, standing.generation) == standing.generation
            assert standing.n_pes == len(members)
            assert standing.generation not in self.ended
        if members:
            generation = world.generation
            assert self.sets.setdefault(generation, set(members)) == set(members)
            assert {s.nbytes for s in members.values()} == {next(iter(members.values())).nbytes}
            assert sum(s.mints for s in members.values()) <= 1
        else:
            self.ended.add(world.generation)
        for process, standing in standings.items():
            if process in self.member_of and process not in members:
                assert standing.phase is Phase.ENDED
                assert standing.why


TestWorld = WorldMachine.TestCase
TestWorld.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
