"""The policy as its drivers see it: hand-computed schedules, every event, every refusal."""

from __future__ import annotations

import pytest

from scheduler_plugin import events as ev
from scheduler_plugin.cost_model import CostModel
from scheduler_plugin.outline import CostKey, chain
from scheduler_plugin.policy import FairPolicy
from scheduler_plugin.requests import State
from scheduler_plugin.settings import Settings
from st2i_dask.errors import PolicyError

ONE = chain("one", [("Fn", "m", "1")])
TWO = chain("two", [("Fn", "m", "1"), ("Fn", "m", "1")])
DEAR = chain("dear", [("Fn", "big", "1")])


def known_costs(**seconds):
    """Costs learned beforehand: compute by model; nothing to load."""
    costs = CostModel()
    for model, compute in seconds.items():
        for _ in range(2):
            costs.observe(
                CostKey("Fn", model, "1"),
                ev.Measured(0.0, compute, 0.0),
                loaded_share=1.0,
                pulled=False,
            )
    return costs


@pytest.fixture
def policy():
    """Slack 0, costs known (m: 1 s, big: 10 s), no loads, executor w1."""
    policy = FairPolicy(Settings(slack_s=0.0, default_cap=3), costs=known_costs(m=1.0, big=10.0))
    policy.handle(ev.ExecutorJoined(0.0, "w1"))
    yield policy
    policy._check()


def submit(policy, now, request, tenant="t", outline=ONE, ready=True):
    policy.handle(ev.RequestSubmitted(now, request, tenant, outline))
    if ready:
        policy.handle(ev.InvocationReady(now, f"{request}/0", request, 0))


def complete(policy, now, key, seconds=1.0, **more):
    return policy.handle(ev.Completed(now, key, ev.Measured(0.0, seconds, 0.0), **more))


def test_a_request_runs_through(policy):
    submit(policy, 0.0, "r", outline=TWO)
    decision = policy.next_decision(0.0)
    assert (decision.key, decision.executor, decision.tenant) == ("r/0", "w1", "t")
    assert (decision.request, decision.position, decision.steps) == ("r", 0, 1)
    assert decision.estimate == (0.0, 1.0, 0.0)
    assert policy.state("r/0") is State.RUNNING
    assert policy.ledger.vtime("t") == 1.0
    assert policy.next_decision(0.5) is None
    assert complete(policy, 2.0, "r/0", 2.0) == []
    assert policy.ledger.vtime("t") == 2.0
    policy.handle(ev.InvocationReady(2.0, "r/1", "r", 1))
    assert policy.next_decision(2.0).key == "r/1"
    complete(policy, 3.0, "r/1")
    assert policy.state("r/1") is State.DONE
    assert not policy.ledger.is_active("t")
    policy.handle(ev.RequestClosed(3.0, "r"))
    assert policy.state("r/1") is None
    assert policy.ledger.service("t") == 3.0


def test_two_tenants_with_unequal_costs_by_hand(policy):
    """1 s against 10 s, slack 0: after one dear run the cheap tenant runs until it has caught up."""
    for number in range(3):
        submit(policy, 0.0, f"c{number}", "cheap")
        submit(policy, 0.0, f"d{number}", "dear", DEAR)
    now, order = 0.0, []
    for cheap in range(3, 25):
        decision = policy.next_decision(now)
        order.append(decision.tenant[0])
        seconds = 10.0 if decision.tenant == "dear" else 1.0
        now += seconds
        complete(policy, now, decision.key, seconds)
        policy.handle(ev.RequestClosed(now, decision.request))
        if decision.tenant == "cheap":
            submit(policy, now, f"c{cheap}", "cheap")
        elif len(order) < 20:
            submit(policy, now, f"d{cheap}", "dear", DEAR)
    # Tie at 0: equal waits, the shorter path wins. Then the dear one, then 9 cheap ones to catch up.
    # At the tie (10 each) the longest-waiting has the word; cheap is shorter.
    assert "".join(order).startswith("cd" + "c" * 9)
    assert order[:22].count("d") == 2


