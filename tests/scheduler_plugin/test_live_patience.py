"""Waiting for a worker that has the model, on live clusters: bounded also where nothing else happens."""

from __future__ import annotations

import threading
import time

from scheduler_plugin import events as ev

from .live import TIMEOUT, chain, decisions_of, hooks, plugin_of, serving

LOAD_S, COMPUTE_S = 1.0, 0.05


def teach(dask_scheduler):
    """The model of the chain takes a second to load, and next to nothing to run."""
    costs = dask_scheduler.plugins["st2i-scheduler"].policy.costs
    for key in list(costs._compute):
        for _ in range(30):
            used = ev.Measured(LOAD_S, COMPUTE_S, 0.0)
            costs.observe(key, used, loaded_share=1.0, pulled=False)


def asked(client, label):
    return chain.submit(client, value=0.0, label=label, steps=1)


def test_a_worker_that_has_the_model_and_hangs_is_waited_for_no_longer_than_the_load():
    with serving(2) as client:
        asked(client, "first").result(timeout=TIMEOUT)
        client.run_on_scheduler(teach)
        decisions = decisions_of(client)
        begun, go_on = threading.Event(), threading.Event()
        hooks["hangs"] = lambda value: (begun.set(), go_on.wait(TIMEOUT))
        hanging = asked(client, "hangs")
        assert begun.wait(TIMEOUT)
        begin = time.monotonic()
        assert asked(client, "second").result(timeout=TIMEOUT) == 1.0
        waited = time.monotonic() - begin
        assert LOAD_S - 0.1 < waited < LOAD_S + 3.0
        assert len({decision.executor for decision in decisions}) == 2
        go_on.set()
        assert hanging.result(timeout=TIMEOUT) == 1.0
        del hanging


def test_it_goes_to_that_worker_as_soon_as_it_is_done():
    with serving(2) as client:
        asked(client, "first").result(timeout=TIMEOUT)
        client.run_on_scheduler(teach)
        decisions = decisions_of(client)
        begun, go_on = threading.Event(), threading.Event()
        hooks["busy"] = lambda value: (begun.set(), go_on.wait(TIMEOUT))
        busy = asked(client, "busy")
        assert begun.wait(TIMEOUT)
        second = asked(client, "second")
        time.sleep(0.2)
        assert plugin_of(client).policy.waits_until is not None
        go_on.set()
        assert client.gather([busy, second]) == [1.0, 1.0]
        assert len(decisions) == 2
        assert decisions[0].executor == decisions[1].executor
        del busy, second
