"""The same small trace, simulated and on a live cluster of two workers: the same order, like latencies."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
from distributed import Client

import st2i_dask as st2i
from st2i_dask.simulate import systems
from st2i_dask.simulate.cluster import Cluster
from st2i_dask.simulate.profiles import Model, Profile
from st2i_dask.simulate.tasks import Arrival
from st2i_dask.simulate.workflows import Position, Workflow
from st2i_dask.simulate.workload import Workload

#: Seconds of a step, steps.
KINDS = {"short": (0.2, 3), "long": (0.5, 3)}
#: When, whose. Both workers are busy from the third on; the order is the same for any hop up to 16 ms.
TRACE = [
    *((0.0, "long"), (0.6, "short"), (1.33, "long"), (1.64, "long")),
    *((2.13, "long"), (2.16, "long"), (2.43, "short")),
]


class Hold(st2i.ModelFn):
    """Takes its executor for `seconds`."""

    def setup_io(self) -> None:
        self.add_input("value")
        self.add_output("same")

    def execute(self, model_components: Any, value: Any) -> dict[str, Any]:
        time.sleep(self.options["seconds"])
        return {"same": value}


def live_workflow(kind):
    seconds, steps = KINDS[kind]

    @st2i.workflow(name=f"simulated-{kind}", replace=True)
    def chain(value: float) -> Any:
        hold = Hold(name=kind, seconds=seconds)
        for _ in range(steps):
            value = hold(value)
        return value

    return chain


def live(trace):
    """By request, when it ended, seconds from the start; and its latency. And the seconds of a hop, as
    a request alone shows them."""
    with st2i.local_cluster(2, dashboard_address=None) as cluster, Client(cluster) as client:
        st2i.attach(client)
        workflows = {kind: live_workflow(kind) for kind in KINDS}

        def alone(kind):
            began = time.monotonic()
            workflows[kind].submit(client, tenant="learner", value=0.0).result()
            seconds, steps = KINDS[kind]
            return (time.monotonic() - began) / steps - seconds

        for _ in range(3):
            client.gather(
                [w.submit(client, tenant="learner", value=0.0) for w in workflows.values()]
            )
        hop_s = min(alone("short") for _ in range(3))
        ended: dict[int, float] = {}
        began = time.monotonic() + 0.1
        futures, submitted = [], []
        for number, (at, kind) in enumerate(trace):
            time.sleep(max(0.0, began + at - time.monotonic()))
            submitted.append(time.monotonic())
            future = workflows[kind].submit(client, tenant=kind, value=float(number))
            future.add_done_callback(
                lambda _, number=number: ended.setdefault(number, time.monotonic())
            )
            futures.append(future)
        client.gather(futures)
        while len(ended) < len(trace):
            time.sleep(0.01)
    return [(ended[n] - began, ended[n] - submitted[n]) for n in range(len(trace))], hop_s


def simulated(trace, hop_s=4e-3):
    models = {k: Model(1000, 0.0, seconds, layers=1) for k, (seconds, _) in KINDS.items()}
    profile = Profile(models, hop_s=hop_s, link_latency_s=1e-3)
    workflows = {}
    for kind, (_, steps) in KINDS.items():
        positions = [
            Position("Hold", (kind,), (n - 1,) if n else (), out_bytes=100) for n in range(steps)
        ]
        workflows[kind] = Workflow(kind, tuple(positions))
    load = Workload("live", profile, workflows, dict.fromkeys(workflows, 1.0))
    report = Cluster(systems.OURS, load, 2).run([Arrival(at, kind) for at, kind in trace])
    found = {int(f.request[1:]): (f.finished, f.latency_s) for f in report.finished}
    return [found[n] for n in range(len(trace))]


def order_of(found):
    return sorted(range(len(found)), key=lambda number: found[number])


def test_simulator_and_live_cluster_agree():
    expected = simulated(TRACE)
    order = order_of(expected)
    assert order != list(range(len(TRACE)))
    assert all(order_of(simulated(TRACE, hop_s)) == order for hop_s in (1e-3, 8e-3, 16e-3))
    assert min(later[0] - at[0] for at, later in pairwise(sorted(expected))) > 0.1
    waited = [
        latency - KINDS[kind][0] * KINDS[kind][1]
        for (_, latency), (_, kind) in zip(expected, TRACE, strict=True)
    ]
    assert sum(seconds > 0.2 for seconds in waited) >= 3, "nobody waits: any policy would do"
    for _ in range(4):  # a machine that is busy with other things is late
        found, hop_s = live(TRACE)
        expected = simulated(TRACE, max(0.0, hop_s))
        ratios = [ours[1] / theirs[1] for ours, theirs in zip(found, expected, strict=True)]
        if order_of(found) == order and all(0.9 <= ratio <= 1.1 for ratio in ratios):
            return
    pytest.fail(
        f"live order {order_of(found)}, simulated {order}; latencies by theirs: {ratios}; "
        f"{hop_s} s a hop"
    )
