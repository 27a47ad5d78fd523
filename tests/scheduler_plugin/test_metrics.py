"""The scheduler's /metrics page on live clusters, read with prometheus_client's own parser."""

from __future__ import annotations

import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import st2i_dask as st2i
from scheduler_plugin import events as ev
from scheduler_plugin.journal import Journal
from scheduler_plugin.metrics import SchedulerCollector
from scheduler_plugin.metrics_counts import OTHER, Counts
from scheduler_plugin.metrics_tenants import TENANTS
from scheduler_plugin.outline import chain as chain_outline
from scheduler_plugin.policy import FairPolicy
from scheduler_plugin.usage import UsageTotals
from st2i_dask.submission import submit_requests
from st2i_dask.tenants import check_tenant

from ..st2i_dask.metrics_rules import check, families, grew, page, samples, value
from .live import chain, fan, hooks, idle, plugin_of, serving, until


@pytest.fixture(scope="module")
def client():
    with serving(2) as client:
        yield client


def scheduler_page(client):
    return page(client.cluster.scheduler)


def test_the_page_fits_the_rules_and_the_tables(client):
    before = scheduler_page(client)
    futures = [chain.submit(client, value=0.0, tenant="ann") for _ in range(3)]
    futures += [fan.submit(client, value=0.0, tenant="bob")]
    client.gather(futures)
    until(lambda: idle(client))
    text = scheduler_page(client)
    assert {"st2i_executors", "st2i_tenant_vtime_seconds", "st2i_decision_seconds"} <= set(
        check(text)
    )
    grew(before, text)
    assert "dask_scheduler_workers" in text, "Dask's own figures stay"
    plugin = plugin_of(client)
    for row in st2i.tenants(client):
        tenant = row["tenant"]
        assert value(text, "st2i_tenant_vtime_seconds", tenant=tenant) == row["vtime_s"]
        assert value(text, "st2i_tenant_service_seconds_total", tenant=tenant) == row["service_s"]
        usage = plugin.usage.tenants[tenant]
        for part in ("load", "compute", "transfer"):
            seconds = value(text, "st2i_tenant_device_seconds_total", tenant=tenant, part=part)
            assert seconds == getattr(usage, part)
        assert value(text, "st2i_tenant_invocations_total", tenant=tenant) == usage.invocations
    assert value(text, "st2i_tenant_requests_total", tenant="ann", outcome="done") == 3
    assert value(text, "st2i_tenant_submitted_requests_total", tenant="bob") == 1
    assert value(text, "st2i_executors", state="idle") == 2
    runs = sum(
        value(text, "st2i_tenant_runs_total", tenant=tenant, outcome="done")
        for tenant in ("ann", "bob")
    )
    assert value(text, "st2i_decision_seconds_count") == runs
    assert value(text, "st2i_queue_wait_seconds_count") == runs
    assert value(text, "st2i_request_latency_seconds_count", workflow="live-chain") == 3
    assert value(text, "st2i_request_latency_seconds_count", workflow="live-fan") == 1
    plugin.counts._check()
    plugin.bridge.journal._check()


def test_failures_cancellations_and_refusals_are_counted(client):
    def fail(value):
        raise RuntimeError("as the test wants")

    hooks["bad"] = fail
    failing = chain.submit(client, value=0.0, label="bad", tenant="carl")
    with pytest.raises(RuntimeError, match="as the test wants"):
        failing.result()
    failing.cancel()
    hooks["slow"] = lambda value: time.sleep(0.3)
    running = chain.submit(client, value=0.0, label="slow", tenant="dora")
    until(lambda: plugin_of(client).policy._fleet.running)
    text = scheduler_page(client)
    assert value(text, "st2i_executors", state="busy") == 1
    assert value(text, "st2i_running_invocations") == 1
    assert value(text, "st2i_tenant_open_requests", tenant="dora", state="running") == 1
    running.cancel()
    until(lambda: idle(client))
    st2i.settings(client, caps={"eve": 1})
    with pytest.raises(st2i.LimitError):
        submit_requests(client, [chain.request("eve", value=0.0) for _ in range(3)])
    until(lambda: value(scheduler_page(client), "st2i_open_requests") == 0)
    text = scheduler_page(client)
    check(text)
    for tenant, outcome in (("carl", "failed"), ("dora", "cancelled")):
        assert value(text, "st2i_tenant_runs_total", tenant=tenant, outcome=outcome) == 1
        assert value(text, "st2i_tenant_requests_total", tenant=tenant, outcome=outcome) == 1
    assert value(text, "st2i_tenant_refused_requests_total", tenant="eve") == 3


