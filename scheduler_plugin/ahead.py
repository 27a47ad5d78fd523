"""Several denoising steps as one task: what may run ahead, and taking in what has.

A chain is a run of consecutive positions of one ModelFn on one model, each of which needs nothing but
results of the chain before it and what its first position needs. Its steps keep their keys: the worker
stores each result under its own, and the scheduler moves those tasks into memory when the first one's
completion arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dask._task_spec import Task, TaskRef

from st2i_dask.invocation import LEADING, Call, run_invocation, run_steps
from st2i_dask.request import ANNOTATION

from .outline import Outline


def chain_lengths(outline: Outline) -> tuple[int, ...]:
    """For each position, how many steps can run as one task from there on, itself included."""
    lengths = []
    for first, step in enumerate(outline.steps):
        available = {*step.deps, first}
        length = 1
        for position in range(first + 1, len(outline)):
            later = outline.steps[position]
            if (
                later.cost_key != step.cost_key
                or later.gang != step.gang
                or later.callback_deps
                or first + length - 1 not in later.deps
                or not available.issuperset(later.deps)
            ):
                break
            available.add(position)
            length += 1
        lengths.append(length)
    return tuple(lengths)


def fused(tasks: list[Task]) -> Task | None:
    """One task that runs them all, with the key and dependencies of the first. None: not ours."""
    first = tasks[0]
    if any(task.func is not run_invocation for task in tasks):
        return None
    names = tuple(ref.key for ref in first.args[LEADING:])
    calls = tuple(
        Call(
            *task.args[:LEADING],
            dependencies=tuple(ref.key for ref in task.args[LEADING:]),
            key=task.key,
        )
        for task in tasks
    )
    return Task(first.key, run_steps, calls, names, *(TaskRef(name) for name in names))


@dataclass(frozen=True, slots=True)
class Result:
    """A result in a worker's memory, as Dask's completion message would have told of it."""

    worker: str
    nbytes: int
    type: bytes
    typename: str
    first: Any  # the key whose task computed it


class ComputedAhead:
    """Results of steps that ran under another key's task, until their own tasks take them."""

    def __init__(self) -> None:
        self._results: dict[Any, Result] = {}

    def note(self, key: Any, worker: str, message: dict[str, Any]) -> None:
        """A completion that may name results computed ahead."""
        report = (message.get("metadata") or {}).get(ANNOTATION) or {}
        for later, nbytes in report.get("ahead", {}).items():
            kind = message["type"], message["typename"]
            self._results[later] = Result(worker, nbytes, *kind, first=key)

    def worker(self, key: Any) -> str | None:
        """Where the key's result is; None if it was not computed ahead."""
        result = self._results.get(key)
        return result.worker if result is not None else None

    def take(self, key: Any) -> Result:
        """The key's result, now its own task's. KeyError if there is none."""
        return self._results.pop(key)

    def leftover(self, first: Any) -> list[Any]:
        """Results of that task which nobody took: their requests are gone. Forgets them."""
        keys = [key for key, result in self._results.items() if result.first == first]
        for key in keys:
            del self._results[key]
        return keys
