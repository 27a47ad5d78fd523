"""How fast the simulator is: a saturated cluster of 256 executors, one core, virtual time.

Found: 13,000 dispatches and 41,000 events a second where nothing is to be loaded, 8,500 and 27,000 in the
paper's S1, where models come and go. Of 75 us a dispatch the policy that serves takes 45 (25 for the
decision, 20 for what it is told), weights 8, the simulator 22: 50,000 dispatches a second are more than it
would do round a policy that costs nothing. An event is whatever the policy is told, or a decision of it.
"""

from __future__ import annotations

from typing import Any

from st2i_dask.simulate import generate, systems
from st2i_dask.simulate.cluster import Cluster
from st2i_dask.simulate.profiles import Model, Profile
from st2i_dask.simulate.workflows import diffusion
from st2i_dask.simulate.workload import Workload, s1

EXECUTORS = 256
REQUESTS = 2_000


def run(requests: int = REQUESTS) -> dict[str, Any]:
    """`events_per_s`, `dispatches_per_s`, `invocations_per_s`: for each second of one core, nothing to load; the same
    with `loading_` before it: the paper's S1 at its default rate. `virtual_per_s`: seconds simulated."""
    warm = _measure(_resident(), requests)
    loading = _measure(s1(), requests)
    return {**warm, **{f"loading_{name}": value for name, value in loading.items()}}


def _resident() -> Workload:
    """Five tenants whose models all fit everywhere and load in no time."""
    models = {
        name: Model(1 << 20, 0.0, s) for name, s in (("text", 0.02), ("unet", 0.2), ("vae", 0.2))
    }
    workflows = {f"t{n}": diffusion(f"w{n}", ["text"], "unet", 20 + n, "vae") for n in range(5)}
    return Workload("resident", Profile(models), workflows, dict.fromkeys(workflows, 1.0))


def _measure(workload: Workload, requests: int) -> dict[str, float]:
    rate = 1.05 * EXECUTORS / workload.device_s()
    arrivals = generate.evaluation(workload, rate, requests / rate, seed=1)
    report = Cluster(systems.OURS, workload, EXECUTORS).run(arrivals)
    events = report.events + report.dispatches
    return {
        "events_per_s": round(events / report.cpu_s),
        "dispatches_per_s": round(report.dispatches / report.cpu_s),
        "invocations_per_s": round(report.invocations / report.cpu_s),
        "virtual_per_s": round(report.seconds / report.cpu_s, 2),
        "us_per_dispatch": round(1e6 * report.cpu_s / report.dispatches, 1),
    }
