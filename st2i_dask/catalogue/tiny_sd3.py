"""Tiny Stable Diffusion 3 pipelines with random weights, built from configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .tiny import _CLIP_BOS, _CLIP_EOS, _MAX_TOKENS, clip_tokenizer, t5_tokenizer
from .tiny_parts import FLOW, autoencoder, without_zeros

_WIDTH = 32  # of the text encoders
_JOINT = 2 * _WIDTH
_LATENTS = 16  # StableDiffusion3InpaintPipeline takes no other number of channels

#: Forms of ControlNets: of SD3 with zeros as pooled projections and with the prompt's, and of SD3.5
#: large, which reads no prompt and has the transformer's position embedding.
CONTROL_FORMS = ("zeros", "pooled", "large")


def save_sd3(path: str | Path, **options: Any) -> Path:
    """Build a StableDiffusion3Pipeline and save it as a Diffusers folder (float32, about 0.6 MB).

    options: of `sd3`; `pipeline`: another class of its, StableDiffusion3InpaintPipeline for example.
    """
    import diffusers

    path = Path(path)
    class_name = options.pop("pipeline", "StableDiffusion3Pipeline")
    made = getattr(diffusers, class_name)(**sd3(**options).components)
    made.save_pretrained(path, safe_serialization=True)
    return path


def save_sd3_controlnet(path: str | Path, *, form: str = "zeros", **options: Any) -> Path:
    """Build a StableDiffusion3ControlNetPipeline and save it as a Diffusers folder.

    form: one of CONTROL_FORMS. options: of `sd3`.
    """
    from diffusers import StableDiffusion3ControlNetPipeline

    path = Path(path)
    pipeline = StableDiffusion3ControlNetPipeline(
        **sd3(**options).components, controlnet=sd3_control(form, options.get("seed", 0) + 1)
    )
    if form == "large":
        # A checkpoint of it has no position embedding; the pipeline has just put one in.
        pipeline.controlnet.pos_embed = None
    pipeline.save_pretrained(path, safe_serialization=True)
    return path


def save_sd3_control(path: str | Path, *, form: str = "zeros", seed: int = 1) -> Path:
    """A ControlNet alone, in a folder of its own."""
    path = Path(path)
    sd3_control(form, seed).save_pretrained(path, safe_serialization=True)
    return path


def _transformer_config(layers: int) -> dict[str, Any]:
    return dict(
        sample_size=16,
        patch_size=2,
        num_layers=layers,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_JOINT,
        caption_projection_dim=32,
        pooled_projection_dim=2 * _WIDTH,
        out_channels=_LATENTS,
        pos_embed_max_size=24,
    )


def sd3_control(form: str, seed: int = 1, layers: int = 2) -> Any:
    """An SD3ControlNetModel none of whose weights are zero."""
    import torch
    from diffusers import SD3ControlNetModel

    large = form == "large"
    config = {**_transformer_config(layers), "in_channels": _LATENTS}
    if large:
        config["joint_attention_dim"] = None
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        controlnet = SD3ControlNetModel(
            **config, use_pos_embed=not large, force_zeros_for_pooled_projection=form == "zeros"
        )
        return without_zeros(controlnet)


def sd3(
    *,
    seed: int = 0,
    layers: int = 3,
    t5: bool = True,
    in_channels: int = _LATENTS,
    v35: bool = False,
) -> Any:
    """A StableDiffusion3Pipeline.

    t5: False: without its third text encoder. in_channels: 33 for a transformer made for inpainting.
    v35: the transformer of SD3.5, with normalised queries and keys and dual attention.
    """
    import torch
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    form = dict(qk_norm="rms_norm", dual_attention_layers=(0, 1)) if v35 else {}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformer = SD3Transformer2DModel(
            **_transformer_config(layers), in_channels=in_channels, **form
        )
        vae = autoencoder(latent_channels=_LATENTS, **FLOW)
        text_encoder, text_encoder_2 = projected_clip(), projected_clip()
        text_encoder_3 = _t5() if t5 else None
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=clip_tokenizer(),
        text_encoder_2=text_encoder_2,
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=text_encoder_3,
        tokenizer_3=t5_tokenizer() if t5 else None,
        transformer=transformer.eval(),
    )


def projected_clip() -> Any:
    """A CLIP text model with a projection, as SD3 and SDXL have them: 32 wide, two layers."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=514,
            hidden_size=_WIDTH,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=_MAX_TOKENS,
            projection_dim=_WIDTH,
            bos_token_id=_CLIP_BOS,
            eos_token_id=_CLIP_EOS,
            pad_token_id=_CLIP_EOS,
            hidden_act="gelu",
        )
    ).eval()  # type: ignore[no-untyped-call]


def _t5() -> Any:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=128, d_model=_JOINT, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return T5EncoderModel(config).eval()  # type: ignore[no-untyped-call]
