"""Gangs by hand: who becomes a member, until when, and what is charged."""

from __future__ import annotations

import json

import pytest

from scheduler_plugin import events as ev
from scheduler_plugin.ahead import chain_lengths
from scheduler_plugin.cost_model import CostModel
from scheduler_plugin.instructions import RaiseYield
from scheduler_plugin.outline import CostKey, Outline, Step
from scheduler_plugin.policy import FairPolicy
from scheduler_plugin.settings import Settings
from st2i_dask.errors import PolicyError

KEY = CostKey("Fn", "m", "1")
PLAIN = Outline("plain", (Step("Fn", "m", "1"),))
WIDE = Outline("wide", (Step("Fn", "m", "1", gang=4),))
LED = Outline("led", (Step("Fn", "m", "1", gang=4), Step("Fn", "m", "1", (), (0,))))


def measured(compute_s, load_s=0.0):
    return ev.Measured(load_s, compute_s, 0.0)


def known(compute_s=6.0, load_s=0.0):
    costs = CostModel()
    for _ in range(2):
        costs.observe(KEY, measured(compute_s, load_s), loaded_share=1.0, pulled=False)
    return costs


def cluster(executors, *, costs=None, missing=None, **settings):
    """missing: share of the model to load, by executor; 0 where nothing is said."""
    policy = FairPolicy(Settings(slack_s=0.0, **settings), costs=costs or known())
    for number in range(executors):
        name = f"w{number}"
        policy.handle(ev.ExecutorJoined(0.0, name, 100, {"m": (missing or {}).get(name, 0.0)}))
    return policy


def submit(policy, now, name, outline=WIDE, steps=1, tenant=None):
    tenant = tenant or name
    policy.handle(ev.RequestSubmitted(now, name, tenant, outline))
    for position in range(len(outline)):
        policy.handle(ev.InvocationReady(now, f"{name}/{position}", name, position, steps=steps))


def decide(policy, now):
    decision = policy.next_decision(now)
    policy._check()
    return decision


def tell(policy, event):
    instructions = policy.handle(event)
    policy._check()
    return instructions


# Who


def test_members_up_to_its_gang():
    policy = cluster(6)
    submit(policy, 0.0, "a")
    decision = decide(policy, 0.0)
    assert len({decision.executor, *decision.members}) == 4
    assert policy.idle_executors == 2


@pytest.mark.parametrize(
    ("executors", "others", "members"), [(1, 0, 0), (4, 3, 0), (4, 9, 0), (4, 2, 1), (3, 0, 2)]
)
def test_only_those_that_nothing_ready_would_take(executors, others, members):
    policy = cluster(executors)
    submit(policy, 0.0, "a")
    for number in range(others):  # of another tenant and of its own
        submit(policy, 1.0, f"b{number}", PLAIN, tenant="ab"[number % 2])
    decisions = [decide(policy, 1.0) for _ in range(min(executors, 1 + others))]
    (wide,) = [d for d in decisions if d.request == "a"]
    assert len(wide.members) == members
    assert None not in decisions, "somebody waits for an executor that a gang holds"


def test_what_its_own_dispatch_lets_in_keeps_an_executor():
    policy = cluster(2)
    submit(policy, 0.0, "a", LED)
    first, second = decide(policy, 0.0), decide(policy, 0.0)
    assert (first.key, first.members) == ("a/0", ())
    assert (second.key, second.executor != first.executor) == ("a/1", True)


def test_those_with_the_model_come_first():
    policy = cluster(
        4, costs=known(load_s=1.0), missing={"w0": 0.0, "w1": 1.0, "w2": 0.5, "w3": 1.0}
    )
    submit(policy, 0.0, "a", Outline("two", (Step("Fn", "m", "1", gang=3),)))
    decision = decide(policy, 0.0)
    assert decision.executor == "w0"
    assert decision.members[0] == "w2"
    assert len(decision.members) == 2


@pytest.mark.parametrize(("steps", "members"), [(1, ()), (20, ("w1",))])
def test_a_load_that_all_would_wait_for_must_be_worth_it(steps, members):
    """20 s of load for 6 s a step: half of twenty steps is, half of one is not."""
    policy = cluster(2, costs=known(load_s=20.0), missing={"w1": 1.0})
    submit(policy, 0.0, "a", steps=steps)
    decision = decide(policy, 0.0)
    assert decision.members == members
    assert decision.estimate.load_s == (20.0 if members else 0.0), "they wait for the slowest"


