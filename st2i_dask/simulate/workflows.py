"""Workflows as the simulator sees them: positions, the weights each needs, the bytes each gives on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from scheduler_plugin.ahead import chain_lengths
from scheduler_plugin.outline import Outline, Step

from ..errors import ParameterError
from .gangs import Split
from .profiles import Profile

#: Bytes of results at 1024x1024 in bfloat16: embeddings, latents, one residual stack, an image.
EMBEDDING_BYTES = 4 << 20
LATENT_BYTES = 1 << 19
RESIDUAL_BYTES = 5 * (24 << 20)
IMAGE_BYTES = 3 << 20
BUCKET = "1024x1024"


@dataclass(frozen=True)
class Position:
    """One invocation. models: whose weights it needs, the last one being what it runs. split: how
    several executors can compute it together; None: they cannot."""

    fn: str
    models: tuple[str, ...]
    deps: tuple[int, ...] = ()
    callback_deps: tuple[int, ...] = ()
    out_bytes: int = 0
    split: Split | None = None

    @cached_property
    def model(self) -> str:
        """What the policy knows it by: adapters are part of the name."""
        return "+".join(reversed(self.models))

    @property
    def step(self) -> Step:
        """As the policy sees it."""
        gang = self.split.executors if self.split is not None else 1
        return Step(self.fn, self.model, BUCKET, self.deps, self.callback_deps, gang)


@dataclass(frozen=True)
class Workflow:
    """A DAG of invocations in topological order."""

    name: str
    positions: tuple[Position, ...]
    outline: Outline = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        steps = tuple(position.step for position in self.positions)
        object.__setattr__(self, "outline", Outline(self.name, steps))

    @cached_property
    def chains(self) -> tuple[int, ...]:
        """How many positions can run as one task, by position."""
        return chain_lengths(self.outline)

    @property
    def models(self) -> tuple[str, ...]:
        """All that it needs, in order of first use."""
        return tuple(dict.fromkeys(m for p in self.positions for m in p.models))

    def device_s(self, profile: Profile) -> float:
        """Seconds of compute of one request, all positions one after the other: solo latency."""
        return sum(profile.model(p.models[-1]).compute_s for p in self.positions)


def diffusion(
    name: str,
    encoders: Sequence[str],
    denoiser: str,
    steps: int,
    decoder: str,
    *,
    controlnet: str | None = None,
    adapter: str | None = None,
    split: Split | None = None,
) -> Workflow:
    """Encoders beside each other, `steps` denoising steps, a decoder.

    controlnet: runs beside every step, which takes its residuals through a callback input. adapter: a
    LoRA on the denoiser; its weights are its own, those of the denoiser are shared. split: how several
    executors can compute a denoising step together.
    """
    if steps < 1 or not encoders:
        raise ParameterError(
            f"workflow {name!r} has {len(encoders)} encoders and {steps} steps; give at least one"
        )
    found = [Position("Encode", (encoder,), out_bytes=EMBEDDING_BYTES) for encoder in encoders]
    given = tuple(range(len(found)))
    weights = (denoiser,) if adapter is None else (adapter, denoiser)
    latents: tuple[int, ...] = ()
    for _ in range(steps):
        callback: tuple[int, ...] = ()
        if controlnet is not None:
            callback = (len(found),)
            found.append(
                Position("Control", (controlnet,), given + latents, out_bytes=RESIDUAL_BYTES)
            )
        found.append(Position("Denoise", weights, given + latents, callback, LATENT_BYTES, split))
        latents = (len(found) - 1,)
    found.append(Position("Decode", (decoder,), latents, out_bytes=IMAGE_BYTES))
    return Workflow(name, tuple(found))


def monolith(workflow: Workflow) -> Workflow:
    """The whole workflow as one function on one device."""
    return Workflow(workflow.name, (Position("Workflow", (workflow.name,)),))
