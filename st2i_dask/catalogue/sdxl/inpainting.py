"""Stable Diffusion XL inpainting, bit-identical to `diffusers.StableDiffusionXLInpaintPipeline`.

Both forms: a UNet made for it, which gets mask and masked image as more channels (9), and any other
(4 channels), where what is outside the mask is put back after each step.
"""

from typing import Annotated, Any

from ...parameters import Maybe, Static
from ...workflow import Workflow, workflow
from ..denoising import seeded
from ..folder import DiffusersFolder
from ..given_picture import outside, prepare_mask, prepare_pixels, to_float
from ..inpainting_forms import denoise_options, is_made_for_it
from ..input_image import InputImage, MaskImage
from ..spread import draw_images
from .composing import SDXL, Guidance, Images, Output, Start
from .image_parts import LATENTS, mask_latents, start_inpainting
from .image_to_image import Share

# Channels of a UNet that gets latents, mask and masked image.
_MADE_FOR_IT = 9


def sdxl_inpainting_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    num_steps: int = 50,
    height: int | None = None,
    width: int | None = None,
    guidance_scale: float = 7.5,
    strength: float = 0.9999,
    sizes: tuple[int, ...] | None = None,
) -> Workflow:
    """The workflow of a Stable Diffusion XL folder that draws a part of an image anew.

    Defaults are the pipeline's own. mask_image: white where the picture is drawn anew. strength: the
    share of the steps that are taken. sizes, negative_prompt, split_guidance: as in text to image.
    """
    sdxl = SDXL(folder, dtype, scored=True, noises=True)
    made_for_it = is_made_for_it(
        folder.source,
        "StableDiffusionXLInpaintPipeline",
        "UNets",
        (LATENTS, _MADE_FOR_IT),
        sdxl.channels,
        sdxl.vae_config["latent_channels"],
    )
    side = sdxl.side(sizes)

    def compose(
        *,
        prompt: Annotated[str, sdxl.prompt],
        negative_prompt: Annotated[Maybe[str | None], sdxl.negative_prompt] = None,
        image: Annotated[Any, InputImage()],
        mask_image: Annotated[Any, MaskImage()],
        seed: int = 0,
        num_steps: Annotated[int, sdxl.steps] = num_steps,
        height: Annotated[int, side] = height or sdxl.default_side,
        width: Annotated[int, side] = width or sdxl.default_side,
        guidance_scale: Guidance = guidance_scale,
        strength: Share = strength,
        num_images: Images = 1,
        spread: Static[bool] = False,
        loras: Annotated[Static[Any], sdxl.loras] = (),
        split_guidance: Static[bool] = False,
        output_type: Output = "pil",
    ) -> Any:
        """Stable Diffusion XL, inpainting."""
        batch = 1 if spread else num_images
        text = sdxl.text(prompt, negative_prompt, batch, guidance_scale, split_guidance, loras)
        pixels = to_float(prepare_pixels(image, height, width, sdxl.factor))
        mask = prepare_mask(mask_image, height, width, sdxl.factor)
        encoder = sdxl.encoder()

        def draw(seed: Any, images: int) -> Any:
            state, original = seeded(seed), None
            if not made_for_it or strength < 1:
                encoded = encoder(pixels, state, text.like, centred=False)
                original, state = encoded.latents, encoded.generator_state_after
            schedule, steps = sdxl.schedule(text.like, num_steps, strength)
            latents, noise, originals, state = start_inpainting(
                original,
                state,
                schedule,
                steps.start,
                strength,
                images,
                height,
                width,
                sdxl.factor,
                text.like,
            )
            # Always encoded: a scheduler that adds noise goes on where this has stopped drawing.
            encoded = encoder(outside(pixels, mask), state, text.like, centred=False)
            masked, state = encoded.latents, encoded.generator_state_after
            for_both = made_for_it and text.batch_scale is not None
            small_mask, masked = mask_latents(
                mask,
                masked if made_for_it else None,
                images,
                height,
                width,
                sdxl.factor,
                for_both,
                text.like,
            )

            return sdxl.picture(
                Start(latents, schedule, steps, state),
                text,
                loras,
                output_type,
                **denoise_options(made_for_it, small_mask, masked, originals, noise),
            )

        return draw_images(draw, seed, num_images, spread)

    made: Workflow = workflow(name=name, replace=True)(compose)
    return made
