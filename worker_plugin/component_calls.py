"""Between an orchestrator and the scheduler: component calls out, their results in.

A call's key follows from its number, so an orchestrator that runs again elsewhere finds what the one
before it had made: it asks for each call by its key first. Results travel as everywhere: as tickets to
who can reach the heap that they lie in.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from distributed.core import clean_exception
from distributed.protocol.serialize import ToPickle
from distributed.worker import get_data_from_worker
from distributed.worker_state_machine import FreeKeysEvent, UpdateDataEvent

from st2i_dask.errors import OutputError
from st2i_dask.outputs import TaskOutputs

from .tensor_store import TensorStore, receiving

logger = logging.getLogger(__name__)

#: So often a call is sent again whose arguments or result were lost with a worker.
ATTEMPTS = 20


class CallsOver(Exception):
    """The scheduler wants nothing of this orchestrator any more."""


@dataclass(eq=False)
class Sent:
    """A tensor of arguments under a key of its own. outputs: None once Dask has it."""

    key: str
    outputs: TaskOutputs | None


class CallChannel:
    """One per run of an orchestrator. Coroutines run on the worker's event loop; `new` and `drop` in
    any thread."""

    def __init__(self, worker: Any, store: TensorStore, key: str, request: Any):
        self._worker = worker
        self._store = store
        self._key = key
        self._request = request
        self._known: frozenset[str] = frozenset()
        self._run = ""
        self._made = 0
        self._dropped: list[str] = []
        self._attempts = 0

    async def open(self) -> None:
        """Tell the scheduler who orchestrates, and hear of calls that were made before."""
        answer = await self._worker.scheduler.st2i_orchestrates(
            owner=self._key, worker=self._worker.address
        )
        if answer is None:
            raise CallsOver(self._key)
        self._known, self._run = frozenset(answer["calls"]), answer["run"]

    def new(self, outputs: TaskOutputs) -> Sent:
        self._made += 1
        return Sent(f"argument-{self._made:04d}-{self._run}-{self._id}", outputs)

    def drop(self, sent: Sent) -> None:
        """No later call will have it."""
        self._dropped.append(sent.key)

    async def recorded(self, index: int, call: Any) -> TaskOutputs | None:
        """The result of a call that was made before; None if it must be made."""
        key = self._call_key(index, call)
        if key not in self._known:
            return None
        answer = await self._worker.scheduler.st2i_call_result(
            owner=self._key, worker=self._worker.address, key=key
        )
        return await self._result(key, answer)

    async def submit(self, index: int, call: Any, sent: list[Sent]) -> TaskOutputs | None:
        """The result of a new call; None if it was lost and must be sent again."""
        key = self._call_key(index, call)
        fresh = {s.key: s.outputs for s in sent if s.outputs is not None}
        nbytes = {name: outputs.__sizeof__() for name, outputs in fresh.items()}
        if fresh:
            stimulus_id = f"st2i-arguments-{key}"
            self._worker.handle_stimulus(UpdateDataEvent(data=fresh, stimulus_id=stimulus_id))
            for s in sent:
                s.outputs = None
        dropped, self._dropped = self._dropped, []
        workflow = self._request.workflow
        answer = {"status": "over"}
        try:
            answer = await self._worker.scheduler.st2i_call(
                owner=self._key,
                worker=self._worker.address,
                key=key,
                task=ToPickle(call.task(key, workflow, [s.key for s in sent])),
                annotation=call.annotation(key, self._request.tenant, workflow),
                arguments=nbytes,
                dropped=dropped,
            )
        finally:
            # Also where it is stopped meanwhile, or the scheduler not reached: nobody else would free them.
            if answer["status"] == "over" and fresh:
                keys, stimulus_id = list(fresh), f"st2i-not-wanted-{key}"
                self._worker.handle_stimulus(FreeKeysEvent(keys=keys, stimulus_id=stimulus_id))
        return await self._result(key, answer)

    async def _result(self, key: str, answer: dict[str, Any]) -> TaskOutputs | None:
        while True:
            status = answer["status"]
            if status == "over":
                raise CallsOver(self._key)
            if status == "error":
                _, error, trace = clean_exception(answer["exception"], answer["traceback"])
                raise error.with_traceback(trace)
            if status == "lost":
                self._count(key)
                return None
            outputs = await self._fetch(key, answer["who_has"])
            if outputs is not None:
                return outputs
            self._count(key)
            answer = await self._worker.scheduler.st2i_call_result(
                owner=self._key, worker=self._worker.address, key=key
            )

    def _count(self, key: str) -> None:
        self._attempts += 1
        if self._attempts > ATTEMPTS:
            raise OutputError(
                f"component call {key!r} was lost {ATTEMPTS} times; see the logs of the workers"
            )

    async def _fetch(self, key: str, who_has: list[str]) -> TaskOutputs | None:
        """The result, from a worker that has it; None when none has it any more."""
        here = self._worker.data.get(key)
        if here is not None:
            return here  # type: ignore[no-any-return]
        for address in who_has:
            try:
                with receiving(self._store):
                    answer = await get_data_from_worker(
                        self._worker.rpc, [key], address, who=self._worker.address
                    )
            except OSError as error:
                logger.info("%s is not to be had from %s: %s", key, address, error)
                continue
            found = answer.get("data", {}).get(key)
            if isinstance(found, TaskOutputs) and found.lost is None:
                return found
        return None

    @property
    def _id(self) -> str:
        return self._key.rpartition("-")[2]

    def _call_key(self, index: int, call: Any) -> str:
        name = f"{call.model_fn.name}@{self._request.workflow}"
        label = "".join(c if c.isalnum() or c in "._@" else "_" for c in name)
        return f"{label}-{index:04d}-{self._id}"
