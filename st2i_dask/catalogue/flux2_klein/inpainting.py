"""FLUX.2 Klein inpainting, bit-identical to `diffusers.Flux2KleinInpaintPipeline`.

The image has the picture's own size, rounded down to whole tokens and at most a megapixel.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from ...parameters import Static
from ...workflow import Workflow, workflow
from ..denoising import keep_outside, seeded
from ..folder import DiffusersFolder
from ..input_image import MaskImage
from ..narrowed import without
from ..spread import draw_images
from ..strength import Strength, first_step
from .composing import (
    LAYERS,
    MAX_SEQUENCE_LENGTH,
    Guidance,
    KleinBase,
    Length,
    NumImages,
    Output,
    Spread,
    Start,
)
from .inpainting_parts import PictureEncoder, prepare_from_image, prepare_mask, size_of_picture
from .parts import draw_noise
from .references import OwnSizeImage, shrunk


def klein_inpainting_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    num_steps: int | None = None,
    guidance_scale: float = 8.0,
    strength: float = 0.8,
    max_sequence_length: int = MAX_SEQUENCE_LENGTH,
    text_encoder_out_layers: Sequence[int] = LAYERS,
) -> Workflow:
    """The inpainting workflow of a FLUX.2 Klein folder. Defaults are the pipeline's own, but for a
    distilled model 4 steps.

    text_encoder_out_layers: the text encoder's layers whose results are used.
    """
    base = KleinBase(folder, dtype, None, text_encoder_out_layers)
    picture = OwnSizeImage(least=base.multiple)

    def target(values: Mapping[str, Any]) -> tuple[int, int]:
        width, height = shrunk(values["image"].size)
        return width // base.multiple * base.multiple, height // base.multiple * base.multiple

    def compose(
        prompt: Annotated[str, base.prompt],
        image: Annotated[Any, picture],
        mask_image: Annotated[Any, MaskImage(size=target)],
        image_reference: Annotated[Any, picture] = None,
        seed: int = 0,
        num_steps: Annotated[int, base.steps] = num_steps or base.default_steps,
        guidance_scale: Guidance = guidance_scale,
        strength: Annotated[Static[float], Strength()] = strength,
        num_images: NumImages = 1,
        spread: Spread = False,
        loras: Annotated[Static[Any], base.loras] = (),
        max_sequence_length: Length = max_sequence_length,
        output_type: Output = "pil",
    ) -> Any:
        """FLUX.2 Klein inpainting: what is black in the mask stays; a reference shows what to draw."""
        together = 1 if spread else num_images
        texts = base.texts(prompt, guidance_scale, max_sequence_length, together, loras)
        encoded = PictureEncoder(base.source, **base.options)(image, image_reference, together)
        height, width = size_of_picture(image, base.multiple)

        def draw(seed: Any, images: int) -> Any:
            noise, latent_ids = draw_noise(
                texts.embeds,
                seeded(seed),
                images,
                height,
                width,
                base.channels,
                base.vae_scale_factor,
            )
            latents, schedule = prepare_from_image(
                encoded.image_latents, noise, num_steps, strength, *base.scheduler
            )
            mask = prepare_mask(mask_image, height, width, base.vae_scale_factor, latents)

            def after(step: int, schedule: Any, latents: Any) -> Any:
                return keep_outside(step, schedule, latents, encoded.image_latents, noise, mask)

            steps = range(first_step(num_steps, strength), num_steps)
            return base.picture(
                Start(latents, latent_ids, schedule, steps),
                texts,
                guidance_scale,
                loras,
                (None, None),
                output_type,
                references=dict(
                    reference_latents=encoded.reference_latents,
                    reference_ids=encoded.reference_ids,
                ),
                after=after,
            )

        return draw_images(draw, seed, num_images, spread)

    fixed: dict[str, Any] = {"guidance_scale": None} if base.distilled else {}
    made: Workflow = workflow(name=name, replace=True)(without(compose, fixed))
    return made
