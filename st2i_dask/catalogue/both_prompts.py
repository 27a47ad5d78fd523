"""Guidance of the Stable Diffusion pipelines: prompt and negative prompt go through a model in one
batch, or with split guidance in two forwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..glue import glue
from .denoising import guided


@dataclass(frozen=True)
class Text:
    """What a request says, inside a workflow.

    forwards: embeddings and pooled embeddings of each forward of a step: one of both prompts in a batch
    or of a prompt without guidance, or the negative prompt's and the prompt's. scale: of guidance; None
    without.
    """

    forwards: tuple[tuple[Any, Any], ...]
    scale: float | None = None

    @property
    def batch_scale(self) -> float | None:
        """Guidance within a forward; None where a forward is of one prompt."""
        return self.scale if len(self.forwards) == 1 else None

    @property
    def like(self) -> Any:
        """A tensor of the pipeline's dtype and device."""
        return self.forwards[0][0]

    def guided(self, predicted: list[Any]) -> Any:
        """What the scheduler takes of a step, from what its forwards predicted."""
        return predicted[0] if len(predicted) == 1 else guided(*predicted[::-1], self.scale)


def text_of(
    positive: tuple[Any, Any],
    negative: Callable[[], tuple[Any, Any]],
    guidance_scale: float,
    split: bool,
) -> Text:
    """positive: embeddings and pooled ones of the prompt. negative: composes those of the negative one,
    if they are needed."""
    if guidance_scale <= 1:  # as `do_classifier_free_guidance` of the pipelines has it
        return Text((positive,))
    unwanted = negative()
    if split:
        return Text((unwanted, positive), guidance_scale)
    both = stack(unwanted[0], positive[0]), stack(unwanted[1], positive[1])
    return Text((both,), guidance_scale)


@glue
def stack(negative: Any, positive: Any) -> Any:
    """The negative prompt's and then the prompt's, in one batch."""
    import torch

    return torch.cat([negative, positive], dim=0)


def doubled(latents: Any, guidance_scale: float | None) -> Any:
    """What goes through a model in one batch: with guidance once for each of both prompts."""
    import torch

    return latents if guidance_scale is None else torch.cat([latents] * 2)


def halved(noise_pred: Any, guidance_scale: float | None) -> Any:
    """What a model predicted for what `doubled` gave, guided."""
    if guidance_scale is None:
        return noise_pred
    unwanted, wanted = noise_pred.chunk(2)
    return guided(wanted, unwanted, guidance_scale)
