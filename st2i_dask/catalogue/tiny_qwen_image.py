"""A tiny Qwen-Image pipeline with random weights, without and with a ControlNet; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .tiny_parts import without_zeros
from .tiny_qwen import qwen_tokenizer


def save_qwen_image(path: str | Path, **options: Any) -> Path:
    """Build a QwenImagePipeline and save it as a Diffusers folder (float32, 1 MB); options of
    `qwen_image`."""
    path = Path(path)
    qwen_image(**options).save_pretrained(path, safe_serialization=True)
    return path


def save_qwen_image_controlnet(path: str | Path, **options: Any) -> Path:
    """Build a QwenImageControlNetPipeline and save it; options of `qwen_image_controlnet`."""
    path = Path(path)
    qwen_image_controlnet(**options).save_pretrained(path, safe_serialization=True)
    return path


def qwen_image_controlnet(*, seed: int = 0, layers: int = 2, control_layers: int = 1) -> Any:
    """A QwenImageControlNetPipeline: `qwen_image` with a ControlNet none of whose weights are zero."""
    import torch
    from diffusers import QwenImageControlNetModel, QwenImageControlNetPipeline

    base = qwen_image(seed=seed, layers=layers)
    with torch.random.fork_rng():
        torch.manual_seed(seed + 1)
        controlnet = QwenImageControlNetModel(**_transformer_config(control_layers))
        without_zeros(controlnet)
    return QwenImageControlNetPipeline(**base.components, controlnet=controlnet)


def _transformer_config(layers: int) -> dict[str, Any]:
    return dict(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=layers,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(8, 4, 4),
    )


def qwen_image(*, seed: int = 0, layers: int = 2) -> Any:
    """A QwenImagePipeline, VAE factor 8, with latents of other mean and spread than 0 and 1."""
    import torch
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=262,
        rope_parameters={"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=2048,
    )
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformer = QwenImageTransformer2DModel(**_transformer_config(layers))
        vae = AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 2, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[-0.8, 0.1, 0.4, -0.1],
            latents_std=[2.8, 1.5, 2.3, 1.6],
        )
        text_encoder = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(
                text_config=text,
                vision_config=vision,
                image_token_id=5,
                video_token_id=6,
                vision_start_token_id=7,
                vision_end_token_id=8,
            )
        )
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02),
        vae=vae.eval(),
        text_encoder=text_encoder.eval(),  # type: ignore[no-untyped-call]
        tokenizer=qwen_tokenizer(),
        transformer=transformer.eval(),
    )
