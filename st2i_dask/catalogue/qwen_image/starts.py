"""What Qwen-Image denoises a given picture from.

The order of calls and of random draws follows `QwenImageImg2ImgPipeline` and
`QwenImageInpaintPipeline`.
"""

from __future__ import annotations

from typing import Any

from ..denoising import generator_of
from ..from_picture import FromMaskedPicture, FromPicture
from ..input_image import restore
from .parts import make_scheduler


class ImageStart(FromPicture):
    """Latents are packed, (images, tokens, channels * 4)."""

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        from diffusers import QwenImageImg2ImgPipeline

        _, latents = noisy_latents(QwenImageImg2ImgPipeline, pipeline.vae, **inputs)
        return {"latents": latents}


class InpaintingStart(FromMaskedPicture):
    """All four are packed, (images, tokens, channels * 4)."""

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        from diffusers import QwenImageInpaintPipeline

        vae = pipeline.vae
        whole, made = noisy_latents(QwenImageInpaintPipeline, vae, **inputs)
        latents, noise, image_latents = made
        channels, height, width = inputs["channels"], inputs["height"], inputs["width"]
        mask = whole.mask_processor.preprocess(
            restore(inputs["mask_image"]), height=height, width=width
        )
        # The pipeline encodes the masked picture as well, and never reads it: latents are taken as
        # they are.
        factor = whole.vae_scale_factor
        unread = mask.new_zeros(1, whole.latent_channels, 1, height // factor, width // factor)
        mask, _ = whole.prepare_mask_latents(
            mask,
            unread,
            1,
            channels,
            inputs["num_images"],
            height,
            width,
            vae.dtype,
            vae.device,
            None,
        )
        return {"latents": latents, "noise": noise, "image_latents": image_latents, "mask": mask}


def noisy_latents(pipeline_class: Any, vae: Any, **inputs: Any) -> tuple[Any, Any]:
    """A pipeline of the class, and what its own `prepare_latents` gives for the picture."""
    scheduler = make_scheduler(*inputs["settings"], vae.device)
    pipeline = pipeline_class(
        scheduler=scheduler, vae=vae, text_encoder=None, tokenizer=None, transformer=None
    )
    height, width, num_images = inputs["height"], inputs["width"], inputs["num_images"]
    image = pipeline.image_processor.preprocess(
        restore(inputs["image"]), height=height, width=width
    )
    start = scheduler.timesteps[scheduler.begin_index :][:1]
    made = pipeline.prepare_latents(
        image.float(),
        start.repeat(num_images),
        num_images,
        inputs["channels"],
        height,
        width,
        vae.dtype,
        vae.device,
        generator_of(inputs["seed"]),
    )
    return pipeline, made
