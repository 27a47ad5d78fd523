"""Places and waits of requests, against small cases worked out by hand."""

from __future__ import annotations

import pytest

from scheduler_plugin import events as ev
from scheduler_plugin.cost_model import CostModel
from scheduler_plugin.outline import CostKey, chain
from scheduler_plugin.policy import FairPolicy
from scheduler_plugin.prospects import prospects
from scheduler_plugin.settings import Settings

TWO = chain("two", [("Fn", "m", "1"), ("Fn", "m", "1")])  # 2 s


@pytest.fixture
def policy():
    """1 s an invocation, executor w1, weight of b: 2."""
    costs = CostModel()
    for _ in range(2):
        key = CostKey("Fn", "m", "1")
        costs.observe(key, ev.Measured(0.0, 1.0, 0.0), loaded_share=1.0, pulled=False)
    policy = FairPolicy(Settings(weights={"b": 2.0}), costs=costs)
    policy.handle(ev.ExecutorJoined(0.0, "w1"))
    yield policy
    policy._check()


def submit(policy, request, tenant):
    policy.handle(ev.RequestSubmitted(0.0, request, tenant, TWO))
    policy.handle(ev.InvocationReady(0.0, f"{request}/0", request, 0))


def row(done, total, place, wait_s):
    return {"done": done, "total": total, "place": place, "wait_s": pytest.approx(wait_s)}


def test_alone_it_is_first_and_takes_its_own_time(policy):
    submit(policy, "r", "a")
    assert prospects(policy, ["r"], 0.0) == {"r": row(0, 2, 1, 2.0)}


def test_unknown_requests_are_left_out(policy):
    assert prospects(policy, ["r"], 0.0) == {}


def test_progress_and_no_place_once_it_has_started(policy):
    submit(policy, "r", "a")
    assert policy.next_decision(0.0).key == "r/0"
    assert prospects(policy, ["r"], 0.0) == {"r": row(0, 2, None, 2.0)}
    policy.handle(ev.Completed(1.0, "r/0", ev.Measured(0.0, 1.0, 0.0)))
    assert prospects(policy, ["r"], 1.0) == {"r": row(1, 2, None, 1.0)}


def test_the_wait_falls_while_what_is_before_it_runs_but_not_below_what_is_left(policy):
    submit(policy, "a0", "a")
    submit(policy, "a1", "a")
    assert policy.next_decision(0.0).key == "a0/0"
    for now, wait_s in [(0.0, 4.0), (0.25, 3.75), (1.0, 3.0), (9.0, 3.0)]:
        assert prospects(policy, ["a1"], now)["a1"] == row(0, 2, 1, wait_s)


def test_steps_that_somebody_has_counted_go_before_the_clock(policy):
    submit(policy, "a0", "a")
    policy.next_decision(0.0)
    assert prospects(policy, ["a0"], 0.5, {"a0": 0})["a0"]["wait_s"] == pytest.approx(2.0)


def test_more_executors_do_not_shorten_what_comes_one_after_the_other(policy):
    for n in range(2, 5):
        policy.handle(ev.ExecutorJoined(0.0, f"w{n}"))
    submit(policy, "a0", "a")
    assert prospects(policy, ["a0"], 0.0)["a0"] == row(0, 2, 1, 2.0)
    for n in range(1, 6):
        submit(policy, f"a{n}", "a")
    # Ten seconds before the last one's own, on four executors; then its two.
    assert prospects(policy, ["a5"], 0.0)["a5"] == row(0, 2, 6, 10 / 4 + 2)
    policy.next_decision(0.0)
    assert prospects(policy, ["a0"], 0.5)["a0"] == row(0, 2, None, 1.5)


def test_own_requests_come_in_order_and_others_by_weight(policy):
    for n in range(3):
        submit(policy, f"a{n}", "a")
    for n in range(5):
        submit(policy, f"b{n}", "b")
    # Before a1's end a has 4 s; b, of weight 2, has 8 of its 10 s meanwhile.
    assert prospects(policy, ["a1", "b4"], 0.0) == {
        "a1": row(0, 2, 2 + 4, 4.0 + 8.0),
        "b4": row(0, 2, 5 + 2, 10.0 + 5.0),
    }


def test_without_an_executor_nobody_knows_when(policy):
    submit(policy, "r", "a")
    policy.handle(ev.ExecutorLeft(0.0, "w1"))
    assert prospects(policy, ["r"], 0.0)["r"]["wait_s"] is None
