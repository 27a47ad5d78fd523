"""Stable Diffusion 3 inpainting, bit-identical to `diffusers.StableDiffusion3InpaintPipeline`.

Both forms: a transformer made for it, which gets mask and masked image as more channels (33), and any
other (16 channels), where what is outside the mask is put back after each step.
"""

from typing import Annotated, Any

from ...parameters import Static
from ...workflow import Workflow, workflow
from ..denoising import seeded
from ..folder import DiffusersFolder
from ..given_picture import outside, prepare_mask, prepare_pixels, to_float
from ..inpainting_forms import denoise_options, is_made_for_it
from ..input_image import InputImage, MaskImage
from ..spread import draw_images
from .composing import SD3, Guidance, Images, Length, Output, Share
from .image_parts import mask_latents, start_inpainting
from .parts import VaeEncoder

# The pipeline knows no other numbers of channels: of latents, and of those with mask and image.
_CHANNELS = 16, 33


def sd3_inpainting_workflow(
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
    """The workflow of a Stable Diffusion 3 folder that draws a part of an image anew.

    Defaults are the pipeline's own. mask_image: white where the picture is drawn anew. strength: the
    share of the steps that are taken. sizes, split_guidance: as in text to image.
    """
    sd3 = SD3(folder, dtype, noises=True)
    latent_channels = sd3.vae_config["latent_channels"]
    made_for_it = is_made_for_it(
        folder.source,
        "StableDiffusion3InpaintPipeline",
        "transformers",
        _CHANNELS,
        sd3.channels,
        latent_channels,
    )
    side = sd3.side(sizes)

    def compose(
        *,
        prompt: Annotated[str, sd3.prompt],
        negative_prompt: Annotated[str, sd3.negative_prompt] = "",
        image: Annotated[Any, InputImage()],
        mask_image: Annotated[Any, MaskImage()],
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
        """Stable Diffusion 3, inpainting."""
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
        pixels = to_float(prepare_pixels(image, height, width, sd3.factor))
        mask = prepare_mask(mask_image, height, width, sd3.factor)
        encoder = VaeEncoder(folder.source, **sd3.options)

        def draw(seed: Any, images: int) -> Any:
            state, original = seeded(seed), None
            if not made_for_it or strength < 1:
                encoded = encoder(pixels, state, shifted=True)
                original, state = encoded.latents, encoded.generator_state_after
            schedule, steps = sd3.schedule(text.like, num_steps, height, width, strength)
            latents, noise, originals, state = start_inpainting(
                original,
                state,
                schedule,
                steps.start,
                strength,
                images,
                height,
                width,
                latent_channels,
                sd3.factor,
                text.like,
            )
            masked = originals  # of which that form takes no notice
            if made_for_it:
                masked = encoder(outside(pixels, mask), state, shifted=True).latents
            doubled = made_for_it and text.batch_scale is not None
            small_mask, masked = mask_latents(
                mask, masked, images, height, width, sd3.factor, doubled, text.like
            )

            # This pipeline does not shift back what it decodes.
            return sd3.picture(
                latents,
                schedule,
                steps,
                text,
                loras,
                output_type,
                **denoise_options(made_for_it, small_mask, masked, originals, noise),
                shifted=False,
            )

        return draw_images(draw, seed, num_images, spread)

    made: Workflow = workflow(name=name, replace=True)(compose)
    return made
