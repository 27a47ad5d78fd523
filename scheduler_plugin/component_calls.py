"""Requests that grow: an orchestrator's component calls, from when it asks until nobody wants it.

An orchestrator is a plain Dask task that has seceded. Each of its calls is a request of one position for
the fair policy. Results stay, wanted in the name of the request, until the orchestrator's task is over:
one that runs again after the loss of its worker finds them. Arguments that the orchestrator has put
under keys of their own stay until it says that it has dropped them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from st2i_dask.pipelines.orchestration import ORCHESTRATION
from st2i_dask.request import request_id
from st2i_dask.tenants import check_tenant

from .bridge import Bridge
from .policy import FairPolicy

logger = logging.getLogger(__name__)

#: How often a call of a tenant that is at its cap asks again, seconds.
ASK_AGAIN_S = 0.02


@dataclass(eq=False)
class _Orchestration:
    tenant: str
    runs: int = 0
    calls: dict[str, None] = field(default_factory=dict)
    arguments: set[str] = field(default_factory=set)
    waiting: dict[str, list[asyncio.Future[dict[str, Any]]]] = field(default_factory=dict)


class ComponentCalls:
    """Event loop only."""

    def __init__(self, scheduler: Any, bridge: Bridge, policy: FairPolicy):
        self._scheduler = scheduler
        self._bridge = bridge
        self._policy = policy
        self._owners: dict[str, _Orchestration] = {}
        self._owner_of: dict[str, str] = {}  # by call
        self.handlers: dict[str, Callable[..., Any]] = {
            "st2i_orchestrates": self.orchestrates,
            "st2i_call": self.call,
            "st2i_call_result": self.call_result,
        }

    def stop(self) -> None:
        for owner in list(self._owners):
            self._over(owner)

    # -- hooks -------------------------------------------------------------------------------------

    def submitted(self, keys: list[Any]) -> None:
        """New tasks: orchestrators among them go to a worker at once, one after the other to each."""
        for key in keys:
            ts = self._scheduler.tasks[key]
            tenant = _tenant(ts)
            if tenant is None or key in self._owners:
                continue
            self._owners[key] = _Orchestration(tenant)
            self._bridge.reservations.arrived(tenant)
            # What is bound to workers is never held back on the scheduler; loosely, so that any other
            # does when they are gone.
            ts.worker_restrictions = set(self._scheduler.workers) or None
            ts.loose_restrictions = True

    def transitioned(self, key: Any, finish: str) -> None:
        owner = self._owner_of.get(key)
        if owner is not None:
            if finish in ("memory", "erred", "forgotten"):
                self._answer(owner, key)
        elif finish in ("memory", "erred", "forgotten") and key in self._owners:
            # Not now: Dask is in the middle of its transitions.
            self._scheduler.loop.add_callback(self._over, key)

    def waiting(self, tenant: str) -> int:
        """Requests of the tenant that have made no call yet: they count for its cap."""
        return sum(o.tenant == tenant and not o.calls for o in self._owners.values())

    def owners(self, requests: Collection[str]) -> dict[str, str]:
        """Of these requests those that an orchestrator makes, and its key."""
        if not requests:
            return {}
        by_name = {request_id(owner): owner for owner in self._owners}
        return {name: by_name[name] for name in requests if name in by_name}

    def count(self, owner: str) -> tuple[int, list[str]]:
        """Of a request's calls, how many are done, and which are not."""
        under_way = [key for key in self._owners[owner].calls if self._state(key) is None]
        return len(self._owners[owner].calls) - len(under_way), under_way

    def owner_of(self, call: str) -> str | None:
        """The orchestrator that makes that call; None for any other task."""
        return self._owner_of.get(call)

    # -- RPC, from workers -------------------------------------------------------------------------

    def orchestrates(self, owner: str, worker: str) -> dict[str, Any] | None:
        """RPC `st2i_orchestrates`: that worker follows the request now. Which calls were made before, and
        a name for this run; None if it is not wanted there."""
        ts = self._scheduler.tasks.get(owner)
        if not self._is_run_by(owner, worker):
            return None
        tenant = _tenant(ts)
        if tenant is None:
            return None
        orchestration = self._owners.setdefault(owner, _Orchestration(tenant))
        orchestration.runs += 1
        # Those that the run before has put somewhere are of no use to this one.
        self._release(owner, orchestration.arguments)
        return {"calls": list(orchestration.calls), "run": str(orchestration.runs)}

    async def call(
        self,
        owner: str,
        worker: str,
        key: str,
        task: Any,
        annotation: dict[str, Any],
        arguments: dict[str, int],
        dropped: list[str],
    ) -> dict[str, Any]:
        """RPC `st2i_call`: make that call, whose result is the answer (see `_state`).

        arguments: bytes of the keys that the worker has put into its memory for it.
        """
        orchestration = self._owners.get(owner)
        if orchestration is None or not self._is_run_by(owner, worker):
            return {"status": "over"}
        self._learn(owner, worker, arguments)
        self._release(owner, dropped)
        if key not in self._scheduler.tasks:
            while self._policy.refusal(orchestration.tenant) is not None:
                await asyncio.sleep(ASK_AGAIN_S)
                if self._owners.get(owner) is not orchestration:
                    return {"status": "over"}
            if any(sent not in self._scheduler.tasks for sent in task.dependencies):
                # Dask keeps one copy of an argument, which may have been on a worker that is gone.
                return {"status": "lost"}
            self._submit(owner, key, task, annotation)
        return await self.call_result(owner, worker, key)

    async def call_result(self, owner: str, worker: str, key: str) -> dict[str, Any]:
        """RPC `st2i_call_result`: the answer when there is one."""
        orchestration = self._owners.get(owner)
        if orchestration is None or not self._is_run_by(owner, worker):
            return {"status": "over"}
        answer = self._state(key)
        if answer is not None:
            return answer
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        orchestration.waiting.setdefault(key, []).append(future)
        return await future

    # -- inside ------------------------------------------------------------------------------------

    def _is_run_by(self, owner: str, worker: str) -> bool:
        ts = self._scheduler.tasks.get(owner)
        on = ts.processing_on if ts is not None else None
        return on is not None and on.address == worker

    def _learn(self, owner: str, worker: str, arguments: dict[str, int]) -> None:
        if arguments:
            self._owners[owner].arguments.update(arguments)
            where = {key: [worker] for key in arguments}
            self._scheduler.update_data(who_has=where, nbytes=arguments, client=_client(owner))

    def _submit(self, owner: str, key: str, task: Any, annotation: dict[str, Any]) -> None:
        self._owners[owner].calls[key] = None
        self._owner_of[key] = owner
        self._scheduler._create_taskstate_from_graph(
            start=time.time(),
            dsk={key: task},
            keys={key},
            ordered={key: 0},
            client=_client(owner),
            annotations_by_type={"st2i": {key: annotation}},
            global_annotations=None,
            stimulus_id=f"st2i-call-{key}",
            submitting_task=None,
            span_metadata={"collections": []},
        )

    def _state(self, key: str) -> dict[str, Any] | None:
        """done (who_has), error (exception, traceback) or lost; None: under way."""
        ts = self._scheduler.tasks.get(key)
        if ts is None or ts.state == "forgotten":
            return {"status": "lost"}
        if ts.state == "memory":
            return {"status": "done", "who_has": [ws.address for ws in ts.who_has or ()]}
        if ts.state == "erred":
            blamed = ts.exception_blame or ts
            return {
                "status": "error",
                "exception": blamed.exception,
                "traceback": blamed.traceback,
            }
        return None

    def _answer(self, owner: str, key: str) -> None:
        orchestration = self._owners[owner]
        answer = self._state(key)
        if answer is None:
            return
        if answer["status"] == "lost":
            orchestration.calls.pop(key, None)
            self._owner_of.pop(key, None)
        for future in orchestration.waiting.pop(key, ()):
            if not future.done():
                future.set_result(answer)

    def _over(self, owner: str) -> None:
        """Nothing of the request is wanted any more."""
        orchestration = self._owners.pop(owner, None)
        if orchestration is None:
            return
        for futures in orchestration.waiting.values():
            for future in futures:
                if not future.done():
                    future.set_result({"status": "over"})
        for key in orchestration.calls:
            self._owner_of.pop(key, None)
        client = _client(owner)
        if client in self._scheduler.clients:  # not where it ended before its first call
            keys = [ts.key for ts in self._scheduler.clients[client].wants_what]
            self._scheduler.client_releases_keys(
                keys=keys, client=client, stimulus_id=f"st2i-over-{owner}"
            )
            self._scheduler.clients.pop(client, None)
        self._bridge.seams.arm()

    def _release(self, owner: str, keys: Any) -> None:
        orchestration = self._owners[owner]
        keys = [key for key in keys if key in orchestration.arguments]
        if keys:
            orchestration.arguments.difference_update(keys)
            self._scheduler.client_releases_keys(
                keys=keys, client=_client(owner), stimulus_id=f"st2i-dropped-{owner}"
            )


def _client(owner: str) -> str:
    """Who wants the keys of a request: a client in name only, as Dask has for published data."""
    return f"st2i-request-{owner}"


def _tenant(ts: Any) -> str | None:
    """The tenant of an orchestrator's task; None for any other."""
    annotation = (ts.annotations or {}).get(ORCHESTRATION) if ts is not None else None
    if not isinstance(annotation, dict):
        return None
    try:
        return check_tenant(annotation.get("tenant"))
    except ValueError:
        return None
