"""The models and glue of the Z-Image workflows.

The order of calls and every dtype follow `ZImagePipeline.__call__`; what it computes in helpers of its
own is called from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from ...gang import running_gang
from ...glue import glue
from ..denoising import generator_of
from ..part import PipelinePart
from ..token_count import TokenCounter
from .sequence import shared_sequence


class QwenText(PipelinePart):
    """Prompt to the embeddings of its tokens, (tokens, cap_feat_dim)."""

    parts = frozenset({"text_encoder", "tokenizer"})

    def setup_io(self) -> None:
        self.add_input("prompt")
        self.add_input("max_sequence_length")
        self.add_output("prompt_embeds")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        embeds = pipeline._encode_prompt(
            prompt=[inputs["prompt"]],
            device=pipeline.text_encoder.device,
            max_sequence_length=inputs["max_sequence_length"],
        )
        return {"prompt_embeds": embeds[0]}


class ZImageTransformer(PipelinePart):
    """One denoising step: latents (images, channels, height, width) to the predicted velocity.

    predicted: (images, channels, 1, height, width) in the model's dtype, and with a negative prompt as
    many again for that one, made in the same forward. A ControlNet's residuals are a callback input;
    places: the layers that they are added after.
    """

    parts = frozenset({"transformer"})

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_input("timestep")
        self.add_input("prompt_embeds")
        self.add_input("negative_prompt_embeds", optional=True)
        self.add_input("cfg_truncation", optional=True)
        self.add_input("residuals", callback=True, optional=True)
        self.add_input("places", optional=True)
        self.add_output("predicted")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        import torch

        transformer = pipeline.transformer
        latents, timestep, prompts = model_inputs(transformer.dtype, **inputs)
        residuals = inputs["residuals"]
        if residuals is not None:
            residuals = ByLayer(residuals, inputs["places"])
        gang = running_gang()
        with shared_sequence(transformer, gang) if gang is not None else nullcontext():
            predicted = transformer(
                latents,
                timestep,
                prompts,
                controlnet_block_samples=residuals,
                joint_attention_kwargs=None,
                return_dict=False,
            )[0]
        return {"predicted": torch.stack(predicted)}


class ByLayer:
    """Residuals by the number of the layer that each is added after; one is fetched when it is read."""

    def __init__(self, residuals: Any, places: Sequence[int]):
        self._residuals = residuals
        self._index = {place: index for index, place in enumerate(places)}

    def __contains__(self, layer: int) -> bool:
        return layer in self._index

    def __getitem__(self, layer: int) -> Any:
        return self._residuals[self._index[layer]]


def model_inputs(
    dtype: Any,
    latents: Any,
    timestep: Any,
    prompt_embeds: Any,
    negative_prompt_embeds: Any,
    cfg_truncation: float | None,
    **_: Any,
) -> tuple[list[Any], Any, list[Any]]:
    """What transformer and ControlNet take: latents (channels, 1, height, width) in `dtype`, times and
    embeddings of each image. Once more with the negative prompt, if there is one and it has an effect."""
    images = len(latents)
    latents = latents.to(dtype)
    prompts = [prompt_embeds] * images
    if negative_prompt_embeds is not None and not is_truncated(timestep, cfg_truncation):
        latents = latents.repeat(2, 1, 1, 1)
        timestep = timestep.repeat(2)
        prompts += [negative_prompt_embeds] * images
    return list(latents.unsqueeze(2).unbind(dim=0)), timestep, prompts


def is_truncated(timestep: Any, cfg_truncation: float | None) -> bool:
    """Whether guidance is off at this time (0 at the start, 1 at the end)."""
    # No time is above 1; reading one waits for the device.
    return cfg_truncation is not None and cfg_truncation < 1 and timestep[0].item() > cfg_truncation


@glue
def combine(
    positive: Any,
    negative: Any,
    timestep: Any,
    guidance_scale: float,
    cfg_normalization: float,
    cfg_truncation: float,
) -> Any:
    """The velocity that the scheduler takes, (images, channels, height, width) float32.

    positive, negative: what the transformer predicted for the prompts; positive may hold both.
    """
    import torch

    images = len(timestep)
    if negative is None and len(positive) == 2 * images:
        positive, negative = positive[:images], positive[images:]
    elif is_truncated(timestep, cfg_truncation):
        negative = None
    if negative is None:
        return -positive.float().squeeze(2)
    mixed = []
    for pos, neg in zip(positive.float(), negative.float(), strict=True):
        made = pos + guidance_scale * (pos - neg)
        if cfg_normalization > 0:
            largest = torch.linalg.vector_norm(pos) * cfg_normalization
            norm = torch.linalg.vector_norm(made)
            if norm > largest:
                made = made * (largest / norm)
        mixed.append(made)
    return -torch.stack(mixed).squeeze(2)


class VaeDecoder(PipelinePart):
    """Latents to pixels in about [-1, 1], (images, 3, height, width)."""

    parts = frozenset({"vae"})

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_output("pixels")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        vae = pipeline.vae
        latents = inputs["latents"].to(vae.dtype)
        latents = (latents / vae.config.scaling_factor) + vae.config.shift_factor
        return {"pixels": vae.decode(latents, return_dict=False)[0]}


@glue
def draw_noise(
    prompt_embeds: Any,
    seed: int,
    num_images: int,
    channels: int,
    height: int,
    width: int,
    vae_scale_factor: int,
) -> Any:
    """Initial latents (images, channels, height, width) float32, on the embeddings' device."""
    import torch
    from diffusers import ZImagePipeline

    # prepare_latents reads nothing else of a pipeline.
    helper = SimpleNamespace(vae_scale_factor=vae_scale_factor)
    return ZImagePipeline.prepare_latents(
        helper,
        num_images,
        channels,
        height,
        width,
        torch.float32,
        prompt_embeds.device,
        generator_of(seed),
    )


