"""Stable Diffusion XL image to image, bit-identical to `diffusers.StableDiffusionXLImg2ImgPipeline`.

The result has the image's size, rounded down to what the VAE takes. The refiner is one of its folders.
"""

from typing import Annotated, Any

from ...parameters import Maybe, Static
from ...workflow import Workflow, workflow
from ..folder import DiffusersFolder
from ..given_picture import prepare_pixels
from ..spread import draw_images
from .composing import MAX_SIDE, SDXL, Guidance, Images, Output
from .image_parts import SizedImage, Strength

Share = Annotated[Static[float], Strength()]


def sdxl_image_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    num_steps: int = 50,
    guidance_scale: float = 5.0,
    strength: float = 0.3,
) -> Workflow:
    """The workflow of a Stable Diffusion XL folder that changes an image. Defaults are the pipeline's.

    strength: the share of the steps that are taken; at 1 nothing of the image is left.
    negative_prompt, split_guidance: as in text to image.
    """
    sdxl = SDXL(folder, dtype, scored=True, noises=True)
    pictures = SizedImage(least=sdxl.factor, most=MAX_SIDE)

    def compose(
        *,
        prompt: Annotated[str, sdxl.prompt],
        negative_prompt: Annotated[Maybe[str | None], sdxl.negative_prompt] = None,
        image: Annotated[Any, pictures],
        seed: int = 0,
        num_steps: Annotated[int, sdxl.steps] = num_steps,
        guidance_scale: Guidance = guidance_scale,
        strength: Share = strength,
        num_images: Images = 1,
        spread: Static[bool] = False,
        loras: Annotated[Static[Any], sdxl.loras] = (),
        split_guidance: Static[bool] = False,
        output_type: Output = "pil",
    ) -> Any:
        """Stable Diffusion XL, image to image."""
        batch = 1 if spread else num_images
        text = sdxl.text(prompt, negative_prompt, batch, guidance_scale, split_guidance, loras)
        pixels = prepare_pixels(image, None, None, sdxl.factor)

        def draw(seed: Any, images: int) -> Any:
            start = sdxl.start_from_picture(pixels, seed, text.like, num_steps, strength, images)
            return sdxl.picture(start, text, loras, output_type)

        return draw_images(draw, seed, num_images, spread)

    made: Workflow = workflow(name=name, replace=True)(compose)
    return made
