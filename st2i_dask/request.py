"""A request: one run of a workflow for a tenant, as a Dask graph with one task per invocation."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from dask._task_spec import Task, TaskRef
from dask.tokenize import normalize_token

from .fusion import Program
from .invocation import run_invocation
from .plan import PackedTask

#: The task annotation that scheduler and workers read. Its value is a dict, see `annotation`.
ANNOTATION = "st2i"


@dataclass(frozen=True)
class Composed:
    """One combination of a workflow's static parameters, ready to be submitted any number of times."""

    workflow: str
    version: str
    program: Program
    packed: tuple[PackedTask, ...]  # per position
    labels: tuple[str, ...]  # per position: ModelFn and model, one Dask progress bar each
    fns: tuple[str, ...]  # per position: the ModelFn's name
    model_keys: tuple[str, ...]  # per position
    bucket: str  # the static parameters that decide what one invocation costs


class RequestGraph(dict[str, Task]):
    """Tasks by key. Dask names a graph by its content, which takes longer than all the rest of a submit;
    no two requests share a key, so the keys name it."""


normalize_token.register(RequestGraph, tuple)


@dataclass(frozen=True)
class Request:
    """The graph of one request. `key` is the Dask key of its result."""

    key: str
    tenant: str
    tasks: dict[str, Task]
    annotations: dict[str, dict[str, Any]]  # by key


def request_id(key: Any) -> str:
    """The request that a task's key belongs to, as the scheduler calls it."""
    return str(key).rpartition("-")[2]


def build_request(
    composed: Composed, data: dict[str, Any], *, tenant: str, about: dict[str, Any]
) -> Request:
    """The tasks of one request.

    data: checked data parameters. about: what the result's metadata says.
    """
    request_id = secrets.token_hex(8)
    keys = [
        # key_split() of Dask stops at the first part that is not letters: the group is the label.
        f"{label}-{position:03d}-{request_id}"
        for position, label in enumerate(composed.labels)
    ]
    tasks: dict[str, Task] = {}
    annotations: dict[str, dict[str, Any]] = {}
    for task in composed.program.tasks:
        key = keys[task.position]
        final = task.position == composed.program.result_position
        tasks[key] = Task(
            key,
            run_invocation,
            composed.packed[task.position],
            {name: data[name] for name in task.parameters},
            about if final else None,
            tuple(keys[producer] for producer in task.callbacks),
            *(TaskRef(keys[dependency]) for dependency in task.dependencies),
        )
        annotations[key] = {
            "tenant": tenant,
            "request": request_id,
            "workflow": composed.workflow,
            "position": task.position,
            "fn": composed.fns[task.position],
            "model": composed.model_keys[task.position],
            "bucket": composed.bucket,
            "callbacks": task.callbacks,
            "gang": task.gang,
        }
    return Request(keys[composed.program.result_position], tenant, tasks, annotations)