def test_busy_executors_are_no_members():
    policy = cluster(3)
    tell(policy, ev.ExecutorBusy(0.0, "w1"))
    submit(policy, 0.0, "a")
    decision = decide(policy, 0.0)
    assert {decision.executor, *decision.members} == {"w0", "w2"}


def test_a_decision_is_stale_once_a_member_is_taken():
    policy = cluster(2)
    submit(policy, 0.0, "a")
    decision = policy.peek(0.0)
    tell(policy, ev.ExecutorBusy(0.0, decision.members[0]))
    with pytest.raises(PolicyError, match="not idle"):
        policy.commit(decision, 0.0)
    policy._check()


# Until when

ENDS = {
    "completed": lambda: [ev.Completed(2.0, "a/0", measured(2.0))],
    "failed": lambda: [ev.Failed(2.0, "a/0")],
    "lost": lambda: [ev.Lost(2.0, "a/0")],
    "stopped": lambda: [ev.Cancelled(2.0, "a/0", stopped=True)],
    "drained": lambda: [ev.Cancelled(1.0, "a/0"), ev.Drained(2.0, "w0", measured(2.0))],
    "closed": lambda: [ev.RequestClosed(1.0, "a"), ev.Drained(2.0, "w0", measured(2.0))],
    "left": lambda: [ev.ExecutorLeft(2.0, "w0")],
}


@pytest.mark.parametrize("how", ENDS)
def test_held_until_the_run_ends(how):
    policy = cluster(3)
    submit(policy, 0.0, "a")
    assert decide(policy, 0.0).executor == "w0"
    for event in ENDS[how]():
        assert not policy.is_idle("w1")
        tell(policy, event)
    assert policy.is_idle("w1")
    assert policy.is_idle("w2")
    assert policy.ledger.service("a") == 6.0


def test_a_plain_task_on_a_member_keeps_it_beyond_the_run():
    policy = cluster(2)
    submit(policy, 0.0, "a")
    decide(policy, 0.0)
    tell(policy, ev.ExecutorBusy(1.0, "w1"))
    tell(policy, ev.Completed(2.0, "a/0", measured(2.0)))
    assert policy.idle_names() == ["w0"]
    tell(policy, ev.ExecutorIdle(3.0, "w1"))
    assert policy.is_idle("w1")


def test_a_plain_task_that_ends_does_not_free_a_member():
    policy = cluster(2)
    submit(policy, 0.0, "a")
    decide(policy, 0.0)
    tell(policy, ev.ExecutorBusy(1.0, "w1"))
    tell(policy, ev.ExecutorIdle(1.5, "w1"))
    assert not policy.is_idle("w1")


# What is charged


def test_the_estimate_counts_for_each_until_the_size_is_known():
    policy = cluster(3)
    submit(policy, 0.0, "a")
    decision = decide(policy, 0.0)
    assert decision.estimate.total_s == 6.0
    assert policy.ledger.vtime("a") == 18.0
    tell(policy, ev.Completed(2.5, "a/0", measured(2.5)))
    assert policy.ledger.vtime("a") == 7.5
    submit(policy, 3.0, "b")
    assert decide(policy, 3.0).estimate.total_s == 2.5
    assert policy.costs.compute_s(KEY) == 6.0
    assert policy.costs.compute_s(KEY, 2) == 6.0


def test_a_member_that_leaves_is_charged_until_then():
    policy = cluster(3)
    submit(policy, 0.0, "a")
    decide(policy, 0.0)
    tell(policy, ev.ExecutorLeft(1.0, "w2"))
    assert policy.ledger.vtime("a") == 6.0 + 6.0 + 1.0
    tell(policy, ev.Completed(4.0, "a/0", measured(4.0)))
    assert policy.ledger.service("a") == 4.0 + 4.0 + 1.0
    assert policy.costs.compute_s(KEY, 3) == 6.0, "nothing is learned of a run of changing size"
    assert policy.costs.compute_s(KEY, 2) == 6.0


@pytest.mark.parametrize(("served", "charged"), [(0, 4.0), (1, 8.0), (2, 12.0), (5, 12.0)])
def test_members_that_did_not_take_part_are_not_charged(served, charged):
    policy = cluster(3)
    submit(policy, 0.0, "a")
    decide(policy, 0.0)
    tell(policy, ev.Completed(4.0, "a/0", measured(4.0), members=served))
    assert policy.ledger.service("a") == charged
    learned = {group: policy.costs.compute_s(KEY, group) for group in (1, 2, 3)}
    assert (
        learned
        == {
            0: {1: 5.0, 2: 5.0, 3: 5.0},  # the median of 6 and 4
            1: {1: 6.0, 2: 4.0, 3: 6.0},
            2: {1: 6.0, 2: 6.0, 3: 4.0},
        }[min(2, served)]
    )


