"""Runs are kept by request, the latest last, within bounds of count and age."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_plugin.events import Measured
from scheduler_plugin.instructions import Estimate
from scheduler_plugin.journal import RequestRecord, RunRecord
from scheduler_plugin.outline import chain
from scheduler_plugin.run_history import OTHERS, RunHistory, Spent


def run(
    over,
    request,
    position=0,
    tenant="ann",
    fn="Step",
    outcome="done",
    used=(0.0, 0.0, 0.0),
    steps=1,
):
    """A run that is over."""
    record = RequestRecord(request, tenant, chain("w", [(fn, "m", "b")] * 10), 0.0, "")
    begun = Estimate(0.0, 0.0, 0.0), 0.0, 0.0, 0.0, ""
    made = RunRecord(f"{request}-{position}", record, position, "tcp://a", steps, *begun)
    made.over, made.outcome = over, outcome
    made.used = None if used is None else Measured(*used)
    return made


def test_a_request_has_its_runs_in_order_and_comes_first_when_heard_last():
    history = RunHistory()
    history.ended(run(1.0, "r1", used=(0.5, 1.0, 0.25)))
    history.ended(run(2.0, "r2", tenant="bob", outcome="failed", used=None))
    history.ended(run(3.0, "r1", 1, steps=4))
    history._check()
    first, second = history.latest(10)
    assert (first.request, second.request) == ("r1", "r2")
    assert [(r.position, r.outcome, r.steps) for r in first.runs] == [
        (0, "done", 1),
        (1, "done", 4),
    ]
    assert (first.runs[0].load_s, first.runs[0].compute_s, first.runs[0].transfer_s) == (
        0.5,
        1,
        0.25,
    )
    assert [h.request for h in history.latest(10, "bob")] == ["r2"]
    assert [h.request for h in history.latest(1)] == ["r1"]
    assert (history.count(), history.count("r1"), history.count("nobody")) == (2, 1, 0)
    assert "r1" in history
    assert "r3" not in history


def test_totals_by_modelfn_and_workflow_outlive_what_is_forgotten():
    history = RunHistory(requests=1, kinds=2)
    history.ended(run(1.0, "r1", fn="Text", used=(1.0, 2.0, 3.0)))
    history.ended(run(2.0, "r2", fn="Text", used=(1.0, 2.0, 3.0)))
    history.ended(run(3.0, "r3", fn="Vae", used=(0.0, 1.0, 0.0)))
    history.ended(run(4.0, "r4", fn="Unet", used=(0.0, 5.0, 0.0), steps=2))
    history.ended(run(5.0, "r5", fn="Other", used=(0.0, 5.0, 0.0)))
    history._check()
    assert len(history) == 1
    assert history.spent[("Text", "w")] == Spent(2, 2, 2.0, 4.0, 6.0)
    assert history.spent[OTHERS] == Spent(2, 3, 0.0, 10.0, 0.0)


def test_the_old_are_forgotten():
    history = RunHistory(age_s=10.0)
    history.ended(run(0.0, "r1"))
    history.ended(run(6.0, "r2"))
    history.forget(10.0)
    assert len(history) == 2
    history.forget(10.1)
    assert [h.request for h in history.latest(5)] == ["r2"]
    history._check()


def test_a_request_of_very_many_runs_keeps_some_and_says_so():
    history = RunHistory(per_request=3)
    for position in range(10):
        history.ended(run(float(position), "r1", position))
    history._check()
    (only,) = history.latest(5)
    assert [r.position for r in only.runs] == [0, 1, 9]
    assert only.left_out == 7


def over(at, request, outcome="cancelled", submitted=0.0):
    """A request that is over."""
    record = RequestRecord(request, "ann", chain("w", [("F", "m", "b")] * 10), submitted, "")
    record.over, record.outcome = at, outcome
    return record


def test_how_a_request_ended_and_when_whether_it_ran_or_not():
    history = RunHistory()
    history.ended(run(1.0, "r1"))
    (open_,) = history.latest(1)
    assert (open_.outcome, open_.over, open_.last) == (None, None, 1.0)
    history.request_over(over(3.0, "r1"))
    history.request_over(over(4.0, "r2", "done", submitted=2.0))
    history.ended(run(5.0, "r1", 1, outcome="cancelled"))  # its thread could not be stopped
    history._check()
    first, second = history.latest(9)
    assert (first.request, first.outcome, first.over, first.last) == ("r1", "cancelled", 3.0, 5.0)
    assert (second.request, second.outcome, second.over) == ("r2", "done", 4.0)
    assert (second.runs, second.submitted) == ([], 2.0)


def test_thousands_cancelled_at_once_do_not_drive_out_those_that_ran():
    history = RunHistory(requests=50, bare=5)
    for number in range(20):
        history.ended(run(float(number), f"ran{number}"))
    for number in range(1000):
        history.request_over(over(30.0, f"bare{number}"))
    history._check()
    assert history.count("ran") == 20
    assert [h.request for h in history.latest(9, "bare")] == [
        f"bare{n}" for n in range(999, 994, -1)
    ]
    history.forget(30.0 + 901.0)
    assert len(history) == 0
    history._check()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 5), st.booleans()), max_size=80))
def test_the_bounds_hold_whatever_ends(ends):
    history = RunHistory(requests=4, runs=12, per_request=5, bare=2, age_s=20.0, kinds=3)
    now, ran = 0.0, 0
    for number, later, whole in ends:
        now += later
        if whole:
            history.request_over(over(now, f"r{number}"))
        else:
            history.ended(run(now, f"r{number}", fn=f"F{number}"))
            ran += 1
        history._check()
        assert len(history) <= 4
        assert history.latest(1)[0].request == f"r{number}"
    assert sum(s.runs for s in history.spent.values()) == ran
