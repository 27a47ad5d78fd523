"""The outline of a workflow: its DAG as the scheduler sees it, without models or code.

Positions are topological: a position depends only on smaller ones. Requests of one workflow with
the same static parameters share one outline (equal outlines are interned by whoever keys on them),
so what is derived from it (critical path, lanes) is computed once and not per request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from st2i_dask.errors import PolicyError
from st2i_dask.model_fn import GANG_LIMIT


class CostKey(NamedTuple):
    """What seconds are learned for: one ModelFn with one model on one shape bucket."""

    fn: str
    model: str
    bucket: str


@dataclass(frozen=True, slots=True)
class Step:
    """One position: which ModelFn runs which model on which shape, and what it waits for.

    `deps` must be complete before it can run; `callback_deps` need only have been dispatched.
    `gang`: the most executors that it can use at once.
    """

    fn: str
    model: str
    bucket: str
    deps: tuple[int, ...] = ()
    callback_deps: tuple[int, ...] = ()
    gang: int = 1

    @property
    def cost_key(self) -> CostKey:
        return CostKey(self.fn, self.model, self.bucket)


@dataclass(frozen=True)
class Outline:
    """All positions of a workflow. Immutable and hashable; the hash is computed once.

    `successors[p]` and `consumers[p]` are the positions that wait for p through an ordinary and
    through a callback input. PolicyError: no position, a position waits for a later one, or its gang
    is out of range.
    """

    workflow: str
    steps: tuple[Step, ...]
    cost_keys: tuple[CostKey, ...] = field(init=False, repr=False, compare=False)
    successors: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    consumers: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.workflow, str) or not self.workflow:
            raise PolicyError(
                f"workflow name {self.workflow!r} is not a non-empty string; give the workflow's name"
            )
        if not self.steps:
            raise PolicyError(
                f"workflow {self.workflow!r} has 0 positions, at least 1 is needed; "
                "submit a workflow that calls a ModelFn"
            )
        successors: list[list[int]] = [[] for _ in self.steps]
        consumers: list[list[int]] = [[] for _ in self.steps]
        for position, step in enumerate(self.steps):
            for kind, waits, into in (
                ("depends on", step.deps, successors),
                ("takes a callback from", step.callback_deps, consumers),
            ):
                for earlier in waits:
                    if not isinstance(earlier, int) or not 0 <= earlier < position:
                        raise PolicyError(
                            f"workflow {self.workflow!r}: position {position} {kind} {earlier!r}; "
                            f"allowed are positions 0 to {position - 1}: number them topologically"
                        )
                    into[earlier].append(position)
            if type(step.gang) is not int or not 1 <= step.gang <= GANG_LIMIT:
                raise PolicyError(
                    f"workflow {self.workflow!r}: gang of position {position} is {step.gang!r}; "
                    f"give a whole number from 1 to {GANG_LIMIT}"
                )
        put = object.__setattr__
        put(self, "cost_keys", tuple(step.cost_key for step in self.steps))
        put(self, "successors", tuple(map(tuple, successors)))
        put(self, "consumers", tuple(map(tuple, consumers)))
        put(self, "_hash", hash((self.workflow, self.steps)))

    def __hash__(self) -> int:
        return self._hash

    def __len__(self) -> int:
        return len(self.steps)

    def downstream(self, position: int) -> set[int]:
        """All positions that cannot run if this one fails, itself not included. O(DAG)."""
        found: set[int] = set()
        stack = [position]
        while stack:
            at = stack.pop()
            for after in (*self.successors[at], *self.consumers[at]):
                if after not in found:
                    found.add(after)
                    stack.append(after)
        return found


def chain(workflow: str, steps: Iterable[tuple[str, str, str]]) -> Outline:
    """An outline in which each (fn, model, bucket) waits for the one before it.

    >>> chain("basic", [("Text", "t5", "77"), ("Denoise", "flux", "1024x1024")]).successors
    ((1,), ())
    """
    return Outline(
        workflow,
        tuple(
            Step(fn, model, bucket, deps=(position - 1,) if position else ())
            for position, (fn, model, bucket) in enumerate(steps)
        ),
    )
