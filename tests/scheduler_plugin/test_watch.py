"""What is recorded of a policy is what it did; a closed watch refers to no policy."""

import gc
import weakref

import pytest

from scheduler_plugin import events as ev
from scheduler_plugin import glance
from scheduler_plugin.glance import Occupant
from scheduler_plugin.journal import Journal
from scheduler_plugin.outline import Outline, Step, chain
from scheduler_plugin.policy import FairPolicy
from scheduler_plugin.settings import Settings
from scheduler_plugin.watch import Facts, Watch
from st2i_dask.bench._crowd import Crowd

TWO = chain("pair", [("Text", "m1", "b"), ("Unet", "m2", "b")])


def started(executors=1):
    policy = FairPolicy(Settings())
    for number in range(executors):
        policy.handle(ev.ExecutorJoined(0.0, f"tcp://{number}", 1 << 30))
    policy.handle(ev.RequestSubmitted(1.0, "r1", "ann", TWO))
    policy.handle(ev.InvocationReady(1.0, "k0", "r1", 0))
    decision = policy.next_decision(2.0)
    assert decision is not None
    return policy


def test_standings_and_occupants():
    policy = started(executors=3)
    policy.handle(ev.ExecutorBusy(2.5, "tcp://1"))
    ann, nobody = glance.standings(policy, ["ann", "nobody"])
    assert (ann.queued, ann.running, ann.active, ann.ready) == (0, 1, True, False)
    assert ann.vtime_s == policy.ledger.vtime("ann") > 0
    assert nobody == (0.0, 0.0, 0, 0, False, False)
    running = policy.peek  # nothing more to decide
    assert running(3.0) is None
    (where,) = {"tcp://0", "tcp://2"} & glance.occupants(policy).keys()
    assert glance.occupants(policy) == {
        where: Occupant(where, "runs", "ann", "r1", "Text", "pair", 2.0),
        "tcp://1": Occupant("tcp://1", "plain"),
    }
    assert glance.executors(policy) == ["tcp://0", "tcp://1", "tcp://2"]
    assert glance.tenant_names(policy, "an", 5) == ["ann"]
    assert glance.tenant_names(policy, "bob", 5) == []
    policy.handle(ev.Cancelled(4.0, "k0", stopped=False))
    assert glance.occupants(policy)[where].state == "ends"


def test_an_executor_that_is_held_for_another_says_for_whom():
    policy = FairPolicy(Settings())
    for name in ("tcp://0", "tcp://1"):
        policy.handle(ev.ExecutorJoined(0.0, name, 1 << 30))
    outline = Outline("wide", (Step("Unet", "m", "b", gang=2),))
    policy.handle(ev.RequestSubmitted(1.0, "r1", "ann", outline))
    policy.handle(ev.InvocationReady(1.0, "k0", "r1", 0))
    decision = policy.next_decision(2.0)
    assert len(decision.members) == 1
    found = glance.occupants(policy)
    leader, (member,) = decision.executor, decision.members
    assert (found[leader].state, found[leader].leader) == ("runs", "")
    assert found[member] == Occupant(member, "assists", "ann", "r1", "Unet", "wide", 2.0, 1, leader)
    assert [run.executor for run in glance.runs(policy)] == [leader]


def told(policy, journal, event):
    policy.handle(event)
    journal.happened(event)


def watched():
    """A policy, its journal, and a watch that the journal tells; k0 runs since 2.0."""
    policy, journal = FairPolicy(Settings()), Journal()
    watch = Watch(policy)
    journal.watch(watch)
    told(policy, journal, ev.ExecutorJoined(0.0, "tcp://0", 1 << 30))
    told(policy, journal, ev.RequestSubmitted(1.0, "r1", "ann", TWO))
    told(policy, journal, ev.InvocationReady(1.0, "k0", "r1", 0))
    journal.dispatched(policy.next_decision(2.0), 2.0)
    return policy, journal, watch


