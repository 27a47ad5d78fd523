"""The Dask SchedulerPlugin: fair dispatch of ModelFns, quick messages, accounting by tenant."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from distributed import SchedulerPlugin

from st2i_dask.errors import PolicyError
from st2i_dask.request import ANNOTATION

from . import events as ev
from .bridge import Bridge
from .policy import FairPolicy
from .settings import Settings
from .usage import UsageTotals

#: Name under which the plugin is registered with the scheduler.
SCHEDULER_PLUGIN = "st2i-scheduler"


class ServingSchedulerPlugin(SchedulerPlugin):
    """Runs on the scheduler's event loop."""

    name = SCHEDULER_PLUGIN
    idempotent = True

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()

    async def start(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.usage = UsageTotals()
        self.policy = FairPolicy(self.settings)
        self.bridge = Bridge(scheduler, self.policy, time.monotonic)
        self.bridge.start()
        scheduler.handlers["st2i_usage"] = self.report
        scheduler.handlers["st2i_tenants"] = self.tenants
        scheduler.handlers["st2i_settings"] = self.change_settings
        for stream in [*scheduler.stream_comms.values(), *scheduler.client_comms.values()]:
            _send_at_once(stream)

    async def close(self) -> None:
        self.bridge.stop()
        for name in ("st2i_usage", "st2i_tenants", "st2i_settings"):
            self.scheduler.handlers.pop(name, None)

    # -- hooks -------------------------------------------------------------------------------------

    def add_worker(self, scheduler: Any, worker: str) -> None:
        _send_at_once(scheduler.stream_comms[worker])
        self.bridge.joined(worker)

    def remove_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
        self.bridge.left(worker)

    def add_client(self, scheduler: Any, client: str) -> None:
        # Dask makes the client's stream right after this hook.
        scheduler.loop.add_callback(self._quicken_client, client)

    def _quicken_client(self, client: str) -> None:
        stream = self.scheduler.client_comms.get(client)
        if stream is not None:
            _send_at_once(stream)

    def update_graph(
        self, scheduler: Any, *, tasks: list[Any], stimulus_id: str, **kwargs: Any
    ) -> None:
        self.bridge.submitted(tasks, stimulus_id)

    def transition(
        self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any
    ) -> None:
        if start == "processing" and finish == "memory":
            self._account(key, kwargs)
        self.bridge.transitioned(key, start, finish, stimulus_id, **kwargs)

    def _account(self, key: Any, message: dict[str, Any]) -> None:
        annotation = (self.scheduler.tasks[key].annotations or {}).get(ANNOTATION)
        report = (message.get("metadata") or {}).get(ANNOTATION)
        if annotation and report:
            self.usage.completed(
                annotation["tenant"],
                report["load"],
                report["compute"],
                report["transfer"],
                invocations=1 + len(report.get("ahead", ())),
            )

    # -- RPC ---------------------------------------------------------------------------------------

    def report(self) -> dict[str, dict[str, Any]]:
        """RPC `st2i_usage`: totals by tenant."""
        return {
            tenant: {**asdict(usage), "device_seconds": usage.device_seconds}
            for tenant, usage in self.usage.tenants.items()
        }

    def tenants(self) -> list[dict[str, Any]]:
        """RPC `st2i_tenants`: every tenant's standing."""
        return [asdict(row) for row in self.policy.tenants(time.monotonic())]

    def change_settings(self, changes: dict[str, Any] | None = None) -> dict[str, Any]:
        """RPC `st2i_settings`: apply changes, if any; the rows that hold now, or what was wrong."""
        if changes:
            try:
                settings = self.policy.settings.with_changes(**changes)
            except PolicyError as error:
                return {"error": str(error)}
            self.policy.handle(ev.SettingsChanged(time.monotonic(), settings))
            self.bridge.seams.arm()
        return {"rows": [tuple(row) for row in self.policy.settings.rows()]}


def _send_at_once(stream: Any) -> None:
    # BatchedSend waits this long between messages (5 ms by default) so that it can merge them; a
    # dependent hop would wait for it twice.
    stream.interval = 0
