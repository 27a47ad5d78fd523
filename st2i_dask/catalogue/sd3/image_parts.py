"""The glue of Stable Diffusion 3 workflows that start from an image.

The order of random draws and every dtype follow the `__call__` of StableDiffusion3Img2ImgPipeline and
StableDiffusion3InpaintPipeline; what they compute in helpers of their own is called from there.
"""

from types import SimpleNamespace
from typing import Any

from ...glue import glue
from ..denoising import resumed


@glue
def start_from_image(
    image_latents: Any, generator_state: Any, scheduler: Any, first: int, num_images: int, like: Any
) -> Any:
    """An image's latents with the noise of the first timestep, (num_images, channels, height, width)."""
    from diffusers import StableDiffusion3Img2ImgPipeline

    # What has as many channels as latents have is not encoded again.
    config = SimpleNamespace(latent_channels=image_latents.shape[1])
    return StableDiffusion3Img2ImgPipeline.prepare_latents(
        SimpleNamespace(vae=SimpleNamespace(config=config), scheduler=scheduler),
        image_latents,
        scheduler.timesteps[first : first + 1].repeat(num_images),
        1,
        num_images,
        like.dtype,
        like.device,
        resumed(generator_state),
    )


@glue(outputs=4)
def start_inpainting(
    image_latents: Any,
    generator_state: Any,
    scheduler: Any,
    first: int,
    strength: float,
    num_images: int,
    height: int,
    width: int,
    channels: int,
    factor: int,
    like: Any,
) -> tuple[Any, Any, Any, Any]:
    """Latents to begin with, the noise in them, the image's for each picture, and the generator's state
    after the draw.

    image_latents: None: not needed, the latents are all noise.
    """
    from diffusers import StableDiffusion3InpaintPipeline

    generator = resumed(generator_state)
    made = StableDiffusion3InpaintPipeline.prepare_latents(
        SimpleNamespace(
            vae_scale_factor=factor,
            scheduler=scheduler,
            _encode_vae_image=lambda image, generator: image,
        ),
        num_images,
        channels,
        height,
        width,
        like.dtype,
        like.device,
        generator,
        image=image_latents,
        timestep=scheduler.timesteps[first : first + 1].repeat(num_images),
        is_strength_max=strength == 1.0,
        return_noise=True,
        return_image_latents=image_latents is not None,
    )
    latents, noise, *repeated = made
    return latents, noise, repeated[0] if repeated else None, generator.get_state()


@glue(outputs=2)
def mask_latents(
    mask: Any,
    masked_latents: Any,
    num_images: int,
    height: int,
    width: int,
    factor: int,
    doubled: bool,
    like: Any,
) -> tuple[Any, Any]:
    """The mask (images, 1, height / factor, width / factor), and the masked image's latents.

    masked_latents: scaled and shifted already. doubled: for both prompts in one batch.
    """
    from diffusers import StableDiffusion3InpaintPipeline

    config = SimpleNamespace(shift_factor=0.0, scaling_factor=1.0)
    helper = SimpleNamespace(vae_scale_factor=factor, vae=SimpleNamespace(config=config))
    made: tuple[Any, Any] = StableDiffusion3InpaintPipeline.prepare_mask_latents(
        helper,
        mask,
        masked_latents,
        1,
        num_images,
        height,
        width,
        like.dtype,
        like.device,
        None,
        doubled,
    )
    return made
