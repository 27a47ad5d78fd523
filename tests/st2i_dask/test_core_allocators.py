"""Both allocators against models that compute from the live blocks alone what must happen next."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from st2i_dask._core import GRANULE, Allocator

KINDS = ("best_fit", "buddy")


class Model:
    """Live blocks {start: length}, granules."""

    def __init__(self, kind, total):
        self.kind, self.total, self.live, self.peak = kind, total, {}, 0

    def gaps(self):
        return {"best_fit": self._best_fit_gaps, "buddy": self._buddy_gaps}[self.kind]()

    def _best_fit_gaps(self):
        gaps, end = [], 0
        for start, length in [*sorted(self.live.items()), (self.total, 0)]:
            if start > end:
                gaps.append((start - end, end))
            end = start + length
        return sorted(gaps)

    def _buddy_gaps(self):
        """The largest free aligned powers of two: there is one way only to divide free space."""
        gaps, start, left = [], 0, self.total
        while left:
            size = 1 << (left.bit_length() - 1)
            self._divide(start, size, gaps)
            start, left = start + size, left - size
        return sorted(gaps)

    def _divide(self, start, size, gaps):
        inside = [at for at, n in self.live.items() if at < start + size and start < at + n]
        if not inside:
            gaps.append((size, start))
        elif inside != [start] or self.live[start] < size:
            self._divide(start, size // 2, gaps)
            self._divide(start + size // 2, size // 2, gaps)

    def rounded(self, nbytes):
        n = -(-nbytes // GRANULE)
        return n if self.kind == "best_fit" else 1 << (n - 1).bit_length()

    def alloc(self, nbytes):
        """The start that must come, granules; None when there must be none."""
        n = self.rounded(nbytes)
        fits = [(size, start) for size, start in self.gaps() if size >= n]
        if not fits:
            return None
        start = min(fits)[1]
        self.live[start] = n
        self.peak = max(self.peak, sum(self.live.values()))
        return start

    def statistics(self):
        used = sum(self.live.values())
        return {
            "used": used * GRANULE,
            "free": (self.total - used) * GRANULE,
            "largest_free": max((size for size, _ in self.gaps()), default=0) * GRANULE,
            "blocks": len(self.live),
            "peak": self.peak * GRANULE,
        }


class Machine(RuleBasedStateMachine):
    kind = ""

    @initialize(total=st.integers(1, 70))
    def start(self, total):
        self.model = Model(self.kind, total)
        self.allocator = Allocator(total * GRANULE + total % 3, self.kind)
        assert self.allocator.nbytes == total * GRANULE

    @rule(n=st.integers(1, 20), short=st.integers(0, GRANULE - 1))
    def alloc(self, n, short):
        self._alloc(n * GRANULE - short)

    @rule(nbytes=st.integers(1, 80 * GRANULE))
    def alloc_any(self, nbytes):
        self._alloc(nbytes)

    def _alloc(self, nbytes):
        start = self.model.alloc(nbytes)
        offset = self.allocator.alloc(nbytes)
        assert offset == (None if start is None else start * GRANULE)

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def free(self, data):
        start = data.draw(st.sampled_from(sorted(self.model.live)))
        del self.model.live[start]
        self.allocator.free(start * GRANULE)

    @rule(offset=st.integers(0, 80 * GRANULE))
    def free_what_is_not_there(self, offset):
        if offset % GRANULE or offset // GRANULE not in self.model.live:
            with pytest.raises(ValueError, match=str(offset)):
                self.allocator.free(offset)

    @invariant()
    def agrees(self):
        if hasattr(self, "model"):
            self.allocator._check()
            assert self.allocator.statistics() == self.model.statistics()


class BestFitMachine(Machine):
    kind = "best_fit"


class BuddyMachine(Machine):
    kind = "buddy"


for machine in (BestFitMachine, BuddyMachine):
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestBestFit = BestFitMachine.TestCase
TestBuddy = BuddyMachine.TestCase


def random_steps(kind, steps, seed):
    """Blocks stay inside, never overlap, and all of it is one gap again at the end."""
    total = 1 << 12
    allocator = Allocator(total * GRANULE, kind)
    chance = random.Random(seed)
    owner = [None] * total  # of every granule
    live = []
    for step in range(steps):
        if not live or chance.random() < 0.55:
            n = chance.choice((1, 1, 2, 7, 8, 30, 96, 288))
            offset = allocator.alloc(n * GRANULE)
            if offset is None:
                assert allocator.statistics()["largest_free"] < n * GRANULE
                continue
            start = offset // GRANULE
            assert owner[start : start + n] == [None] * n
            owner[start : start + n] = [step] * n
            live.append((start, n))
        else:
            start, n = live.pop(chance.randrange(len(live)))
            owner[start : start + n] = [None] * n
            allocator.free(start * GRANULE)
        if step % 100 == 0:
            allocator._check()
    for start, _ in live:
        allocator.free(start * GRANULE)
    allocator._check()
    assert allocator.statistics()["largest_free"] == total * GRANULE
    assert allocator.statistics()["used"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_random_steps(kind):
    random_steps(kind, 5_000, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_many_random_steps(kind, seed):
    random_steps(kind, 60_000, seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nbytes", [0, -1, GRANULE - 1])
def test_an_arena_below_a_granule_is_refused(kind, nbytes):
    with pytest.raises(ValueError, match=rf"arena of {nbytes} bytes .* least is {GRANULE}"):
        Allocator(nbytes, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nbytes", [0, -1, -(1 << 62)])
def test_a_block_below_a_byte_is_refused(kind, nbytes):
    with pytest.raises(ValueError, match=f"block of {nbytes} bytes"):
        Allocator(GRANULE, kind).alloc(nbytes)


def test_another_kind_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"worst_fit.*best_fit, buddy"):
        Allocator(GRANULE, "worst_fit")


@pytest.mark.parametrize("kind", KINDS)
def test_an_arena_as_large_as_devices_have(kind):
    allocator = Allocator(200 << 30, kind)
    blocks = [allocator.alloc(24 << 20) for _ in range(100)]
    assert None not in blocks
    assert allocator.alloc(1 << 62) is None
    for offset in blocks:
        allocator.free(offset)
    allocator._check()
