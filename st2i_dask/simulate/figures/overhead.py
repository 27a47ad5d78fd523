"""Section 8.5: what the DAG costs at 256 executors with 600 requests in flight."""

from __future__ import annotations

import random
from typing import Any

from .. import h800
from ..cluster import Cluster
from ..systems import OURS
from ..tasks import Arrival
from ..workload import Workload, s1
from . import Claim, Effort, Figure

EXECUTORS, IN_FLIGHT = 256, 600
#: Of a decision with all that belongs to it, policy and Dask, on the scheduler. With one step a task it
#: takes three times stock Dask's CPU time a task (`st2i bench throughput`); that is taken to be 0.2 ms.
DECISION_S = 6e-4


def run(effort: Effort) -> Figure:
    rounds = 3 if effort.dense else 2
    workload = s1()
    rows = []
    for name, decision_s, hop_s in (
        ("all costs", DECISION_S, h800.PROFILE.hop_s),
        ("no scheduler queue", 0.0, h800.PROFILE.hop_s),
        ("data plane only", 0.0, 0.0),
    ):
        rows.append((name, *_shares(workload, decision_s, hop_s, rounds)))
    whole = rows[0]
    claims = [
        Claim(
            "Section 8.5: overhead at 256 executors, 600 in flight, S1",
            "3.3 % of execution time",
            f"{100 * whole[1]:.1f} %: from one task to the next {100 * whole[2]:.1f} %, pulls "
            f"{100 * whole[3]:.2f} %",
            f"simulated with {1e3 * h800.PROFILE.hop_s:g} ms a hop and {1e3 * DECISION_S:g} ms of "
            "scheduler a dispatch: the first measured live on two cores, the second three times stock "
            "Dask's, taken to be 0.2 ms",
        ),
        Claim(
            "Section 8.5: one request against one Diffusers call",
            "3 % slower",
            "1.00 to 1.03 of its time in six runs",
            "live, tiny models: `st2i bench overhead`",
        ),
    ]

    def draw(canvas: Any) -> None:
        axes = canvas.subplots()
        axes.bar([r[0] for r in rows], [100 * r[2] for r in rows], label="from task to task")
        axes.bar(
            [r[0] for r in rows],
            [100 * r[3] for r in rows],
            bottom=[100 * r[2] for r in rows],
            label="pulls",
        )
        axes.axhline(3.3, color="black", ls=":", label="paper")
        axes.set_ylabel("of execution time (%)")
        axes.legend()

    columns = ("costs", "overhead", "control", "pulls", "scheduler_busy", "dispatches")
    return Figure("8.5", "Overhead of the DAG at 256 executors", columns, rows, claims, draw)


def _shares(workload: Workload, decision_s: float, hop_s: float, rounds: int) -> tuple[Any, ...]:
    profile = workload.profile.with_load(1.0, hop_s=hop_s)
    cluster = Cluster(OURS.with_slack(20.0), workload.on(profile), EXECUTORS, decision_s=decision_s)
    chance = random.Random(1)
    tenants, shares = list(workload.shares), list(workload.shares.values())
    # As many at once as are to be in flight, then as many as are served.
    rate = EXECUTORS / workload.device_s()
    owners = chance.choices(tenants, shares, k=rounds * IN_FLIGHT)
    arrivals = [Arrival(max(0.0, (n - IN_FLIGHT) / rate), t) for n, t in enumerate(owners)]
    report = cluster.run(arrivals)
    compute_s = report.device_s - report.stalled_s - report.transfer_s
    control, pulls = report.control_s / compute_s, report.transfer_s / compute_s
    busy = report.dispatches * decision_s / report.seconds
    return control + pulls, control, pulls, busy, report.dispatches
