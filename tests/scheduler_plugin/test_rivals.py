"""The rivals' choices by hand: same interface as the fair queue, other order."""

from __future__ import annotations

import pytest

from scheduler_plugin import events as ev
from scheduler_plugin.outline import CostKey, chain
from scheduler_plugin.policy import FairPolicy
from scheduler_plugin.rivals import CHOOSERS, chooser
from scheduler_plugin.settings import Settings
from st2i_dask.errors import PolicyError

LONG = chain("long", [("Fn", "m", "1")] * 3)
SHORT = chain("short", [("Fn", "m", "1")])
DEAR = chain("dear", [("Fn", "big", "1")])
SECONDS = {"m": 1.0, "big": 10.0}


def order(name, requests, decisions, **settings):
    """Requests in the order in which one executor runs their invocations."""
    policy = FairPolicy(Settings(slack_s=0.0, **settings), chooser=chooser(name))
    for model, seconds in SECONDS.items():
        for _ in range(2):
            policy.costs.observe(
                CostKey("Fn", model, "1"),
                ev.Measured(0.0, seconds, 0.0),
                loaded_share=1.0,
                pulled=False,
            )
    policy.handle(ev.ExecutorJoined(0.0, "w"))
    for request, (tenant, outline) in requests.items():
        policy.handle(ev.RequestSubmitted(0.0, request, tenant, outline))
        policy.handle(ev.InvocationReady(0.0, f"{request}/0", request, 0))
    now, found = 0.0, []
    for _ in range(decisions):
        decision = policy.next_decision(now)
        if decision is None:
            break
        found.append(decision.request)
        now += decision.estimate.total_s
        policy.handle(
            ev.Completed(now, decision.key, ev.Measured(0.0, decision.estimate.total_s, 0.0))
        )
        after = decision.position + 1
        if after < len(requests[decision.request][1]):
            key = f"{decision.request}/{after}"
            policy.handle(ev.InvocationReady(now, key, decision.request, after))
        policy._check()
    return "".join(found)


def test_fifo_serves_requests_in_the_order_of_their_submission():
    requests = {"b": ("t", LONG), "a": ("u", SHORT), "c": ("t", SHORT)}
    assert order("fifo", requests, 9) == "bbbac"


def test_sjf_serves_the_request_with_the_fewest_seconds():
    requests = {"d": ("t", DEAR), "l": ("u", LONG), "s": ("v", SHORT), "r": ("t", SHORT)}
    assert order("sjf", requests, 9) == "srllld"


def test_vtc_counts_operations_whatever_they_cost():
    requests = {f"d{n}": ("dear", DEAR) for n in range(3)}
    requests |= {f"c{n}": ("cheap", SHORT) for n in range(3)}
    assert order("vtc", requests, 6) == "d0c0d1c1d2c2"


def test_vtc_divides_by_the_weight():
    requests = {f"h{n}": ("heavy", SHORT) for n in range(4)}
    requests |= {f"l{n}": ("light", SHORT) for n in range(2)}
    found = order("vtc", requests, 6, weights={"heavy": 2.0})
    assert found == "h0l0h1h2l1h3"


def test_vtc_lifts_a_newcomer_to_the_least_count():
    policy = FairPolicy(Settings(), chooser=chooser("vtc"))
    policy.handle(ev.ExecutorJoined(0.0, "w"))
    for number in range(5):
        policy.handle(ev.RequestSubmitted(0.0, f"r{number}", "first", SHORT))
        policy.handle(ev.InvocationReady(0.0, f"r{number}/0", f"r{number}", 0))
    for number in range(3):
        policy.next_decision(float(number))
        policy.handle(ev.Completed(number + 1.0, f"r{number}/0", ev.Measured(0.0, 1.0, 0.0)))
    policy.handle(ev.RequestSubmitted(3.0, "new", "newcomer", SHORT))
    policy.handle(ev.InvocationReady(3.0, "new/0", "new", 0))
    assert policy._chooser._counts == {"first": 3.0, "newcomer": 3.0}


def test_unknown_names_are_refused_with_the_names_there_are():
    with pytest.raises(PolicyError, match="no policy is called 'best'; there are fair, fifo"):
        chooser("best")
    assert set(CHOOSERS) == {"fair", "fifo", "sjf", "vtc"}
