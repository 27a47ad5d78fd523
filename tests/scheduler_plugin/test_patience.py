"""What had better wait: for whom, for how long at most, and what goes in its place."""

from __future__ import annotations

import pytest

from scheduler_plugin import events as ev
from scheduler_plugin.cost_model import CostModel
from scheduler_plugin.fair_queue import FEW
from scheduler_plugin.outline import CostKey, chain
from scheduler_plugin.patience import PATIENCE
from scheduler_plugin.policy import MOST_HELD, FairPolicy
from scheduler_plugin.rivals import CHOOSERS
from scheduler_plugin.settings import Settings

LOAD_S = 20.0
COMPUTE_S = 1.0
SOON_S = LOAD_S / PATIENCE  # what is worth waiting for, with everybody's turn


def outline(model):
    return chain(f"w-{model}", [("Fn", model, "1")])


def known(*models, load_s=LOAD_S):
    costs = CostModel()
    for model in models:
        for _ in range(2):
            used = ev.Measured(load_s, COMPUTE_S, 0.0)
            costs.observe(CostKey("Fn", model, "1"), used, loaded_share=1.0, pulled=False)
    return costs


def submit(policy, now, name, model, tenant="t"):
    policy.handle(ev.RequestSubmitted(now, name, tenant, outline(model)))
    policy.handle(ev.InvocationReady(now, f"{name}/0", name, 0))


def decide(policy, now):
    decision = policy.next_decision(now)
    policy._check()
    return decision


def cluster(resident, *, costs=None, chooser="fair", **settings):
    """resident: by executor, the models that it has."""
    policy = FairPolicy(
        Settings(slack_s=100.0, **settings),
        costs=costs or known("a", "b"),
        chooser=CHOOSERS[chooser],
    )
    for name, models in resident.items():
        policy.handle(ev.ExecutorJoined(0.0, name, 100, dict.fromkeys(models, 0.0)))
    return policy


@pytest.fixture
def policy():
    """w1 has model a and runs it until 1 s; w2 has nothing."""
    policy = cluster({"w1": "a", "w2": ""})
    submit(policy, 0.0, "first", "a")
    assert decide(policy, 0.0).executor == "w1"
    return policy


def test_it_waits_for_an_executor_that_is_done_in_a_moment(policy):
    submit(policy, 0.5, "second", "a")
    assert decide(policy, 0.5) is None
    assert policy.waits_until == 0.5 + LOAD_S
    policy.handle(ev.Completed(1.0, "first/0", ev.Measured(0.0, COMPUTE_S, 0.0)))
    assert decide(policy, 1.0).executor == "w1"
    assert policy.waits_until is None


def test_others_go_in_its_place(policy):
    submit(policy, 0.5, "second", "a")
    submit(policy, 0.6, "third", "b")
    decision = decide(policy, 0.6)
    assert (decision.request, decision.executor) == ("third", "w2")


def test_a_long_run_is_not_waited_for(policy):
    """Its turn and the one before it would take longer than a tenth of the load."""
    for name in ("second", "third"):
        submit(policy, 0.0, name, "a")
    assert decide(policy, 0.0).executor == "w2"


def test_a_load_that_is_short_is_not_avoided():
    policy = cluster({"w1": "a", "w2": ""}, costs=known("a", load_s=1.0))
    submit(policy, 0.0, "first", "a")
    decide(policy, 0.0)
    submit(policy, 0.5, "second", "a")
    assert decide(policy, 0.5).executor == "w2"


def test_a_load_that_was_never_measured_is_worth_no_wait():
    costs = CostModel()
    for _ in range(2):
        used = ev.Measured(0.0, COMPUTE_S, 0.0)
        costs.observe(CostKey("Fn", "a", "1"), used, loaded_share=0.0, pulled=False)
    policy = cluster({"w1": "a", "w2": ""}, costs=costs)
    submit(policy, 0.0, "first", "a")
    decide(policy, 0.0)
    submit(policy, 0.9, "second", "a")
    assert decide(policy, 0.9).executor == "w2"


def test_what_nobody_has_is_loaded_at_once(policy):
    submit(policy, 0.5, "second", "b")
    assert decide(policy, 0.5).executor == "w2"


