"""Both forms of inpainting that the Stable Diffusion pipelines have: with a denoiser made for it, which
gets mask and masked image as more channels, and with any other, where what is outside the mask is put
back after each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import LoadError
from .denoising import keep_outside


def is_made_for_it(
    source: str, pipeline: str, what: str, taken: tuple[int, int], channels: int, of_vae: int
) -> bool:
    """Whether a denoiser of so many channels is made for inpainting.

    LoadError for numbers that the pipeline does not know. what: the denoisers, for the error. taken:
    channels of latents, and those of a denoiser that is made for it. of_vae: channels of the VAE.
    """
    latents, made_for_it = taken
    if channels not in taken or of_vae != latents:
        raise LoadError(
            f"{source!r}: {pipeline} takes {what} of {latents} or {made_for_it} channels and VAEs of "
            f"{latents}, not {channels} and {of_vae}"
        )
    return channels == made_for_it


def denoise_options(
    made_for_it: bool, mask: Any, masked: Any, image_latents: Any, noise: Any
) -> dict[str, Callable[..., Any]]:
    """What a family's denoising loop does otherwise: its each_forward and after_step.

    mask, masked: in the size of latents, for the denoiser that is made for it. image_latents, noise: to
    put back what is outside the mask, for any other.
    """
    if made_for_it:
        return {"each_forward": lambda *_: {"inpainting": (mask, masked)}}

    def after_step(latents: Any, schedule: Any, step: int) -> Any:
        return keep_outside(step, schedule, latents, image_latents, noise, mask)

    return {"after_step": after_step}
