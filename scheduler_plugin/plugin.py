"""The Dask SchedulerPlugin: quick messages and accounting by tenant."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from distributed import SchedulerPlugin

from st2i_dask.request import ANNOTATION

from .usage import UsageTotals

#: Name under which the plugin is registered with the scheduler.
SCHEDULER_PLUGIN = "st2i-scheduler"


class ServingSchedulerPlugin(SchedulerPlugin):
    """Runs on the scheduler's event loop."""

    name = SCHEDULER_PLUGIN
    idempotent = True

    def __init__(self) -> None:
        self.usage = UsageTotals()

    async def start(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        scheduler.handlers["st2i_usage"] = self.report
        for stream in [*scheduler.stream_comms.values(), *scheduler.client_comms.values()]:
            _send_at_once(stream)

    async def close(self) -> None:
        self.scheduler.handlers.pop("st2i_usage", None)

    def add_worker(self, scheduler: Any, worker: str) -> None:
        _send_at_once(scheduler.stream_comms[worker])

    def add_client(self, scheduler: Any, client: str) -> None:
        # Dask makes the client's stream right after this hook.
        scheduler.loop.add_callback(self._quicken_client, client)

    def _quicken_client(self, client: str) -> None:
        stream = self.scheduler.client_comms.get(client)
        if stream is not None:
            _send_at_once(stream)

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if start != "processing" or finish != "memory":
            return
        annotation = (self.scheduler.tasks[key].annotations or {}).get(ANNOTATION)
        seconds = (kwargs.get("metadata") or {}).get(ANNOTATION)
        if annotation and seconds:
            self.usage.completed(annotation["tenant"], **seconds)

    def report(self) -> dict[str, dict[str, Any]]:
        """RPC `st2i_usage`: totals by tenant."""
        return {
            tenant: {**asdict(usage), "device_seconds": usage.device_seconds}
            for tenant, usage in self.usage.tenants.items()
        }


def _send_at_once(stream: Any) -> None:
    # BatchedSend waits this long between messages (5 ms by default) so that it can merge them; a
    # dependent hop would wait for it twice.
    stream.interval = 0
