"""Glue around the denoising loop that families share: generators, timesteps, the scheduler's step."""

from __future__ import annotations

import copy
from typing import Any

from ..glue import glue


def generator_of(seed: int) -> Any:
    """Where a request's noise comes from: a CPU generator, on every device."""
    import torch

    return torch.Generator("cpu").manual_seed(seed)


def resumed(state: Any) -> Any:
    """A CPU generator in a state that an earlier draw left (`Generator.get_state`)."""
    import torch

    generator = torch.Generator("cpu")
    generator.set_state(state.cpu())
    return generator


#: Of Diffusers' schedulers: what no step writes into. Other tensors are states, and some are added to.
_TABLES = ("timesteps", "sigmas", "betas", "alphas", "alphas_cumprod", "_internal_dict")


def own_scheduler(scheduler: Any) -> Any:
    """A copy whose state may move on, with the same tables and configuration. Inputs are immutable: a retry
    may read the same scheduler again."""
    shared = [value for name in _TABLES if (value := getattr(scheduler, name, None)) is not None]
    return copy.deepcopy(scheduler, {id(value): value for value in shared})


@glue
def seeded(seed: int) -> Any:
    """State of a CPU generator that nothing was drawn from."""
    return generator_of(seed).get_state()


@glue
def timestep(scheduler: Any, step: int, latents: Any) -> Any:
    """The timestep of a step for each image, (images,), in the latents' dtype."""
    return scheduler.timesteps[step].expand(latents.shape[0]).to(latents.dtype)


@glue
def nth_timestep(scheduler: Any, step: int) -> Any:
    """The timestep of a step as the scheduler has it; no dimensions."""
    return scheduler.timesteps[step]


@glue(outputs=2)
def scheduler_step(scheduler: Any, step: int, noise_pred: Any, latents: Any) -> tuple[Any, Any]:
    """Latents after the step, and the scheduler's state for the next one."""
    scheduler = own_scheduler(scheduler)
    latents = scheduler.step(noise_pred, scheduler.timesteps[step], latents, return_dict=False)[0]
    return latents, scheduler


@glue
def guided(noise_pred: Any, unwanted: Any, scale: float) -> Any:
    """Guidance of two forwards: away from what the negative prompt would give."""
    return unwanted + scale * (noise_pred - unwanted)


@glue
def keep_outside(
    step: int, scheduler: Any, latents: Any, image_latents: Any, noise: Any, mask: Any
) -> Any:
    """Inpainting, after a step: where the mask is 0, the picture, noised as the next step expects it.

    scheduler: after the step. All tensors in the latents' layout, or such that they broadcast to it.
    """
    import torch

    kept = image_latents
    if step + 1 < len(scheduler.timesteps):
        timestep = torch.tensor([scheduler.timesteps[step + 1]])
        if hasattr(scheduler, "scale_noise"):  # of flow models
            kept = scheduler.scale_noise(kept, timestep, noise)
        else:
            # Some of the others move their tables to the device then.
            kept = own_scheduler(scheduler).add_noise(kept, noise, timestep)
    return (1 - mask) * kept + mask * latents
