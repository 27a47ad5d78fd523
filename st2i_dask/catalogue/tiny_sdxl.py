"""Tiny Stable Diffusion XL pipelines with random weights, built from configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .tiny import clip_text, clip_tokenizer
from .tiny_parts import autoencoder, without_zeros
from .tiny_sd3 import projected_clip

_WIDTH = 32  # of the text encoders


def save_sdxl(
    path: str | Path, *, pipeline: str = "StableDiffusionXLPipeline", **options: Any
) -> Path:
    """Build a pipeline and save it as a Diffusers folder (float32, about 0.7 MB).

    pipeline: its class; StableDiffusionXLControlNetPipeline gets a ControlNet. options: of `sdxl`;
    others that the class takes itself (force_zeros_for_empty_prompt, requires_aesthetics_score).
    """
    import diffusers

    path = Path(path)
    own = {name: options.pop(name) for name in list(options) if name not in _OPTIONS}
    parts = sdxl(**options).components
    if "ControlNet" in pipeline:
        own["controlnet"] = sdxl_control(options.get("seed", 0) + 1)
    if options.get("refiner"):
        parts.update(text_encoder=None, tokenizer=None)
    made = getattr(diffusers, pipeline)(**parts, **own)
    made.save_pretrained(path, safe_serialization=True)
    return path


def save_sdxl_control(path: str | Path, *, seed: int = 1) -> Path:
    """A ControlNet alone, in a folder of its own."""
    path = Path(path)
    sdxl_control(seed).save_pretrained(path, safe_serialization=True)
    return path


def _unet_config(refiner: bool = False) -> dict[str, Any]:
    ids = 5 if refiner else 6  # sizes, crops and a score, or sizes, crops and sizes
    return dict(
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        layers_per_block=1,
        attention_head_dim=(2, 4),
        norm_num_groups=4,
        cross_attention_dim=_WIDTH if refiner else 2 * _WIDTH,
        use_linear_projection=True,
        transformer_layers_per_block=(1, 2),
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=_WIDTH + 8 * ids,
    )


def sdxl_control(seed: int = 1) -> Any:
    """A ControlNetModel none of whose weights are zero."""
    import torch
    from diffusers import ControlNetModel

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        controlnet = ControlNetModel(
            **_unet_config(), in_channels=4, conditioning_embedding_out_channels=(8, 16)
        )
        return without_zeros(controlnet)


_OPTIONS = ("seed", "in_channels", "upcast", "refiner", "latents_mean", "latents_std")


def sdxl(
    *,
    seed: int = 0,
    in_channels: int = 4,
    upcast: bool = True,
    refiner: bool = False,
    latents_mean: tuple[float, ...] | None = None,
    latents_std: tuple[float, ...] | None = None,
) -> Any:
    """A StableDiffusionXLPipeline.

    in_channels: 9 for a UNet made for inpainting. upcast: whether the VAE wants float32. refiner: the
    UNet of the refiner, for one text encoder and a score. latents_mean, latents_std: of the VAE.
    """
    import torch
    from diffusers import (
        EulerDiscreteScheduler,
        StableDiffusionXLPipeline,
        UNet2DConditionModel,
    )

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        unet = UNet2DConditionModel(
            **_unet_config(refiner),
            sample_size=16,
            in_channels=in_channels,
            out_channels=4,
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        )
        vae = autoencoder(
            scaling_factor=0.13025,
            force_upcast=upcast,
            latents_mean=latents_mean,
            latents_std=latents_std,
        )
        text_encoder, text_encoder_2 = clip_text(), projected_clip()
    scheduler = EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        steps_offset=1,
        timestep_spacing="leading",
    )
    return StableDiffusionXLPipeline(
        scheduler=scheduler,
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=clip_tokenizer(),
        text_encoder_2=text_encoder_2,
        tokenizer_2=clip_tokenizer(),
        unet=unet.eval(),
    )