def test_waiting_for_a_members_load_teaches_nothing():
    policy = cluster(2, costs=known(load_s=1.0), missing={"w1": 1.0})
    submit(policy, 0.0, "a")
    assert decide(policy, 0.0).members == ("w1",)
    tell(policy, ev.Completed(4.0, "a/0", measured(4.0)))
    assert policy.costs.compute_s(KEY, 2) == 6.0


def test_a_better_estimate_of_its_size_revises_what_is_in_flight():
    policy = cluster(4)
    pair = Outline("pair", (Step("Fn", "m", "1", gang=2),))
    for name in "ab":
        submit(policy, 0.0, name, pair)
    assert [len(decide(policy, 0.0).members) for _ in "ab"] == [1, 1]
    assert policy.ledger.vtime("b") == 12.0
    tell(policy, ev.Completed(4.0, "a/0", measured(4.0)))
    assert policy.ledger.vtime("b") == 8.0


# Several steps as one task


def test_steps_of_a_gang_run_as_one_task():
    policy = cluster(3, steps_per_task=8)
    submit(policy, 0.0, "a", steps=30)
    decision = decide(policy, 0.0)
    assert (decision.steps, len(decision.members)) == (8, 2)
    assert policy.ledger.vtime("a") == 3 * 8 * 6.0
    assert policy.ledger.largest_charge() == 3 * 6.0, "L_max: one step of the whole gang"


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_whoever_waits_for_an_executor_that_it_holds_interrupts_it(tenant):
    policy = cluster(3)
    submit(policy, 0.0, "a", steps=30)
    decide(policy, 0.0)
    submit(policy, 8.0, "b", PLAIN, tenant=tenant)
    assert decide(policy, 8.0) is None
    assert policy.yields(8.0) == [RaiseYield("a/0", "w0")]
    assert policy.ledger.vtime("a") == 3 * 2 * 6.0, "two steps, on three executors"
    tell(policy, ev.Completed(12.0, "a/0", measured(12.0), steps=2))
    assert decide(policy, 12.0).request == "b"


def test_one_executor_goes_on_for_its_own_tenant():
    policy = cluster(1)
    submit(policy, 0.0, "a", steps=30)
    decide(policy, 0.0)
    submit(policy, 8.0, "b", PLAIN, tenant="a")
    assert policy.yields(8.0) == []


def test_steps_of_different_gangs_are_no_chain():
    steps = [Step("Fn", "m", "1", (n - 1,) if n else (), gang=g) for n, g in enumerate((2, 2, 3))]
    assert chain_lengths(Outline("chain", tuple(steps))) == (2, 1, 1)


# Values


@pytest.mark.parametrize("gang", [0, 17, -1, True, 2.0, "2", None])
def test_a_gang_out_of_range_is_refused(gang):
    with pytest.raises(PolicyError, match=r"gang of position 0 is .*from 1 to 16"):
        Outline("w", (Step("Fn", "m", "1", gang=gang),))


def test_costs_of_gangs_are_saved_and_loaded():
    costs = known()
    costs.observe(KEY, measured(2.0), group=3, loaded_share=0.0, pulled=False)
    restored = CostModel.from_dict(json.loads(json.dumps(costs.to_dict())))
    restored._check()
    assert restored.to_dict() == costs.to_dict()
    assert [restored.compute_s(KEY, group) for group in (1, 2, 3)] == [6.0, 6.0, 2.0]
    old = costs.to_dict()
    del old["gang"]
    assert CostModel.from_dict(old).compute_s(KEY, 3) == 6.0
    taken = CostModel()
    taken.replace_with(costs)
    assert taken.compute_s(KEY, 3) == 2.0


@pytest.mark.parametrize("size", ["1", "0", "x", "-2"])
def test_saved_costs_of_no_gang_are_refused(size):
    saved = known().to_dict() | {"gang": [["Fn", "m", "1", size, 1, [1.0]]]}
    with pytest.raises(PolicyError, match="size of a gang"):
        CostModel.from_dict(saved)


def test_alone_is_guessed_from_what_a_gang_took():
    """Of a key that only gangs have run: their seconds together, as if they had divided all of it."""
    costs = CostModel()
    costs.observe(KEY, measured(2.0), group=4, loaded_share=0.0, pulled=False)
    assert costs.compute_s(KEY) == 8.0
    assert costs.compute_s(KEY, 2) == 8.0
