"""The paper's two settings: which workflows there are, who asks for them, and how often.

A tenant asks for one workflow. How much of the requests a tenant sends is the measured popularity of
the checkpoints in Alibaba's cluster-trace-v2026-GenAI, most popular first; which workflow gets which
share is drawn from the seed, as the paper assigns its workflows to its tenants at random.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ParameterError
from . import h800
from .gangs import z_image
from .profiles import Profile
from .workflows import Workflow, diffusion

#: Shares of the most popular checkpoints among 26,823 requests.
POPULARITY = (
    *(0.307, 0.150, 0.094, 0.079, 0.075, 0.043, 0.036, 0.030, 0.027, 0.027),
    *(0.021, 0.009, 0.007, 0.007, 0.007, 0.005, 0.004, 0.004, 0.004, 0.004),
)
#: Share of the executors' seconds that requests compute for at rate scale 1, on 32 executors. The paper
#: does not give its rates; it says that MCache falls below 90 % at 1.0, and so does MCache with FIFO here.
LOAD_AT_SCALE_1 = 0.75
EXECUTORS = 32


@dataclass(frozen=True)
class Workload:
    """Workflows by tenant, and each tenant's share of the requests."""

    name: str
    profile: Profile
    workflows: Mapping[str, Workflow]
    shares: Mapping[str, float]

    def __post_init__(self) -> None:
        if not self.workflows or set(self.workflows) != set(self.shares):
            raise ParameterError(
                f"workload {self.name!r}: workflows are given for {sorted(self.workflows)}, shares "
                f"for {sorted(self.shares)}; give both for the same tenants, one at least"
            )

    def device_s(self) -> float:
        """Seconds of compute of an average request."""
        total = sum(self.shares.values())
        return (
            sum(
                share * self.workflows[tenant].device_s(self.profile)
                for tenant, share in self.shares.items()
            )
            / total
        )

    def rate(self, scale: float) -> float:
        """Requests per second at this rate scale."""
        return scale * LOAD_AT_SCALE_1 * EXECUTORS / self.device_s()

    def on(self, profile: Profile) -> Workload:
        """The same requests on another device."""
        return Workload(self.name, profile, self.workflows, self.shares)


_SD35 = (("clip-l", "clip-g", "t5-sd3"), "sd35-large", 28, "sd35-vae")
_Z_IMAGE = (("qwen3-4b",), "z-image", 50, "flux1-vae")
_TURBO = (("qwen3-4b",), "z-image-turbo", 8, "flux1-vae")
_FLUX = (("clip-flux", "t5-flux"), "flux1-dev", 28, "flux1-vae")
_SCHNELL = (("clip-flux", "t5-flux"), "flux1-schnell", 4, "flux1-vae")
_KLEIN = (("qwen3-8b",), "flux2-klein", 4, "flux2-vae")

BASIC = {
    "sd35": diffusion("sd35", *_SD35),
    "z-image": diffusion("z-image", *_Z_IMAGE),
    "turbo": diffusion("turbo", *_TURBO),
    "flux-dev": diffusion("flux-dev", *_FLUX),
    "klein": diffusion("klein", *_KLEIN),
}
SCHNELL = diffusion("schnell", *_SCHNELL)


def wide_z_image(executors: int) -> Workflow:
    """Z-Image, each step of which so many executors can compute together."""
    return diffusion("z-image", *_Z_IMAGE, split=z_image(executors, guided=True))


CONTROLLED = {
    "sd35-canny": diffusion("sd35-canny", *_SD35, controlnet="sd35-canny"),
    "sd35-depth": diffusion("sd35-depth", *_SD35, controlnet="sd35-depth"),
    "z-image-control": diffusion("z-image-control", *_Z_IMAGE, controlnet="z-image-control"),
    "turbo-control": diffusion("turbo-control", *_TURBO, controlnet="turbo-control"),
    "flux-canny": diffusion("flux-canny", *_FLUX, controlnet="flux1-canny"),
    "flux-depth": diffusion("flux-depth", *_FLUX, controlnet="flux1-depth"),
}
ADAPTED = {
    f"{name}-lora-{number}": diffusion(f"{name}-lora-{number}", *parts, adapter=f"lora-{number}")
    for number, (name, parts) in enumerate(
        [
            *(("sd35", _SD35), ("z-image", _Z_IMAGE), ("turbo", _TURBO), ("turbo", _TURBO)),
            *(("flux-dev", _FLUX), ("flux-dev", _FLUX), ("schnell", _SCHNELL), ("klein", _KLEIN)),
        ]
    )
}


def s1(seed: int = 1, profile: Profile = h800.PROFILE) -> Workload:
    """Setting 1: five basic workflows."""
    return drawn("S1", list(BASIC.values()), seed, profile)


def s2(seed: int = 1, profile: Profile = h800.PROFILE) -> Workload:
    """Setting 2: twenty workflows, fourteen of them with a ControlNet or a LoRA."""
    everything = [*BASIC.values(), SCHNELL, *CONTROLLED.values(), *ADAPTED.values()]
    return drawn("S2", everything, seed, profile)


SETTINGS = {"S1": s1, "S2": s2}


def setting(name: str, seed: int = 1, profile: Profile = h800.PROFILE) -> Workload:
    """The workload of this name. ParameterError lists the names."""
    made = SETTINGS.get(name.upper())
    if made is None:
        raise ParameterError(f"no setting is called {name!r}; there are {', '.join(SETTINGS)}")
    return made(seed, profile)


def drawn(name: str, workflows: Sequence[Workflow], seed: int, profile: Profile) -> Workload:
    """These workflows, the measured shares given out at random."""
    order = list(workflows)
    random.Random(seed).shuffle(order)
    total = sum(POPULARITY[: len(order)])
    by_tenant = {f"t-{workflow.name}": workflow for workflow in order}
    shares = {tenant: share / total for tenant, share in zip(by_tenant, POPULARITY, strict=False)}
    return Workload(name, profile, by_tenant, shares)
