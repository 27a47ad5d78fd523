"""Fair shares on live clusters that check themselves, and executors that are handed back for them."""

from __future__ import annotations

import threading
import time

import pytest

from scheduler_plugin import events as ev

from .live import (
    TIMEOUT,
    Charges,
    chain,
    decisions_of,
    events_of,
    hooks,
    learn,
    runs,
    serving,
    started,
    submit,
    until,
)
from .spreads import spreads


def assert_fair(charges, slack_s, capsys):
    """Charged as measured, equal within the bound, whatever else the machine does meanwhile: seconds
    inside the models do not count here, since on a busy machine a short run takes as long around
    the model as inside. But they may not be more than was charged."""
    worst = spreads(charges, slack_s)
    contested = charges.contested()
    served = {}
    for ran in contested:
        served[ran.tenant] = served.get(ran.tenant, 0.0) + ran.used / ran.weight
    unit = slack_s + charges.largest()
    with capsys.disabled():
        print(
            f"\nservice by weight {served}, spread {worst.difference:.3f} s <= "
            f"{unit + max(unit, worst.gap) + 2 * worst.error:.3f} s (errors {worst.error:.3f} s)"
        )
    assert worst.excess <= 1e-6, worst
    inside = {}
    for run in runs:
        inside[run.key] = inside.get(run.key, 0.0) + run.stop - run.start
    assert inside
    for key, seconds in inside.items():
        assert charges.ran[key].used >= 0.98 * seconds
    return served


@pytest.mark.parametrize("n_workers", [1, 2])
def test_cheap_and_dear_tenants_get_equal_service(n_workers, capsys):
    slack = 0.02
    with serving(n_workers, slack_s=slack) as client:
        learn(client, steps=4, seconds=0.005)
        learn(client, steps=2, seconds=0.05)
        charges = Charges(client)
        futures = submit(client, "bob", 14 * n_workers, steps=2, seconds=0.05)
        futures += submit(client, "ann", 60 * n_workers, steps=4, seconds=0.005)
        client.gather(futures)
        served = assert_fair(charges, slack, capsys)
        assert min(served.values()) > 0.5 * n_workers  # there was something to divide
        ours = list(charges.ran.values())
        # Up to where one of them has hardly anything ready any more.
        rest_of = 4 * n_workers
        last = min(
            [i for i, d in enumerate(ours) if d.tenant == t][-rest_of] for t in ["ann", "bob"]
        )
        first = max(min(i for i, d in enumerate(ours) if d.tenant == t) for t in ("ann", "bob"))
        assert {d.steps for d in ours[first:last]} == {1}
        del futures


def test_weights_divide_the_service(capsys):
    weights = {"ann": 1.0, "bob": 3.0}
    with serving(1, weights=weights) as client:
        learn(client, steps=4, seconds=0.01)
        charges = Charges(client)
        futures = submit(client, "ann", 25, steps=4, seconds=0.01)
        futures += submit(client, "bob", 25, steps=4, seconds=0.01)
        client.gather(futures)
        served = assert_fair(charges, 0.02, capsys)
        assert served["ann"] > 0.15
        del futures


def test_alone_several_steps_run_as_one_task():
    with serving(1, steps_per_task=4) as client:
        made = decisions_of(client)
        assert submit(client, "ann", 1, steps=8)[0].result(timeout=TIMEOUT) == 8.0
        assert [d.steps for d in made] == [4, 4]
        assert [run.value for run in runs] == [float(i) for i in range(8)]


def test_a_newcomer_waits_for_one_step_not_for_a_task(capsys):
    step = 0.06
    waited = []
    with serving(1, steps_per_task=8) as client:
        learn(client, steps=24, seconds=step)
        learn(client, steps=1, seconds=0.001)
        told = events_of(client)
        long = submit(client, "ann", 1, steps=24, seconds=step)
        for arrival in range(3):
            until(lambda n=1 + 8 * arrival: len(started("ann")) >= n, seconds=TIMEOUT)
            chain.submit(
                client, tenant="bob", value=0.0, label=f"bob{arrival}", steps=1, seconds=0.001
            ).result(timeout=TIMEOUT)
            here = max(
                e.now for e in told if isinstance(e, ev.RequestSubmitted) and e.tenant == "bob"
            )
            (mine,) = started(f"bob{arrival}")
            between = [r for r in started("ann") if here < r.start < mine.start]
            assert len(between) <= 1, between
            waited.append(mine.start - here)
        with capsys.disabled():
            print(f"\nnewcomer waited {[round(w, 3) for w in waited]} s, a step is {step} s")
        assert long[0].result(timeout=TIMEOUT) == 24.0
        values = [run.value for run in started("ann")]
        assert values == [float(i) for i in range(24)]  # nothing ran twice
        del long


def test_a_yield_that_overtakes_the_inputs_is_not_lost():
    """The task is still fetching what it needs when a newcomer arrives."""
    with serving(1, steps_per_task=8) as client:
        learn(client, steps=8, seconds=0.02)
        worker = next(iter(client.cluster.workers.values()))
        running = threading.Event()

        def pause(value):
            if value == 0.0:
                running.set()
                time.sleep(0.2)

        hooks["ann"] = pause
        (long,) = submit(client, "ann", 1, steps=8, seconds=0.02)
        running.wait(TIMEOUT)
        runner = worker.plugins["st2i-worker"].runner
        key = next(iter(runner._worker.state.executing)).key
        # As if the thread had not been started yet.
        task = worker.state.tasks[key]

        def early():
            state, task.state = task.state, "ready"
            try:
                runner.yield_wanted(key)
            finally:
                task.state = state

        client.cluster.sync(_in_loop, early)
        made = decisions_of(client)
        assert long.result(timeout=TIMEOUT) == 8.0
        assert made, "the task did not hand back"
        del long


async def _in_loop(function):
    return function()