def make_scheduler(
    class_name: str,
    config: dict[str, Any],
    num_steps: int,
    tokens: int,
    strength: float | None,
    begin: bool,
    device: Any,
) -> Any:
    """A request's own scheduler with its timesteps set, shifted with the number of image tokens.

    strength: of a given picture; None: without one. begin: whether the pipeline tells it that it begins
    with its first step.
    """
    import diffusers
    from diffusers import ZImageImg2ImgPipeline
    from diffusers.pipelines.z_image.pipeline_z_image import (
        calculate_shift,
        get_default_z_image_sigmas,
        retrieve_timesteps,
    )

    scheduler = getattr(diffusers, class_name).from_config(config)
    config = scheduler.config
    mu = calculate_shift(
        tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", 1.15),
    )
    sigmas = get_default_z_image_sigmas(num_steps)
    retrieve_timesteps(scheduler, num_steps, device, sigmas=sigmas, mu=mu)
    if strength is not None:
        # get_timesteps reads nothing else of a pipeline.
        helper = SimpleNamespace(scheduler=scheduler)
        ZImageImg2ImgPipeline.get_timesteps(helper, num_steps, strength, device)
    elif begin:
        scheduler.set_begin_index(0)
    return scheduler


@glue
def prepare_scheduler(latents: Any, *settings: Any) -> Any:
    """`make_scheduler` with these settings, on the latents' device."""
    return make_scheduler(*settings, latents.device)


@glue
def model_time(scheduler: Any, step: int, latents: Any) -> Any:
    """The time of a step as the model takes it, (images,) float32: 0 at the start, 1 at the end."""
    return (1000 - scheduler.timesteps[step].expand(latents.shape[0])) / 1000


class ChatCounter(TokenCounter):
    """Length of a prompt inside the chat template, as the text encoder sees it."""

    def __call__(self, text: str) -> int:
        chat = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=True,
        )
        return len(self.tokenizer(chat, verbose=False).input_ids)
