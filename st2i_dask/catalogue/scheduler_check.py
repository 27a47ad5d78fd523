"""Whether a folder's scheduler is one that a pipeline of flow models can run, and run again alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import LoadError
from .folder import DiffusersFolder

_USUAL = "FlowMatchEulerDiscreteScheduler"
_STEPS = 3


def check_scheduler(
    folder: DiffusersFolder, make: Callable[[int], Any], *, noises: bool = False
) -> None:
    """LoadError unless the scheduler takes one timestep a step and draws no noise of its own.

    make: the scheduler with its timesteps set, for so many steps, as the pipeline sets them.
    noises: whether it must be able to add noise to a picture.
    """
    class_name = folder.index["scheduler"][1]
    if folder.scheduler_config.get("stochastic_sampling"):
        raise LoadError(
            f"{folder.source!r}: its scheduler has stochastic_sampling=True and draws noise that no "
            "seed gives again; set it to False"
        )
    if class_name == _USUAL:
        return
    import torch

    cure = f"take {_USUAL}: st2i.load(..., scheduler={{'_class_name': {_USUAL!r}}})"
    try:
        with torch.random.fork_rng(devices=[]):
            scheduler = make(_STEPS)
            before = torch.get_rng_state()
            sample = torch.zeros(1, 4, 4)
            scheduler.step(sample, scheduler.timesteps[0], sample, return_dict=False)
            draws = not torch.equal(before, torch.get_rng_state())
    except Exception as error:
        raise LoadError(
            f"{folder.source!r}: the pipeline cannot use the scheduler {class_name} as it is "
            f"configured ({error}); {cure}"
        ) from error
    why = None
    if draws:
        why = "draws noise that no seed gives again"
    elif len(scheduler.timesteps) != _STEPS:
        why = f"makes {len(scheduler.timesteps)} timesteps of {_STEPS} steps"
    elif noises and not hasattr(scheduler, "scale_noise"):
        why = "adds no noise to a picture"
    if why:
        raise LoadError(f"{folder.source!r}: the scheduler {class_name} {why}; {cure}")
