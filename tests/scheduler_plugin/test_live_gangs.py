"""Gangs on live clusters: a task is told its members, and nobody else gets them while it runs."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from distributed import get_worker
from distributed.worker import thread_state

import st2i_dask as st2i
from scheduler_plugin import events as ev
from st2i_dask.gang import running_gang
from st2i_dask.submission import submit_requests

from .live import TIMEOUT, decisions_of, hooks, plugin_of, runs, serving, until
from .live import Step as Plain

#: What each task was told, by key: one entry a run.
told: dict[str, list[list[str]]] = {}


class Wide(Plain):
    """A step that three executors can run together."""

    gang = 3

    def execute(self, model_components, value, label, seconds, other):
        gang = running_gang()
        if gang is not None and gang.rank > 0:
            time.sleep(seconds)
            return {"sum": value}
        note = get_worker().state.tasks[thread_state.key].annotations["st2i"]
        told.setdefault(thread_state.key, []).append(note.get("members", []))
        return super().execute(model_components, value, label, seconds, other)


@st2i.workflow(name="live-wide", replace=True)
def wide(value: float, label: str = "", steps: int = 1, seconds: st2i.Static[float] = 0.0):
    step = Wide()
    for _ in range(steps):
        value = step(value, label, seconds)
    return value


@st2i.workflow(name="live-narrow", replace=True)
def narrow(value: float, label: str = "", seconds: st2i.Static[float] = 0.0):
    return Plain()(value, label, seconds)


@pytest.fixture
def client():
    told.clear()
    with serving(3) as client:
        yield client


def workers_of(client):
    return set(client.scheduler_info(n_workers=-1)["workers"])


def test_the_workers_task_is_told_its_members(client):
    assert wide.submit(client, value=0.0).result(timeout=TIMEOUT) == 1.0
    ((key, (members,)),) = told.items()
    (run,) = runs
    assert run.key == key
    assert {run.worker, *members} == workers_of(client)
    assert len(members) == 2


@pytest.mark.parametrize(("requests", "members"), [(3, [0, 0, 0]), (2, [0, 1])])
def test_only_what_nobody_else_would_take(client, requests, members):
    asked = [wide.request(value=0.0, seconds=0.1) for _ in range(requests)]
    client.gather(submit_requests(client, asked))
    assert sorted(len(found) for (found,) in told.values()) == members


def test_members_take_nothing_else_until_the_run_ends(client):
    decisions = decisions_of(client)
    begun, go_on = threading.Event(), threading.Event()
    hooks["wide"] = lambda value: (begun.set(), go_on.wait(TIMEOUT))
    first = wide.submit(client, value=0.0, label="wide")
    assert begun.wait(TIMEOUT)
    second = narrow.submit(client, value=0.0, tenant="other")
    time.sleep(0.3)
    assert len(decisions) == 1
    assert len(decisions[0].members) == 2
    go_on.set()
    assert client.gather([first, second]) == [1.0, 1.0]


def test_a_run_after_a_loss_knows_no_members_of_the_one_before(client):
    """A member goes, which the run survives, then its own worker: the next run is alone."""
    begun = threading.Event()
    hooks["wide"] = lambda value: (begun.set(), time.sleep(0.5))
    future = wide.submit(client, value=0.0, label="wide")
    assert begun.wait(TIMEOUT)
    (held,) = plugin_of(client).policy._fleet.running.values()
    by_address = {w.address: w for w in client.cluster.workers.values()}
    for gone in (held.run.members[0], held.run.dispatch.executor):
        closing = by_address[gone].close()
        asyncio.run_coroutine_threadsafe(closing, client.loop.asyncio_loop).result(TIMEOUT)
    assert future.result(timeout=TIMEOUT) == 1.0
    (runs_told,) = told.values()
    assert list(map(len, runs_told)) == [2, 0]


def test_every_executor_held_is_charged(client):
    wide.submit(client, value=0.0, tenant="first").result(timeout=TIMEOUT)  # members load the model
    wide.submit(client, value=0.0, seconds=0.2, tenant="w").result(timeout=TIMEOUT)
    narrow.submit(client, value=0.0, seconds=0.2, tenant="n").result(timeout=TIMEOUT)
    until(lambda: plugin_of(client).policy.ledger.service("n") > 0)
    service = {t: plugin_of(client).policy.ledger.service(t) for t in "wn"}
    # Its leader also waits for the members to come.
    assert 2.7 * service["n"] < service["w"] < 5 * service["n"]
    usage = client.run_on_scheduler(lambda dask_scheduler: plugin_usage(dask_scheduler))
    assert usage["w"] == pytest.approx(service["w"], rel=1e-6)


def plugin_usage(dask_scheduler):
    tenants = dask_scheduler.plugins["st2i-scheduler"].usage.tenants
    return {tenant: usage.device_seconds for tenant, usage in tenants.items()}


def test_steps_of_a_gang_run_as_one_task_and_end_for_another_tenant(client):
    decisions = decisions_of(client)
    begun = threading.Event()
    hooks["wide"] = lambda value: begun.set()
    long = wide.submit(client, value=0.0, label="wide", steps=30, seconds=0.1, tenant="a")
    assert begun.wait(TIMEOUT)
    short = narrow.submit(client, value=0.0, tenant="b")
    begin = time.monotonic()
    assert short.result(timeout=TIMEOUT) == 1.0
    assert time.monotonic() - begin < 1.5
    assert len(decisions[0].members) == 2
    assert decisions[0].steps > 1
    assert long.result(timeout=TIMEOUT) == 30.0


def test_a_refused_report_of_members_is_no_harm(client):
    with pytest.raises(ValueError, match="whole number >= 0"):
        ev.Completed(0.0, "k", ev.Measured(), members=-1)
