"""FLUX.2 Klein text to image, and to image from reference pictures (editing), bit-identical to
`diffusers.Flux2KleinPipeline`.

Both forms: distilled (few steps, no guidance) and base (guidance by two forwards a step).
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from ...parameters import Static
from ...workflow import Workflow, workflow
from ..denoising import seeded
from ..folder import DiffusersFolder
from ..narrowed import without
from ..spread import draw_images
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
from .parts import (
    ReferenceEncoder,
    draw_noise,
    prepare_scheduler,
    size_like,
)
from .references import ReferenceImages


def klein_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    num_steps: int | None = None,
    height: int | None = None,
    width: int | None = None,
    guidance_scale: float = 4.0,
    max_sequence_length: int = MAX_SEQUENCE_LENGTH,
    sizes: tuple[int, ...] | None = None,
    text_encoder_out_layers: Sequence[int] = LAYERS,
    editing: bool = False,
) -> Workflow:
    """The workflow of a Flux2KleinPipeline folder. Defaults are the pipeline's own, but for a distilled
    model 4 steps.

    sizes: the only sides in pixels that the model draws well; None: any that the pipeline takes.
    text_encoder_out_layers: the text encoder's layers whose results are used.
    editing: from one or several reference pictures; without height or width the first one's.
    """
    base = KleinBase(folder, dtype, sizes, text_encoder_out_layers)
    sides: Any = int
    if editing:
        sides = int | None
    else:
        height, width = height or base.default_side, width or base.default_side

    def compose(
        prompt: Annotated[str, base.prompt],
        image: Annotated[Any, ReferenceImages()],
        seed: int = 0,
        num_steps: Annotated[int, base.steps] = num_steps or base.default_steps,
        height: Annotated[sides, base.side] = height,
        width: Annotated[sides, base.side] = width,
        guidance_scale: Guidance = guidance_scale,
        num_images: NumImages = 1,
        spread: Spread = False,
        loras: Annotated[Static[Any], base.loras] = (),
        max_sequence_length: Length = max_sequence_length,
        output_type: Output = "pil",
    ) -> Any:
        """FLUX.2 Klein text to image, or text and reference pictures to image."""
        together = 1 if spread else num_images
        texts = base.texts(prompt, guidance_scale, max_sequence_length, together, loras)
        references: dict[str, Any] = {}
        if editing:
            encoded = ReferenceEncoder(base.source, **base.options)(image, together)
            references = dict(
                reference_latents=encoded.reference_latents, reference_ids=encoded.reference_ids
            )
            height, width = size_like(image, height, width, base.multiple)

        def draw(seed: Any, images: int) -> Any:
            latents, latent_ids = draw_noise(
                texts.embeds,
                seeded(seed),
                images,
                height,
                width,
                base.channels,
                base.vae_scale_factor,
            )
            schedule = prepare_scheduler(latents, num_steps, *base.scheduler)
            return base.picture(
                Start(latents, latent_ids, schedule, range(num_steps)),
                texts,
                guidance_scale,
                loras,
                (height, width),
                output_type,
                references=references,
            )

        return draw_images(draw, seed, num_images, spread)

    fixed: dict[str, Any] = {}
    if base.distilled:
        fixed["guidance_scale"] = None
    if not editing:
        fixed["image"] = None
    made: Workflow = workflow(name=name, replace=True)(without(compose, fixed))
    return made


#: From reference pictures.
klein_edit_workflow = partial(klein_workflow, editing=True)
