"""What all Z-Image workflows compose, and what their parameters are."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from ...errors import LoadError
from ...parameters import Static
from ...rules import Multiple, OneOf, Prompt, Range
from ...workflow import Workflow
from ..denoising import keep_outside, scheduler_step
from ..folder import DiffusersFolder, check_dtype
from ..form import form
from ..input_image import InputImage, MaskImage
from ..lora import Loras, adapted
from ..pictures import finish_pixels
from ..scheduler_check import Steps, check_scheduler
from ..spread import MAX_IMAGES, draw_images
from ..strength import Strength, first_step
from .parts import (
    ChatCounter,
    QwenText,
    VaeDecoder,
    ZImageTransformer,
    combine,
    draw_noise,
    make_scheduler,
    model_time,
    prepare_scheduler,
)
from .starts import ImageStart, InpaintingStart

#: Executors that share the tokens of one image.
MAX_GANG = 8
# Pixels per side; Z-Image itself is trained up to about four megapixels.
MAX_SIDE = 4096
#: The sequences of text and of image tokens are padded to multiples of this.
_PADDED = 32
#: What a workflow begins with, and its parameters beside the prompts.
IMAGE = ("image", "strength")
INPAINTING = ("image", "mask_image", "strength")
CONTROL = ("control_image", "controlnet_conditioning_scale")
CONTROLLED_INPAINTING = ("image", "mask_image", *CONTROL)

#: Composes a request's ControlNet from: options of its ModelFns, those with the transformer's adapters,
#: control_image, image, mask_image, height, width, images of one forward. Gives what composes a step:
#: from the inputs that both models have in common and the scale to the transformer's other inputs.
ControlOf = Callable[..., Callable[[dict[str, Any], Any], dict[str, Any]]]


def z_image(
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
    """The workflow of a Z-Image folder that takes these inputs.

    defaults: values of its parameters in place of the pipeline's own. about: says what it draws.
    sizes: the only sides in pixels that the model draws well; None: any that the pipeline takes.
    """
    check_dtype(dtype)
    _check_chat_template(folder)
    config = folder.config("transformer")
    vae_scale_factor = 2 ** (len(folder.config("vae")["block_out_channels"]) - 1)
    multiple = vae_scale_factor * 2  # a token is 2x2 latents
    # Positions of tokens that the model has: of the text, then of rows and columns.
    longest, *positions = config["axes_lens"]
    longest = (longest - 2) // _PADDED * _PADDED
    largest = min(MAX_SIDE, multiple * min(positions))
    side: Any = OneOf(sizes) if sizes else Multiple(multiple, multiple, largest)
    usual = min(1024, largest // multiple * multiple)
    counter = ChatCounter(folder, "tokenizer")
    limit = "max_sequence_length"
    scheduler = folder.scheduler

    def scheduled(steps: int) -> Any:
        return make_scheduler(*scheduler, steps, 64, None, True, "cpu")

    check_scheduler(folder, scheduled, noises="strength" in inputs)
    options = {"dtype": dtype} if dtype else {}

    def compose(
        *,
        prompt: Annotated[str, Prompt(max_tokens=limit, count=counter)],
        negative_prompt: Annotated[
            str, Prompt(max_tokens=limit, count=counter, may_be_empty=True)
        ] = "",
        image: Annotated[Any, InputImage()],
        mask_image: Annotated[Any, MaskImage()],
        control_image: Annotated[Any, InputImage()],
        seed: int = 0,
        num_steps: Annotated[int, Steps(scheduled)] = 50,
        height: Annotated[int, side] = usual,
        width: Annotated[int, side] = usual,
        guidance_scale: Annotated[Static[float], Range(0, 100)] = 5.0,
        cfg_normalization: Annotated[float, Range(0, 100)] = 0.0,
        cfg_truncation: Annotated[float, Range(0, 1)] = 1.0,
        strength: Annotated[Static[float], Strength()] = 1.0,
        controlnet_conditioning_scale: Annotated[float, Range(-10, 10)] = 0.75,
        num_images: Annotated[Static[int], Range(1, MAX_IMAGES)] = 1,
        spread: Static[bool] = False,
        loras: Annotated[Static[Any], Loras(folder)] = (),
        split_guidance: Static[bool] = False,
        sequence_parallel: Annotated[int, Range(1, MAX_GANG)] = 1,
        max_sequence_length: Annotated[int, Range(1, longest)] = min(512, longest),
        output_type: Static[Literal["pil", "pt"]] = "pil",
    ) -> Any:
        source = folder.source
        text = QwenText(source, **adapted(options, loras, "text_encoder"))
        transformer = ZImageTransformer(source, **adapted(options, loras, "transformer"))
        transformer.gang = sequence_parallel or 1
        decoder = VaeDecoder(source, **options)
        guided = guidance_scale > 0
        wanted = text(prompt, max_sequence_length)
        unwanted = text(negative_prompt, max_sequence_length) if guided else None
        first = first_step(num_steps, strength) if "strength" in inputs else 0
        settings = (
            *scheduler,
            num_steps,
            (height // multiple) * (width // multiple),
            strength if "strength" in inputs else None,
            control_of is None,
        )
        control = None
        if control_of is not None:
            together = 1 if spread else num_images
            # It runs modules of the transformer, adapters and all.
            with_adapters = adapted(options, loras, "transformer")
            control = control_of(
                options,
                with_adapters,
                control_image,
                image,
                mask_image,
                height,
                width,
                together,
            )

        def forward(latents: Any, time: Any, embeds: Any, negative: Any) -> Any:
            common = dict(
                latents=latents,
                timestep=time,
                prompt_embeds=embeds,
                negative_prompt_embeds=negative,
                cfg_truncation=cfg_truncation,
            )
            more = control(common, controlnet_conditioning_scale) if control else {}
            return transformer(**common, **more)

        def draw(seed: Any, images: int) -> Any:
            kept: Any = None
            shape = images, config["in_channels"], height, width
            if "strength" not in inputs:
                latents = draw_noise(wanted, seed, *shape, vae_scale_factor)
            elif "mask_image" in inputs:
                start = InpaintingStart(source, **options)
                kept = start(image, mask_image, seed, *shape, settings)
                latents = kept.latents
            else:
                latents = ImageStart(source, **options)(image, seed, *shape, settings)
            schedule = prepare_scheduler(latents, *settings)
            for step in range(first, num_steps):
                time = model_time(schedule, step, latents)
                if guided and split_guidance:
                    positive = forward(latents, time, wanted, None)
                    negative = forward(latents, time, unwanted, None)
                else:
                    positive, negative = forward(latents, time, wanted, unwanted), None
                velocity = combine(
                    positive, negative, time, guidance_scale, cfg_normalization, cfg_truncation
                )
                latents, schedule = scheduler_step(schedule, step, velocity, latents)
                if kept is not None:
                    latents = keep_outside(
                        step, schedule, latents, kept.image_latents, kept.noise, kept.mask
                    )
            return finish_pixels(decoder(latents), output_type, multiple, "the Z-Image VAE")

        return draw_images(draw, seed, num_images, spread)

    absent = {*INPAINTING, *CONTROL} - set(inputs)
    if control_of is not None:
        # A ControlNet's residuals arrive at one executor, for all tokens.
        absent.add("sequence_parallel")
    return form(compose, absent, defaults, source=folder.source, name=name, about=about)


def _check_chat_template(folder: DiffusersFolder) -> None:
    path = folder.path / "tokenizer"
    if (path / "chat_template.jinja").is_file() or (path / "chat_template.json").is_file():
        return
    config = path / "tokenizer_config.json"
    if not config.is_file() or not folder.config("tokenizer", config.name).get("chat_template"):
        raise LoadError(
            f"{folder.source!r}: its tokenizer has no chat template, which prompts are put into; "
            f"copy {path} again"
        )