def test_peek_changes_nothing_and_commit_carries_out(policy):
    submit(policy, 0.0, "r")
    decision = policy.peek(0.0)
    assert policy.peek(0.0) == decision
    assert policy.state("r/0") is State.READY
    policy.commit(decision, 0.0)
    assert policy.state("r/0") is State.RUNNING
    with pytest.raises(PolicyError, match="is running and cannot become running"):
        policy.commit(decision, 0.0)


def test_a_stale_decision_is_refused(policy):
    submit(policy, 0.0, "r")
    decision = policy.peek(0.0)
    policy.handle(ev.ExecutorBusy(0.0, "w1"))
    with pytest.raises(PolicyError, match="not idle"):
        policy.commit(decision, 0.0)
    assert policy.state("r/0") is State.READY


def test_never_for_a_busy_executor(policy):
    submit(policy, 0.0, "r")
    policy.handle(ev.ExecutorBusy(0.0, "w1"))
    assert policy.next_decision(0.0) is None
    policy.handle(ev.ExecutorIdle(1.0, "w1"))
    assert policy.next_decision(1.0).executor == "w1"
    policy.handle(ev.ExecutorIdle(1.0, "w1"))
    assert not policy.is_idle("w1"), "an invocation still runs there"


def test_the_resident_model_wins_and_the_report_replaces_what_was_known(policy):
    policy.handle(ev.ExecutorJoined(0.0, "w2", 0, {"m": 0.0}))
    submit(policy, 0.0, "r")
    decision = policy.next_decision(0.0)
    # Loading takes 0 s by what was learned: equal, and w1 joined first.
    assert decision.executor == "w1"
    complete(policy, 1.0, "r/0", missing={}, free_bytes=5)
    assert policy._placement.missing_on("w1", "m") == 1.0
    policy.handle(ev.ResidencyReported(1.0, "w1", {"m": 0.5}, 7))
    assert policy._placement.missing_on("w1", "m") == 0.5


def test_load_and_pull_are_in_the_estimate():
    policy = FairPolicy(Settings(bandwidth=100.0))
    policy.handle(ev.ExecutorJoined(0.0, "w1", 0, {"m": 0.5}))
    policy.handle(ev.RequestSubmitted(0.0, "r", "t", ONE))
    policy.handle(ev.InvocationReady(0.0, "r/0", "r", 0, 300, {"w1": 100}))
    estimate = policy.next_decision(0.0).estimate
    assert estimate.load_s == policy.costs.load_s(CostKey("Fn", "m", "1")) * 0.5 > 0
    assert estimate.transfer_s == 2.0
    assert policy.ledger.vtime("t") == estimate.total_s


def test_a_better_estimate_revises_charges_in_flight():
    policy = FairPolicy(Settings())
    for name in ("w1", "w2"):
        policy.handle(ev.ExecutorJoined(0.0, name))
    for request in ("a", "b"):
        submit(policy, 0.0, request)
        policy.next_decision(0.0)
    assert policy.ledger.vtime("t") == 12.0  # two times 1 s compute and 5 s load: the priors
    policy.handle(ev.Completed(1.0, "a/0", ev.Measured(0.5, 0.25, 0.0)))
    assert policy.ledger.vtime("t") == 1.5
    policy._check()


# Ends other than completion


def test_a_failure_charges_what_was_used_and_kills_what_is_downstream(policy):
    submit(policy, 0.0, "r", outline=TWO)
    policy.next_decision(0.0)
    policy.handle(ev.Failed(3.0, "r/0", ev.Measured(0.0, 0.25, 0.0)))
    assert policy.ledger.vtime("t") == 0.25
    assert policy.state("r/0") is State.DEAD
    assert not policy.ledger.is_active("t")
    assert policy.is_idle("w1")
    policy.handle(ev.RequestClosed(3.0, "r"))


