"""FLUX.1 text to image, bit-identical to `diffusers.FluxPipeline`.

Both forms: dev (a guidance embedding, timesteps shifted with the image size) and schnell (neither).
"""

from typing import Annotated, Any

from ...parameters import Maybe, Static
from ...workflow import Workflow, workflow
from ..denoising import seeded
from ..folder import DiffusersFolder
from ..narrowed import without
from ..spread import draw_images
from .composing import (
    MAX_SEQUENCE_LENGTH,
    FluxBase,
    Guidance,
    Length,
    NumImages,
    Output,
    Spread,
    Start,
    TrueCfg,
)
from .parts import prepare


def flux_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    num_steps: int | None = None,
    height: int | None = None,
    width: int | None = None,
    guidance_scale: float = 3.5,
    max_sequence_length: int = MAX_SEQUENCE_LENGTH,
    sizes: tuple[int, ...] | None = None,
) -> Workflow:
    """The workflow of a FluxPipeline folder. Defaults are the pipeline's own where it has them.

    sizes: the only sides in pixels that the model draws well; None: any that the pipeline takes.
    """
    base = FluxBase(folder, dtype, sizes, flow_sigmas=True)

    def compose(
        prompt: Annotated[str, base.prompt],
        negative_prompt: Annotated[Maybe[str | None], base.negative_prompt] = None,
        seed: int = 0,
        num_steps: Annotated[int, base.steps] = num_steps or base.default_steps,
        height: Annotated[int, base.side] = height or base.default_side,
        width: Annotated[int, base.side] = width or base.default_side,
        guidance_scale: Guidance = guidance_scale,
        true_cfg_scale: TrueCfg = 1.0,
        num_images: NumImages = 1,
        spread: Spread = False,
        loras: Annotated[Static[Any], base.loras] = (),
        max_sequence_length: Length = max_sequence_length,
        output_type: Output = "pil",
    ) -> Any:
        """FLUX.1 text to image; a negative prompt, be it empty, has a say with true_cfg_scale above 1."""
        batch = 1 if spread else num_images
        texts = base.texts(
            prompt, negative_prompt, true_cfg_scale, max_sequence_length, batch, loras
        )

        def draw(seed: Any, images: int) -> Any:
            latents, image_ids, schedule = prepare(
                texts.embeds,
                seeded(seed),
                images,
                num_steps,
                height,
                width,
                base.channels,
                base.vae_scale_factor,
                *base.scheduler,
            )
            start = Start(latents, image_ids, schedule, range(num_steps))
            return base.picture(start, texts, guidance_scale, loras, height, width, output_type)

        return draw_images(draw, seed, num_images, spread)

    fixed = {} if base.guided else {"guidance_scale": None}
    made: Workflow = workflow(name=name, replace=True)(without(compose, fixed))
    return made
