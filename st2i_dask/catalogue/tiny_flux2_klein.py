"""Tiny FLUX.2 Klein pipelines with random weights, built from configurations; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .tiny_qwen import qwen_config, qwen_tokenizer

#: Layers of the tiny text encoder that give the embeddings: `st2i.load(path,
#: text_encoder_out_layers=LAYERS)`.
LAYERS = (0, 1, 2)


def save_flux2_klein(path: str | Path, *, distilled: bool = True, seed: int = 0) -> Path:
    """Build a Flux2KleinPipeline and save it as a Diffusers folder (float32, about 0.4 MB)."""
    path = Path(path)
    flux2_klein(distilled=distilled, seed=seed).save_pretrained(path, safe_serialization=True)
    return path


def flux2_klein(
    *, distilled: bool = True, seed: int = 0, layers: tuple[int, int] = (1, 2), heads: int = 2
) -> Any:
    """A Flux2KleinPipeline, VAE factor 2. layers: double and single blocks, of width 16 * heads."""
    import torch
    from diffusers import (
        AutoencoderKLFlux2,
        FlowMatchEulerDiscreteScheduler,
        Flux2KleinPipeline,
        Flux2Transformer2DModel,
    )
    from transformers import Qwen3ForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformer = Flux2Transformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=layers[0],
            num_single_layers=layers[1],
            attention_head_dim=16,
            num_attention_heads=heads,
            joint_attention_dim=32 * len(LAYERS),
            timestep_guidance_channels=32,
            axes_dims_rope=[4, 4, 4, 4],
            guidance_embeds=False,
        )
        # As made, the prompt would hardly matter.
        transformer.context_embedder.weight.data.mul_(50)
        vae = AutoencoderKLFlux2(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 8),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=4,
            sample_size=32,
        )
        # As made, 0 and 1: what reads them would not matter.
        vae.bn.running_mean.normal_(std=0.1)
        vae.bn.running_var.uniform_(0.5, 1.5)
        text_encoder = Qwen3ForCausalLM(qwen_config())
    return Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae.eval(),
        text_encoder=text_encoder.eval(),  # type: ignore[no-untyped-call]
        tokenizer=qwen_tokenizer(),
        transformer=transformer.eval(),
        is_distilled=distilled,
    )