def test_a_run_is_recorded_with_what_its_worker_measured():
    policy, journal, watch = watched()
    watch.sample(2.5)
    used = ev.Measured(0.5, 0.25, 0.0)
    told(policy, journal, ev.Completed(3.0, "k0", used))
    (only,) = watch.requests.latest(9)
    assert (only.request, only.tenant, only.workflow, only.submitted) == ("r1", "ann", "pair", 1.0)
    (run,) = only.runs
    assert (run.fn, run.executor, run.started, run.stopped) == ("Text", "tcp://0", 2.0, 3.0)
    assert (run.load_s, run.compute_s, run.steps, run.outcome) == (0.5, 0.25, 1, "done")
    watch.sample(4.0)
    names, used = watch.tenants.used()
    assert (names, used.tolist()) == (["ann"], [0.75])
    watch._check()


def test_a_run_that_is_lost_counts_no_device_seconds():
    policy, journal, watch = watched()
    told(policy, journal, ev.Lost(3.0, "k0"))
    (run,) = watch.requests.latest(1)[0].runs
    assert (run.outcome, run.compute_s) == ("lost", 0.0)


def test_a_request_that_is_cancelled_has_ended_then_whether_it_ran_or_not():
    policy, journal, watch = watched()
    told(policy, journal, ev.Completed(3.0, "k0", ev.Measured(0.5, 0.25, 0.0)))
    assert watch.requests.latest(1)[0].outcome is None
    told(policy, journal, ev.RequestSubmitted(3.5, "r2", "bob", TWO))
    for request in ("r1", "r2"):
        told(policy, journal, ev.RequestClosed(4.0, request))
    ends = [(h.request, h.outcome, h.over, len(h.runs)) for h in watch.requests.latest(9)]
    assert ends == [("r2", "cancelled", 4.0, 0), ("r1", "cancelled", 4.0, 1)]
    watch._check()


def test_a_closed_watch_refers_to_no_policy_and_records_nothing():
    policy, journal, watch = watched()
    gone = weakref.ref(policy)
    watch.sample(2.5)
    watch.close()
    told(policy, journal, ev.Completed(3.0, "k0", ev.Measured(0.5, 0.25, 0.0)))
    del policy
    gc.collect()
    assert gone() is None
    watch.sample(3.0)
    assert len(watch.tenants) == 1
    assert len(watch.requests) == 0


def test_a_busy_cluster_is_told_as_the_policy_has_it():
    crowd = Crowd(6, 20, mean_s=0.5)
    watch = Watch(crowd.policy)
    crowd.journal.watch(watch)
    for second in range(1, 30):
        crowd.advance(float(second))
        watch.sample(float(second))
        watch._check()
    crowd.policy._check()
    rows = {row.tenant: row for row in crowd.policy.tenants(29.0)}
    names, vtimes, queued, running = watch.tenants.latest()
    assert set(names) == set(rows)
    for at, name in enumerate(names):
        assert vtimes[at] == pytest.approx(rows[name].vtime_s)
        assert (queued[at], running[at]) == (rows[name].queued, rows[name].running)
    spent = sum(s.compute_s + s.load_s + s.transfer_s for s in watch.requests.spent.values())
    assert spent == pytest.approx(sum(row.service_s for row in rows.values()))


def test_answers_of_executors_age_and_are_forgotten():
    facts = Facts()
    facts.answer(1.0, "a", {"models": []})
    facts.no_answer("a", "no answer within 2 s")
    facts.no_answer("b", "no answer within 2 s")
    assert set(facts.silent) == {"a", "b"}
    assert facts.answered == {"a": 1.0}
    facts.answer(2.0, "a", {"models": [1]})
    assert set(facts.silent) == {"b"}
    facts.keep({"b"})
    assert (facts.answers, facts.answered, set(facts.silent)) == ({}, {}, {"b"})