def test_two_schedulers_of_one_process_have_pages_of_their_own(client):
    before = families(scheduler_page(client))
    with serving(1) as other:
        assert chain.submit(other, value=0.0, tenant="zoe").result() == 3.0
        text = scheduler_page(other)
        check(text)
        tenants = {dict(labels).get("tenant") for _, labels in samples(text)} - {None}
        assert tenants == {"zoe"}
        assert value(text, "st2i_executors", state="idle") == 1
        worker = next(iter(other.cluster.workers.values()))
        assert "st2i_executors" not in page(worker), "nor is it on the pages of its workers"
    after = families(scheduler_page(client))
    assert after.keys() == before.keys()
    assert "zoe" not in scheduler_page(client)


def test_unregistered_the_page_is_dasks_own_again():
    with serving(1, at_rest=False) as client:
        scheduler = client.cluster.scheduler
        rules = scheduler.http_application.wildcard_router.rules
        targets = [rule.target for rule in rules]
        assert "st2i_" in scheduler_page(client)
        client.unregister_scheduler_plugin("st2i-scheduler")
        until(lambda: "st2i_" not in scheduler_page(client))
        assert "dask_scheduler_workers" in scheduler_page(client)
        changed = [a for a, b in zip(targets, (r.target for r in rules), strict=True) if a is not b]
        assert [base.__name__ for base in changed[0].__mro__[:2]] == [
            "Extended",
            "PrometheusHandler",
        ]
        st2i.attach(client, device="cpu")
        until(lambda: "st2i_" in scheduler_page(client))
        check(scheduler_page(client))


class Policy:
    """A collector on a policy without a cluster."""

    def __init__(self):
        self.policy, self.journal, self.counts = FairPolicy(), Journal(), Counts()
        self.journal.watch(self.counts)
        collector = SchedulerCollector(self.policy, self.counts, UsageTotals())
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        self._requests = 0
        self.tell(ev.ExecutorJoined(0.0, "e"))

    def tell(self, event):
        self.policy.handle(event)
        self.journal.happened(event)

    def request(self, tenant, seconds, workflow="basic"):
        self._requests += 1
        name = f"r{self._requests}"
        outline = chain_outline(workflow, [("Text", "t5", "77")])
        self.tell(ev.RequestSubmitted(0.0, name, tenant, outline))
        self.tell(ev.InvocationReady(0.0, name, name, 0))
        self.journal.dispatched(self.policy.next_decision(0.0), 0.0)
        self.tell(ev.Completed(0.0, name, ev.Measured(compute_s=seconds)))

    def page(self):
        return generate_latest(self._registry).decode()


def test_a_tenant_called_other_is_not_taken_for_the_others():
    with pytest.raises(st2i.ParameterError):
        check_tenant(OTHER)
    policy = Policy()
    policy.request("other", 7.0)
    served = {
        dict(labels)["tenant"]: seconds
        for (name, labels), seconds in samples(policy.page()).items()
        if name == "st2i_tenant_service_seconds_total"
    }
    assert served == {"other": 7.0}


def test_any_number_of_tenants_gives_a_bounded_page_that_adds_up():
    policy = Policy()
    for number in range(3 * TENANTS):
        policy.request(f"t{number:03d}", 1.0 + number)
    first = policy.page()
    check(first)
    labels = {dict(labels)["tenant"] for name, labels in samples(first) if "_tenant_" in name}
    assert len(labels) == TENANTS + 1
    assert OTHER in labels
    assert f"t{3 * TENANTS - 1}" in labels
    policy.request("t000", 1000.0)  # now the most served
    second = policy.page()
    served = {
        dict(labels)["tenant"]: seconds
        for (name, labels), seconds in samples(second).items()
        if name == "st2i_tenant_service_seconds_total"
    }
    assert "t000" in served
    assert sum(served.values()) == pytest.approx(sum(range(3 * TENANTS)) + 3 * TENANTS + 1000)
    still = samples(second)
    for at, count in samples(first).items():
        if at in still and at[0].endswith("_total"):
            assert still[at] >= count, at
    assert len(second.splitlines()) < 45 * TENANTS


@pytest.mark.parametrize("name", ['say "hi"\\n\n{}=,', "prüfung ☃", "bad \ud800 half", "w" * 4000])
def test_any_workflow_name_gives_a_page_that_parses(name):
    policy = Policy()
    policy.request("ann", 1.0, workflow=name)
    text = policy.page()
    check(text)
    (label,) = {
        dict(labels)["workflow"]
        for at, labels in samples(text)
        if at.endswith("latency_seconds_sum")
    }
    assert label == name.encode("utf-8", "replace").decode()[:120]
