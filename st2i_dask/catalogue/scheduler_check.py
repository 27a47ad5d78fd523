"""Whether a pipeline can run a scheduler, and run it again alike; found before anything is run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..errors import LoadError, ParameterError
from ..rules import NOTHING, Range

if TYPE_CHECKING:
    from .folder import DiffusersFolder

_MAX_STEPS = 1000
# Some schedulers begin with a few steps of another kind.
_TRIED = 4

#: Gives the scheduler with its timesteps set for so many steps, as the pipeline sets them.
Make = Callable[[int], Any]


def find_class(name: str) -> Any:
    """Diffusers' scheduler class. LoadError if there is none, or if it needs what is not installed."""
    import diffusers

    cls = getattr(diffusers, name, None)
    # What needs an absent library is of a class that only says so.
    missing = [library for library in getattr(cls, "_backends", ()) if find_spec(library) is None]
    if missing and name.endswith("Scheduler"):
        raise LoadError(
            f"scheduler {name!r} needs {' and '.join(missing)}: pip install {' '.join(missing)}, here "
            "and on every worker"
        )
    if not (isinstance(cls, type) and issubclass(cls, diffusers.SchedulerMixin)):
        raise LoadError(f"scheduler {name!r} is none of Diffusers; see diffusers.schedulers")
    return cls


def check_scheduler(
    folder: DiffusersFolder,
    make: Make,
    *,
    predicts_noise: bool = False,
    one_a_step: bool = True,
    noises: bool = False,
    hint: str = "",
) -> bool:
    """Whether the scheduler draws noise from the request's generator. It is tried, without a model.

    predicts_noise: the pipeline is one of models that predict noise: it scales the model's input, and
        gives its generator to schedulers that take one. one_a_step: it takes one timestep a step.
    noises: it adds noise to a picture. hint: what to change in the usual scheduler's configuration.

    LoadError where the pipeline cannot run it as it is configured, and where it draws noise that no seed
    gives again.
    """
    name, config = folder.scheduler
    usual = "EulerDiscreteScheduler" if predicts_noise else "FlowMatchEulerDiscreteScheduler"
    find_class(name)
    scheduler, draws, why = None, False, ""
    try:
        scheduler = make(_TRIED)
        draws, why = _tried(scheduler, predicts_noise)
    except Exception as error:  # whatever it meets first
        why = f"fails as it is configured ({_short(error)})"
    if not why:
        count = len(scheduler.timesteps)
        how = "add_noise" if predicts_noise else "scale_noise"
        if one_a_step and count != _TRIED:
            why = f"makes {count} timesteps of {_TRIED} steps"
        elif predicts_noise and not hasattr(scheduler, "init_noise_sigma"):
            why = "does not say how strong the noise is that it begins with"
        elif noises and not hasattr(scheduler, how):
            why = "adds no noise to a picture"
    if not why:
        return draws
    if config.get("stochastic_sampling") and "no seed" in why:
        why = f"has stochastic_sampling=True and {why}"
        cure = "set it to False: st2i.load(..., scheduler={'stochastic_sampling': False})"
    elif name == usual:
        cure = f"{hint or 'correct its configuration'}: st2i.load(..., scheduler={{...}})"
    else:
        cure = f"take {usual}: st2i.load(..., scheduler={{'_class_name': {usual!r}}})"
        cure += f", and {hint}" if hint else ""
    raise LoadError(
        f"{folder.source!r}: its pipeline cannot use the scheduler {name}, which {why}; {cure}"
    )


def _tried(scheduler: Any, predicts_noise: bool) -> tuple[bool, str]:
    """Whether its steps draw from a generator that they are given, and what is wrong. Used up by it."""
    import torch

    options: dict[str, Any] = {}
    generator = torch.Generator("cpu").manual_seed(0)
    if predicts_noise and "generator" in inspect.signature(scheduler.step).parameters:
        options["generator"] = generator
    before = generator.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        state = torch.get_rng_state()
        sample = torch.ones(1, 4, 8, 8)
        for timestep in scheduler.timesteps:
            if predicts_noise:
                scheduler.scale_model_input(sample, timestep)
            predicted = torch.zeros_like(sample)
            sample = scheduler.step(predicted, timestep, sample, **options, return_dict=False)[0]
        if not torch.equal(state, torch.get_rng_state()):
            return False, "draws noise that no seed gives again"
    finite = bool(torch.isfinite(sample).all())
    why = "" if finite else "makes numbers that are not finite as it is configured"
    return not torch.equal(before, generator.get_state()), why


def _short(error: Exception) -> str:
    """torch's own messages list all that it would have taken."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


class Steps:
    """Rule: 1 to 1,000 denoising steps, of which the scheduler can make a schedule."""

    def __init__(self, make: Make):
        self._make = make
        self._range = Range(1, _MAX_STEPS)
        self._faults: dict[int, str] = {}

    def check(self, name: str, value: Any, values: Mapping[str, Any] = NOTHING) -> None:
        self._range.check(name, value)
        if value not in self._faults:
            self._faults[value] = self._fault(value)
        if fault := self._faults[value]:
            raise ParameterError(f"{name}={value!r} does not suit the scheduler: {fault}")

    def describe(self) -> str:
        return self._range.describe()

    def _fault(self, steps: int) -> str:
        import torch

        try:
            scheduler = self._make(steps)
        except Exception as error:  # Diffusers raises what it meets first
            return f"it cannot make so many ({_short(error)}); take another number"
        if not torch.isfinite(torch.as_tensor(scheduler.timesteps).double()).all():
            return "its timesteps are not finite numbers; take more steps"
        return ""
