"""A tenant cannot gain by coming and going, splitting, cancelling late, tiny requests or a trickle."""

from __future__ import annotations

import pytest

from scheduler_plugin import events as ev
from scheduler_plugin.outline import chain
from scheduler_plugin.policy import FairPolicy
from scheduler_plugin.settings import Settings

from .spreads import spreads
from .virtual_cluster import Truth, VirtualCluster

SLACK, SECONDS = 1.0, 30.0
WORK = chain("work", [("Step", "m", "1")] * 3)
SPLIT = chain("split", [("Step", "m", "1")])
TINY = chain("tiny", [("Step", "tiny", "1")])
COMPUTE = {"m": 0.5, "tiny": 0.02}


def cluster_with_an_honest_tenant(executors=2):
    """The honest tenant is backlogged from the start to the end."""
    policy = FairPolicy(Settings(slack_s=SLACK, default_cap=None))
    cluster = VirtualCluster(
        policy, executors, Truth(compute=COMPUTE, noise=0.2), seed=5, check_every=250
    )
    for _ in range(int(SECONDS * executors)):
        cluster.submit(0.0, "honest", WORK)
    return cluster


def gained(cluster):
    """Device seconds the gamer got more than the honest tenant; and the bound on that."""
    cluster.run(until=SECONDS)
    service = cluster.service(until=SECONDS)
    worst = spreads(cluster, SLACK)
    bound = 2 * (SLACK + cluster.largest()) + 2 * worst.error
    assert worst.excess <= 1e-6
    assert sum(service.values()) == pytest.approx(2 * SECONDS, rel=0.05)
    return service["gamer"] - service["honest"], bound


def test_the_honest_pair_is_served_alike():
    cluster = cluster_with_an_honest_tenant()
    for _ in range(60):
        cluster.submit(0.0, "gamer", WORK)
    gain, bound = gained(cluster)
    assert abs(gain) <= bound


def test_leaving_and_coming_back_every_second():
    cluster = cluster_with_an_honest_tenant()
    for second in range(int(SECONDS)):
        for number in range(6):
            name = cluster.submit(second, "gamer", SPLIT, name=f"g{second}-{number}")
            cluster.cancel(second + 0.4, name)
    left = set()
    cluster.after_batch = lambda c: left.add(c.policy.ledger.is_active("gamer"))
    gain, bound = gained(cluster)
    assert gain <= bound
    assert left == {True, False}


def test_splitting_into_many_requests():
    cluster = cluster_with_an_honest_tenant()
    for _ in range(180):
        cluster.submit(0.0, "gamer", SPLIT)
    gain, bound = gained(cluster)
    assert abs(gain) <= bound


def test_cancelling_just_before_the_end():
    cluster = cluster_with_an_honest_tenant()
    for number in range(300):
        cluster.submit(number * 0.1, "gamer", SPLIT, name=f"g{number}")

    cancelled = set()

    def cancel_late(cluster):
        for ran in cluster.ran[-4:]:
            if ran.tenant == "gamer" and ran.request not in cancelled:
                cancelled.add(ran.request)
                cluster.cancel(ran.dispatched + 0.4, ran.request)

    cluster.after_batch = cancel_late
    gain, bound = gained(cluster)
    assert any(ran.outcome == "cancelled" for ran in cluster.ran)
    assert gain <= bound
    ledger = cluster.policy.ledger
    ended = sum(r.used for r in cluster.ran if r.tenant == "gamer" and r.outcome)
    assert ledger.service("gamer") == pytest.approx(ended)


def test_thousands_of_tiny_workflows():
    cluster = cluster_with_an_honest_tenant()
    for _ in range(2000):
        cluster.submit(0.0, "gamer", TINY)
    gain, bound = gained(cluster)
    assert abs(gain) <= bound


def test_a_trickle_saves_up_no_more_than_one_unit_of_credit():
    """Never without work, next to nothing of it ready, then a burst."""
    cluster = cluster_with_an_honest_tenant()
    half = SECONDS / 2
    blocked = ev.RequestSubmitted(0.0, "blocked", "gamer", WORK)
    cluster.policy.handle(blocked)
    for number in range(int(half)):
        cluster.submit(float(number), "gamer", TINY)
    for _ in range(80):
        cluster.submit(half, "gamer", WORK)
    cluster.run(until=SECONDS)
    before, after = cluster.service(until=half), cluster.service(until=SECONDS)
    assert before["honest"] - before["gamer"] > 1.9 * half
    burst = {tenant: after[tenant] - before[tenant] for tenant in after}
    unit = SLACK + cluster.largest()
    assert burst["gamer"] - burst["honest"] <= 2 * unit + 2 * spreads(cluster, SLACK).error


def test_many_executors_and_many_gamers_at_once():
    cluster = cluster_with_an_honest_tenant(executors=8)
    for number in range(100):
        cluster.submit(0.0, "tiny", TINY)
        cluster.submit(0.0, "split", SPLIT)
        cluster.submit(0.1 * number, "late", SPLIT)
    cluster.run(until=10.0)
    assert spreads(cluster, SLACK).excess <= 1e-6
