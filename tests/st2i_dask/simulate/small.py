"""Small workloads whose schedules can be worked out by hand."""

from __future__ import annotations

from st2i_dask.simulate.profiles import Model, Profile
from st2i_dask.simulate.workflows import diffusion
from st2i_dask.simulate.workload import Workload

MIB = 1 << 20

#: Whole seconds: no pulls, no time between invocations.
EXACT = Profile(
    {
        "text": Model(4 * MIB, 4.0, 1.0, layers=4),
        "unet": Model(8 * MIB, 8.0, 4.0, layers=4),
        "other": Model(8 * MIB, 8.0, 2.0, layers=4),
        "control": Model(4 * MIB, 4.0, 1.0, layers=4),
        "vae": Model(1 * MIB, 1.0, 2.0, layers=1),
        "lora": Model(1 * MIB, 0.5, 0.0, layers=1),
    },
    memory_bytes=2_000_000_000 + 64 * MIB,
    activation_bytes=0,
    link_latency_s=0.0,
    link_bandwidth=1e18,
    hop_s=0.0,
)


def workload(profile=EXACT, **workflows):
    """A tenant for each workflow; one of two steps where none is given."""
    workflows = workflows or {"a": diffusion("two", ["text"], "unet", 2, "vae")}
    return Workload("small", profile, workflows, dict.fromkeys(workflows, 1.0))


def solo_s(workload):
    return {t: w.device_s(workload.profile) for t, w in workload.workflows.items()}
