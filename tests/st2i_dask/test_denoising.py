"""A scheduler's state for the next step: its own, while tables and configuration are shared."""

from __future__ import annotations

import pickle

import diffusers
import pytest
import torch
from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers

from st2i_dask.catalogue.denoising import own_scheduler

NAMES = [*(each.name for each in KarrasDiffusionSchedulers), "FlowMatchEulerDiscreteScheduler"]
NAMES += ["LCMScheduler", "TCDScheduler"]


def step(scheduler, number, latents):
    """One step of a model that gives half of what it gets; schedulers with noise get the same."""
    timestep = scheduler.timesteps[number]
    if hasattr(scheduler, "scale_model_input"):
        latents = scheduler.scale_model_input(latents, timestep)
    torch.manual_seed(number)
    return scheduler.step(latents / 2, timestep, latents, return_dict=False)[0]


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_the_schedulers_own_and_change_no_earlier_state(name):
    cls = getattr(diffusers, name, None)
    if cls is None or getattr(cls, "_is_dummy", False) or "dummy" in cls.__module__:
        pytest.skip(f"{name} needs another package")
    first = cls()
    first.set_timesteps(5)
    plain = pickle.loads(pickle.dumps(first))
    latents = expected = torch.linspace(-1, 1, 48).reshape(1, 3, 4, 4)
    states = [(first, pickle.dumps(first))]
    for number in range(5):
        scheduler = own_scheduler(states[-1][0])
        latents = step(scheduler, number, latents)
        expected = step(plain, number, expected)
        states.append((scheduler, pickle.dumps(scheduler)))
    assert torch.equal(latents, expected)
    assert [pickle.dumps(scheduler) for scheduler, _ in states] == [before for _, before in states]
    assert states[-1][0].timesteps is first.timesteps
