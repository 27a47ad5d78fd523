"""Figure 12 right: one Z-Image request with and without its ControlNet beside the base model."""

from __future__ import annotations

from typing import Any

from .. import h800
from ..cluster import Cluster
from ..systems import OURS
from ..tasks import Arrival
from ..workload import CONTROLLED, Workload
from . import Claim, Effort, Figure

WORKFLOWS = ("z-image-control", "turbo-control", "flux-canny", "sd35-canny")


def run(effort: Effort) -> Figure:
    rows = []
    for name in WORKFLOWS:
        workflow = CONTROLLED[name]
        alone, beside = _latency(name, 1), _latency(name, 2)
        control_s = sum(
            h800.PROFILE.model(p.models[-1]).compute_s
            for p in workflow.positions
            if p.fn == "Control"
        )
        whole_s = workflow.device_s(h800.PROFILE)
        rows.append((name, alone, beside, beside / alone, (whole_s - control_s) / whole_s))
    first = rows[0]
    claims = [
        Claim(
            "Figure 12 right: ControlNet beside the base model, Z-Image",
            "close to the theoretical optimum",
            f"{first[3]:.2f} of the latency without, optimum {first[4]:.2f}",
            "simulated, the ControlNet's seconds are an estimate",
        ),
        Claim(
            "Figure 12 right: sequence parallelism",
            "close to the theoretical optimum",
            "-",
            "not possible here: models are not split over executors",
        ),
    ]

    def draw(canvas: Any) -> None:
        axes = canvas.subplots()
        places = range(len(rows))
        axes.bar([p - 0.2 for p in places], [r[3] for r in rows], 0.4, label="ours")
        axes.bar([p + 0.2 for p in places], [r[4] for r in rows], 0.4, label="optimum")
        axes.set_xticks(list(places), [r[0] for r in rows])
        axes.set_ylabel("latency, 1 without parallelism")
        axes.set_ylim(0, 1.05)
        axes.legend()

    columns = ("workflow", "sequential_s", "parallel_s", "normalised", "optimum")
    return Figure("12-right", "ControlNet parallelism", columns, rows, claims, draw)


def _latency(name: str, executors: int) -> float:
    """Of a request that finds all models there."""
    workload = Workload("one", h800.PROFILE, {"t": CONTROLLED[name]}, {"t": 1.0})
    arrivals = [Arrival(1000.0 * n, "t") for n in range(4)]
    return Cluster(OURS, workload, executors).run(arrivals).finished[-1].latency_s
