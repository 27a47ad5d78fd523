"""FLUX.1 from a picture: image to image and inpainting, bit-identical to `diffusers.FluxImg2ImgPipeline`
and `diffusers.FluxInpaintPipeline`."""

from functools import partial
from typing import Annotated, Any

from ...parameters import Maybe, Static
from ...workflow import Workflow, workflow
from ..denoising import keep_outside, seeded
from ..folder import DiffusersFolder
from ..input_image import InputImage, MaskImage
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
    TrueCfg,
)
from .image_parts import ImageEncoder, prepare_from_image, prepare_mask


def flux_image_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    num_steps: int | None = None,
    height: int | None = None,
    width: int | None = None,
    guidance_scale: float = 7.0,
    strength: float = 0.6,
    max_sequence_length: int = MAX_SEQUENCE_LENGTH,
    sizes: tuple[int, ...] | None = None,
    inpainting: bool = False,
) -> Workflow:
    """The image to image workflow of a FLUX.1 folder. Defaults are the pipeline's own.

    sizes: the only sides in pixels that the model draws well; None: any that the pipeline takes.
    inpainting: with a mask; what is black in it stays as it is.
    """
    base = FluxBase(folder, dtype, sizes, noises=True)

    def compose(
        prompt: Annotated[str, base.prompt],
        image: Annotated[Any, InputImage()],
        mask_image: Annotated[Any, MaskImage()],
        negative_prompt: Annotated[Maybe[str | None], base.negative_prompt] = None,
        seed: int = 0,
        num_steps: Annotated[int, base.steps] = num_steps or base.default_steps,
        height: Annotated[int, base.side] = height or base.default_side,
        width: Annotated[int, base.side] = width or base.default_side,
        guidance_scale: Guidance = guidance_scale,
        true_cfg_scale: TrueCfg = 1.0,
        strength: Annotated[Static[float], Strength()] = strength,
        num_images: NumImages = 1,
        spread: Spread = False,
        loras: Annotated[Static[Any], base.loras] = (),
        max_sequence_length: Length = max_sequence_length,
        output_type: Output = "pil",
    ) -> Any:
        """FLUX.1 text and picture to image; strength 1 leaves nothing of the picture."""
        batch = 1 if spread else num_images
        texts = base.texts(
            prompt, negative_prompt, true_cfg_scale, max_sequence_length, batch, loras
        )
        encoder = ImageEncoder(base.source, **base.options)
        steps = range(first_step(num_steps, strength), num_steps)

        def draw(seed: Any, images: int) -> Any:
            encoded = encoder(image, seeded(seed), height, width)
            latents, image_ids, schedule, noise, image_latents = prepare_from_image(
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
            after = None
            if mask_image is not None:
                factor = base.vae_scale_factor
                mask = prepare_mask(mask_image, images, height, width, factor, latents)

                def after(step: int, schedule: Any, latents: Any) -> Any:
                    return keep_outside(step, schedule, latents, image_latents, noise, mask)

            start = Start(latents, image_ids, schedule, steps)
            return base.picture(
                start, texts, guidance_scale, loras, height, width, output_type, after=after
            )

        return draw_images(draw, seed, num_images, spread)

    fixed: dict[str, Any] = {} if base.guided else {"guidance_scale": None}
    if not inpainting:
        fixed["mask_image"] = None
    made: Workflow = workflow(name=name, replace=True)(without(compose, fixed))
    return made


#: With a mask.
flux_inpainting_workflow = partial(flux_image_workflow, inpainting=True)
