"""Whether the denoising loops can call a scheduler, and what they must give it."""

from __future__ import annotations

import inspect
from typing import Any


def draws_noise(scheduler: Any, *, from_generator: bool) -> bool:
    """Whether the scheduler's steps draw noise from the generator that they are given.

    scheduler: with its timesteps set; it is used up. from_generator: whether the pipeline gives its
    generator to schedulers that take one. ValueError or TypeError where the loop cannot call it, and
    where it draws noise that no seed gives again.
    """
    import torch

    options: dict[str, Any] = {}
    generator = torch.Generator("cpu").manual_seed(0)
    if from_generator and "generator" in inspect.signature(scheduler.step).parameters:
        options["generator"] = generator
    before = generator.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        state = torch.get_rng_state()
        sample = torch.zeros(1, 4, 8, 8)
        for timestep in scheduler.timesteps:
            if from_generator:
                scheduler.scale_model_input(sample, timestep)
            noise = torch.zeros_like(sample)
            sample = scheduler.step(noise, timestep, sample, **options, return_dict=False)[0]
        if not torch.equal(state, torch.get_rng_state()):
            raise ValueError("it draws noise that no seed gives again")
    return not torch.equal(before, generator.get_state())
