"""Lanes: ready work that differs only in waiting time.

A lane is (tenant, workflow outline, position); the shape bucket is part of the outline. What is
the same for all tenants at one position of one outline is a *kind*: its remaining path is stored once.
Seconds on the best idle executor are stored once per cost key. So a change of an estimate, or of which
executor is idle, touches one number. Kinds stay until their outline is used no more.

Every number that a choice depends on is kept twice: in the objects, for few lanes, and in columns, which
NumPy reads without a copy, for many.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .backlog import Backlog
from .candidates import Candidate, Outlook
from .outline import CostKey, Outline

Floats = NDArray[np.float64]


@dataclass(slots=True, eq=False)
class Cost:
    """A cost key of some kind. own_s, load_s: without any load, and of a whole one; run_s: with what is
    to be loaded on the best idle executor. Up to date while there are lanes."""

    key: CostKey
    index: int
    own_s: float = 0.0
    load_s: float = 0.0
    run_s: float = 0.0
    kinds: int = 0
    lanes: int = 0


@dataclass(slots=True, eq=False)
class Kind:
    """One position of one outline, shared by the lanes of all tenants. path_s: remaining critical path."""

    position: int
    index: int
    cost: Cost
    path_s: float


@dataclass(slots=True, eq=False)
class Lane:
    """The waiting invocations of one tenant at one kind, longest waiting first. since: of the head, s."""

    tenant: str
    kind: Kind
    row: int
    vtime_s: float
    since: float
    waiting: Backlog = field(default_factory=Backlog)


class Lanes:
    """All lanes, in no particular order: `rows`."""

    def __init__(self, outlook: Outlook) -> None:
        self._outlook = outlook
        self.rows: list[Lane] = []
        self._by_tenant: dict[str, dict[Kind, Lane]] = {}
        self._kinds: dict[Outline, dict[int, Kind]] = {}
        self._costs: dict[str, dict[CostKey, Cost]] = {}  # by model
        self._where: dict[str, Lane] = {}
        # By row, seconds; then the index of kind and cost, by which the last two have theirs.
        self._since, self._vtime = array("d"), array("d")
        self._kind, self._cost = array("q"), array("q")
        self._path, self._run = array("d"), array("d")
        self._free_kinds: list[int] = []
        self._free_costs: list[int] = []

    def __len__(self) -> int:
        """Number of lanes."""
        return len(self.rows)

    @property
    def queued(self) -> int:
        return len(self._where)

    def __contains__(self, key: object) -> bool:
        return key in self._where

    # Rows

    def add(self, candidate: Candidate, vtime_s: float) -> None:
        tenant, position = candidate.tenant, candidate.position
        kinds = self._kinds.get(candidate.outline)
        if kinds is None or position not in kinds:
            kinds = self._new_kind(candidate)
        kind = kinds[position]
        lanes = self._by_tenant.get(tenant)
        if lanes is None:
            lanes = self._by_tenant[tenant] = {}
        lane = lanes.get(kind)
        if lane is None:
            lane = lanes[kind] = self._new_lane(candidate, kind, vtime_s)
        elif candidate.since < lane.since:
            lane.since = self._since[lane.row] = candidate.since
        lane.waiting.push((candidate.since,), candidate)
        self._where[candidate.key] = lane

    def discard(self, key: str) -> None:
        """Take it out; KeyError if it does not wait here."""
        lane = self._where.pop(key)
        waiting = lane.waiting
        waiting.remove(key)
        if waiting:
            lane.since = self._since[lane.row] = waiting.first_rank()[0]
        else:
            self._drop_lane(lane)

    def set_vtime(self, tenant: str, vtime_s: float) -> None:
        lanes = self._by_tenant.get(tenant)
        if lanes is not None:
            for lane in lanes.values():
                lane.vtime_s = self._vtime[lane.row] = vtime_s

    def columns(self) -> tuple[Floats, Floats, Floats, Floats]:
        """(since, vtime, path, run) by row, s; no lane may come or go while they are in use."""
        kind, cost = np.frombuffer(self._kind, np.int64), np.frombuffer(self._cost, np.int64)
        path, run = np.frombuffer(self._path).take(kind), np.frombuffer(self._run).take(cost)
        return np.frombuffer(self._since), np.frombuffer(self._vtime), path, run

    def leave_out(self, model: str, rows: NDArray[np.bool_]) -> None:
        """Make False those of lanes that need this model."""
        of_row = np.frombuffer(self._cost, np.int64)
        for cost in self._costs.get(model, {}).values():
            rows &= of_row != cost.index

    # Estimates

    def refresh_outline(self, outline: Outline) -> None:
        """Ask the outlook again for all kinds of an outline."""
        for kind in self._kinds.get(outline, {}).values():
            kind.path_s = self._outlook.path_s(outline, kind.position)
            self._path[kind.index] = kind.path_s
            self._ask(kind.cost)

    def refresh_models(self, models: Collection[str] | None) -> None:
        """Ask the outlook again how much of these models is missing; None: also what any load takes."""
        if models is None:
            for costs in self._costs.values():
                for cost in costs.values():
                    self._ask(cost)
            return
        known, outlook = self._costs, self._outlook
        for model in models:
            if model in known:
                for cost in known[model].values():
                    if cost.lanes:
                        cost.run_s = cost.own_s + cost.load_s * outlook.missing(model)
                        self._run[cost.index] = cost.run_s

    def forget_outline(self, outline: Outline) -> None:
        """No more lanes of it are expected; there are none now."""
        for kind in self._kinds.pop(outline, {}).values():
            self._free_kinds.append(kind.index)
            cost = kind.cost
            cost.kinds -= 1
            if not cost.kinds:
                costs = self._costs[cost.key.model]
                del costs[cost.key]
                if not costs:
                    del self._costs[cost.key.model]
                self._free_costs.append(cost.index)

    def _ask(self, cost: Cost) -> None:
        outlook, key = self._outlook, cost.key
        cost.own_s, cost.load_s = outlook.own_s(key), outlook.load_s(key)
        cost.run_s = cost.own_s + cost.load_s * outlook.missing(key.model)
        self._run[cost.index] = cost.run_s

    # Growing and shrinking

    def _new_lane(self, first: Candidate, kind: Kind, vtime_s: float) -> Lane:
        lane = Lane(first.tenant, kind, len(self.rows), vtime_s, first.since)
        cost = kind.cost
        if not cost.lanes:
            self._ask(cost)
        cost.lanes += 1
        self.rows.append(lane)
        self._since.append(first.since)
        self._vtime.append(vtime_s)
        self._kind.append(kind.index)
        self._cost.append(cost.index)
        return lane

    def _drop_lane(self, lane: Lane) -> None:
        last, row = self.rows.pop(), lane.row
        since, vtime = self._since.pop(), self._vtime.pop()
        kind, cost = self._kind.pop(), self._cost.pop()
        if last is not lane:
            self.rows[row], last.row = last, row
            self._since[row], self._vtime[row] = since, vtime
            self._kind[row], self._cost[row] = kind, cost
        lane.kind.cost.lanes -= 1
        lanes = self._by_tenant[lane.tenant]
        del lanes[lane.kind]
        if not lanes:
            del self._by_tenant[lane.tenant]

    def _new_kind(self, candidate: Candidate) -> dict[int, Kind]:
        """The kinds of its outline, its own one now among them."""
        outline, position = candidate.outline, candidate.position
        key = candidate.cost_key
        costs = self._costs.setdefault(key.model, {})
        cost = costs.get(key)
        if cost is None:
            cost = costs[key] = Cost(key, _free(self._run, self._free_costs))
        cost.kinds += 1
        path_s = self._outlook.path_s(outline, position)
        kind = Kind(position, _free(self._path, self._free_kinds), cost, path_s)
        self._path[kind.index] = path_s
        kinds = self._kinds.setdefault(outline, {})
        kinds[position] = kind
        return kinds

    def _check(self) -> None:
        outlook = self._outlook
        queued = 0
        lanes_of: dict[Cost, int] = {}
        for row, lane in enumerate(self.rows):
            kind, cost = lane.kind, lane.kind.cost
            head = lane.waiting.first()
            lane.waiting._check()
            assert (lane.row, lane.tenant) == (row, head.tenant)
            assert self._by_tenant[lane.tenant][kind] is lane
            assert self._kinds[head.outline][head.position] is kind
            assert self._where[head.key] is lane
            assert (self._kind[row], self._cost[row]) == (kind.index, cost.index)
            assert lane.since == self._since[row] == lane.waiting.first_rank()[0] == head.since
            assert lane.vtime_s == self._vtime[row]
            queued += len(lane.waiting)
            lanes_of[cost] = lanes_of.get(cost, 0) + 1
        rows = len(self.rows)
        assert all(len(c) == rows for c in (self._since, self._vtime, self._kind, self._cost))
        assert sum(map(len, self._by_tenant.values())) == rows
        for lanes in self._by_tenant.values():
            assert len({lane.vtime_s for lane in lanes.values()}) == 1
        assert queued == len(self._where)
        kinds_of: dict[Cost, int] = {}
        for outline, kinds in self._kinds.items():
            for position, kind in kinds.items():
                assert (kind.position, kind.cost.key) == (position, outline.cost_keys[position])
                assert self._path[kind.index] == kind.path_s == outlook.path_s(outline, position)
                kinds_of[kind.cost] = kinds_of.get(kind.cost, 0) + 1
        costs = [cost for costs in self._costs.values() for cost in costs.values()]
        assert {cost: cost.kinds for cost in costs} == kinds_of
        for cost in costs:
            assert self._costs[cost.key.model][cost.key] is cost
            assert cost.lanes == lanes_of.pop(cost, 0)
            if cost.lanes:
                assert cost.own_s == outlook.own_s(cost.key)
                assert cost.load_s == outlook.load_s(cost.key)
                assert self._run[cost.index] == cost.run_s >= cost.own_s
        assert not lanes_of
        assert sum(kinds_of.values()) + len(self._free_kinds) == len(self._path)
        assert len(costs) + len(self._free_costs) == len(self._run)


def _free(column: array[float], free: list[int]) -> int:
    """An index that nobody uses."""
    if free:
        return free.pop()
    column.append(0.0)
    return len(column) - 1
