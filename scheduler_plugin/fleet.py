"""What occupies each executor: an invocation, a cancelled run that cannot be stopped, a run that another
executor leads, or a task that is no ModelFn. An executor is idle when nothing does."""

from __future__ import annotations

import math
from collections.abc import Mapping

from st2i_dask.errors import PolicyError

from .placement import Placement
from .requests import Invocation, Run


class Fleet:
    """Occupants of executors; keeps the idle flags of the placement table true."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.running: dict[str, Invocation] = {}  # by executor
        self.draining: dict[str, tuple[str, Run]] = {}  # by executor: tenant and cancelled run
        self.members: dict[str, Run] = {}  # by executor that is a member of its gang
        self.multi_step: dict[str, Invocation] = {}  # running more than one step, by key
        self._plain: set[str] = set()

    def known(self, executor: str) -> None:
        """PolicyError unless the executor has joined and not left."""
        if executor not in self.placement:
            raise PolicyError(
                f"executor {executor!r} is not known; report ExecutorJoined first, "
                "and nothing after ExecutorLeft"
            )

    def join(self, executor: str, missing: Mapping[str, float], free_bytes: int) -> None:
        self.placement.join(executor, missing, free_bytes)
        self.placement.set_idle(executor, True)

    def leave(self, executor: str) -> None:
        assert executor not in self.running
        assert executor not in self.draining
        assert executor not in self.members
        self._plain.discard(executor)
        self.placement.leave(executor)

    def set_plain(self, executor: str, occupied: bool) -> None:
        """A task that is no ModelFn took the executor, or has left it."""
        if occupied:
            self._plain.add(executor)
        else:
            self._plain.discard(executor)
        self.refresh(executor)

    def occupy(self, invocation: Invocation, run: Run) -> None:
        invocation.run = run
        self.running[run.dispatch.executor] = invocation
        if run.dispatch.steps > 1:
            self.multi_step[invocation.key] = invocation
        for member in run.executors[1:]:
            self.members[member] = run
        for executor in run.executors:
            assert self.placement.is_idle(executor)
            self.placement.set_idle(executor, False)
        self.expect(run)

    def expect(self, run: Run) -> None:
        """Its estimate is known, or moved."""
        for executor in run.executors:
            self.placement.expect(executor, run.started + run.estimate_s)

    def vacate(self, invocation: Invocation) -> Run:
        """The invocation runs no more; its executors are not yet idle (see `release`)."""
        run = invocation.run
        assert run is not None
        del self.running[run.dispatch.executor]
        self.multi_step.pop(invocation.key, None)
        invocation.run = None
        return run

    def release(self, run: Run) -> None:
        """It has ended: what it held is idle, if nothing else occupies it."""
        for member in run.executors[1:]:
            del self.members[member]
        for executor in run.executors:
            self.placement.expect(executor, math.inf)
            self.refresh(executor)

    def depart(self, member: str, now: float) -> Run:
        """A member leaves; the run goes on without it."""
        run = self.members.pop(member)
        run.executors = tuple(executor for executor in run.executors if executor != member)
        run.departed = (*run.departed, now - run.started)
        return run

    def refresh(self, executor: str) -> None:
        """Idle, if nothing occupies it any more."""
        occupied = (
            executor in self.running
            or executor in self.draining
            or executor in self.members
            or executor in self._plain
        )
        self.placement.set_idle(executor, not occupied)

    def runs(self) -> list[Run]:
        """All that run, cancelled ones that cannot be stopped included."""
        running = [i.run for i in self.running.values() if i.run is not None]
        return running + [run for _, run in self.draining.values()]

    def _check(self) -> None:
        self.placement._check()
        occupied = [*self.running, *self.draining, *self.members]
        assert len(set(occupied)) == len(occupied), "an executor runs two invocations"
        executors = self.placement.executors()
        assert {*occupied, *self._plain} <= set(executors)
        for executor in executors:
            busy = executor in occupied or executor in self._plain
            assert self.placement.is_idle(executor) != busy
        held = {member: run for run in self.runs() for member in run.members}
        assert held == self.members
        multi = {i.key: i for i in self.running.values() if i.run and i.run.dispatch.steps > 1}
        assert multi == self.multi_step
