"""Reading annotations: which tasks are invocations of which request.

Whatever a client writes into an annotation by hand, the scheduler must live with it: what is not
sound is a plain task, and the log says why, once per reason.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

from st2i_dask.errors import St2iError
from st2i_dask.request import ANNOTATION
from st2i_dask.tenants import check_tenant

from .ahead import chain_lengths
from .outline import Outline, Step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """A task that the policy dispatches."""

    request: str
    position: int
    steps: int = 1  # how many steps can run as one task from here on


@dataclass(frozen=True, slots=True)
class NewRequest:
    name: str
    tenant: str
    outline: Outline


class Intake:
    """Entries by task key, and how many keys each request still has."""

    def __init__(self, scheduler: Any):
        self._scheduler = scheduler
        self.entries: dict[Any, Entry] = {}
        self._keys: dict[str, set[Any]] = {}  # by request
        self._at: dict[str, list[Any]] = {}  # by request: keys by position
        self._warned: set[str] = set()

    def take(self, keys: list[Any]) -> list[NewRequest]:
        """The requests among newly submitted tasks; their tasks become entries."""
        found: dict[str, list[tuple[Any, dict[str, Any]]]] = {}
        for key in keys:
            ts = self._scheduler.tasks.get(key)
            annotation = (ts.annotations or {}).get(ANNOTATION) if ts is not None else None
            if annotation is None or key in self.entries:
                continue
            why = _unsound(annotation, ts)
            if why:
                self._warn(key, why)
            else:
                found.setdefault(annotation["request"], []).append((key, annotation))
        requests = []
        for name, tasks in sorted(found.items(), key=_number):
            try:
                requests.append(self._request(name, tasks))
            except (St2iError, LookupError, TypeError, ValueError) as error:
                self._warn(name, f"its tasks make no request ({error})")
        return requests

    def forget(self, key: Any) -> str | None:
        """The task is gone; the request's name if it was the last one."""
        entry = self.entries.pop(key)
        keys = self._keys[entry.request]
        keys.discard(key)
        if keys:
            return None
        del self._keys[entry.request], self._at[entry.request]
        return entry.request

    def disown(self, request: str) -> list[Any]:
        """Its tasks are plain ones from now on; their keys."""
        del self._keys[request]
        keys = self._at.pop(request)
        for key in keys:
            del self.entries[key]
        return keys

    def keys_from(self, key: Any, count: int) -> list[Any]:
        """The keys of `count` consecutive positions, `key` the first."""
        entry = self.entries[key]
        return self._at[entry.request][entry.position : entry.position + count]

    def keys_at(self, key: Any, positions: Any) -> list[Any]:
        """The keys of other positions of the task's request."""
        at = self._at[self.entries[key].request]
        return [at[position] for position in positions]

    def annotation(self, request: str) -> dict[str, Any]:
        """What its client has written on the task of its first position."""
        annotation: dict[str, Any] = self._scheduler.tasks[self._at[request][0]].annotations[
            ANNOTATION
        ]
        return annotation

    def _request(self, name: str, tasks: list[tuple[Any, dict[str, Any]]]) -> NewRequest:
        if name in self._keys:
            raise ValueError(f"request {_short(name)} exists already")
        tasks.sort(key=lambda task: task[1]["position"])
        positions = [annotation["position"] for _, annotation in tasks]
        if positions != list(range(len(tasks))):
            raise ValueError(f"positions {_short(positions)} are not 0 to {len(tasks) - 1}")
        for field in ("tenant", "workflow"):
            if len({annotation[field] for _, annotation in tasks}) > 1:
                raise ValueError(f"they name more than one {field}")
        position = {key: number for number, (key, _) in enumerate(tasks)}
        steps = []
        for key, annotation in tasks:
            dependencies = self._scheduler.tasks[key].dependencies
            steps.append(
                (
                    annotation["fn"],
                    annotation["model"],
                    annotation["bucket"],
                    tuple(sorted([position[d.key] for d in dependencies if d.key in position])),
                    tuple(annotation["callbacks"]),
                    annotation.get("gang", 1),
                )
            )
        _, first = tasks[0]
        outline, lengths = _outline(first["workflow"], tuple(steps))
        self._keys[name] = set(position)
        self._at[name] = list(position)
        for key, number in position.items():
            self.entries[key] = Entry(name, number, lengths[number])
        return NewRequest(name, first["tenant"], outline)

    def _warn(self, key: Any, why: str) -> None:
        if why not in self._warned and len(self._warned) < 1_000:
            self._warned.add(why)
            logger.warning(
                "task %s has an %r annotation but runs as a plain Dask task: %s",
                _short(key),
                ANNOTATION,
                why,
            )

    def _check(self) -> None:
        assert {key for keys in self._keys.values() for key in keys} == set(self.entries)
        assert all(self._keys.values())
        assert set(self._at) == set(self._keys)


def _number(item: tuple[str, list[tuple[Any, dict[str, Any]]]]) -> int:
    """The request's place in its message; annotations without one come first."""
    _, tasks = item
    number = tasks[0][1].get("number")
    return number if type(number) is int else 0


#: The fields of a Step.
_StepFields = tuple[str, str, str, tuple[int, ...], tuple[int, ...], int]

_TEXTS = ("request", "workflow", "fn", "model", "bucket")


def _unsound(annotation: Any, ts: Any) -> str:
    """Why the task cannot be dispatched by the policy; empty when it can."""
    if not isinstance(annotation, dict):
        return f"the annotation is a {type(annotation).__name__}, not a dict"
    if set(map(type, map(annotation.get, _TEXTS))) != {str}:
        for name in _TEXTS:
            if not isinstance(annotation.get(name), str):
                return f"{name!r} is {_short(annotation.get(name))}, not text"
    callbacks = annotation.get("callbacks")
    if not isinstance(callbacks, (tuple, list)) or (
        callbacks and set(map(type, callbacks)) != {int}
    ):
        return f"'callbacks' is {callbacks!r}, not a list of positions"
    position = annotation.get("position")
    if type(position) is not int or position < 0:
        return f"'position' is {_short(position)}, not a whole number >= 0"
    if not isinstance(ts.key, str):
        return "its key is not a string"
    if ts.state != "released":
        return "it was submitted before"
    if not _is_tenant(annotation.get("tenant")):
        return f"'tenant' is {_short(annotation.get('tenant'))}, not a tenant's name"
    if ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions or ts.actor:
        return "it is tied to workers, hosts or resources, where the policy cannot choose"
    return ""


def _is_tenant(name: Any) -> bool:
    return type(name) is str and _is_tenants_name(name)


@functools.lru_cache(maxsize=4096)
def _is_tenants_name(name: str) -> bool:
    try:
        check_tenant(name)
    except St2iError:
        return False
    return True


@functools.lru_cache(maxsize=1024)
def _outline(workflow: str, steps: tuple[_StepFields, ...]) -> tuple[Outline, tuple[int, ...]]:
    """The outline, the same object for all requests of a workflow, and its chain lengths."""
    outline = Outline(workflow, tuple(Step(*fields) for fields in steps))
    return outline, chain_lengths(outline)


def _short(value: Any) -> str:
    """What a client wrote, cut to what a log line may hold."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
