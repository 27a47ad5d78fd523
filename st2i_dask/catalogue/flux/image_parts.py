"""The models and glue of FLUX.1 workflows that start from a picture.

The order of calls and every dtype follow `FluxImg2ImgPipeline.__call__` and
`FluxInpaintPipeline.__call__`.
"""

from types import SimpleNamespace
from typing import Any

from ...glue import glue
from ..denoising import resumed
from ..input_image import restore
from ..part import PipelinePart
from .parts import VaeDecoder, make_scheduler


class ImageEncoder(PipelinePart):
    """A picture to its latents (1, channels, height, width in latents).

    next_state: of the generator, after the draw; the pipeline goes on to draw the noise from it.
    """

    parts = VaeDecoder.parts

    def setup_io(self) -> None:
        self.add_input("image")
        self.add_input("generator_state")
        self.add_input("height")
        self.add_input("width")
        self.add_output("image_latents")
        self.add_output("next_state")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        import torch
        from diffusers import FluxImg2ImgPipeline

        vae = pipeline.vae
        processor = _processor(pipeline.vae_scale_factor, vae.config.latent_channels)
        image = processor.preprocess(
            restore(inputs["image"]), height=inputs["height"], width=inputs["width"]
        ).to(dtype=torch.float32)
        generator = resumed(inputs["generator_state"])
        latents = FluxImg2ImgPipeline._encode_vae_image(
            pipeline, image.to(device=vae.device, dtype=vae.dtype), generator
        )
        return {"image_latents": latents, "next_state": generator.get_state()}


def _processor(vae_scale_factor: int, channels: int, **options: Any) -> Any:
    from diffusers.image_processor import VaeImageProcessor

    return VaeImageProcessor(
        vae_scale_factor=vae_scale_factor * 2, vae_latent_channels=channels, **options
    )


@glue(outputs=5)
def prepare_from_image(
    prompt_embeds: Any,
    image_latents: Any,
    generator_state: Any,
    num_images: int,
    num_steps: int,
    strength: float,
    height: int,
    width: int,
    channels: int,
    vae_scale_factor: int,
    scheduler_class: str,
    scheduler_config: dict[str, Any],
) -> tuple[Any, Any, Any, Any, Any]:
    """What `prepare` gives, with the picture under the noise; then the noise and the picture alone.

    All latents are packed, (images, tokens, channels * 4). The scheduler begins with the step that
    `strength` leaves first.
    """
    from diffusers import FluxInpaintPipeline

    pipeline = FluxInpaintPipeline
    device = prompt_embeds.device
    tokens = (height // vae_scale_factor // 2) * (width // vae_scale_factor // 2)
    scheduler = make_scheduler(
        scheduler_class, scheduler_config, num_steps, tokens, device, flow_sigmas=False
    )
    # Neither reads anything else of a pipeline.
    helper = SimpleNamespace(
        scheduler=scheduler,
        vae_scale_factor=vae_scale_factor,
        latent_channels=image_latents.shape[1],  # they are latents already
        _pack_latents=pipeline._pack_latents,
        _prepare_latent_image_ids=pipeline._prepare_latent_image_ids,
    )
    timesteps, _ = pipeline.get_timesteps(helper, num_steps, strength, device)
    latents, noise, image_latents, image_ids = pipeline.prepare_latents(
        helper,
        image_latents,
        timesteps[:1].repeat(num_images),
        num_images,
        channels,
        height,
        width,
        prompt_embeds.dtype,
        device,
        resumed(generator_state),
    )
    return latents, image_ids, scheduler, noise, image_latents


@glue
def prepare_mask(
    mask_image: Any, num_images: int, height: int, width: int, vae_scale_factor: int, latents: Any
) -> Any:
    """A mask for packed latents and in their shape and dtype: 1 where the picture is drawn anew."""
    import torch
    from diffusers import FluxInpaintPipeline

    channels = latents.shape[2] // 4
    processor = _processor(
        vae_scale_factor, channels, do_normalize=False, do_binarize=True, do_convert_grayscale=True
    )
    mask = processor.preprocess(restore(mask_image), height=height, width=width)
    # As prepare_mask_latents, which also encodes the masked picture that only FLUX.1 Fill reads.
    size = 2 * (height // (vae_scale_factor * 2)), 2 * (width // (vae_scale_factor * 2))
    mask = torch.nn.functional.interpolate(mask, size=size)
    mask = mask.to(device=latents.device, dtype=latents.dtype).repeat(num_images, channels, 1, 1)
    return FluxInpaintPipeline._pack_latents(mask, num_images, channels, *size)
