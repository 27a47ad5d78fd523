"""Stable Diffusion 3 and 3.5 text to image, bit-identical to `diffusers.StableDiffusion3Pipeline`.

Its guidance of single layers (`skip_guidance_layers`) is not offered.
"""

from typing import Annotated, Any

from ...parameters import Static
from ...workflow import Workflow, workflow
from ..folder import DiffusersFolder
from ..spread import draw_images
from .composing import SD3, Guidance, Images, Length, Output
from .parts import draw_latents


def sd3_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    num_steps: int = 28,
    height: int | None = None,
    width: int | None = None,
    guidance_scale: float = 7.0,
    max_sequence_length: int = 256,
    sizes: tuple[int, ...] | None = None,
) -> Workflow:
    """The workflow of a StableDiffusion3Pipeline folder. Defaults are the pipeline's own.

    sizes: the only sides in pixels that the model draws well; None: any that the pipeline takes.

    split_guidance runs the negative prompt's and the prompt's half of each step as two invocations,
    at once on two executors; the pipeline runs them in one batch, and the last bits may differ.
    """
    sd3 = SD3(folder, dtype)
    side = sd3.side(sizes)

    def compose(
        prompt: Annotated[str, sd3.prompt],
        negative_prompt: Annotated[str, sd3.negative_prompt] = "",
        seed: int = 0,
        num_steps: Annotated[int, sd3.steps] = num_steps,
        height: Annotated[int, side] = height or sd3.default_side,
        width: Annotated[int, side] = width or sd3.default_side,
        guidance_scale: Guidance = guidance_scale,
        num_images: Images = 1,
        spread: Static[bool] = False,
        loras: Annotated[Static[Any], sd3.loras] = (),
        split_guidance: Static[bool] = False,
        max_sequence_length: Length = max_sequence_length,
        output_type: Output = "pil",
    ) -> Any:
        """Stable Diffusion 3, text to image."""
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

        def draw(seed: Any, images: int) -> Any:
            latents = draw_latents(seed, text.like, images, height, width, sd3.channels, sd3.factor)
            schedule, steps = sd3.schedule(text.like, num_steps, height, width)
            return sd3.picture(latents, schedule, steps, text, loras, output_type)

        return draw_images(draw, seed, num_images, spread)

    made: Workflow = workflow(name=name, replace=True)(compose)
    return made