def test_a_lost_run_is_charged_by_the_clock_and_runs_again(policy):
    submit(policy, 0.0, "r")
    policy.next_decision(0.0)
    policy.handle(ev.Lost(0.75, "r/0"))
    assert policy.ledger.vtime("t") == 0.75
    assert policy.state("r/0") is State.BLOCKED
    policy.handle(ev.InvocationReady(1.0, "r/0", "r", 0))
    assert policy.next_decision(1.0).key == "r/0"
    complete(policy, 2.0, "r/0")
    assert policy.ledger.service("t") == 1.75


def test_a_worker_that_leaves_loses_its_run_and_may_come_back(policy):
    submit(policy, 0.0, "r")
    policy.next_decision(0.0)
    policy.handle(ev.ExecutorLeft(0.5, "w1"))
    assert policy.state("r/0") is State.BLOCKED
    assert policy.ledger.vtime("t") == 0.5
    policy.handle(ev.InvocationReady(0.5, "r/0", "r", 0))
    assert policy.next_decision(0.5) is None
    policy.handle(ev.ExecutorJoined(1.0, "w1"))
    assert policy.next_decision(1.0).executor == "w1"


def test_cancelled_while_queued_costs_nothing(policy):
    submit(policy, 0.0, "r")
    policy.handle(ev.Cancelled(0.0, "r/0"))
    assert policy.next_decision(0.0) is None
    assert policy.ledger.vtime("t") == 0.0
    assert not policy.ledger.is_active("t")


def test_cancelled_while_running_occupies_and_costs_until_it_has_ended(policy):
    submit(policy, 0.0, "r")
    policy.next_decision(0.0)
    policy.handle(ev.Cancelled(0.25, "r/0"))
    assert not policy.is_idle("w1")
    assert policy.ledger.is_active("t")
    assert policy.ledger.vtime("t") == 1.0
    policy.handle(ev.Drained(0.75, "w1", ev.Measured(0.0, 0.5, 0.0)))
    assert policy.is_idle("w1")
    assert policy.ledger.vtime("t") == 0.5
    assert not policy.ledger.is_active("t")
    with pytest.raises(PolicyError, match="no cancelled invocation"):
        policy.handle(ev.Drained(1.0, "w1"))


@pytest.mark.parametrize("end", ["idle", "left", "stopped"])
def test_other_ends_of_a_cancelled_run_are_charged_by_the_clock(policy, end):
    submit(policy, 0.0, "r")
    policy.next_decision(0.0)
    policy.handle(ev.Cancelled(0.25, "r/0", stopped=end == "stopped"))
    if end == "idle":
        policy.handle(ev.ExecutorIdle(0.25, "w1"))
    elif end == "left":
        policy.handle(ev.ExecutorLeft(0.25, "w1"))
    assert policy.ledger.vtime("t") == 0.25
    assert not policy.ledger.is_active("t")


def test_a_key_cancelled_while_running_can_be_ready_again_elsewhere(policy):
    policy.handle(ev.ExecutorJoined(0.0, "w2"))
    submit(policy, 0.0, "r")
    policy.next_decision(0.0)
    policy.handle(ev.RequestClosed(0.1, "r"))
    submit(policy, 0.2, "r")
    assert policy.next_decision(0.2).executor == "w2"
    policy._check()
    policy.handle(ev.Drained(0.5, "w1"))
    complete(policy, 1.2, "r/0")


def test_closing_a_request_drops_what_is_queued_and_drains_what_runs(policy):
    fan = chain("fan", [("Fn", "m", "1")] * 3)
    policy.handle(ev.ExecutorJoined(0.0, "w2"))
    submit(policy, 0.0, "r", outline=fan)
    submit(policy, 0.0, "s", outline=fan)
    assert policy.next_decision(0.0).request == "r"
    submit(policy, 0.0, "q")
    for request in ("r", "s"):
        policy.handle(ev.RequestClosed(0.5, request))
        policy._check()
    assert policy.next_decision(0.5) == ("q/0", "w2", "t", "q", 0, (0.0, 1.0, 0.0), 1, (), ())
    assert policy.queued == 0
    assert not policy.is_idle("w1"), "the cancelled run has not ended"


