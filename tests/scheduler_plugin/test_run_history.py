"""Runs are kept by request, the latest last, within bounds of count and age."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_plugin.glance import RunGlance
from scheduler_plugin.run_history import OTHERS, RunHistory, Spent


def run(request, position=0, tenant="ann", fn="Step", workflow="w", started=0.0):
    return RunGlance(request, tenant, workflow, 3, position, fn, "tcp://a", 0.0, started, 1)


def test_a_request_has_its_runs_in_order_and_comes_first_when_heard_last():
    history = RunHistory()
    history.ended(1.0, run("r1"), "done", 0.5, 1.0, 0.25)
    history.ended(2.0, run("r2", tenant="bob"), "failed")
    history.ended(3.0, run("r1", 1), "done", steps=4)
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
    history.ended(1.0, run("r1", fn="Text"), "done", 1.0, 2.0, 3.0)
    history.ended(2.0, run("r2", fn="Text"), "done", 1.0, 2.0, 3.0)
    history.ended(3.0, run("r3", fn="Vae"), "done", 0.0, 1.0, 0.0)
    history.ended(4.0, run("r4", fn="Unet"), "done", 0.0, 5.0, 0.0, steps=2)
    history.ended(5.0, run("r5", fn="Other"), "done", 0.0, 5.0, 0.0)
    history._check()
    assert len(history) == 1
    assert history.spent[("Text", "w")] == Spent(2, 2, 2.0, 4.0, 6.0)
    assert history.spent[OTHERS] == Spent(2, 3, 0.0, 10.0, 0.0)


def test_the_old_are_forgotten():
    history = RunHistory(age_s=10.0)
    history.ended(0.0, run("r1"), "done")
    history.ended(6.0, run("r2"), "done")
    history.forget(10.0)
    assert len(history) == 2
    history.forget(10.1)
    assert [h.request for h in history.latest(5)] == ["r2"]
    history._check()


def test_a_request_of_very_many_runs_keeps_some_and_says_so():
    history = RunHistory(per_request=3)
    for position in range(10):
        history.ended(float(position), run("r1", position), "done")
    history._check()
    (only,) = history.latest(5)
    assert [r.position for r in only.runs] == [0, 1, 9]
    assert only.left_out == 7


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 5)), max_size=80))
def test_the_bounds_hold_whatever_ends(ends):
    history = RunHistory(requests=4, runs=12, per_request=5, age_s=20.0, kinds=3)
    now = 0.0
    for number, later in ends:
        now += later
        history.ended(now, run(f"r{number}", fn=f"F{number}"), "done", compute_s=1.0)
        history._check()
        assert len(history) <= 4
        assert history.latest(1)[0].request == f"r{number}"
    assert sum(s.runs for s in history.spent.values()) == len(ends)
