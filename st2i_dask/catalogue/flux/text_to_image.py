"""FLUX.1 text to image, bit-identical to `diffusers.FluxPipeline`.

Both forms: dev (a guidance embedding, timesteps shifted with the image size) and schnell (neither).
"""

from typing import Annotated, Any, Literal

from ...parameters import Static
from ...rules import Multiple, OneOf, Prompt, Range
from ...workflow import Workflow, workflow
from ..denoising import scheduler_step, timestep
from ..folder import DiffusersFolder, check_dtype
from ..pictures import finish_pixels
from .parts import (
    ClipText,
    FluxTransformer,
    T5Text,
    TokenCounter,
    VaeDecoder,
    prepare,
    text_ids,
)

# The pipeline's own limit (FluxPipeline.check_inputs).
MAX_SEQUENCE_LENGTH = 512
# Pixels per side; FLUX.1 itself is trained up to about two megapixels.
MAX_SIDE = 4096


def side_rule(sizes: tuple[int, ...] | None, vae_scale_factor: int) -> OneOf | Multiple:
    """The rule for height and width: these sizes, or whatever packs into tokens of 2x2 latents."""
    return OneOf(sizes) if sizes else Multiple(vae_scale_factor * 2, vae_scale_factor * 2, MAX_SIDE)


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
    check_dtype(dtype)
    transformer_config = folder.config("transformer")
    vae_scale_factor = 2 ** (len(folder.config("vae")["block_out_channels"]) - 1)
    guided = bool(transformer_config.get("guidance_embeds"))
    channels = transformer_config["in_channels"] // 4
    scheduler_config = folder.scheduler_config
    scheduler_class = folder.index["scheduler"][1]

    options = {"dtype": dtype} if dtype else {}
    clip = ClipText(folder.source, **options)
    t5 = T5Text(folder.source, **options)
    transformer = FluxTransformer(folder.source, **options)
    vae = VaeDecoder(folder.source, **options)

    def compose(
        prompt: Any, seed: Any, steps: int, h: int, w: int, guidance: Any, length: int, out: str
    ) -> Any:
        pooled = clip(prompt)
        embeds = t5(prompt, length)
        latents, image_ids, scheduler = prepare(
            embeds, seed, steps, h, w, channels, vae_scale_factor, scheduler_class, scheduler_config
        )
        ids = text_ids(embeds, pooled)
        for step in range(steps):
            noise_pred = transformer(
                latents=latents,
                timestep=timestep(scheduler, step, latents),
                guidance_scale=guidance,
                pooled_prompt_embeds=pooled,
                prompt_embeds=embeds,
                text_ids=ids,
                image_ids=image_ids,
            )
            latents, scheduler = scheduler_step(scheduler, step, noise_pred, latents)
        return finish_pixels(vae(latents, h, w), out, vae_scale_factor * 2, "the FLUX VAE")

    side: Any = side_rule(sizes, vae_scale_factor)
    default_side = 128 * vae_scale_factor  # FluxPipeline.default_sample_size
    height, width = height or default_side, width or default_side
    num_steps = num_steps or (28 if guided else 4)
    tokens = TokenCounter(folder)

    PromptText = Annotated[str, Prompt(max_tokens="max_sequence_length", count=tokens)]
    Steps = Annotated[int, Range(1, 1000)]
    Side = Annotated[int, side]
    Guidance = Annotated[float, Range(0, 100)]
    Length = Annotated[int, Range(1, MAX_SEQUENCE_LENGTH)]
    Output = Static[Literal["pil", "pt"]]

    def dev(
        prompt: PromptText,
        seed: int = 0,
        num_steps: Steps = num_steps,
        height: Side = height,
        width: Side = width,
        guidance_scale: Guidance = guidance_scale,
        max_sequence_length: Length = max_sequence_length,
        output_type: Output = "pil",
    ) -> Any:
        """FLUX.1 with guidance embedding (dev), text to image."""
        return compose(
            prompt,
            seed,
            num_steps,
            height,
            width,
            guidance_scale,
            max_sequence_length,
            output_type,
        )

    def schnell(
        prompt: PromptText,
        seed: int = 0,
        num_steps: Steps = num_steps,
        height: Side = height,
        width: Side = width,
        max_sequence_length: Length = max_sequence_length,
        output_type: Output = "pil",
    ) -> Any:
        """FLUX.1 without guidance embedding (schnell), text to image."""
        return compose(
            prompt, seed, num_steps, height, width, None, max_sequence_length, output_type
        )

    made: Workflow = workflow(name=name, replace=True)(dev if guided else schnell)
    return made
