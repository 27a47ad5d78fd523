"""The Dask SchedulerPlugin: fair dispatch of ModelFns, quick messages, accounting by tenant."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from distributed import SchedulerPlugin

from st2i_dask import logs
from st2i_dask.config import scheduler_settings, trace_options
from st2i_dask.errors import AttachError, PolicyError, St2iError
from st2i_dask.messages import quicken, restore
from st2i_dask.metrics_page import MetricsPage
from st2i_dask.request import ANNOTATION

from . import events as ev
from .bridge import Bridge
from .candidates import Chooser
from .component_calls import ComponentCalls
from .cost_model import CostModel
from .dashboard import open_board
from .fair_queue import FairQueue
from .metrics import SchedulerCollector
from .metrics_counts import Counts
from .policy import FairPolicy
from .request_log import RequestLog
from .settings import Settings
from .standings import Standings
from .usage import UsageTotals
from .world_service import WorldService

#: Name under which the plugin is registered with the scheduler.
SCHEDULER_PLUGIN = "st2i-scheduler"


class ServingSchedulerPlugin(SchedulerPlugin):
    """Runs on the scheduler's event loop."""

    name = SCHEDULER_PLUGIN
    idempotent = True

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        chooser: Callable[[Any, float], Chooser] = FairQueue,
    ) -> None:
        """settings: None: the configuration of the scheduler's node, see st2i_dask.config.
        chooser: who is next; the fair queue, or a rival for comparison (see rivals.py)."""
        self.settings = settings
        self.chooser = chooser
        self._undo = ExitStack()

    async def start(self, scheduler: Any) -> None:
        """AttachError or PolicyError when the node's configuration is wrong; nothing is left then."""
        logs.set_up()
        settings = self.settings or configured_settings()
        self.scheduler = scheduler
        with ExitStack() as undo:
            self._start(scheduler, settings, undo)
            self._undo = undo.pop_all()

    def _start(self, scheduler: Any, settings: Settings, undo: ExitStack) -> None:
        """undo: gets what ends each part, as soon as the part is there."""
        self.usage = UsageTotals()
        self.policy = FairPolicy(settings, chooser=self.chooser)
        self.bridge = Bridge(scheduler, self.policy, time.monotonic)
        self.counts = Counts()
        self.bridge.journal.watch(self.counts)
        self.bridge.journal.watch(RequestLog())
        self.traces: Any = None
        if trace_options()["enabled"]:
            from .tracing import RequestTraces  # and with it OpenTelemetry

            self.traces = RequestTraces(
                self.bridge.intake.annotation, lambda request: self.calls.owner_of(request)
            )
            undo.callback(self.traces.close)
            self.bridge.journal.watch(self.traces)
        collector = SchedulerCollector(self.policy, self.counts, self.usage)
        self.metrics = MetricsPage(scheduler, collector)
        undo.callback(self.metrics.close)
        self.metrics.open()
        undo.callback(self.bridge.stop)
        self.bridge.start()
        self.calls = ComponentCalls(scheduler, self.bridge, self.policy)
        undo.callback(self.calls.stop)
        self.worlds = WorldService(lambda: len(scheduler.workers))
        undo.callback(self.worlds.stop)
        handlers = {
            "st2i_usage": self.report,
            "st2i_tenants": self.tenants,
            "st2i_settings": self.change_settings,
            "st2i_refusals": self.refusals,
            "st2i_costs": self.costs,
            "st2i_prospects": self.prospects,
            **self.worlds.handlers,
            **self.calls.handlers,
        }
        undo.callback(_take_away, scheduler.handlers, handlers)
        scheduler.handlers.update(handlers)
        undo.callback(_restore_streams, scheduler)
        for stream in scheduler.stream_comms.values():
            quicken(stream)
        self.board = open_board(scheduler, self.policy, time.monotonic)
        if self.board is not None:
            undo.callback(self.board.close)
            self.bridge.journal.watch(self.board.watch)

    async def close(self) -> None:
        """Also where `start` did not end, or was not called: Dask closes every plugin it was given."""
        self._undo.close()

    # -- hooks -------------------------------------------------------------------------------------

    def add_worker(self, scheduler: Any, worker: str) -> None:
        quicken(scheduler.stream_comms[worker])
        self.bridge.joined(worker)

    def remove_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
        self.bridge.left(worker)
        self.worlds.left(worker)

    def update_graph(
        self, scheduler: Any, *, tasks: list[Any], stimulus_id: str, **kwargs: Any
    ) -> None:
        if self.traces is not None:
            self.traces.tasks_submitted(map(scheduler.tasks.__getitem__, tasks))
        self.calls.submitted(tasks)
        self.bridge.submitted(tasks, stimulus_id)

    def transition(
        self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any
    ) -> None:
        if start == "processing" and finish == "memory":
            self._account(key, kwargs)
        self.bridge.transitioned(key, start, finish, stimulus_id, kwargs)
        self.calls.transitioned(key, finish)
        if self.traces is not None and finish in ("memory", "erred", "forgotten"):
            self.traces.task_over(key, finish)

    def _account(self, key: Any, message: dict[str, Any]) -> None:
        report = (message.get("metadata") or {}).get(ANNOTATION)
        if not report:
            return
        annotation = (self.scheduler.tasks[key].annotations or {}).get(ANNOTATION)
        # Whatever a client wrote there by hand must not stop the bridge.
        if isinstance(annotation, dict) and isinstance(annotation.get("tenant"), str):
            seconds = report["load"], report["compute"], report["transfer"]
            size = self.policy.group_size(key, sum(seconds), report.get("members"))
            self.usage.completed(
                annotation["tenant"],
                *(size * part for part in seconds),
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
        """RPC `st2i_settings`: apply changes, if any; the rows that hold now and the package's version,
        or what was wrong."""
        if changes:
            try:
                settings = self.policy.settings.with_changes(**self._merged(changes))
            except St2iError as error:
                return {"error": str(error)}
            self.policy.handle(ev.SettingsChanged(time.monotonic(), settings))
            self.bridge.seams.arm()
        rows = [tuple(row) for row in self.policy.settings.rows()]
        return {"rows": rows, "version": version("st2i_dask")}

    def _merged(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Weights and caps are changed tenant by tenant; None takes a tenant's own away."""
        merged = dict(changes)
        for name in ("weights", "caps"):
            if isinstance(changes.get(name), dict):
                both = {**getattr(self.policy.settings, name), **changes[name]}
                merged[name] = {t: value for t, value in both.items() if value is not None}
        return merged

    def refusals(self, requests: dict[str, int]) -> dict[str, str]:
        """RPC `st2i_refusals`: tenants that may not submit that many requests now, and why.

        When all may, their places are kept until the requests arrive.
        """
        now, promised = time.monotonic(), self.bridge.reservations
        answers = {
            tenant: self.policy.refusal(
                tenant, promised.count(tenant, now) + self.calls.waiting(tenant) + n
            )
            for tenant, n in requests.items()
        }
        refused = {tenant: why for tenant, why in answers.items() if why is not None}
        for tenant, why in refused.items():
            self.bridge.journal.refused(tenant, requests[tenant], why, now)
        if not refused:
            for tenant, n in requests.items():
                promised.promise(tenant, n, now)
        return refused

    async def prospects(self, requests: list[str]) -> dict[str, dict[str, Any]]:
        """RPC `st2i_prospects`: of these requests, those that are open, see `Prospect`."""
        standings = Standings(self.scheduler, self.policy, self.calls)
        return await standings.of(requests, time.monotonic())

    def costs(self, replace: str | None = None) -> dict[str, str]:
        """RPC `st2i_costs`: what was learned, as JSON text; with `replace`, that takes its place."""
        if replace is not None:
            try:
                learned = CostModel.from_dict(json.loads(replace))
                self.policy.handle(ev.CostsReplaced(time.monotonic(), learned))
            except PolicyError as error:
                return {"error": str(error)}
        return {"costs": json.dumps(self.policy.costs.to_dict())}


def _take_away(handlers: dict[str, Any], ours: dict[str, Any]) -> None:
    for name in ours:
        handlers.pop(name, None)


def _restore_streams(scheduler: Any) -> None:
    for stream in scheduler.stream_comms.values():
        restore(stream)


def configured_settings() -> Settings:
    """The settings configured on this node. PolicyError or AttachError on a bad one."""
    try:
        return Settings(**scheduler_settings())
    except (St2iError, TypeError, AttributeError) as error:
        if isinstance(error, AttachError):
            raise
        raise PolicyError(f"configuration st2i.scheduler: {error}") from error
