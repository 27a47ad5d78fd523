"""Executors: which are idle, what is resident where, and which one is the best for an invocation.

    seconds to result = load still missing + bytes to pull / bandwidth

and for what lets others in that must not share its executor (a callback's producer), the seconds that
these have to load more because that one is taken. The fewest win; among equals (within a microsecond) the one with most free memory, then the first in
the table.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from st2i_dask.errors import PolicyError

_EQUAL_S = 1e-6
#: Up to that many idle executors a plain loop is faster than NumPy.
FEW = 16

Floats = NDArray[np.float64]


class Place(NamedTuple):
    """Where to run. `missing`: share of the model to load there; `pull_bytes`: inputs to fetch."""

    executor: str
    missing: float
    pull_bytes: int


class Placement:
    """The table of executors. Choosing costs O(executors) in NumPy; a change of state O(models
    resident on that executor)."""

    def __init__(self) -> None:
        self._slot: dict[str, int] = {}
        self._names: list[str | None] = [None] * 64
        self._free_slots: list[int] = list(range(63, -1, -1))
        self._missing: dict[str, Floats] = {}  # model -> share missing, by slot
        self._resident: dict[str, Mapping[str, float]] = {}  # by executor
        self._free_bytes: Floats = np.zeros(64)
        self._blocked: Floats = np.full(64, np.inf)  # 0 when idle, inf when not
        self._ends: Floats = np.full(64, np.inf)  # when what runs there should end; inf: no idea
        self._idle: dict[str, Mapping[str, float]] = {}  # with what is resident there
        self._moved: set[str] = set()  # models whose least_missing may have changed

    # Questions

    def __len__(self) -> int:
        return len(self._slot)

    def __contains__(self, executor: object) -> bool:
        return executor in self._slot

    @property
    def idle(self) -> int:
        """Number of idle executors."""
        return len(self._idle)

    def is_idle(self, executor: str) -> bool:
        return executor in self._idle

    def idle_names(self) -> list[str]:
        return list(self._idle)

    def executors(self) -> list[str]:
        return list(self._slot)

    def missing_on(self, executor: str, model: str) -> float:
        """Share of the model that has to be loaded there, 0 to 1."""
        return self._resident[executor].get(model, 1.0)

    def least_missing(self, model: str) -> float:
        """Share of the model that has to be loaded on the best idle executor, 0 to 1."""
        if len(self._idle) > FEW:
            column = self._missing.get(model)
            return 1.0 if column is None else min(1.0, float((column + self._blocked).min()))
        least = 1.0
        for resident in self._idle.values():
            share = resident.get(model, 1.0)
            if share < least:
                least = share
        return least

    def soonest(self, model: str, load_s: float, now: float) -> tuple[float, float]:
        """Seconds until a busy executor should be done and have the model, and how many executors have
        it, shares added up; (inf, 0) where none has any of it."""
        column = self._missing.get(model)
        if column is None:
            return math.inf, 0.0
        seconds = self._ends - now
        np.maximum(seconds, 0.0, out=seconds)
        seconds += column * load_s
        return float(seconds.min()), float(len(column) - column.sum())

    def take_moved(self) -> set[str]:
        """Models whose `least_missing` may have changed since this was last asked."""
        moved, self._moved = self._moved, set()
        return moved

    # Changes

    def join(self, executor: str, missing: Mapping[str, float], free_bytes: int) -> None:
        """A new executor, not idle yet."""
        if executor in self._slot:
            raise PolicyError(
                f"executor {executor!r} is already there; report that it left before it joins again"
            )
        if not self._free_slots:
            self._grow()
        slot = self._slot[executor] = self._free_slots.pop()
        self._names[slot] = executor
        self._resident[executor] = {}
        self.report(executor, missing, free_bytes)

    def leave(self, executor: str) -> None:
        self.set_idle(executor, False)
        self._forget(executor)
        slot = self._slot.pop(executor)
        self._ends[slot] = np.inf
        del self._resident[executor]
        self._names[slot] = None
        self._free_slots.append(slot)

    def set_idle(self, executor: str, idle: bool) -> None:
        if idle == (executor in self._idle):
            return
        if idle:
            self._idle[executor] = self._resident[executor]
            self._blocked[self._slot[executor]] = 0.0
        else:
            del self._idle[executor]
            self._blocked[self._slot[executor]] = math.inf
        self._moved.update(self._resident[executor])

    def expect(self, executor: str, ends: float) -> None:
        """When what runs there should end; inf: nobody knows."""
        self._ends[self._slot[executor]] = ends

    def report(self, executor: str, missing: Mapping[str, float], free_bytes: int | None) -> None:
        """What is resident there now, replacing what was known; free memory if it is known."""
        slot = self._slot[executor]
        if free_bytes is not None:
            self._free_bytes[slot] = free_bytes
        if missing == self._resident[executor]:
            return
        self._moved.update(self._resident[executor])
        self._forget(executor)
        resident = {model: share for model, share in missing.items() if share < 1.0}
        self._resident[executor] = resident
        if executor in self._idle:
            self._idle[executor] = resident
        for model, share in resident.items():
            column = self._missing.get(model)
            if column is None:
                column = self._missing[model] = np.ones(len(self._names))
            column[slot] = share
        self._moved.update(resident)

    def loaded(self, executor: str, model: str) -> None:
        """The model has just run there, and nothing else is known: it is resident."""
        resident = self._resident[executor]
        if resident.get(model, 1.0) > 0.0:
            self.report(executor, {**resident, model: 0.0}, None)

    def _forget(self, executor: str) -> None:
        slot = self._slot[executor]
        for model in self._resident[executor]:
            column = self._missing[model]
            column[slot] = 1.0
            if column.min() == 1.0:
                del self._missing[model]
        self._resident[executor] = {}

    def _grow(self) -> None:
        size = len(self._names)
        self._names += [None] * size
        self._free_slots.extend(range(2 * size - 1, size - 1, -1))
        self._free_bytes = np.concatenate([self._free_bytes, np.zeros(size)])
        self._blocked = np.concatenate([self._blocked, np.full(size, np.inf)])
        self._ends = np.concatenate([self._ends, np.full(size, np.inf)])
        for model, column in self._missing.items():
            self._missing[model] = np.concatenate([column, np.ones(size)])

    # The choice

    def place(
        self,
        model: str,
        load_s: float,
        input_bytes: int = 0,
        input_at: Mapping[str, int] | None = None,
        bandwidth: float = 1.0,
        apart_from: Collection[str] = (),
        lets_in: Collection[tuple[str, float]] = (),
    ) -> Place | None:
        """The idle executor with the fewest seconds to result; None when there is none.

        load_s: the whole model from scratch. input_at: bytes each executor already holds.
        bandwidth: bytes per second. apart_from: executors whose running producers must not share.
        lets_in: model, and its load from scratch, of each that will need another executor.
        """
        if len(self._idle) == 1:
            (executor,) = self._idle
            if executor in apart_from:
                return None
        else:
            found = self._fastest(
                model, load_s, input_bytes, input_at, bandwidth, apart_from, lets_in
            )
            if found is None:
                return None
            executor = found
        held = input_at.get(executor, 0) if input_at else 0
        missing = self._resident[executor].get(model, 1.0)
        return Place(executor, missing, max(0, input_bytes - held))

    def members(
        self, model: str, load_s: float, most_s: float, count: int, leader: str
    ) -> tuple[str, ...]:
        """Up to `count` further idle executors for a gang, the fewest seconds to load first, then the
        most free memory; none that would take more than `most_s` to load."""
        column = self._missing.get(model)
        idle = [executor for executor in self._idle if executor != leader]
        found = []
        for executor in idle:
            slot = self._slot[executor]
            seconds = (1.0 if column is None else float(column[slot])) * load_s
            if seconds <= most_s + _EQUAL_S:
                found.append((seconds, -self._free_bytes[slot], slot, executor))
        return tuple(executor for *_, executor in heapq.nsmallest(count, found))

    def _fastest(
        self,
        model: str,
        load_s: float,
        input_bytes: int,
        input_at: Mapping[str, int] | None,
        bandwidth: float,
        apart_from: Collection[str],
        lets_in: Collection[tuple[str, float]],
    ) -> str | None:
        column = self._missing.get(model)
        if column is None:
            seconds = self._blocked + load_s
        else:
            seconds = column * load_s
            seconds += self._blocked
        if input_at:
            for executor, held in input_at.items():
                slot = self._slot.get(executor)
                if slot is not None:
                    seconds[slot] -= min(held, input_bytes) / bandwidth
        for executor in apart_from:
            slot = self._slot.get(executor)
            if slot is not None:
                seconds[slot] = np.inf
        for other, other_load_s in lets_in:
            self._spare_best(other, other_load_s, seconds)
        fewest = seconds.min()
        if fewest == math.inf:
            return None
        equal = (seconds <= fewest + _EQUAL_S).nonzero()[0]
        best = 0 if len(equal) == 1 else self._free_bytes.take(equal).argmax()
        return self._names[int(equal[best])]

    def _spare_best(self, model: str, load_s: float, seconds: Floats) -> None:
        """Add what is lost on the idle executor that is best for that model: its seconds on the next."""
        column = self._missing.get(model)
        if column is None:
            return
        loads = column * load_s + self._blocked
        best = int(loads.argmin())
        first, loads[best] = loads[best], np.inf
        seconds[best] += min(load_s, float(loads.min())) - first

    def _check(self) -> None:
        assert {slot: name for name, slot in self._slot.items()} == {
            slot: name for slot, name in enumerate(self._names) if name is not None
        }
        assert set(self._resident) == set(self._slot)
        assert all(
            resident is self._resident[executor] for executor, resident in self._idle.items()
        )
        assert len(self._free_slots) + len(self._slot) == len(self._names)
        for slot, name in enumerate(self._names):
            assert (self._blocked[slot] == 0.0) == (name is not None and name in self._idle)
            assert self._ends[slot] == np.inf or (name is not None and name not in self._idle)
            resident = {} if name is None else self._resident[name]
            for model, column in self._missing.items():
                assert column[slot] == resident.get(model, 1.0)
            assert all(
                0.0 <= share < 1.0 and model in self._missing for model, share in resident.items()
            )
        for model, column in self._missing.items():
            assert column.min() < 1.0, f"{model} is resident nowhere"
            shares = [column[self._slot[executor]] for executor in self._idle]
            assert self.least_missing(model) == min([1.0, *shares])
