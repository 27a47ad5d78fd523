"""Figure 12 right: one Z-Image request with and without its ControlNet beside the base model, and on gangs."""

from __future__ import annotations

from typing import Any

from .. import h800
from ..cluster import Cluster
from ..profiles import Profile
from ..systems import OURS
from ..tasks import Arrival
from ..workflows import Workflow
from ..workload import CONTROLLED, Workload, wide_z_image
from . import Claim, Effort, Figure

WORKFLOWS = ("z-image-control", "turbo-control", "flux-canny", "sd35-canny")
SIZES = (1, 2, 4)
LINKS = {"NVLink": h800.NODE, "between nodes": h800.PROFILE}


def run(effort: Effort) -> Figure:
    rows = [*map(_beside, WORKFLOWS)]
    rows += [_together(n, link) for link in LINKS for n in SIZES]
    control, (_, two, four) = rows[0], rows[len(WORKFLOWS) :][:3]
    far = rows[-1]
    claims = [
        Claim(
            "Figure 12 right: ControlNet beside the base model, Z-Image",
            "close to the theoretical optimum",
            f"{control[-2]:.2f} of the latency without, optimum {control[-1]:.2f}",
            "simulated, the ControlNet's seconds are an estimate",
        ),
        Claim(
            "Figure 12 right: sequence parallelism, Z-Image",
            "close to the theoretical optimum",
            f"{two[-2]:.2f} and {four[-2]:.2f} of the latency on 2 and 4 executors, optimum "
            f"{two[-1]:.2f} and {four[-1]:.2f}; between nodes {far[-2]:.2f} on 4",
            "simulated; keys and values are exchanged in every block, beside no computation",
        ),
    ]

    def draw(canvas: Any) -> None:
        axes = canvas.subplots()
        shown = [row for row in rows if row[-1] < 1]
        places = range(len(shown))
        axes.bar([p - 0.2 for p in places], [row[-2] for row in shown], 0.4, label="ours")
        axes.bar([p + 0.2 for p in places], [row[-1] for row in shown], 0.4, label="optimum")
        names = [f"{row[0]}\n{row[1]}\non {row[2]}" for row in shown]
        axes.set_xticks(list(places), names, fontsize=7)
        axes.set_ylabel("latency, 1 without parallelism")
        axes.set_ylim(0, 1.05)
        axes.legend()

    columns = (
        "workflow",
        "way",
        "executors",
        "sequential_s",
        "parallel_s",
        "normalised",
        "optimum",
    )
    return Figure("12-right", "Parallelism within a request", columns, rows, claims, draw)


def _beside(name: str) -> tuple[Any, ...]:
    """Its ControlNet on another executor, which at best costs nothing."""
    workflow = CONTROLLED[name]
    alone, beside = _latency(workflow, 1), _latency(workflow, 2)
    control_s = _compute_s(workflow, "Control")
    whole_s = workflow.device_s(h800.PROFILE)
    return (name, "ControlNet", 2, alone, beside, beside / alone, (whole_s - control_s) / whole_s)


def _together(executors: int, link: str) -> tuple[Any, ...]:
    """Its steps on a gang, which at best divides them; the rest stays as it is."""
    workflow = wide_z_image(executors)
    alone = _latency(workflow, 1, LINKS[link])
    parallel = _latency(workflow, executors, LINKS[link])
    steps_s, whole_s = _compute_s(workflow, "Denoise"), workflow.device_s(LINKS[link])
    best = (whole_s - steps_s + steps_s / executors) / whole_s
    return (workflow.name, link, executors, alone, parallel, parallel / alone, best)


def _compute_s(workflow: Workflow, fn: str) -> float:
    model = h800.PROFILE.model
    return sum(model(p.models[-1]).compute_s for p in workflow.positions if p.fn == fn)


def _latency(workflow: Workflow, executors: int, profile: Profile = h800.PROFILE) -> float:
    """Of a request that finds all models there."""
    workload = Workload("one", profile, {"t": workflow}, {"t": 1.0})
    arrivals = [Arrival(1000.0 * n, "t") for n in range(4)]
    return Cluster(OURS, workload, executors).run(arrivals).finished[-1].latency_s
