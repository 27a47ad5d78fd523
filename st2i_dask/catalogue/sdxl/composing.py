"""What all tasks of Stable Diffusion XL compose alike: text, the denoising loop, pixels."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from ...errors import LoadError
from ...parameters import Static
from ...rules import Multiple, OneOf, Prompt, Range
from ..both_prompts import Text, stack, text_of
from ..denoising import nth_timestep, scheduler_step, seeded
from ..folder import DiffusersFolder, check_dtype, stored_dtype
from ..lora import Loras, adapted
from ..pictures import finish_pixels
from ..scheduler_check import Steps, check_scheduler
from ..spread import MAX_IMAGES
from ..token_count import TokenCounter
from .image_parts import start_from_image
from .parts import (
    ClipGText,
    ClipLText,
    SDXLUnet,
    join_text,
    make_scheduler,
    make_time_ids,
    noisy_step,
    scale_input,
    scheduled,
    time_ids,
    zeros,
)
from .vae import UpcastVaeDecoder, UpcastVaeEncoder, VaeDecoder, VaeEncoder

# Sides are multiples of it, whatever the VAE (StableDiffusionXLPipeline.check_inputs).
SIDES = 8
# Pixels per side; the model itself is trained on about one megapixel.
MAX_SIDE = 4096
# What the refiner is told of the prompt's and the negative prompt's picture; the pipeline's defaults.
_SCORES = (6.0, 2.5)


@dataclass(frozen=True)
class Start:
    """What denoising starts from, inside a workflow: latents, the scheduler, the steps that are taken,
    and what a scheduler that adds noise goes on to draw from."""

    latents: Any
    schedule: Any
    steps: range
    generator_state: Any


class SDXL:
    """A folder of Stable Diffusion XL as workflows need it. LoadError if a pipeline would not take it.

    begins: whether the pipeline tells the scheduler that it begins with the first step. scored: whether
    the pipeline gives aesthetic scores to a model that wants them. noises: whether it adds noise to a
    picture. steps: the rule for the number of steps. noisy: whether the scheduler's steps draw noise.
    """

    def __init__(
        self,
        folder: DiffusersFolder,
        dtype: str | None,
        *,
        begins: bool = True,
        scored: bool = False,
        noises: bool = False,
    ):
        check_dtype(dtype)
        self.folder = folder
        self.options: dict[str, Any] = {"dtype": dtype} if dtype else {}
        self.dtype = dtype
        self.unet_config = folder.config("unet")
        self.vae_config = folder.config("vae")
        self.channels = self.unet_config["in_channels"]
        self.factor = 2 ** (len(self.vae_config["block_out_channels"]) - 1)
        self.default_side = self.unet_config["sample_size"] * self.factor
        self.has_clip_l = bool((folder.index.get("text_encoder") or [None])[0])
        self.text_width = folder.config("text_encoder_2")["projection_dim"]
        self.empty_is_zeros = bool(folder.index.get("force_zeros_for_empty_prompt", True))
        wants_scores = scored and folder.index.get("requires_aesthetics_score")
        self.scores = _SCORES if wants_scores else None
        self.begins = begins
        self.loras = Loras(folder)
        self.scheduler = folder.scheduler
        self._check()

        def usual(num_steps: int) -> Any:
            return scheduled(*self.scheduler, num_steps, None, self.begins)[0]

        self.noisy = check_scheduler(
            folder, usual, predicts_noise=True, one_a_step=False, noises=noises
        )
        self.steps = Steps(usual)

    def _check(self) -> None:
        import torch

        source = self.folder.source
        if self.unet_config.get("time_cond_proj_dim") is not None:
            raise LoadError(
                f"{source!r}: its UNet has the guidance scale embedded (time_cond_proj_dim), which has "
                "no workflow here; st2i.from_pipeline takes it"
            )
        try:
            time_ids(self.unet_config, 8, 8, self.text_width, torch.float32, self.scores)
        except (TypeError, ValueError) as error:
            raise LoadError(f"{source!r} cannot be used for this task: {error}") from error

    # -- rules of parameters -------------------------------------------------------------------

    @cached_property
    def prompt(self) -> Prompt:
        return self._text(may_be_empty=False)

    @cached_property
    def negative_prompt(self) -> Prompt:
        return self._text(may_be_empty=True)

    def _text(self, may_be_empty: bool) -> Prompt:
        part = "tokenizer" if self.has_clip_l else "tokenizer_2"
        tokens = TokenCounter(self.folder, part)
        config = self.folder.config("text_encoder_2")
        return Prompt(
            max_tokens=config["max_position_embeddings"], count=tokens, may_be_empty=may_be_empty
        )

    def side(self, sizes: tuple[int, ...] | None) -> OneOf | Multiple:
        """Of height and width in pixels."""
        unit = math.lcm(SIDES, self.factor)
        return OneOf(sizes) if sizes else Multiple(unit, unit, MAX_SIDE)

    # -- composing -----------------------------------------------------------------------------

    def text(
        self,
        prompt: Any,
        negative_prompt: Any,
        num_images: int,
        guidance_scale: float,
        split: bool,
        loras: Any = (),
    ) -> Text:
        """negative_prompt: None: none, which is not the same as an empty one."""
        source = self.folder.source
        first_options = adapted(self.options, loras, "text_encoder")
        clip_l = ClipLText(source, **first_options) if self.has_clip_l else None
        clip_g = ClipGText(source, **adapted(self.options, loras, "text_encoder_2"))

        def encoded(words: Any) -> tuple[Any, Any]:
            first = clip_l and tuple(clip_l(words, num_images))
            joined: tuple[Any, Any] = join_text(first, tuple(clip_g(words, num_images)))
            return joined

        positive = encoded(prompt)

        def negative() -> tuple[Any, Any]:
            if negative_prompt is None and self.empty_is_zeros:
                return zeros(positive[0]), zeros(positive[1])
            return encoded("" if negative_prompt is None else negative_prompt)

        return text_of(positive, negative, guidance_scale, split)

    def schedule(
        self, like: Any, num_steps: int, strength: float | None = None
    ) -> tuple[Any, range]:
        """A request's scheduler, and its timesteps that are taken."""
        scheduler, first = scheduled(*self.scheduler, num_steps, strength, self.begins)
        made = make_scheduler(*self.scheduler, num_steps, strength, self.begins, like)
        return made, range(first, len(scheduler.timesteps))

    def encoder(self) -> VaeEncoder | UpcastVaeEncoder:
        """A VAE that wants it encodes in float32 whatever the pipeline's dtype."""
        if self.vae_config.get("force_upcast", True) and self._dtype != "float32":
            return UpcastVaeEncoder(self.folder.source, **self.options)
        return VaeEncoder(self.folder.source, **self.options)

    def _decoder(self) -> VaeDecoder | UpcastVaeDecoder:
        # It decodes so only what would overflow.
        if self.vae_config.get("force_upcast", True) and self._dtype == "float16":
            return UpcastVaeDecoder(self.folder.source, **self.options)
        return VaeDecoder(self.folder.source, **self.options)

    @cached_property
    def _dtype(self) -> str:
        return self.dtype or stored_dtype(self.folder)

    def start_from_picture(
        self, pixels: Any, seed: Any, like: Any, num_steps: int, strength: float, num_images: int
    ) -> Start:
        """Of image to image. pixels: as `prepare_pixels` gives them."""
        encoded = self.encoder()(pixels, seeded(seed), like, centred=True)
        schedule, steps = self.schedule(like, num_steps, strength)
        latents, state = start_from_image(
            encoded.latents,
            encoded.generator_state_after,
            schedule,
            steps.start,
            num_images,
            like,
        )
        return Start(latents, schedule, steps, state)

    def picture(
        self,
        start: Start,
        text: Text,
        loras: Any,
        output_type: str,
        *,
        each_forward: Callable[[int, int, dict[str, Any]], dict[str, Any]] = lambda *_: {},
        after_step: Callable[[Any, Any, int], Any] = lambda latents, *_: latents,
    ) -> Any:
        """The images of a request.

        each_forward: what else the UNet gets, from the step, the forward's number and what it gets
        anyway. after_step: the latents to go on with, from those, the scheduler and the step.
        """
        unet = SDXLUnet(self.folder.source, **adapted(self.options, loras, "unet"))
        latents, scheduler, state = start.latents, start.schedule, start.generator_state
        positive, negative = make_time_ids(
            self.unet_config, latents, self.factor, self.text_width, self.scores, text.like
        )
        ids = [positive] if len(text.forwards) == 1 else [negative, positive]
        if text.batch_scale is not None:
            ids = [stack(negative, positive)]
        for step in start.steps:
            scaled, scheduler = scale_input(scheduler, step, latents)
            predicted = []
            for number, (embeds, pooled) in enumerate(text.forwards):
                common = dict(
                    latents=scaled,
                    timestep=nth_timestep(scheduler, step),
                    guidance_scale=text.batch_scale,
                    prompt_embeds=embeds,
                    pooled_prompt_embeds=pooled,
                    time_ids=ids[number],
                )
                predicted.append(unet(**common, **each_forward(step, number, common)))
            noise_pred = text.guided(predicted)
            if self.noisy:
                latents, scheduler, state = noisy_step(scheduler, step, noise_pred, latents, state)
            else:
                latents, scheduler = scheduler_step(scheduler, step, noise_pred, latents)
            latents = after_step(latents, scheduler, step)
        return finish_pixels(self._decoder()(latents), output_type, self.factor, "the SDXL VAE")


# Types of parameters that are the same for every folder.
Guidance = Annotated[Static[float], Range(0, 100)]
Images = Annotated[int, Range(1, MAX_IMAGES)]
Output = Static[Literal["pil", "pt"]]
