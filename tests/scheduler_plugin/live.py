"""Helpers for tests on live clusters: a model that does what a test says, and what must hold after.

Workers run in this process unless a test asks for others, so models and tests share what is here.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import dask
import numpy as np
from distributed import Client, LocalCluster, get_worker
from distributed.worker import thread_state

import st2i_dask as st2i
from scheduler_plugin import events as ev
from scheduler_plugin.metrics_counts import NAMES

from .virtual_cluster import Ran

TIMEOUT = 60.0


class Run(NamedTuple):
    """One execution of a model. Seconds of the monotonic clock."""

    label: str
    value: float
    worker: str
    key: str
    start: float
    stop: float


runs: list[Run] = []
#: By label: called with the value before the model sleeps.
hooks: dict[str, Callable[[float], Any]] = {}


class Step(st2i.ModelFn):
    """value + 1 after `seconds`."""

    def setup_io(self):
        self.add_input("value")
        self.add_input("label")
        self.add_input("seconds")
        self.add_input("other", optional=True)
        self.add_output("sum")

    def load_model(self, model_path):
        return {"weights": np.ones(1024, np.uint8)}

    def execute(self, model_components, value, label, seconds, other):
        start = time.monotonic()
        if label in hooks:
            hooks[label](value)
        time.sleep(seconds)
        worker = get_worker().address
        runs.append(Run(label, value, worker, thread_state.key, start, time.monotonic()))
        return {"sum": value + 1 + (other or 0)}


@st2i.workflow(name="live-chain", replace=True)
def chain(value: float, label: str = "", steps: int = 3, seconds: st2i.Static[float] = 0.0):
    step = Step()
    for _ in range(steps):
        value = step(value, label, seconds)
    return value


@st2i.workflow(name="live-fan", replace=True)
def fan(value: float, label: str = "", width: int = 3, seconds: st2i.Static[float] = 0.0):
    """One step, `width` steps beside each other, each followed by one that adds them up."""
    step = Step()
    first = step(value, label, seconds)
    total = None
    for other in [step(first, label, seconds) for _ in range(width)]:
        total = step(other, label, seconds, total)
    return total


def submit(
    client: Client, tenant: str, n: int, *, steps: int = 3, seconds: float = 0.0
) -> list[Any]:
    """Futures of so many chains, each from its number; their label is the tenant."""
    return [
        chain.submit(
            client, tenant=tenant, value=float(i), label=tenant, steps=steps, seconds=seconds
        )
        for i in range(n)
    ]


def started(label: str) -> list[Run]:
    return [run for run in runs if run.label == label]


def gate(label: str, at: float = 0.0) -> tuple[threading.Event, threading.Event]:
    """(event that says the run has begun, event that lets it go on)."""
    begun, go = threading.Event(), threading.Event()

    def hook(value: float) -> None:
        if value == at:
            begun.set()
            go.wait(TIMEOUT)

    hooks[label] = hook
    return begun, go


class Closure:
    """A callable that is not pickled: workers are in this process."""

    _kept: ClassVar[dict[int, Callable[..., Any]]] = {}

    def __init__(self, function: Callable[..., Any]) -> None:
        self.number = id(function)
        self._kept[self.number] = function

    def __call__(self, *args: Any) -> Any:
        return self._kept[self.number](*args)


class Cluster(LocalCluster):
    """Dask's own fails to close once it has heard of the end of a worker whose beginning it missed:
    one that was killed as it started."""

    def _update_worker_status(self, op: str, msg: Any) -> None:
        if op != "remove" or msg in self.scheduler_info["workers"]:
            super()._update_worker_status(op, msg)


@contextmanager
def serving(
    n_workers: int = 1,
    *,
    processes: bool = False,
    at_rest: bool = True,
    config: dict[str, Any] | None = None,
    cluster_options: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Client]:
    """A client of a cluster that checks itself, attached, with these settings."""
    runs.clear()
    hooks.clear()
    validate = {"distributed.scheduler.validate": True, "distributed.worker.validate": True}
    options = {"threads_per_worker": 1, "dashboard_address": ":0", **(cluster_options or {})}
    with (
        dask.config.set({**validate, **(config or {})}),
        Cluster(n_workers=n_workers, processes=processes, **options) as cluster,
        Client(cluster) as client,
    ):
        st2i.attach(client)
        st2i.settings(client, **{"slack_s": 0.02, **settings})
        with _complaints() as complaints:
            yield client
            hooks.clear()
            if at_rest:
                rest(client)
        assert not complaints


@contextmanager
def _complaints() -> Iterator[list[str]]:
    """What the scheduler's side says it could not do: refused events, hooks that raised."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else ""
            said.append(f"{record.getMessage()} {error!r}")

    bridge, hooks_of_dask = Listener(level=logging.WARNING), Listener(level=logging.INFO)
    hooks_of_dask.addFilter(lambda record: record.getMessage().startswith("Plugin failed"))
    where = [
        (logging.getLogger("scheduler_plugin.bridge"), bridge),
        (logging.getLogger("distributed.scheduler"), hooks_of_dask),
    ]
    for logger, listener in where:
        logger.addHandler(listener)
    try:
        yield said
    finally:
        for logger, listener in where:
            logger.removeHandler(listener)


def plugin_of(client: Client) -> Any:
    """The scheduler's plugin object: the scheduler runs in this process, on another thread."""
    return client.cluster.scheduler.plugins["st2i-scheduler"]


