"""What Z-Image denoises a given picture from.

The order of calls and of random draws follows `ZImageImg2ImgPipeline` and `ZImageInpaintPipeline`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..denoising import generator_of
from ..from_picture import FromMaskedPicture, FromPicture
from ..input_image import restore
from .parts import make_scheduler


class ImageStart(FromPicture):
    """Latents are (images, channels, height, width)."""

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        from diffusers import ZImageImg2ImgPipeline

        return {"latents": noisy_latents(ZImageImg2ImgPipeline, pipeline, **inputs)}


class InpaintingStart(FromMaskedPicture):
    """latents, noise, image_latents: (images, channels, height, width). mask: (images, 1, height, width)."""

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        import torch
        from diffusers import ZImageInpaintPipeline
        from diffusers.image_processor import VaeImageProcessor

        latents, noise, image_latents = noisy_latents(ZImageInpaintPipeline, pipeline, **inputs)
        processor = VaeImageProcessor(
            vae_scale_factor=pipeline.vae_scale_factor * 2,
            do_normalize=False,
            do_binarize=True,
            do_convert_grayscale=True,
        )
        size = dict(height=inputs["height"], width=inputs["width"])
        mask = processor.preprocess(restore(inputs["mask_image"]), **size)
        # The pipeline encodes the masked picture as well, and never reads it.
        mask = torch.nn.functional.interpolate(mask, size=latents.shape[2:], mode="nearest")
        mask = mask.to(device=latents.device, dtype=latents.dtype)
        return {
            "latents": latents,
            "noise": noise,
            "image_latents": image_latents,
            "mask": mask.repeat(inputs["num_images"], 1, 1, 1),
        }


def noisy_latents(pipeline_class: Any, pipeline: Any, **inputs: Any) -> Any:
    """What the class's own `prepare_latents` gives for the picture."""
    vae = pipeline.vae
    height, width = inputs["height"], inputs["width"]
    image = pipeline.image_processor.preprocess(
        restore(inputs["image"]), height=height, width=width
    )
    scheduler = make_scheduler(*inputs["settings"], vae.device)
    start = scheduler.timesteps[scheduler.begin_index :][:1]
    # prepare_latents reads nothing else of a pipeline.
    helper = SimpleNamespace(
        vae=vae, vae_scale_factor=pipeline.vae_scale_factor, scheduler=scheduler
    )
    return pipeline_class.prepare_latents(
        helper,
        image.float(),
        start.repeat(inputs["num_images"]),
        inputs["num_images"],
        inputs["channels"],
        height,
        width,
        vae.dtype,
        vae.device,
        generator_of(inputs["seed"]),
    )
