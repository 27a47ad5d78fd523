"""Strength: how much of a given picture is drawn anew, as a share of the denoising steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ParameterError
from ..rules import NOTHING, Range


def first_step(num_steps: int, strength: float) -> int:
    """The step that denoising begins with, as pipelines of flow models count
    (StableDiffusion3Img2ImgPipeline.get_timesteps)."""
    return int(max(num_steps - min(num_steps * strength, num_steps), 0))


@dataclass(frozen=True)
class Strength:
    """Rule: above 0 to 1, and at least one of `num_steps`, a parameter of the same workflow, is left."""

    def check(self, name: str, value: Any, values: Mapping[str, Any] = NOTHING) -> None:
        Range(0, 1).check(name, value)
        num_steps = values.get("num_steps", 1)
        if first_step(num_steps, value) >= num_steps:
            raise ParameterError(
                f"{name}={value!r} leaves none of {num_steps} steps; allowed: {self.describe()}"
            )

    def describe(self) -> str:
        return "above 0 to 1"
