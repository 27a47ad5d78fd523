"""What all Qwen-Image workflows compose, and what their parameters are."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from ...errors import LoadError
from ...parameters import Maybe, Static
from ...rules import Multiple, OneOf, Prompt, Range
from ...workflow import Workflow
from ..denoising import keep_outside, scheduler_step, seeded, timestep
from ..folder import DiffusersFolder, check_dtype
from ..form import form
from ..input_image import InputImage, MaskImage
from ..lora import Loras, adapted
from ..per_controlnet import is_inside
from ..pictures import finish_pixels
from ..scheduler_check import Steps, check_scheduler
from ..spread import MAX_IMAGES, draw_images
from ..strength import Strength, first_step
from .parts import (
    QwenImageTransformer,
    QwenVlText,
    TemplateCounter,
    VaeDecoder,
    draw_noise,
    guided,
    make_scheduler,
    prepare_scheduler,
)
from .starts import ImageStart, InpaintingStart

# The pipelines' own limit (check_inputs).
MAX_SEQUENCE_LENGTH = 1024
# Pixels per side; Qwen-Image itself is trained up to about three megapixels.
MAX_SIDE = 4096
#: What a workflow begins with: its parameters beside those of text to image.
IMAGE = ("image", "strength")
INPAINTING = ("image", "mask_image", "strength")
CONTROL = (
    "control_image",
    "controlnet_conditioning_scale",
    "control_guidance_start",
    "control_guidance_end",
)

#: Composes a ControlNet's part of a draw, from: options of its ModelFns, control_image, seed, height,
#: width, images. Gives the state of the generator after it, and what composes a step: from the inputs
#: that both models have in common and the scale to the transformer's other inputs.
ControlOf = Callable[..., tuple[Any, Callable[[dict[str, Any], Any], dict[str, Any]]]]


def qwen_image(
    folder: DiffusersFolder,
    inputs: tuple[str, ...],
    defaults: Mapping[str, Any],
    *,
    name: str,
    about: str,
    dtype: str | None,
    sizes: tuple[int, ...] | None = None,
    control_of: ControlOf | None = None,
) -> Workflow:
    """The workflow of a Qwen-Image folder that takes these inputs.

    defaults: values of its parameters in place of the pipeline's own. about: says what it draws.
    sizes: the only sides in pixels that the model draws well; None: any that the pipeline takes.
    """
    check_dtype(dtype)
    config = folder.config("transformer")
    if config.get("guidance_embeds"):
        raise LoadError(
            f"{folder.source!r}: its transformer has guidance_embeds=True, which Diffusers' Qwen-Image "
            "cannot run; use a model that is not distilled with guidance"
        )
    vae_scale_factor = 2 ** len(folder.config("vae")["temperal_downsample"])
    multiple = vae_scale_factor * 2  # a token is 2x2 latents
    side: Any = OneOf(sizes) if sizes else Multiple(multiple, multiple, MAX_SIDE)
    usual = min(128 * vae_scale_factor, MAX_SIDE)  # default_sample_size of the pipelines
    channels = config["in_channels"] // 4
    counter = TemplateCounter(folder, "tokenizer")
    limit = "max_sequence_length"
    scheduler = folder.scheduler

    def scheduled(steps: int) -> Any:
        return make_scheduler(*scheduler, steps, 64, None, "cpu")

    check_scheduler(folder, scheduled, noises="strength" in inputs)
    options = {"dtype": dtype} if dtype else {}

    def compose(
        *,
        prompt: Annotated[str, Prompt(max_tokens=limit, count=counter)],
        negative_prompt: Annotated[
            Maybe[str | None], Prompt(max_tokens=limit, count=counter, may_be_empty=True)
        ] = None,
        image: Annotated[Any, InputImage()],
        mask_image: Annotated[Any, MaskImage()],
        control_image: Annotated[Any, InputImage()],
        seed: int = 0,
        num_steps: Annotated[int, Steps(scheduled)] = 50,
        height: Annotated[int, side] = usual,
        width: Annotated[int, side] = usual,
        true_cfg_scale: Annotated[Static[float], Range(0, 100)] = 4.0,
        strength: Annotated[Static[float], Strength()] = 0.6,
        controlnet_conditioning_scale: Annotated[float, Range(-10, 10)] = 1.0,
        control_guidance_start: Annotated[Static[float], Range(0, 1)] = 0.0,
        control_guidance_end: Annotated[Static[float], Range(0, 1)] = 1.0,
        num_images: Annotated[Static[int], Range(1, MAX_IMAGES)] = 1,
        spread: Static[bool] = False,
        loras: Annotated[Static[Any], Loras(folder)] = (),
        max_sequence_length: Annotated[int, Range(1, MAX_SEQUENCE_LENGTH)] = 512,
        output_type: Static[Literal["pil", "pt"]] = "pil",
    ) -> Any:
        source = folder.source
        text = QwenVlText(source, **adapted(options, loras, "text_encoder"))
        transformer = QwenImageTransformer(source, **adapted(options, loras, "transformer"))
        decoder = VaeDecoder(source, **options)
        together = 1 if spread else num_images
        wanted = text(prompt, max_sequence_length, together)
        unwanted = None
        if negative_prompt is not None and true_cfg_scale > 1:
            unwanted = text(negative_prompt, max_sequence_length, together)
        shape = height // multiple, width // multiple
        first = first_step(num_steps, strength) if "strength" in inputs else 0
        settings = (
            *scheduler,
            num_steps,
            shape[0] * shape[1],
            strength if "strength" in inputs else None,
        )

        def draw(seed: Any, images: int) -> Any:
            kept: Any = None
            control: Any = None
            of_picture = images, channels, height, width, settings
            if "mask_image" in inputs:
                start = InpaintingStart(source, **options)
                kept = start(image, mask_image, seed, *of_picture)
                latents = kept.latents
            elif "image" in inputs:
                latents = ImageStart(source, **options)(image, seed, *of_picture)
            else:
                state = seeded(seed)
                if control_of is not None:
                    state, control = control_of(options, control_image, seed, height, width, images)
                latents = draw_noise(wanted, state, channels, height, width, vae_scale_factor)
            schedule = prepare_scheduler(latents, *settings)
            for step in range(first, num_steps):
                common = dict(
                    latents=latents,
                    timestep=timestep(schedule, step, latents),
                    prompt_embeds=wanted,
                    shape=shape,
                )
                more = {}
                window = control_guidance_start, control_guidance_end
                if control is not None and is_inside(window, step, num_steps):
                    more = control(common, controlnet_conditioning_scale)
                noise_pred = transformer(**common, **more)
                if unwanted is not None:
                    negative = transformer(**{**common, "prompt_embeds": unwanted}, **more)
                    noise_pred = guided(noise_pred, negative, true_cfg_scale)
                latents, schedule = scheduler_step(schedule, step, noise_pred, latents)
                if kept is not None:
                    latents = keep_outside(
                        step, schedule, latents, kept.image_latents, kept.noise, kept.mask
                    )
            pixels = decoder(latents, height, width)
            return finish_pixels(pixels, output_type, multiple, "the Qwen-Image VAE")

        return draw_images(draw, seed, num_images, spread)

    absent = {*INPAINTING, *CONTROL} - set(inputs)
    return form(compose, absent, defaults, source=folder.source, name=name, about=about)
