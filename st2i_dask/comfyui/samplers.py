"""ComfyUI's samplers and schedules as Diffusers' schedulers."""

from __future__ import annotations

from typing import Any

from ..errors import LoadError

#: Of models that are trained for flow matching; the folder's own scheduler already is it.
FLOW = "FlowMatchEulerDiscreteScheduler"
_FLOW_SCHEDULES = ("simple", "normal", "sgm_uniform")

#: (sampler_name, scheduler) -> the scheduler's class, and what its configuration changes.
_SCHEDULERS: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("euler", "normal"): ("EulerDiscreteScheduler", {}),
    ("euler", "simple"): ("EulerDiscreteScheduler", {"timestep_spacing": "trailing"}),
    ("euler", "karras"): ("EulerDiscreteScheduler", {"use_karras_sigmas": True}),
    ("dpmpp_2m", "normal"): ("DPMSolverMultistepScheduler", {}),
    ("dpmpp_2m", "karras"): ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    ("ddim", "ddim_uniform"): ("DDIMScheduler", {}),
    ("ddim", "normal"): ("DDIMScheduler", {}),
    ("uni_pc", "normal"): ("UniPCMultistepScheduler", {}),
}


def scheduler_for(folder_class: str, sampler: str, schedule: str) -> dict[str, Any] | None:
    """What `st2i.load(scheduler=...)` takes; None: the folder's own. LoadError for an unknown pair."""
    if folder_class == FLOW:
        if sampler == "euler" and schedule in _FLOW_SCHEDULES:
            return None
        known = ", ".join(f"euler with {name}" for name in _FLOW_SCHEDULES)
    else:
        found = _SCHEDULERS.get((sampler, schedule))
        if found is not None:
            return {"_class_name": found[0], **found[1]}
        known = ", ".join(f"{one} with {other}" for one, other in _SCHEDULERS)
    raise LoadError(
        f"KSampler: sampler_name={sampler!r} with scheduler={schedule!r} has no counterpart for a "
        f"model with {folder_class}; supported: {known}"
    )
