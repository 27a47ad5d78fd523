"""The journal: records of requests and runs, put together from the policy's events."""

from __future__ import annotations

import pytest

from scheduler_plugin import events as ev
from scheduler_plugin.journal import Journal, Watcher
from scheduler_plugin.outline import chain
from scheduler_plugin.policy import FairPolicy

OUTLINE = chain(
    "basic", [("Text", "t5", "77"), ("Denoise", "flux", "1024"), ("Vae", "vae", "1024")]
)


class Told(Watcher):
    """Everything that the journal tells, as tuples."""

    def __init__(self):
        self.all = []

    def submitted(self, request):
        self.all.append(("submitted", request.name, request.tenant, request.submitted))

    def refused(self, tenant, requests, why, now, stimulus_id):
        self.all.append(("refused", tenant, requests, why, stimulus_id))

    def dispatched(self, run):
        self.all.append(("dispatched", run.key, run.executor, run.started - run.ready))

    def yielding(self, run):
        self.all.append(("yielding", run.key))

    def run_over(self, run):
        used = None if run.used is None else run.used.total_s
        self.all.append((run.outcome, run.key, run.over - run.started, used))

    def result_lost(self, request, key, now, stimulus_id):
        self.all.append(("result lost", key))

    def request_over(self, request):
        self.all.append(("over", request.name, request.outcome, request.over - request.submitted))


class Driven:
    """A policy and its journal, told the same."""

    def __init__(self, executors=1):
        self.policy, self.journal, self.told = FairPolicy(), Journal(), Told()
        self.journal.watch(self.told)
        self.now = 0.0
        for number in range(executors):
            self.tell(ev.ExecutorJoined(0.0, f"e{number}"))

    def tell(self, event):
        self.policy.handle(event)
        self.journal.happened(event)
        self.journal._check()

    def at(self, now):
        self.now = now
        return self

    def submit(self, name="r", tenant="ann"):
        self.tell(ev.RequestSubmitted(self.now, name, tenant, OUTLINE, stimulus_id="s1"))
        self.ready(name, 0)

    def ready(self, name, position):
        self.tell(ev.InvocationReady(self.now, f"{name}-{position}", name, position))

    def dispatch(self):
        decision = self.policy.next_decision(self.now)
        self.journal.dispatched(decision, self.now, 1e-5, "s2")
        return decision

    def complete(self, key, *seconds):
        self.tell(ev.Completed(self.now, key, ev.Measured(*seconds), stimulus_id="s3"))


def test_a_request_from_submit_to_result():
    driven = Driven()
    driven.at(1.0).submit()
    for position in range(3):
        if position:
            driven.ready("r", position)
        driven.at(driven.now + 0.5).dispatch()
        driven.at(driven.now + 2.0).complete(f"r-{position}", 0.5, 1.0, 0.25)
    record = driven.journal._requests["r"]
    assert (record.started, record.over, record.outcome) == (1.5, 8.5, "done")
    assert (record.stimulus_id, record.over_stimulus_id) == ("s1", "s3")
    assert (record.load_s, record.compute_s, record.transfer_s) == (1.5, 3.0, 0.75)
    driven.tell(ev.RequestClosed(9.0, "r"))
    assert driven.told.all == [
        ("submitted", "r", "ann", 1.0),
        *(
            told
            for key in ("r-0", "r-1", "r-2")
            for told in (("dispatched", key, "e0", 0.5), ("done", key, 2.0, 1.75))
        ),
        ("over", "r", "done", 7.5),
    ]
    assert not driven.journal._requests


def test_a_result_that_was_computed_ahead_ends_the_request():
    driven = Driven()
    driven.submit()
    driven.dispatch()
    driven.complete("r-0", 0.0, 1.0)
    for position in (1, 2):
        driven.tell(ev.Skipped(0.0, "r", (position,)))
        driven.journal.computed("r", position, 3.0)
    assert driven.told.all[-1] == ("over", "r", "done", 3.0)