def test_a_result_that_was_lost_is_computed_again(policy):
    submit(policy, 0.0, "r")
    policy.next_decision(0.0)
    complete(policy, 1.0, "r/0")
    assert not policy.ledger.is_active("t")
    policy.handle(ev.InvocationReady(2.0, "r/0", "r", 0))
    assert policy.ledger.is_active("t")
    assert policy.next_decision(2.0).key == "r/0"


def test_an_invocation_whose_input_was_lost_waits_again(policy):
    submit(policy, 0.0, "r")
    policy.handle(ev.InvocationUnready(0.0, "r/0"))
    assert policy.next_decision(0.0) is None
    assert policy.state("r/0") is State.BLOCKED
    policy.handle(ev.InvocationReady(1.0, "r/0", "r", 0))
    assert policy.next_decision(1.0).key == "r/0"


def test_skipped_positions_need_no_run(policy):
    policy.handle(ev.RequestSubmitted(0.0, "r", "t", TWO))
    policy.handle(ev.InvocationReady(0.0, "r/0", "r", 0))
    policy.handle(ev.Skipped(0.0, "r", (0,)))
    assert policy.next_decision(0.0) is None
    policy.handle(ev.InvocationReady(0.0, "r/1", "r", 1))
    assert policy.next_decision(0.0).key == "r/1"
    with pytest.raises(PolicyError, match="is running"):
        policy.handle(ev.Skipped(0.0, "r", (0, 1)))
    with pytest.raises(PolicyError, match="position 7"):
        policy.handle(ev.Skipped(0.0, "r", (0, 7)))


# Admission and settings


def test_over_the_cap_a_submit_is_refused_at_once_with_the_limit(policy):
    for number in range(3):
        submit(policy, 0.0, f"r{number}")
    assert policy.refusal("other") is None
    refusal = policy.refusal("t")
    assert "'t' has 3 queued requests" in refusal
    assert "its limit is 3" in refusal
    assert policy.refusal("other", 3) is None
    assert policy.refusal("other", 4) is not None
    with pytest.raises(PolicyError, match=r"'r3' refused: tenant 't' has 3 queued.*limit is 3"):
        policy.handle(ev.RequestSubmitted(0.0, "r3", "t", ONE))
    assert not policy.has_request("r3")
    policy.next_decision(0.0)  # one has started: it is not queued any more
    policy.handle(ev.RequestSubmitted(0.0, "r3", "t", ONE))


def test_settings_change_while_it_runs(policy):
    submit(policy, 0.0, "a", "ahead")
    submit(policy, 0.0, "b", "behind")
    number = policy.ledger.charge("ahead", 2.0)
    policy.ledger.settle(number, 2.0)
    policy._charging._vtime_moved("ahead")
    assert policy.peek(1.0).tenant == "behind"
    changed = Settings(slack_s=2.0, weights={"behind": 4.0}, default_cap=None)
    policy.handle(ev.SettingsChanged(1.0, changed))
    assert policy.settings is changed
    assert policy.peek(1.0).tenant == "ahead"  # now both are within the slack, and "a" < "b"
    assert policy.refusal("ahead") is None
    policy.next_decision(1.0)
    complete(policy, 2.0, "a/0")
    policy.next_decision(2.0)
    assert policy.ledger.vtime("behind") == 0.25


def test_replaced_costs_hold_for_what_is_open(policy):
    submit(policy, 0.0, "a", "x")
    submit(policy, 0.0, "b", "y")
    first = policy.next_decision(0.0)
    key = policy._book.requests["a"].outline.cost_keys[0]
    learned = CostModel()
    for _ in range(2):
        learned.observe(key, ev.Measured(0.0, 7.0, 0.0), loaded_share=0.0, pulled=False)
    policy.handle(ev.CostsReplaced(1.0, learned))
    policy._check()  # paths and lanes too
    assert policy.costs.compute_s(key) == 7.0
    assert policy.ledger.vtime(first.tenant) == pytest.approx(policy.costs.load_s(key) + 7.0)


