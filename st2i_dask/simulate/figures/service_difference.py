"""Figure 9 right: service of two backlogged tenants, one much dearer, four executors, 2 RPS each."""

from __future__ import annotations

from typing import Any

from scheduler_plugin.settings import Settings

from .. import h800
from ..cluster import Cluster
from ..experiment import spread
from ..systems import OURS
from ..tasks import Arrival
from ..workflows import diffusion
from ..workload import BASIC, Workload
from . import Claim, Effort, Figure

EXECUTORS, RATE, SECONDS, SLACK_S = 4, 2.0, 180.0, 5.0
CHEAP, DEAR = "sd3-medium", "flux-dev"
ORDERS = ("fair", "fifo", "sjf", "vtc")
LABELS = {"fair": "ours", "fifo": "FIFO", "sjf": "SJF", "vtc": "VTC, counting steps"}


def run(effort: Effort) -> Figure:
    found = dict(zip(ORDERS, spread(difference, ORDERS, effort.processes), strict=True))
    rows = [(order, t, d) for order, (_, line) in found.items() for t, d in line]
    worst = {order: max(abs(d) for _, d in line) for order, (_, line) in found.items()}
    bound = 2 * (SLACK_S + found["fair"][0])
    last = {order: line[-1][1] for order, (_, line) in found.items()}
    rivals = ", ".join(f"{LABELS[o]} {last[o]:+.0f} s" for o in ORDERS[1:])
    claim = Claim(
        "Figure 9 right: the dear tenant's service over the cheap one's",
        "FIFO far above, SJF far below, VTC between; no bound",
        f"after {SECONDS:.0f} s: {rivals}; ours {last['fair']:+.1f} s, never above "
        f"{worst['fair']:.1f} s (bound {bound:.1f} s)",
        "simulated; live with two workers: `st2i bench fairness`",
    )

    def draw(canvas: Any) -> None:
        axes = canvas.subplots()
        axes.axhspan(-bound, bound, color="tab:green", alpha=0.15, lw=0, label="our bound")
        for order, (_, line) in found.items():
            axes.step([t for t, _ in line], [d for _, d in line], where="post", label=LABELS[order])
        axes.set_xlabel("time (s)")
        axes.set_ylabel("FLUX.1-dev tenant ahead (device s)")
        axes.grid(alpha=0.3)
        axes.legend()

    columns = ("order", "time_s", "difference_s")
    return Figure("9-right", "Service of two backlogged tenants", columns, rows, [claim], draw)


def difference(order: str) -> tuple[float, list[tuple[float, float]]]:
    """The largest charge of a dispatch, and over time by how much the dear tenant was ahead."""
    cheap = diffusion(CHEAP, ("clip-l", "clip-g", "t5-sd3"), "sd3-medium", 28, "sd35-vae")
    workflows = {CHEAP: cheap, DEAR: BASIC["flux-dev"]}
    workload = Workload("two", h800.PROFILE, workflows, dict.fromkeys(workflows, 1.0))
    # One step a task, so that VTC counts steps.
    settings = Settings(slack_s=SLACK_S, steps_per_task=1)
    system = type(OURS)("ours", "elastic", False, order, settings)
    arrivals = [
        Arrival(n / RATE, tenant) for n in range(int(RATE * SECONDS)) for tenant in workflows
    ]
    report = Cluster(system, workload, EXECUTORS, keep_runs=True).run(arrivals, until=SECONDS)
    ahead, line = 0.0, [(0.0, 0.0)]
    for ran in report.runs:
        ahead += ran.device_s if ran.tenant == DEAR else -ran.device_s
        line.append((ran.ended, ahead))
    every = max(1, len(line) // 400)
    return max(r.device_s for r in report.runs), [*line[::every], line[-1]]
