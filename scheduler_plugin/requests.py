"""The book of open requests: the state of every invocation, and what each tenant has.

Rules of this file:
1. All moves of an invocation between states happen in `move`, and only as `LEGAL` says.
2. It decides nothing: it counts, so that a question about a tenant or a gate is a look-up.

            ready, producers not dispatched      producers dispatched
    BLOCKED ------------------------------> GATED ------------------> READY --> RUNNING --> DONE
       ^                                      |                         |          |          |
       +--------------------------------------+-------------------------+----------+----------+
                              an input, the run or the result was lost

DEAD: will not run (failed, downstream of a failure, cancelled). A DONE position whose result was let
go, and is needed again, becomes READY.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from st2i_dask.errors import PolicyError

from .candidates import Candidate
from .instructions import Dispatch
from .outline import Outline


class State(Enum):
    """Where an invocation stands."""

    BLOCKED = "blocked"
    GATED = "gated"
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    DEAD = "dead"

    __hash__ = object.__hash__  # identity: faster than the hash of the name


LEGAL: dict[State, frozenset[State]] = {
    State.BLOCKED: frozenset({State.GATED, State.READY, State.DONE, State.DEAD}),
    State.GATED: frozenset({State.READY, State.BLOCKED, State.DONE, State.DEAD}),
    State.READY: frozenset({State.RUNNING, State.GATED, State.BLOCKED, State.DONE, State.DEAD}),
    State.RUNNING: frozenset({State.DONE, State.BLOCKED, State.DEAD}),
    State.DONE: frozenset({State.GATED, State.READY, State.BLOCKED}),
    State.DEAD: frozenset({State.GATED, State.READY}),
}

_OPEN = frozenset({State.BLOCKED, State.GATED, State.READY, State.RUNNING})
#: Of each legal move, by how much it changes the positions that are ready, run and are open.
_CHANGES: dict[State, dict[State, tuple[int, int, int]]] = {
    old: {
        to: (
            (to is State.READY) - (old is State.READY),
            (to is State.RUNNING) - (old is State.RUNNING),
            (to in _OPEN) - (old in _OPEN),
        )
        for to in allowed
    }
    for old, allowed in LEGAL.items()
}


@dataclass(slots=True, eq=False)
class Invocation:
    """A position that has been ready: its task, inputs and, while it runs, its run."""

    key: str
    request: Request
    position: int
    input_bytes: int
    input_at: dict[str, int]
    steps: int
    candidate: Candidate
    run: Run | None = None


@dataclass(slots=True, eq=False)
class Run:
    """An invocation on an executor, and on the members of its gang. `charge`: its number in the
    ledger. Seconds are those of the executor that leads; `device_s` counts every executor. `missing`:
    share of the model to load there; `slowest`: the largest one of the group, which all wait for."""

    dispatch: Dispatch
    charge: int
    started: float
    missing: float
    slowest: float
    pull_bytes: int
    unit_s: float  # seconds of it that cannot be interrupted
    estimate_s: float  # what it is charged for while it runs
    candidate: Candidate
    executors: tuple[str, ...]  # that it holds: the one that leads, then its members
    departed: tuple[float, ...] = ()  # seconds that each member served which has left the cluster
    yielding: bool = False

    @property
    def members(self) -> tuple[str, ...]:
        """Executors held beside the first."""
        return self.executors[1:]

    def device_s(self, seconds: float, served: int | None = None) -> float:
        """Device seconds of all its executors if the first is used for so many.

        served: how many members took part, if that is known: no more are counted, who served longest
        first.
        """
        held = len(self.executors) - 1
        if not held and not self.departed:
            return seconds
        if not self.departed and (served is None or served >= held):
            return seconds * (1 + held)
        shares = [seconds] * held + [min(seconds, s) for s in sorted(self.departed, reverse=True)]
        return seconds + sum(shares[:served])


@dataclass(slots=True, eq=False)
class Request:
    """One run of a workflow for a tenant."""

    name: str
    tenant: str
    outline: Outline
    submitted: float
    order: int
    states: list[State]
    standing: Standing  # of its tenant
    invocations: dict[int, Invocation] = field(default_factory=dict)
    open: int = 0  # positions that still have to run
    dispatches: int = 0

    def check_position(self, position: int) -> None:
        """PolicyError unless the request has it."""
        if type(position) is not int or not 0 <= position < len(self.states):
            raise PolicyError(
                f"request {self.name!r} has no position {position!r}; "
                f"allowed are 0 to {len(self.states) - 1}"
            )


@dataclass(slots=True)
class Standing:
    """What a tenant has. Positions: `open` to run, `ready` queued, `running`; `draining` runs of
    cancelled invocations; `waiting` and `started`: requests that have open positions."""

    open: int = 0
    ready: int = 0
    running: int = 0
    draining: int = 0
    waiting: int = 0
    started: int = 0
    requests: int = 0

    @property
    def active(self) -> bool:
        return self.open > 0 or self.draining > 0


class RequestBook:
    """All open requests."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.invocations: dict[str, Invocation] = {}
        self.standings: dict[str, Standing] = {}
        self.ready = 0
        self.ready_of: dict[str, int] = {}  # by model
        self._orders = 0

    def standing(self, tenant: str) -> Standing:
        """The tenant's counts; all 0 for one without requests."""
        return self.standings.get(tenant) or Standing()

    def request(self, name: str) -> Request:
        found = self.requests.get(name)
        if found is None:
            raise PolicyError(f"request {name!r} is not open; submit it first, close it once")
        return found

    def invocation(self, key: str) -> Invocation:
        found = self.invocations.get(key)
        if found is None:
            raise PolicyError(f"{key!r} was never ready in an open request; report it ready first")
        return found

    def state(self, key: str) -> State | None:
        """Where a task stands; None when no open request has it."""
        found = self.invocations.get(key)
        return found.request.states[found.position] if found else None

    def submit(self, name: str, tenant: str, outline: Outline, now: float) -> Request:
        assert name not in self.requests
        self._orders += 1
        states = [State.BLOCKED] * len(outline)
        standing = self.standings.setdefault(tenant, Standing())
        request = Request(name, tenant, outline, now, self._orders, states, standing)
        self.requests[name] = request
        request.open = len(states)
        standing.open += request.open
        standing.requests += 1
        standing.waiting += 1
        return request

    def close(self, request: Request) -> None:
        """Forget it. Its invocations must not be queued or running any more."""
        assert all(invocation.run is None for invocation in request.invocations.values())
        for position, state in enumerate(request.states):
            if state in _OPEN:
                self.move(request, position, State.DEAD)
        del self.requests[request.name]
        for invocation in request.invocations.values():
            del self.invocations[invocation.key]
        request.invocations.clear()  # they refer to it: nothing is left to the garbage collector
        request.standing.requests -= 1
        self._drop_empty(request.tenant, request.standing)

    def move(self, request: Request, position: int, to: State) -> None:
        """Change a state. PolicyError, with nothing changed, if the move is not legal."""
        change = _CHANGES[request.states[position]].get(to)
        if change is None:
            raise self.illegal(request, position, to)
        request.states[position] = to
        ready, running, opened = change
        standing = request.standing
        if ready:
            self.ready += ready
            standing.ready += ready
            model = request.outline.cost_keys[position].model
            count = self.ready_of.get(model, 0) + ready
            if count:
                self.ready_of[model] = count
            else:
                del self.ready_of[model]
        if running:
            standing.running += running
            if running > 0:
                request.dispatches += 1
                if request.dispatches == 1:
                    standing.waiting -= 1
                    standing.started += 1
        if opened:
            request.open += opened
            standing.open += opened
            if not request.open or (request.open == 1 and opened > 0):
                if request.dispatches:
                    standing.started += opened
                else:
                    standing.waiting += opened

    def illegal(self, request: Request, position: int, to: State) -> PolicyError:
        old = request.states[position]
        invocation = request.invocations.get(position)
        return PolicyError(
            f"{invocation.key if invocation else f'position {position}'!r} of request "
            f"{request.name!r} is {old.value} and cannot become {to.value}; from {old.value} it can "
            f"become {', '.join(sorted(s.value for s in LEGAL[old]))}"
        )

    def gate_open(self, request: Request, position: int) -> bool:
        """Whether every callback producer has been dispatched."""
        for producer in request.outline.steps[position].callback_deps:
            state = request.states[producer]
            if state is not State.RUNNING and state is not State.DONE:
                return False
        return True

    def drained(self, tenant: str, delta: int) -> None:
        """A cancelled run of the tenant began (+1) or ended (-1) draining."""
        standing = self.standings[tenant]
        standing.draining += delta
        self._drop_empty(tenant, standing)

    def _drop_empty(self, tenant: str, standing: Standing) -> None:
        if not standing.requests and not standing.draining:
            assert not standing.open
            del self.standings[tenant]

    def _check(self) -> None:
        counted: dict[str, Standing] = {}
        ready = 0
        ready_of: dict[str, int] = {}
        for name, request in self.requests.items():
            assert request.name == name
            assert request.standing is self.standings[request.tenant]
            standing = counted.setdefault(request.tenant, Standing())
            standing.requests += 1
            opened = sum(state in _OPEN for state in request.states)
            assert opened == request.open
            standing.open += opened
            standing.ready += request.states.count(State.READY)
            standing.running += request.states.count(State.RUNNING)
            ready += request.states.count(State.READY)
            if opened:
                if request.dispatches:
                    standing.started += 1
                else:
                    standing.waiting += 1
            for position, invocation in request.invocations.items():
                assert self.invocations[invocation.key] is invocation
                assert invocation.position == position
                assert invocation.request is request
                state = request.states[position]
                assert (invocation.run is not None) == (state is State.RUNNING)
                if state is State.READY:
                    assert self.gate_open(request, position)
                    model = invocation.candidate.model
                    ready_of[model] = ready_of.get(model, 0) + 1
                elif state is State.GATED:
                    assert not self.gate_open(request, position)
            for position, state in enumerate(request.states):
                if state in (State.GATED, State.READY, State.RUNNING):
                    assert position in request.invocations
        assert ready == self.ready
        assert ready_of == self.ready_of
        assert sum(len(r.invocations) for r in self.requests.values()) == len(self.invocations)
        for tenant, standing in self.standings.items():
            expected = counted.pop(tenant, Standing())
            expected.draining = standing.draining
            assert standing == expected, (tenant, standing, expected)
            assert standing.requests or standing.draining
        assert not counted