def test_where_one_that_has_it_is_idle_nothing_waits():
    policy = cluster({"w1": "a", "w2": "", "w3": "a"})
    for name in ("first", "second"):
        submit(policy, 0.0, name, "a")
    assert {decide(policy, 0.0).executor for _ in "ab"} == {"w1", "w3"}


def test_a_run_that_does_not_end_as_expected_is_waited_for_no_longer_than_the_load(policy):
    submit(policy, 0.5, "second", "a")
    assert decide(policy, 0.5) is None
    until = policy.waits_until
    assert decide(policy, until - 1e-3) is None
    assert policy.waits_until == until
    decision = decide(policy, until)
    assert (decision.request, decision.executor) == ("second", "w2")


def test_the_next_one_has_its_own_time(policy):
    submit(policy, 0.5, "second", "a")
    assert decide(policy, 0.5) is None
    policy.handle(ev.RequestClosed(0.7, "second"))
    submit(policy, 0.8, "third", "a")
    assert decide(policy, 0.8) is None
    assert policy.waits_until == 0.8 + LOAD_S


def test_a_run_that_hands_back_is_waited_for_from_then_on():
    policy = cluster({"w1": "a", "w2": ""}, steps_per_task=32)
    policy.handle(ev.RequestSubmitted(0.0, "long", "t", outline("a")))
    policy.handle(ev.InvocationReady(0.0, "long/0", "long", 0, steps=32))
    assert decide(policy, 0.0).steps == 32
    submit(policy, 4.5, "b1", "b", tenant="o")
    decide(policy, 4.5)
    submit(policy, 4.5, "second", "a", tenant="o")
    assert decide(policy, 4.5) is None, "no executor is idle"
    assert [told.key for told in policy.yields(4.5)] == ["long/0"]
    policy.handle(ev.Completed(4.6, "b1/0", ev.Measured(0.0, 0.1, 0.0)))
    assert decide(policy, 4.6) is None, "w2 is idle, w1 is done at 5 s"
    assert policy.waits_until == pytest.approx(4.6 + LOAD_S)


def test_no_more_than_some_models_are_passed_over():
    models = [f"m{n}" for n in range(MOST_HELD + 2)]
    policy = cluster({f"w{m}": [m] for m in models} | {"x": ""}, costs=known(*models))
    for model in models:
        submit(policy, 0.0, f"first-{model}", model)
        decide(policy, 0.0)
    for model in models:
        submit(policy, 0.5, f"second-{model}", model)
    decision = decide(policy, 0.5)
    assert (decision.executor, decision.request) == ("x", f"second-{models[MOST_HELD]}")


@pytest.mark.parametrize("chooser", CHOOSERS)
def test_rivals_are_held_back_as_well(chooser):
    policy = cluster({"w1": "a", "w2": ""}, chooser=chooser)
    submit(policy, 0.0, "first", "a")
    decide(policy, 0.0)
    submit(policy, 0.5, "second", "a")
    assert decide(policy, 0.5) is None
    policy.handle(ev.Completed(1.0, "first/0", ev.Measured(0.0, COMPUTE_S, 0.0)))
    assert decide(policy, 1.0).executor == "w1"


@pytest.mark.parametrize("lanes", [2, FEW, FEW + 8])
def test_a_tenant_that_is_ahead_does_not_go_in_its_place(lanes):
    """Layer 1 comes first: whoever is beyond the slack waits, however few are eligible."""
    policy = cluster({"w1": "a", "w2": "", "w3": "b"})
    submit(policy, 0.0, "first", "a", tenant="poor")
    decide(policy, 0.0)
    for n in range(lanes - 1):
        policy.ledger.activate(f"rich{n}")
        policy.ledger.settle(policy.ledger.charge(f"rich{n}", 500.0), 500.0)
        submit(policy, 0.1, f"rich-{n}", "b", tenant=f"rich{n}")
    submit(policy, 0.5, "second", "a", tenant="poor")
    assert policy._chooser.lanes == lanes
    assert decide(policy, 0.5) is None
    assert policy.waits_until is not None
