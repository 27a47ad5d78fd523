"""The glue of Stable Diffusion 3 workflows that start from an image.

The order of random draws and every dtype follow the `__call__` of StableDiffusion3Img2ImgPipeline and
StableDiffusion3InpaintPipeline; what they compute in helpers of their own is called from there.
"""

from types import SimpleNamespace
from typing import Any

from ...glue import glue
from ..denoising import resumed
from ..input_image import restore


@glue
def prepare_pixels(image: Any, height: int, width: int, factor: int) -> Any:
    """The image (1, 3, height, width) in about [-1, 1], float32 unless it is a tensor of another."""
    from diffusers.image_processor import VaeImageProcessor

    processor = VaeImageProcessor(vae_scale_factor=factor)
    return processor.preprocess(restore(image), height=height, width=width)


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


@glue
def to_float(pixels: Any) -> Any:
    """As the inpainting pipeline has them."""
    import torch

    return pixels.to(dtype=torch.float32)


@glue
def prepare_mask(mask_image: Any, height: int, width: int, factor: int) -> Any:
    """The mask (1, 1, height, width): 1 where the picture is drawn anew, 0 elsewhere."""
    from diffusers.image_processor import VaeImageProcessor

    # As `StableDiffusion3InpaintPipeline.__init__` makes it.
    processor = VaeImageProcessor(
        vae_scale_factor=factor, do_normalize=False, do_binarize=True, do_convert_grayscale=True
    )
    return processor.preprocess(
        restore(mask_image), height=height, width=width, resize_mode="default"
    )


@glue
def outside(pixels: Any, mask: Any) -> Any:
    """The image without what is drawn anew."""
    return pixels * (mask < 0.5)


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


@glue
def keep_outside(
    latents: Any, scheduler: Any, following: int | None, image_latents: Any, noise: Any, mask: Any
) -> Any:
    """Latents with the image's own, as noisy as they are, where the mask is 0.

    scheduler: after the step. following: the next step; None: there is none.
    """
    import torch

    if following is not None:
        timestep = torch.tensor([scheduler.timesteps[following]])
        image_latents = scheduler.scale_noise(image_latents, timestep, noise)
    return (1 - mask) * image_latents + mask * latents
