"""FLUX.1 with ControlNets from a picture, bit-identical to `diffusers.FluxControlNetImg2ImgPipeline`.

As that pipeline, it has no true CFG. A union ControlNet draws several images at once here; there it
does not.
"""

from typing import Annotated, Any

from ...parameters import Static
from ...workflow import Workflow, workflow
from ..denoising import seeded
from ..folder import DiffusersFolder
from ..input_image import InputImage
from ..narrowed import without
from ..spread import draw_images
from ..strength import Strength, first_step
from .composing import (
    MAX_SEQUENCE_LENGTH,
    FluxBase,
    Guidance,
    Length,
    NumImages,
    Output,
    Spread,
    Start,
)
from .control import find_controls
from .image_parts import ImageEncoder, prepare_from_image


def flux_controlnet_image_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    controlnets: tuple[str, ...] = (),
    num_steps: int | None = None,
    height: int | None = None,
    width: int | None = None,
    guidance_scale: float = 7.0,
    strength: float = 0.6,
    max_sequence_length: int = MAX_SEQUENCE_LENGTH,
    sizes: tuple[int, ...] | None = None,
) -> Workflow:
    """The image to image workflow of a FLUX.1 folder with ControlNets. Defaults are the pipeline's own.

    controlnets, sizes: as of `flux_controlnet_workflow`.
    """
    base = FluxBase(folder, dtype, sizes, noises=True)
    controls = find_controls(base, folder, controlnets)

    def compose(
        prompt: Annotated[str, base.prompt],
        image: Annotated[Any, InputImage()],
        control_image: Annotated[Any, controls.images],
        control_mode: Annotated[Any, controls.modes],
        seed: int = 0,
        num_steps: Annotated[int, base.steps] = num_steps or base.default_steps,
        height: Annotated[int, base.side] = height or base.default_side,
        width: Annotated[int, base.side] = width or base.default_side,
        guidance_scale: Guidance = guidance_scale,
        strength: Annotated[Static[float], Strength()] = strength,
        controlnet_conditioning_scale: Annotated[Any, controls.scales] = 1.0,
        control_guidance_start: Annotated[Static[Any], controls.bounds] = 0.0,
        control_guidance_end: Annotated[Static[Any], controls.bounds] = 1.0,
        num_images: NumImages = 1,
        spread: Spread = False,
        loras: Annotated[Static[Any], base.loras] = (),
        max_sequence_length: Length = max_sequence_length,
        output_type: Output = "pil",
    ) -> Any:
        """FLUX.1 with ControlNets, text, picture and control images to image."""
        batch = 1 if spread else num_images
        texts = base.texts(prompt, "", 1.0, max_sequence_length, batch, loras)
        encoder = ImageEncoder(base.source, **base.options)
        steps = range(first_step(num_steps, strength), num_steps)

        def draw(seed: Any, images: int) -> Any:
            hints, state = controls.hints(
                control_image, seeded(seed), images, height, width, texts.embeds
            )
            encoded = encoder(image, state, height, width)
            latents, image_ids, schedule, _, _ = prepare_from_image(
                texts.embeds,
                encoded.image_latents,
                encoded.next_state,
                images,
                num_steps,
                strength,
                height,
                width,
                base.channels,
                base.vae_scale_factor,
                *base.scheduler,
            )
            control = controls.composer(
                hints,
                control_mode,
                controlnet_conditioning_scale,
                steps,
                control_guidance_start,
                control_guidance_end,
            )
            start = Start(latents, image_ids, schedule, steps)
            return base.picture(
                start, texts, guidance_scale, loras, height, width, output_type, control=control
            )

        return draw_images(draw, seed, num_images, spread)

    made: Workflow = workflow(name=name, replace=True)(without(compose, controls.fixed))
    return made