def test_the_tenants_table(policy):
    submit(policy, 0.0, "a", "x")
    submit(policy, 0.0, "b", "x")
    submit(policy, 0.0, "c", "y")
    policy.next_decision(0.0)
    complete(policy, 3.0, "a/0", 3.0)
    policy.next_decision(3.0)
    rows = {row.tenant: row for row in policy.tenants(3.0)}
    assert (rows["x"].vtime_s, rows["x"].queued, rows["x"].running) == (3.0, 1, 0)
    assert (rows["y"].queued, rows["y"].running, rows["y"].share) == (0, 1, 0.0)
    assert rows["x"].share == 1.0
    assert policy.tenants(100.0)[0].share == 0.0
    assert [row.tenant for row in policy.tenants(100.0)] == ["x", "y"]


# Refusals: the state is unchanged


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (ev.ExecutorJoined(1.0, "w1"), "already there"),
        (ev.ExecutorLeft(1.0, "w9"), "executor 'w9' is not known"),
        (ev.ExecutorBusy(1.0, "w9"), "not known"),
        (ev.ExecutorIdle(1.0, "w9"), "not known"),
        (ev.ResidencyReported(1.0, "w9", {}, 0), "not known"),
        (ev.RequestSubmitted(1.0, "r", "t", ONE), "already open"),
        (ev.RequestClosed(1.0, "x"), "request 'x' is not open"),
        (ev.InvocationReady(1.0, "k", "x", 0), "request 'x' is not open"),
        (ev.InvocationReady(1.0, "k", "r", 2), "allowed are 0 to 1"),
        (ev.InvocationReady(1.0, "k", "r", -1), "allowed are 0 to 1"),
        (ev.InvocationReady(1.0, "k", "r", True), "allowed are 0 to 1"),
        (ev.InvocationReady(1.0, "r/0", "r", 0), "is running and cannot become ready"),
        (ev.InvocationReady(1.0, "other", "r", 0), "already belongs to 'r/0'"),
        (ev.InvocationReady(1.0, "r/0", "r", 1), "the key already belongs to 'r'"),
        (ev.InvocationUnready(1.0, "r/0"), "is running and cannot become blocked"),
        (ev.InvocationUnready(1.0, "x"), "never ready"),
        (ev.Completed(1.0, "x", ev.Measured()), "never ready"),
        (ev.Completed(1.0, "q/0", ev.Measured()), "is ready and cannot become done"),
        (ev.Completed(1.0, "r/0", ev.Measured(), steps=2), "reports 2 steps"),
        (ev.Failed(1.0, "q/0"), "is ready and cannot become dead"),
        (ev.Lost(1.0, "q/0"), "is ready and cannot become blocked"),
        (ev.Cancelled(1.0, "x"), "never ready"),
        (ev.Drained(1.0, "w1"), "no cancelled invocation"),
        (ev.Skipped(1.0, "x", ()), "not open"),
        (ev.ExecutorLeft(0.25, "w1"), "one monotonic clock"),
        ("nonsense", "has no attribute"),
    ],
)
def test_illegal_events_are_refused_and_change_nothing(policy, event, message):
    submit(policy, 0.5, "r", outline=TWO)
    policy.next_decision(0.5)
    submit(policy, 0.5, "q")

    def snapshot():
        return (
            policy.tenants(0.5),
            policy.queued,
            policy.idle_executors,
            {key: policy.state(key) for key in ("r/0", "r/1", "q/0")},
            policy.ledger.active(),
        )

    assert policy.state("r/0") is State.RUNNING
    before = snapshot()
    with pytest.raises((PolicyError, AttributeError), match=message):
        policy.handle(event)
    policy._now = 0.5
    assert snapshot() == before
    policy._check()


def test_an_object_that_is_no_known_event_is_refused(policy):
    with pytest.raises(PolicyError, match="is not an event"):
        policy.handle(ev.Event(0.0))
