"""Figure 12 left: latency of one Flux1-Schnell request, by how much of its models is resident."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .. import h800
from ..cluster import Cluster
from ..profiles import Profile
from ..systems import MCACHE, OURS, System
from ..tasks import Arrival
from ..workload import SCHNELL, Workload
from . import Claim, Effort, Figure

#: Real numbers of blocks, finer than the simulator's groups.
BLOCKS = {"flux1-schnell": 57, "t5-flux": 24, "clip-flux": 12, "flux1-vae": 4}
PAPER_ORDER = ("w/o ppl.", "ppl.(0)", "ppl.(L'/2)", "ppl.(L')", "w/o load")


def run(effort: Effort) -> Figure:
    models = {n: replace(h800.PROFILE.models[n], layers=blocks) for n, blocks in BLOCKS.items()}
    profile = Profile(models)
    latency = {
        "w/o ppl.": _latency(profile, MCACHE, 0.0),
        "ppl.(0)": _latency(profile, OURS, 0.0),
        "ppl.(L'/2)": _latency(profile, OURS, 0.5),
        "ppl.(L')": _latency(profile, OURS, 1.0),
        "w/o load": _latency(profile, OURS, None),
    }
    floor, today = latency["w/o load"], latency["ppl.(0)"]
    hidden = {n: 1 - (latency[n] - floor) / (today - floor) for n in ("ppl.(L'/2)", "ppl.(L')")}
    claims = [
        Claim(
            "Figure 12 left: load latency that a prefix of L' hides",
            "90 %",
            f"{100 * hidden[PAPER_ORDER[3]]:.0f} %",
            "simulated; live: `st2i bench prefix`",
        ),
        Claim(
            "Figure 12 left: with half of the prefix evicted",
            "62 %",
            f"{100 * hidden[PAPER_ORDER[2]]:.0f} %",
            "simulated",
        ),
        Claim(
            "Figure 12 left: end-to-end latency against pipelining alone",
            "-21 %",
            f"{100 * (latency[PAPER_ORDER[3]] / today - 1):+.0f} %",
            "simulated",
        ),
    ]
    rows = [(name, latency[name], latency[name] - floor) for name in PAPER_ORDER]

    def draw(canvas: Any) -> None:
        axes = canvas.subplots()
        axes.barh(PAPER_ORDER, [floor] * 5, color="tab:green", label="inference")
        waits = [latency[name] - floor for name in PAPER_ORDER]
        axes.barh(PAPER_ORDER, waits, left=floor, color="tab:red", label="waiting for loads")
        axes.set_xlabel("latency (s)")
        axes.legend()

    columns = ("cached", "latency_s", "waiting_s")
    return Figure("12-left", "One Flux1-Schnell request", columns, rows, claims, draw, (8.0, 3.0))


def _latency(profile: Profile, system: System, share: float | None) -> float:
    """Of a request on one executor. share: of each prefix, rounded up, that is resident; None: all."""
    workload = Workload("one", profile, {"t": SCHNELL}, {"t": 1.0})
    cluster = Cluster(system, workload, 1)
    (device,) = cluster.devices.values()
    arrivals = [Arrival(0.0, "t")]
    if share != 0.0 or share is None:
        arrivals.append(Arrival(1000.0, "t"))
        cluster.run(arrivals[:1])
        if share is not None:
            device._tell_used(500.0)
            for name, weights in device._catalogue.weights.items():
                keep = -int(-weights.prefix * share // 1)
                device._obey(device.cache.trim(name, keep, 500.0), 500.0)
                device._changed.add(name)
            device._renew()
        report = cluster.run(arrivals[1:])
    else:
        report = cluster.run(arrivals)
    return report.finished[-1].latency_s
