"""Stable Diffusion 3 image to image, bit-identical to `diffusers.StableDiffusion3Img2ImgPipeline`."""

from typing import Annotated, Any

from ...parameters import Static
from ...workflow import Workflow, workflow
from ..denoising import seeded
from ..folder import DiffusersFolder
from ..given_picture import prepare_pixels
from ..input_image import InputImage
from ..spread import draw_images
from .composing import SD3, Guidance, Images, Length, Output, Share
from .image_parts import start_from_image
from .parts import VaeEncoder


def sd3_image_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    num_steps: int = 50,
    height: int | None = None,
    width: int | None = None,
    guidance_scale: float = 7.0,
    strength: float = 0.6,
    max_sequence_length: int = 256,
    sizes: tuple[int, ...] | None = None,
) -> Workflow:
    """The workflow of a Stable Diffusion 3 folder that changes an image. Defaults are the pipeline's.

    strength: the share of the steps that are taken; at 1 nothing of the image is left.
    sizes, split_guidance: as in text to image.
    """
    sd3 = SD3(folder, dtype, noises=True)
    side = sd3.side(sizes)

    def compose(
        *,
        prompt: Annotated[str, sd3.prompt],
        negative_prompt: Annotated[str, sd3.negative_prompt] = "",
        image: Annotated[Any, InputImage()],
        seed: int = 0,
        num_steps: Annotated[int, sd3.steps] = num_steps,
        height: Annotated[int, side] = height or sd3.default_side,
        width: Annotated[int, side] = width or sd3.default_side,
        guidance_scale: Guidance = guidance_scale,
        strength: Share = strength,
        num_images: Images = 1,
        spread: Static[bool] = False,
        loras: Annotated[Static[Any], sd3.loras] = (),
        split_guidance: Static[bool] = False,
        max_sequence_length: Length = max_sequence_length,
        output_type: Output = "pil",
    ) -> Any:
        """Stable Diffusion 3, image to image."""
        batch = 1 if spread else num_images
        text = sd3.text(
            prompt,
            negative_prompt,
            batch,
            max_sequence_length,
            guidance_scale,
            split_guidance,
            loras,
        )
        pixels = prepare_pixels(image, height, width, sd3.factor)

        def draw(seed: Any, images: int) -> Any:
            encoder = VaeEncoder(folder.source, **sd3.options)
            encoded = encoder(pixels, seeded(seed), shifted=True)
            schedule, steps = sd3.schedule(text.like, num_steps, height, width, strength)
            latents = start_from_image(
                encoded.latents,
                encoded.generator_state_after,
                schedule,
                steps.start,
                images,
                text.like,
            )
            return sd3.picture(latents, schedule, steps, text, loras, output_type)

        return draw_images(draw, seed, num_images, spread)

    made: Workflow = workflow(name=name, replace=True)(compose)
    return made
