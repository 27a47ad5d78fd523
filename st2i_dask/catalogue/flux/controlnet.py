"""FLUX.1 with ControlNets, bit-identical to `diffusers.FluxControlNetPipeline`.

A ControlNet's residuals are callback inputs of the transformer and are published block by block: both
run at once on two workers, and so do several ControlNets. In steps outside the control window the
pipeline adds zeros; here the ControlNets are not run at all.
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
from .control import find_controls
from .parts import prepare


def flux_controlnet_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    controlnets: tuple[str, ...] = (),
    num_steps: int | None = None,
    height: int | None = None,
    width: int | None = None,
    guidance_scale: float = 7.0,
    max_sequence_length: int = MAX_SEQUENCE_LENGTH,
    sizes: tuple[int, ...] | None = None,
) -> Workflow:
    """The workflow of a FLUX.1 folder with ControlNets. Defaults are the pipeline's own.

    controlnets: folders or hub ids of ControlNets; none: the folder holds one (it is one of a
        FluxControlNetPipeline). With several, `control_image`, `control_mode` and
        `controlnet_conditioning_scale` are lists, as of a FluxMultiControlNetModel;
        `control_guidance_start` and `control_guidance_end` may be.
    sizes: the only sides in pixels that the model draws well; None: any that the pipeline takes.
    """
    base = FluxBase(folder, dtype, sizes)
    controls = find_controls(base, folder, controlnets)

    def compose(
        prompt: Annotated[str, base.prompt],
        control_image: Annotated[Any, controls.images],
        control_mode: Annotated[Any, controls.modes],
        negative_prompt: Annotated[Maybe[str | None], base.negative_prompt] = None,
        seed: int = 0,
        num_steps: Annotated[int, base.steps] = num_steps or base.default_steps,
        height: Annotated[int, base.side] = height or base.default_side,
        width: Annotated[int, base.side] = width or base.default_side,
        guidance_scale: Guidance = guidance_scale,
        true_cfg_scale: TrueCfg = 1.0,
        controlnet_conditioning_scale: Annotated[Any, controls.scales] = 1.0,
        control_guidance_start: Annotated[Static[Any], controls.bounds] = 0.0,
        control_guidance_end: Annotated[Static[Any], controls.bounds] = 1.0,
        num_images: NumImages = 1,
        spread: Spread = False,
        loras: Annotated[Static[Any], base.loras] = (),
        max_sequence_length: Length = max_sequence_length,
        output_type: Output = "pil",
    ) -> Any:
        """FLUX.1 with ControlNets, text and control images to image."""
        batch = 1 if spread else num_images
        texts = base.texts(
            prompt, negative_prompt, true_cfg_scale, max_sequence_length, batch, loras
        )

        def draw(seed: Any, images: int) -> Any:
            hints, state = controls.hints(
                control_image, seeded(seed), images, height, width, texts.embeds
            )
            latents, image_ids, schedule = prepare(
                texts.embeds,
                state,
                images,
                num_steps,
                height,
                width,
                base.channels,
                base.vae_scale_factor,
                *base.scheduler,
                controlled=True,
            )
            control = controls.composer(
                hints,
                control_mode,
                controlnet_conditioning_scale,
                range(num_steps),
                control_guidance_start,
                control_guidance_end,
            )
            start = Start(latents, image_ids, schedule, range(num_steps))
            return base.picture(
                start, texts, guidance_scale, loras, height, width, output_type, control=control
            )

        return draw_images(draw, seed, num_images, spread)

    made: Workflow = workflow(name=name, replace=True)(without(compose, controls.fixed))
    return made
