"""Several denoising steps as one task: only while nobody waits, and handed back within a step."""

from __future__ import annotations

import pytest

from scheduler_plugin import events as ev
from scheduler_plugin.instructions import RaiseYield
from scheduler_plugin.outline import CostKey, chain
from scheduler_plugin.policy import FairPolicy
from scheduler_plugin.settings import Settings

from .virtual_cluster import Truth, VirtualCluster

DENOISE = chain("d", [("Denoise", "flux", "1024x1024")])


def measured(seconds):
    return ev.Measured(0.0, seconds, 0.0)


@pytest.fixture
def policy():
    policy = FairPolicy(Settings(slack_s=0.0, steps_per_task=8))
    for _ in range(2):
        policy.costs.observe(
            CostKey("Denoise", "flux", "1024x1024"),
            measured(1.0),
            loaded_share=1.0,
            pulled=False,
        )
    policy.handle(ev.ExecutorJoined(0.0, "w1"))
    yield policy
    policy._check()


def submit(policy, now, tenant, steps=30):
    policy.handle(ev.RequestSubmitted(now, f"r-{tenant}", tenant, DENOISE))
    policy.handle(ev.InvocationReady(now, f"k-{tenant}", f"r-{tenant}", 0, steps=steps))


def test_alone_several_steps_run_as_one_task_up_to_the_setting(policy):
    submit(policy, 0.0, "a")
    decision = policy.next_decision(0.0)
    assert decision.steps == 8
    assert decision.estimate.compute_s == 8.0


def test_never_more_than_there_are(policy):
    submit(policy, 0.0, "a", steps=3)
    assert policy.next_decision(0.0).steps == 3


def test_when_another_tenant_waits_it_is_one_step_a_task(policy):
    submit(policy, 0.0, "a")
    submit(policy, 0.0, "b")
    assert policy.next_decision(0.0).steps == 1


def test_the_tenants_own_requests_are_no_reason(policy):
    submit(policy, 0.0, "a")
    policy.handle(ev.RequestSubmitted(0.0, "r2", "a", DENOISE))
    policy.handle(ev.InvocationReady(0.0, "k2", "r2", 0, steps=30))
    assert policy.next_decision(0.0).steps == 8


def test_an_executor_for_everybody_is_no_contention(policy):
    policy.handle(ev.ExecutorJoined(0.0, "w2"))
    submit(policy, 0.0, "a")
    submit(policy, 0.0, "b")
    assert [policy.next_decision(0.0).steps for _ in "ab"] == [8, 8]
    assert policy.yields(0.0) == []


def test_a_newcomer_raises_the_yield_once_and_waits_for_one_step(policy):
    submit(policy, 0.0, "a")
    policy.next_decision(0.0)
    assert policy.yields(2.5) == []
    submit(policy, 2.5, "b")
    assert policy.next_decision(2.5) is None
    assert policy.yields(2.5) == [RaiseYield("k-a", "w1")]
    assert policy.yield_wanted("w1")
    assert policy.yields(2.6) == []
    policy.handle(ev.Completed(3.1, "k-a", measured(3.1), steps=3, finished=False))
    assert not policy.yield_wanted("w1")
    policy.handle(ev.InvocationReady(3.1, "k-a", "r-a", 0, steps=27))
    decision = policy.next_decision(3.1)
    assert (decision.tenant, decision.steps) == ("b", 1)


def test_the_newcomer_is_not_lifted_by_steps_that_will_not_run(policy):
    submit(policy, 0.0, "a")
    policy.next_decision(0.0)
    assert policy.ledger.vtime("a") == 8.0
    submit(policy, 2.5, "b")
    assert policy.ledger.vtime("a") == 3.0  # two steps done, and the one it is in
    assert policy.ledger.vtime("b") == 3.0


def test_the_largest_charge_is_one_step_under_contention(policy):
    submit(policy, 0.0, "a")
    policy.next_decision(0.0)
    assert policy.ledger.largest_charge() == 1.0
    policy.handle(ev.Completed(8.0, "k-a", measured(8.0), steps=8, finished=False))
    assert policy.ledger.largest_charge() == 1.0


def test_the_same_work_with_fewer_dispatches_and_no_longer_wait_for_a_newcomer():
    """What it saves, and that it costs a newcomer nothing."""

    def run(steps_per_task):
        policy = FairPolicy(Settings(slack_s=0.0, steps_per_task=steps_per_task))
        cluster = VirtualCluster(
            policy, 1, Truth(compute={"flux": 1.0}, noise=0.2), check_every=1, seed=3
        )
        for _ in range(3):
            cluster.submit(0.0, "batch", DENOISE, steps={0: 30})
        cluster.submit(41.5, "newcomer", DENOISE, steps={0: 4})
        cluster.run()
        first = min(r.dispatched for r in cluster.ran if r.tenant == "newcomer")
        assert cluster.idle_s == 0.0
        return len(cluster.ran), first - 41.5, cluster.service()

    single, multi = run(1), run(8)
    assert single[0] == 94
    assert multi[0] < 94 / 4
    # The step in progress, and one more if the estimates put the newcomer behind by a hair.
    assert max(single[1], multi[1]) <= 2 * 1.2
    assert multi[2]["batch"] == pytest.approx(single[2]["batch"], rel=0.2)


def test_alternating_contention_keeps_both_equal():
    policy = FairPolicy(Settings(slack_s=0.0, steps_per_task=8))
    cluster = VirtualCluster(policy, 2, Truth(compute={"flux": 1.0}), check_every=1)
    for number in range(12):
        cluster.submit(number * 7.0, "a", DENOISE, steps={0: 20})
        cluster.submit(3.0 + number * 7.0, "b", DENOISE, steps={0: 20})
    cluster.run(until=80.0)
    served = cluster.service()
    assert abs(served["a"] - served["b"]) <= 2 * (0.0 + 1.0) + 10
