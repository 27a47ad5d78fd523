"""Thousands of requests with random cancels, failures and losses leave nothing but totals."""

from __future__ import annotations

import random
from functools import partial

import pytest

from scheduler_plugin.outline import Outline, Step, chain
from scheduler_plugin.policy import FairPolicy
from scheduler_plugin.rivals import CHOOSERS
from scheduler_plugin.settings import Settings

from .test_policy_machine import assert_empty
from .virtual_cluster import Truth, VirtualCluster

OUTLINES = (
    chain("one", [("A", "a", "1")]),
    chain("two", [("A", "a", "1"), ("B", "b", "1")]),
    Outline(
        "callback",
        (Step("A", "a", "1"), Step("B", "b", "1"), Step("C", "c", "1", (0,), callback_deps=(1,))),
    ),
)


def soak(requests, policy_name="fair"):
    rng = random.Random(requests)
    policy = FairPolicy(Settings(slack_s=1.0, default_cap=None), chooser=CHOOSERS[policy_name])
    truth = Truth(compute={"a": 0.1, "b": 0.3, "c": 0.2}, load={"b": 0.5}, noise=1.0, held=2)
    cluster = VirtualCluster(policy, 8, truth, seed=1, check_every=max(1, requests // 20))
    for number in range(requests):
        at = number * 0.05
        tenant = f"t{rng.randrange(20)}"
        name = cluster.submit(at, tenant, rng.choice(OUTLINES), name=f"r{number}")
        if rng.random() < 0.4:
            cluster.cancel(at + rng.random() * 3.0, name)
        if rng.random() < 0.02:
            victim = f"w{rng.randrange(8):03}"
            cluster.kill(at, victim)
            cluster.at(at, partial(rejoin, cluster, victim))
    cluster.run()
    return cluster


def rejoin(cluster, executor):
    if executor not in cluster.policy._placement:
        cluster.join(executor)


@pytest.mark.parametrize("policy", sorted(CHOOSERS))
def test_nothing_is_left_but_totals(policy):
    assert_nothing_left(soak(1000 if policy == "fair" else 200, policy))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nothing_is_left_after_ten_thousand_requests():
    assert_nothing_left(soak(10_000))


def assert_nothing_left(cluster):
    policy = cluster.policy
    policy._check()
    assert_empty(policy)
    outcomes = {ran.outcome for ran in cluster.ran}
    assert outcomes == {"completed", "cancelled", "lost"}
    total = sum(row.service_s for row in policy.tenants(cluster.now))
    assert total == pytest.approx(sum(ran.used for ran in cluster.ran))
    assert len(policy.tenants(cluster.now)) == 20
