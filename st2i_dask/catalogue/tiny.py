"""Tiny pipelines with random weights, built from configurations: the families' shapes in kilobytes.

They draw noise, but every code path, dtype and tensor layout is the real one. Nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .tiny_parts import FLOW, autoencoder, without_zeros

# Token ids of the CLIP tokenizer below: 256 bytes, 256 end-of-word bytes, then these two.
_CLIP_BOS, _CLIP_EOS = 512, 513
_MAX_TOKENS = 77


def save_flux(path: str | Path, *, guidance: bool = True, seed: int = 0) -> Path:
    """Build a FluxPipeline and save it as a Diffusers folder (float32, about 0.5 MB).

    guidance: True for the dev form (guidance embedding, dynamic shift), False for schnell.
    """
    path = Path(path)
    flux(guidance=guidance, seed=seed).save_pretrained(path, safe_serialization=True)
    return path


def save_flux_controlnet(path: str | Path, **options: Any) -> Path:
    """Build a FluxControlNetPipeline and save it as a Diffusers folder; options of `flux_controlnet`."""
    path = Path(path)
    flux_controlnet(**options).save_pretrained(path, safe_serialization=True)
    return path


def flux_controlnet(
    *,
    guidance: bool = True,
    seed: int = 0,
    layers: tuple[int, int] = (2, 2),
    heads: int = 2,
    control_layers: tuple[int, int] = (2, 1),
    control_guidance: bool = False,
    pixels: bool = False,
    modes: int | None = None,
) -> Any:
    """A FluxControlNetPipeline: `flux` with a ControlNet none of whose weights are zero.

    control_layers: its double and single blocks. control_guidance: whether it has a guidance embedding.
    pixels: XLabs' form, which takes the image itself and not its latents. modes: of the union form.
    """
    import torch
    from diffusers import FluxControlNetModel, FluxControlNetPipeline

    # XLabs' form makes one token of 8x8 pixels; so must the VAE, with the packing.
    base = flux(guidance=guidance, seed=seed, layers=layers, heads=heads, vae_blocks=2 + pixels)
    with torch.random.fork_rng():
        torch.manual_seed(seed + 1)
        config = {**_transformer_config(control_layers, heads), "guidance_embeds": control_guidance}
        controlnet = FluxControlNetModel(
            **config, num_mode=modes, conditioning_embedding_channels=16 if pixels else None
        )
        without_zeros(controlnet)
    return FluxControlNetPipeline(**base.components, controlnet=controlnet)


def _transformer_config(layers: tuple[int, int], heads: int) -> dict[str, Any]:
    return dict(
        patch_size=1,
        in_channels=16,
        num_layers=layers[0],
        num_single_layers=layers[1],
        attention_head_dim=16,
        num_attention_heads=heads,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )


def flux(
    *,
    guidance: bool = True,
    seed: int = 0,
    layers: tuple[int, int] = (2, 2),
    heads: int = 2,
    vae_blocks: int = 2,
) -> Any:
    """A FluxPipeline. layers: double and single blocks, of width 16 * heads; VAE factor 2 or more."""
    import torch
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        FluxPipeline,
        FluxTransformer2DModel,
    )

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformer = FluxTransformer2DModel(
            **_transformer_config(layers, heads),
            guidance_embeds=guidance,
        )
        vae = autoencoder(blocks=vae_blocks, **FLOW)
        text_encoder, text_encoder_2 = clip_text(), t5_text()
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0 if guidance else 1.0, use_dynamic_shifting=guidance
    )
    return FluxPipeline(
        scheduler=scheduler,
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=clip_tokenizer(),
        text_encoder_2=text_encoder_2,
        tokenizer_2=t5_tokenizer(),
        transformer=transformer.eval(),
    )


def clip_text() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=514,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=_MAX_TOKENS,
            projection_dim=32,
            bos_token_id=_CLIP_BOS,
            eos_token_id=_CLIP_EOS,
            pad_token_id=_CLIP_EOS,
            hidden_act="gelu",
        )
    ).eval()  # type: ignore[no-untyped-call]


def t5_text() -> Any:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return T5EncoderModel(config).eval()  # type: ignore[no-untyped-call]


def clip_tokenizer() -> Any:
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    alphabet = sorted(ByteLevel.alphabet())
    tokens = alphabet + [c + "</w>" for c in alphabet] + ["<|startoftext|>", "<|endoftext|>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=_MAX_TOKENS)


def t5_tokenizer() -> Any:
    from transformers import T5Tokenizer

    letters = [(chr(c), -3.0) for c in range(33, 127)]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0), *letters]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)
