"""Tiny pipelines of families that have no workflow of their own, by the class of their pipeline."""

from __future__ import annotations

from typing import Any

import torch

from st2i_dask.catalogue import tiny, tiny_flux2_klein, tiny_sd3, tiny_z_image
from st2i_dask.catalogue.tiny_parts import autoencoder

torch.set_num_threads(1)  # as the workers: convolutions sum in another order with more


def kl_vae(**more: Any) -> Any:
    return autoencoder(**{"scaling_factor": 0.5, **more})


def unet(**more: Any) -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        **more,
    ).eval()


def safety_checker() -> Any:
    """One that takes nothing away."""
    from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
    from transformers import CLIPConfig

    small = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    vision = {**small, "image_size": 16, "patch_size": 8, "projection_dim": 8}
    config = CLIPConfig(text_config=small, vision_config=vision, projection_dim=8)
    checker = StableDiffusionSafetyChecker(config)
    checker.concept_embeds_weights.data.fill_(2.0)
    checker.special_care_embeds_weights.data.fill_(2.0)
    return checker.eval()


def stable_diffusion() -> Any:
    from diffusers import DDIMScheduler, StableDiffusionPipeline
    from transformers import CLIPImageProcessor

    made = unet(attention_head_dim=4, cross_attention_dim=32)
    crop = {"shortest_edge": 16}
    return StableDiffusionPipeline(
        vae=kl_vae(),
        text_encoder=tiny.clip_text(),
        tokenizer=tiny.clip_tokenizer(),
        unet=made,
        scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=safety_checker(),
        feature_extractor=CLIPImageProcessor(size=crop, crop_size={"height": 16, "width": 16}),
    )


def stable_diffusion_xl() -> Any:
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig.from_dict(
        {**tiny.clip_text().config.to_dict(), "num_hidden_layers": 3, "projection_dim": 32}
    )
    made = unet(
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 1),
        projection_class_embeddings_input_dim=6 * 8 + 32,
        cross_attention_dim=64,
    )
    return StableDiffusionXLPipeline(
        vae=kl_vae(force_upcast=True),
        text_encoder=tiny.clip_text(),
        tokenizer=tiny.clip_tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(config).eval(),
        tokenizer_2=tiny.clip_tokenizer(),
        unet=made,
        scheduler=EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1),
        add_watermarker=False,
    )


def pixart() -> Any:
    from diffusers import (
        DPMSolverMultistepScheduler,
        PixArtSigmaPipeline,
        PixArtTransformer2DModel,
    )

    transformer = PixArtTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=32,
        out_channels=8,
    )
    return PixArtSigmaPipeline(
        tokenizer=tiny.t5_tokenizer(),
        text_encoder=tiny.t5_text(),
        vae=kl_vae(),
        transformer=transformer.eval(),
        scheduler=DPMSolverMultistepScheduler(),
    )


def gemma() -> Any:
    from transformers import Gemma2Config, Gemma2Model

    config = Gemma2Config(
        head_dim=8,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        num_key_value_heads=1,
        vocab_size=128,
        max_position_embeddings=512,
    )
    return Gemma2Model(config).eval()


def sana() -> Any:
    from diffusers import (
        AutoencoderDC,
        FlowMatchEulerDiscreteScheduler,
        SanaPipeline,
        SanaTransformer2DModel,
    )

    transformer = SanaTransformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        sample_size=32,
    )
    blocks = ("ResBlock", "EfficientViTBlock")
    vae = AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41,
    )
    return SanaPipeline(
        tokenizer=tiny.t5_tokenizer(),
        text_encoder=gemma(),
        vae=vae.eval(),
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def aura_flow() -> Any:
    from diffusers import (
        AuraFlowPipeline,
        AuraFlowTransformer2DModel,
        FlowMatchEulerDiscreteScheduler,
    )
    from transformers import UMT5Config, UMT5EncoderModel

    transformer = AuraFlowTransformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        out_channels=4,
        pos_embed_max_size=256,
    )
    text = UMT5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return AuraFlowPipeline(
        tokenizer=tiny.t5_tokenizer(),
        text_encoder=UMT5EncoderModel(text).eval(),
        vae=kl_vae(),
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def lumina2() -> Any:
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        Lumina2Pipeline,
        Lumina2Transformer2DModel,
    )

    transformer = Lumina2Transformer2DModel(
        sample_size=4,
        patch_size=2,
        in_channels=4,
        hidden_size=16,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(128, 64, 64),
        cap_feat_dim=16,
    )
    return Lumina2Pipeline(
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=kl_vae(shift_factor=0.1),
        text_encoder=gemma(),
        tokenizer=tiny.t5_tokenizer(),
    )


MADE = {
    "StableDiffusionPipeline": stable_diffusion,
    "StableDiffusionXLPipeline": stable_diffusion_xl,
    "PixArtSigmaPipeline": pixart,
    "SanaPipeline": sana,
    "AuraFlowPipeline": aura_flow,
    "Lumina2Pipeline": lumina2,
}
SAVED = {
    "Flux2KleinPipeline": tiny_flux2_klein.save_flux2_klein,
    "FluxPipeline": tiny.save_flux,
    "FluxControlNetPipeline": tiny.save_flux_controlnet,
    "StableDiffusion3ControlNetPipeline": tiny_sd3.save_sd3_controlnet,
    "ZImageControlNetPipeline": tiny_z_image.save_z_image_controlnet,
}


def save(name: str, path: Any) -> Any:
    """The folder of a tiny pipeline of that class."""
    if name in SAVED:
        SAVED[name](path)
    else:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            MADE[name]().save_pretrained(path, safe_serialization=True)
    return path