def standing(dask_scheduler: Any) -> dict[str, int]:
    """What is open, after every check that there is. Runs on the scheduler."""
    dask_scheduler.validate_state()
    plugin = dask_scheduler.plugins["st2i-scheduler"]
    bridge, policy = plugin.bridge, plugin.policy
    policy._check()
    plugin.usage._check()
    bridge.intake._check()
    bridge.reservations._check()
    journal, counted = bridge.journal, dict(zip(NAMES, plugin.counts.all, strict=True))
    journal._check()
    plugin.counts._check()
    under_way = len(journal._runs) + len(journal._draining)
    ended = sum(count for name, count in counted.items() if name.startswith("runs_"))
    assert counted["dispatches"] == ended + under_way
    assert bridge._draining.keys() <= dask_scheduler.workers.keys()
    assert bridge._known == set(dask_scheduler.workers)
    return {
        "requests": len(policy._book.requests),
        "standings": len(policy._book.standings),
        "queued": policy.queued,
        "queued on the scheduler": len(dask_scheduler.queued.ours),
        "running": len(policy._fleet.running),
        "draining": len(policy._fleet.draining),
        "draining in the bridge": len(bridge._draining),
        "chosen": len(bridge._chosen),
        "computed ahead": len(bridge._ahead._results),
        "entries": len(bridge.intake.entries),
        "in the journal": len(journal._requests) + under_way,
    }


def left_on_worker(dask_worker: Any) -> list[str]:
    plugin = dask_worker.plugins["st2i-worker"]
    yielding = plugin.runner._yielding & set(dask_worker.state.tasks)  # the rest goes with the next
    return [*map(str, dask_worker.data), *yielding, *plugin.runner._watched]


def rest(client: Client) -> None:
    """Everything is checked and, once all futures are gone, nothing of any request is left."""
    found: dict[str, Any] = {}

    def nothing_left() -> bool:
        gc.collect()  # a future whose exception was raised refers to itself
        found.clear()
        found.update(client.run_on_scheduler(standing))
        found.update({f"on {w}": keys for w, keys in client.run(left_on_worker).items()})
        return not any(found.values())

    until(nothing_left, lambda: f"left behind: {found}")


def until(
    condition: Callable[[], Any],
    what: Callable[[], str] | str = "not in time",
    seconds: float = 30.0,
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what if isinstance(what, str) else what()
        time.sleep(0.01)


def idle(client: Client) -> bool:
    """Whether every executor is free in the policy's eyes and nothing is queued."""
    state = client.run_on_scheduler(standing)
    return not (state["queued"] or state["running"] or state["draining in the bridge"])


def decisions_of(client: Client) -> list[Any]:
    """A list that grows with every decision from now on."""
    policy = plugin_of(client).policy
    made: list[Any] = []
    commit = policy.commit

    def recording(decision: Any, now: float) -> None:
        commit(decision, now)
        made.append(decision)

    policy.commit = recording
    return made


class Charges:
    """What the policy charges from now on, in the form that `virtual_cluster.spreads` takes."""

    def __init__(self, client: Client) -> None:
        self.trace: list[tuple[str, float, object]] = []
        self.ran: dict[str, Ran] = {}
        self._policy = policy = plugin_of(client).policy
        self._ready: dict[str, bool] = {}
        by_charge: dict[int, Ran] = {}
        handle, commit, revise = policy.handle, policy.commit, policy.ledger.revise

        def handling(event: Any) -> Any:
            if isinstance(event, ev.Completed):
                record = self.ran[event.key]
                record.used = event.used.total_s
                self.trace.append(("end", event.now, record))
            told = handle(event)
            self._note_ready(event.now)
            return told

        def committing(decision: Any, now: float) -> None:
            commit(decision, now)
            tenant, seconds = decision.tenant, [decision.estimate.total_s]
            record = Ran(
                tenant,
                decision.request,
                decision.position,
                decision.executor,
                now,
                seconds,
                policy.ledger.weight(tenant),
                decision.steps,
            )
            self.ran[decision.key] = record
            by_charge[policy._book.invocations[decision.key].run.charge] = record
            self.trace.append(("dispatch", now, record))
            self._note_ready(now)

        def revising(number: int, seconds: float) -> None:
            revise(number, seconds)
            by_charge[number].estimates.append(seconds)

        policy.handle, policy.commit, policy.ledger.revise = handling, committing, revising

    def _note_ready(self, now: float) -> None:
        for tenant, standing in self._policy._book.standings.items():
            if self._ready.get(tenant, False) != (standing.ready > 0):
                self._ready[tenant] = standing.ready > 0
                vtimes = {t: total.vtime_s for t, total in self._policy.ledger.totals().items()}
                self.trace.append(("ready", now, (tenant, self._ready[tenant], vtimes)))

    def contested(self) -> list[Ran]:
        """The runs dispatched while more than one tenant had something ready."""
        ready: dict[str, bool] = {}
        found = []
        for what, _, value in self.trace:
            if what == "ready":
                tenant, flag, _ = value  # type: ignore[misc]
                ready[tenant] = flag
            elif what == "dispatch" and sum(ready.values()) > 1:
                found.append(value)
        return found  # type: ignore[return-value]

    def largest(self) -> float:
        """L_max: the largest vTime charge of those, estimated or measured, seconds."""
        return max(max(r.used, *r.estimates, 0.0) / r.weight for r in self.contested())


def events_of(client: Client) -> list[Any]:
    """A list that grows with every event the policy is told from now on."""
    policy = plugin_of(client).policy
    told: list[Any] = []
    handle = policy.handle

    def recording(event: Any) -> Any:
        told.append(event)
        return handle(event)

    policy.handle = recording
    return told


def learn(client: Client, steps: int = 3, seconds: float = 0.0) -> None:
    """Let every worker run the chain once, so that its cost is known and its model loaded."""
    n = len(client.scheduler_info(n_workers=-1)["workers"])
    for _ in range(2):
        client.gather(
            [
                chain.submit(client, value=0.0, label="learn", steps=steps, seconds=seconds)
                for _ in range(n)
            ]
        )
    runs.clear()
