"""Lanes: ready work that differs only in waiting time, with the heads held in NumPy arrays.

A lane is (tenant, workflow outline, position); the shape bucket is part of the outline. What is
the same for all tenants at one position of one outline is a *kind*: its remaining path and own
execution time are stored once. Seconds to load are stored once per model. So a change of an
estimate, or of which executor is idle, touches one number, and the per-lane columns are gathered
again in one pass before the next decision.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .backlog import Backlog
from .candidates import Candidate, Outlook
from .outline import CostKey, Outline

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
_Number = TypeVar("_Number", bound=np.generic)


@dataclass(slots=True, eq=False)
class Kind:
    """One position of one outline, shared by the lanes of all tenants."""

    outline: Outline
    position: int
    index: int
    model: ModelLoad
    lanes: int = 0


@dataclass(slots=True, eq=False)
class ModelLoad:
    """A model some lane needs; its seconds to load live at `index` of the model column."""

    cost_key: CostKey
    index: int
    kinds: int = 0


@dataclass(slots=True, eq=False)
class Lane:
    """The waiting invocations of one tenant at one kind, longest waiting first."""

    tenant: str
    kind: Kind
    index: int
    waiting: Backlog = field(default_factory=Backlog)


class Lanes:
    """All lanes. Rows 0..len-1 of the columns are in use, in no particular order.

    Columns: `since` (what the head waits since, s), `vtime` (of the tenant, s), `path` and `run`
    (remaining critical path; own execution on the best idle executor: both seconds).
    """

    def __init__(self, outlook: Outlook) -> None:
        self._outlook = outlook
        self._lanes: list[Lane] = []
        self._by_tenant: dict[str, dict[Kind, Lane]] = {}
        self._kinds: dict[Outline, dict[int, Kind]] = {}
        self._models: dict[str, ModelLoad] = {}
        self._where: dict[str, Lane] = {}
        self._since: Floats = np.zeros(64)
        self._vtime: Floats = np.zeros(64)
        self._path: Floats = np.zeros(64)
        self._run: Floats = np.zeros(64)
        self._kind_of: Indices = np.zeros(64, dtype=np.intp)
        self._kind_path: Floats = np.zeros(64)
        self._kind_own: Floats = np.zeros(64)
        self._kind_model: Indices = np.zeros(64, dtype=np.intp)
        self._model_load: Floats = np.zeros(64)
        self._free_kinds: list[int] = list(range(63, -1, -1))
        self._free_models: list[int] = list(range(63, -1, -1))
        self._stale = False

    def __len__(self) -> int:
        """Number of lanes."""
        return len(self._lanes)

    @property
    def queued(self) -> int:
        return len(self._where)

    def __contains__(self, key: object) -> bool:
        return key in self._where

    # Rows

    def add(self, candidate: Candidate, vtime_s: float) -> None:
        tenant = candidate.tenant
        lanes = self._by_tenant.setdefault(tenant, {})
        kinds = self._kinds.get(candidate.outline)
        kind = kinds.get(candidate.position) if kinds is not None else None
        if kind is None:
            kind = self._new_kind(candidate)
        lane = lanes.get(kind)
        if lane is None:
            lane = lanes[kind] = self._new_lane(tenant, kind, vtime_s)
        lane.waiting.push((candidate.since,), candidate)
        self._since[lane.index] = lane.waiting.first_rank()[0]
        self._where[candidate.key] = lane

    def discard(self, key: str) -> None:
        """Take it out; KeyError if it does not wait here."""
        lane = self._where.pop(key)
        lane.waiting.remove(key)
        if lane.waiting:
            self._since[lane.index] = lane.waiting.first_rank()[0]
        else:
            self._drop_lane(lane)

    def head(self, row: int) -> Candidate:
        return self._lanes[row].waiting.first()

    def set_vtime(self, tenant: str, vtime_s: float) -> None:
        for lane in self._by_tenant.get(tenant, {}).values():
            self._vtime[lane.index] = vtime_s

    def columns(self) -> tuple[Floats, Floats, Floats, Floats]:
        """(since, vtime, path, run) of all lanes: views, valid until the next change."""
        n = len(self._lanes)
        if self._stale:
            kind_of = self._kind_of[:n]
            self._path[:n] = self._kind_path.take(kind_of)
            run = self._kind_own + self._model_load.take(self._kind_model)
            self._run[:n] = run.take(kind_of)
            self._stale = False
        return self._since[:n], self._vtime[:n], self._path[:n], self._run[:n]

    def not_of(self, model: str) -> NDArray[np.bool_]:
        """Which lanes need another model."""
        held = self._models.get(model)
        of: Indices = self._kind_model.take(self._kind_of[: len(self._lanes)])
        return np.not_equal(of, held.index if held is not None else -1)

    # Estimates

    def refresh_outline(self, outline: Outline) -> None:
        """Ask the outlook again for all live kinds of an outline."""
        for kind in self._kinds.get(outline, {}).values():
            self._ask(kind)

    def refresh_model(self, model: str | None) -> None:
        """Ask the outlook again for the seconds to load a model; None: every model."""
        if model is None:
            for name in self._models:
                self.refresh_model(name)
            return
        held = self._models.get(model)
        if held is not None:
            load_s = self._outlook.load_s(held.cost_key)
            if load_s != self._model_load[held.index]:
                self._model_load[held.index] = load_s
                self._stale = True

    def _ask(self, kind: Kind) -> None:
        self._kind_path[kind.index] = self._outlook.path_s(kind.outline, kind.position)
        self._kind_own[kind.index] = self._outlook.own_s(kind.outline.cost_keys[kind.position])
        self._stale = True

    # Growing and shrinking

    def _new_lane(self, tenant: str, kind: Kind, vtime_s: float) -> Lane:
        index = len(self._lanes)
        if index == len(self._since):
            for column in ("_since", "_vtime", "_path", "_run", "_kind_of"):
                setattr(self, column, _doubled(getattr(self, column)))
        lane = Lane(tenant, kind, index)
        self._lanes.append(lane)
        kind.lanes += 1
        self._vtime[index] = vtime_s
        self._kind_of[index] = kind.index
        if not self._stale:
            self._path[index] = self._kind_path[kind.index]
            self._run[index] = self._kind_own[kind.index] + self._model_load[kind.model.index]
        return lane

    def _drop_lane(self, lane: Lane) -> None:
        last = self._lanes.pop()
        if last is not lane:
            row, end = lane.index, last.index
            self._lanes[row] = last
            for column in (self._since, self._vtime, self._path, self._run):
                column[row] = column[end]
            self._kind_of[row] = self._kind_of[end]
            last.index = row
        lanes = self._by_tenant[lane.tenant]
        del lanes[lane.kind]
        if not lanes:
            del self._by_tenant[lane.tenant]
        kind = lane.kind
        kind.lanes -= 1
        if not kind.lanes:
            self._drop_kind(kind)

    def _new_kind(self, candidate: Candidate) -> Kind:
        cost_key = candidate.cost_key
        model = self._models.get(cost_key.model)
        if model is None:
            if not self._free_models:
                size = len(self._model_load)
                self._model_load = _doubled(self._model_load)
                self._free_models.extend(range(2 * size - 1, size - 1, -1))
            model = ModelLoad(cost_key, self._free_models.pop())
            self._models[cost_key.model] = model
            self._model_load[model.index] = self._outlook.load_s(cost_key)
        if not self._free_kinds:
            size = len(self._kind_path)
            for column in ("_kind_path", "_kind_own", "_kind_model"):
                setattr(self, column, _doubled(getattr(self, column)))
            self._free_kinds.extend(range(2 * size - 1, size - 1, -1))
        model.kinds += 1
        kind = Kind(candidate.outline, candidate.position, self._free_kinds.pop(), model)
        self._kinds.setdefault(candidate.outline, {})[candidate.position] = kind
        self._kind_model[kind.index] = model.index
        self._ask(kind)
        return kind

    def _drop_kind(self, kind: Kind) -> None:
        kinds = self._kinds[kind.outline]
        del kinds[kind.position]
        if not kinds:
            del self._kinds[kind.outline]
        self._free_kinds.append(kind.index)
        self._kind_model[kind.index] = 0
        kind.model.kinds -= 1
        if not kind.model.kinds:
            del self._models[kind.model.cost_key.model]
            self._free_models.append(kind.model.index)

    def _check(self) -> None:
        since, vtime, path, run = self.columns()
        queued = 0
        used: dict[int, int] = {}
        for row, lane in enumerate(self._lanes):
            lane.waiting._check()
            assert lane.index == row
            assert lane.waiting
            assert self._by_tenant[lane.tenant][lane.kind] is lane
            kind = lane.kind
            assert self._kinds[kind.outline][kind.position] is kind
            assert self._models[kind.model.cost_key.model] is kind.model
            assert since[row] == lane.waiting.first_rank()[0] == lane.waiting.first().since
            assert path[row] == self._kind_path[kind.index]
            assert run[row] == self._kind_own[kind.index] + self._model_load[kind.model.index]
            assert self._where[lane.waiting.first().key] is lane
            queued += len(lane.waiting)
            used[kind.index] = used.get(kind.index, 0) + 1
        by_tenant: dict[str, set[float]] = {}
        for row, lane in enumerate(self._lanes):
            by_tenant.setdefault(lane.tenant, set()).add(float(vtime[row]))
        assert all(len(values) == 1 for values in by_tenant.values())
        assert set(by_tenant) == set(self._by_tenant)
        assert queued == len(self._where)
        kinds = [kind for kinds in self._kinds.values() for kind in kinds.values()]
        assert {kind.index: kind.lanes for kind in kinds} == used
        for kind in kinds:
            key = kind.outline.cost_keys[kind.position]
            assert self._kind_path[kind.index] == self._outlook.path_s(kind.outline, kind.position)
            assert self._kind_own[kind.index] == self._outlook.own_s(key)
        assert len(kinds) + len(self._free_kinds) == len(self._kind_path)
        assert len(self._models) + len(self._free_models) == len(self._model_load)
        assert sum(model.kinds for model in self._models.values()) == len(kinds)


def _doubled(column: NDArray[_Number]) -> NDArray[_Number]:
    return np.concatenate([column, np.zeros_like(column)])
