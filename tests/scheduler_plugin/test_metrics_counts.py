"""What the journal tells, counted."""

from __future__ import annotations

import pytest

from scheduler_plugin.instructions import Estimate
from scheduler_plugin.journal import RequestRecord, RunRecord
from scheduler_plugin.metrics_counts import NAMES, OTHER, WORKFLOWS, Counts, Histogram
from scheduler_plugin.outline import chain


def request(tenant="ann", workflow="basic", outcome=None, seconds=1.0):
    outline = chain(workflow, [("Text", "t5", "77")])
    return RequestRecord("r", tenant, outline, 0.0, "s", over=seconds, outcome=outcome)


def run(of, outcome=None, wait=0.5, decided=3e-5):
    estimate = Estimate(0.0, 0.0, 0.0)
    return RunRecord("k", of, 0, "e", 1, estimate, 1.0, 1.0 + wait, decided, "s", outcome=outcome)


def test_a_histogram_counts_up_to_each_bound():
    histogram = Histogram((1, 2.5))
    for seconds in (0.5, 1.0, 1.1, 2.5, 99.0):
        histogram.observe(seconds)
    assert list(histogram.buckets()) == [("1.0", 2), ("2.5", 4), ("+Inf", 5)]
    assert histogram.sum == pytest.approx(104.1)
    histogram._check()


def test_every_kind_is_counted_for_its_tenant_and_for_all():
    counts = Counts()
    for tenant, times in (("ann", 1), ("bob", 2)):
        of = request(tenant)
        for _ in range(times):
            counts.submitted(of)
            for outcome in ("done", "failed", "lost", "cancelled"):
                counts.dispatched(run(of))
                counts.run_over(run(of, outcome))
            counts.yielding(run(of))
            counts.result_lost(of, "k", 0.0, "s")
            for outcome in ("done", "failed", "cancelled"):
                counts.request_over(request(tenant, outcome=outcome))
        counts.refused(tenant, 5, "why", 0.0, "s")
    counts._check()
    ones = dict.fromkeys(NAMES, 1) | {"refused": 5, "dispatches": 4}
    assert dict(zip(NAMES, counts.tenants["ann"], strict=True)) == ones
    twice = {name: 2 * count for name, count in ones.items()} | {"refused": 5}
    assert dict(zip(NAMES, counts.tenants["bob"], strict=True)) == twice
    assert counts.wait.sum == pytest.approx(12 * 0.5)
    assert counts.decision.sum == pytest.approx(12 * 3e-5)
    assert counts.latency["basic"].sum == pytest.approx(3.0), "of requests done"


def test_workflows_beyond_the_limit_share_a_histogram():
    counts = Counts()
    for number in range(WORKFLOWS + 20):
        counts.request_over(request(workflow=f"w{number}", outcome="done"))
        counts.request_over(request(workflow="w" * 500 + str(number), outcome="done"))
    counts._check()
    assert len(counts.latency) == WORKFLOWS + 1
    assert counts.latency[OTHER].sum > 0
    assert max(map(len, counts.latency)) <= 120
