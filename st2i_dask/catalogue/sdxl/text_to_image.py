"""Stable Diffusion XL text to image, bit-identical to `diffusers.StableDiffusionXLPipeline`.

Sizes and crops that the UNet is told are the picture's own, as the pipeline has them by default.
"""

from typing import Annotated, Any

from ...parameters import Maybe, Static
from ...workflow import Workflow, workflow
from ..denoising import seeded
from ..folder import DiffusersFolder
from ..spread import draw_images
from .composing import SDXL, Guidance, Images, Output, Start
from .parts import draw_latents


def sdxl_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    num_steps: int = 50,
    height: int | None = None,
    width: int | None = None,
    guidance_scale: float = 5.0,
    sizes: tuple[int, ...] | None = None,
) -> Workflow:
    """The workflow of a StableDiffusionXLPipeline folder. Defaults are the pipeline's own.

    sizes: the only sides in pixels that the model draws well; None: any that the pipeline takes.

    negative_prompt: None is not the same as "" where the pipeline has zeros for an empty prompt.
    split_guidance runs the negative prompt's and the prompt's half of each step as two invocations,
    at once on two executors; the pipeline runs them in one batch, and the last bits may differ.
    """
    sdxl = SDXL(folder, dtype)
    side = sdxl.side(sizes)

    def compose(
        prompt: Annotated[str, sdxl.prompt],
        negative_prompt: Annotated[Maybe[str | None], sdxl.negative_prompt] = None,
        seed: int = 0,
        num_steps: Annotated[int, sdxl.steps] = num_steps,
        height: Annotated[int, side] = height or sdxl.default_side,
        width: Annotated[int, side] = width or sdxl.default_side,
        guidance_scale: Guidance = guidance_scale,
        num_images: Images = 1,
        spread: Static[bool] = False,
        loras: Annotated[Static[Any], sdxl.loras] = (),
        split_guidance: Static[bool] = False,
        output_type: Output = "pil",
    ) -> Any:
        """Stable Diffusion XL, text to image."""
        batch = 1 if spread else num_images
        text = sdxl.text(prompt, negative_prompt, batch, guidance_scale, split_guidance, loras)

        def draw(seed: Any, images: int) -> Any:
            schedule, steps = sdxl.schedule(text.like, num_steps)
            latents, state = draw_latents(
                seeded(seed),
                schedule,
                text.like,
                images,
                height,
                width,
                sdxl.channels,
                sdxl.factor,
            )
            start = Start(latents, schedule, steps, state)
            return sdxl.picture(start, text, loras, output_type)

        return draw_images(draw, seed, num_images, spread)

    made: Workflow = workflow(name=name, replace=True)(compose)
    return made