def test_skipped_positions_without_a_result_do_not():
    driven = Driven()
    driven.submit()
    driven.tell(ev.Skipped(0.0, "r", (0, 1, 2)))  # so the bridge tells that nobody wants them
    driven.tell(ev.RequestClosed(1.0, "r"))
    assert driven.told.all[-1] == ("over", "r", "cancelled", 1.0)


def test_a_failure_ends_run_and_request_once():
    driven = Driven()
    driven.submit()
    driven.dispatch()
    driven.tell(ev.Failed(2.0, "r-0"))
    driven.tell(ev.RequestClosed(3.0, "r"))
    assert driven.told.all[2:] == [("failed", "r-0", 2.0, None), ("over", "r", "failed", 2.0)]


@pytest.mark.parametrize("event", [ev.Lost(2.0, "r-0"), ev.ExecutorLeft(2.0, "e0")])
def test_a_lost_run_runs_again(event):
    driven = Driven(executors=2)
    driven.submit()
    assert driven.dispatch().executor == "e0"
    driven.tell(event)
    driven.at(3.0).ready("r", 0)
    driven.at(3.5).dispatch()
    told = [row for row in driven.told.all if row[0] in ("lost", "dispatched")]
    assert [row[0] for row in told] == ["dispatched", "lost", "dispatched"]
    assert told[2][3] == 0.5, "it waits again from when it was ready again"


@pytest.mark.parametrize(
    ("end", "used"),
    [
        (ev.Drained(5.0, "e0", ev.Measured(compute_s=4.0)), 4.0),
        (ev.ExecutorIdle(5.0, "e0"), None),
        (ev.ExecutorLeft(5.0, "e0"), None),
    ],
)
def test_a_cancelled_run_is_over_when_its_executor_is_free(end, used):
    driven = Driven()
    driven.submit()
    driven.dispatch()
    driven.tell(ev.Cancelled(1.0, "r-0"))
    driven.tell(ev.RequestClosed(1.0, "r"))
    assert driven.told.all[2:] == [("over", "r", "cancelled", 1.0)]
    driven.tell(end)
    assert driven.told.all[3:] == [("cancelled", "r-0", 5.0, used)]
    assert not driven.journal._draining


def test_a_cancelled_run_that_has_stopped_is_over_at_once():
    driven = Driven()
    driven.submit()
    driven.dispatch()
    driven.tell(ev.Cancelled(1.0, "r-0", stopped=True))
    assert driven.told.all[-1] == ("cancelled", "r-0", 1.0, None)


def test_lost_results_refusals_and_yields_are_told():
    driven = Driven()
    driven.submit()
    driven.dispatch()
    driven.journal.yielding("r-0")
    driven.complete("r-0", 0.0, 1.0)
    driven.tell(ev.ResultLost(1.0, "r-0", "r", 0))
    driven.journal.refused("bob", 3, "over its cap", 2.0, "s9")
    assert driven.told.all[-4] == ("yielding", "r-0")
    assert driven.told.all[-2:] == [
        ("result lost", "r-0"),
        ("refused", "bob", 3, "over its cap", "s9"),
    ]


def test_what_began_before_the_journal_is_left_out():
    driven = Driven()
    driven.policy.handle(ev.RequestSubmitted(0.0, "old", "ann", OUTLINE))
    driven.policy.handle(ev.InvocationReady(0.0, "old-0", "old", 0))
    driven.dispatch()
    driven.journal.yielding("old-0")
    driven.complete("old-0", 0.0, 1.0)
    driven.tell(ev.RequestClosed(1.0, "old"))
    assert driven.told.all == []


def test_a_watcher_that_raises_is_told_nothing_more(caplog):
    class Broken(Watcher):
        def submitted(self, request):
            raise RuntimeError("no")

    driven = Driven()
    driven.journal.watch(Broken())
    driven.submit("a")
    driven.submit("b")
    assert [row[1] for row in driven.told.all] == ["a", "b"]
    assert caplog.text.count("Broken is told nothing more") == 1
    driven.journal.unwatch(driven.told)
    driven.submit("c")
    assert len(driven.told.all) == 2
