"""The models and glue of the Qwen-Image workflows.

The order of calls and every dtype follow `QwenImagePipeline.__call__`; what it computes in helpers of
its own is called from there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ...glue import glue
from ..denoising import resumed
from ..part import PipelinePart
from ..token_count import TokenCounter


class QwenVlText(PipelinePart):
    """Prompt to the embeddings of its tokens, (images, tokens, joint_attention_dim), all alike."""

    parts = frozenset({"text_encoder", "tokenizer"})

    def setup_io(self) -> None:
        self.add_input("prompt")
        self.add_input("max_sequence_length")
        self.add_input("num_images")
        self.add_output("prompt_embeds")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        # One prompt is not padded: its mask is None.
        embeds, _ = pipeline.encode_prompt(
            prompt=[inputs["prompt"]],
            device=pipeline.text_encoder.device,
            num_images_per_prompt=inputs["num_images"],
            max_sequence_length=inputs["max_sequence_length"],
        )
        return {"prompt_embeds": embeds}


class QwenImageTransformer(PipelinePart):
    """One denoising step: packed latents (images, tokens, channels) to the predicted velocity.

    shape: rows and columns of tokens. A ControlNet's residuals are a callback input: each is fetched
    after the block that it is added to.
    """

    parts = frozenset({"transformer"})

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_input("timestep")
        self.add_input("prompt_embeds")
        self.add_input("shape")
        self.add_input("controlnet_block_samples", callback=True, optional=True)
        self.add_output("noise_pred")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        transformer = pipeline.transformer
        with transformer.cache_context("cond"):
            noise_pred = transformer(
                hidden_states=inputs["latents"],
                timestep=inputs["timestep"] / 1000,
                guidance=None,
                encoder_hidden_states_mask=None,
                encoder_hidden_states=inputs["prompt_embeds"],
                img_shapes=[[(1, *inputs["shape"])]],
                controlnet_block_samples=inputs["controlnet_block_samples"],
                attention_kwargs={},
                return_dict=False,
            )[0]
        return {"noise_pred": noise_pred}


@glue
def guided(noise_pred: Any, unwanted: Any, scale: float) -> Any:
    """Away from what the negative prompt would give, each token with the length that it had."""
    import torch

    mixed = unwanted + scale * (noise_pred - unwanted)
    length = torch.norm(noise_pred, dim=-1, keepdim=True)
    return mixed * (length / torch.norm(mixed, dim=-1, keepdim=True))


class VaeDecoder(PipelinePart):
    """Packed latents to pixels in [-1, 1], (images, 3, height, width)."""

    parts = frozenset({"vae"})

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_input("height")
        self.add_input("width")
        self.add_output("pixels")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        vae = pipeline.vae
        latents = pipeline._unpack_latents(
            inputs["latents"], inputs["height"], inputs["width"], pipeline.vae_scale_factor
        ).to(vae.dtype)
        mean, inverse_std = (each.to(latents.dtype) for each in latent_statistics(vae))
        latents = latents / inverse_std + mean
        # Of a film's frames there is one.
        return {"pixels": vae.decode(latents, return_dict=False)[0][:, :, 0]}


def latent_statistics(vae: Any) -> tuple[Any, Any]:
    """Mean of latents and 1 / their standard deviation, (1, channels, 1, 1, 1) float32."""
    import torch

    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean).view(shape).to(vae.device)
    return mean, 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(vae.device)


@glue
def draw_noise(
    prompt_embeds: Any,
    generator_state: Any,
    channels: int,
    height: int,
    width: int,
    vae_scale_factor: int,
) -> Any:
    """Initial packed latents (images, tokens, channels * 4), in the embeddings' dtype and device."""
    from diffusers import QwenImagePipeline

    # prepare_latents reads nothing else of a pipeline.
    helper = SimpleNamespace(
        vae_scale_factor=vae_scale_factor, _pack_latents=QwenImagePipeline._pack_latents
    )
    return QwenImagePipeline.prepare_latents(
        helper,
        prompt_embeds.shape[0],
        channels,
        height,
        width,
        prompt_embeds.dtype,
        prompt_embeds.device,
        resumed(generator_state),
    )


def make_scheduler(
    class_name: str,
    config: dict[str, Any],
    num_steps: int,
    tokens: int,
    strength: float | None,
    device: Any,
) -> Any:
    """A request's own scheduler with its timesteps set, shifted with the number of image tokens.

    strength: of a given picture; None: without one.
    """
    import diffusers
    import numpy as np
    from diffusers import QwenImageImg2ImgPipeline
    from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift, retrieve_timesteps

    scheduler = getattr(diffusers, class_name).from_config(config)
    config = scheduler.config
    mu = calculate_shift(
        tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", 1.15),
    )
    sigmas: Any = np.linspace(1.0, 1 / num_steps, num_steps)
    retrieve_timesteps(scheduler, num_steps, device, sigmas=sigmas, mu=mu)
    if strength is None:
        scheduler.set_begin_index(0)
    else:
        # get_timesteps reads nothing else of a pipeline.
        helper = SimpleNamespace(scheduler=scheduler)
        QwenImageImg2ImgPipeline.get_timesteps(helper, num_steps, strength, device)
    return scheduler


@glue
def prepare_scheduler(latents: Any, *settings: Any) -> Any:
    """`make_scheduler` with these settings, on the latents' device."""
    return make_scheduler(*settings, latents.device)


class TemplateCounter(TokenCounter):
    """Length of a prompt in the pipeline's template, without the part of it that is dropped."""

    _template: tuple[str, int] | None = None

    def __call__(self, text: str) -> int:
        if self._template is None:
            from diffusers import QwenImagePipeline

            bare = QwenImagePipeline(None, None, None, None, None)
            start = bare.prompt_template_encode_start_idx
            self._template = bare.prompt_template_encode, start
        template, start = self._template
        return len(self.tokenizer(template.format(text), verbose=False).input_ids) - start
