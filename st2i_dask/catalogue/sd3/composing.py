"""What all tasks of Stable Diffusion 3 compose alike: text, the denoising loop, pixels."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal

from ...parameters import Static
from ...rules import Multiple, OneOf, Prompt, Range
from ..both_prompts import Text, text_of
from ..denoising import nth_timestep, scheduler_step
from ..folder import DiffusersFolder, check_dtype
from ..lora import Loras, adapted
from ..pictures import finish_pixels
from ..scheduler_check import Steps, check_scheduler
from ..spread import MAX_IMAGES
from ..strength import Strength
from ..token_count import TokenCounter
from .parts import (
    ClipGText,
    ClipLText,
    SD3Transformer,
    T5Text,
    VaeDecoder,
    join_text,
    make_scheduler,
    scheduled,
)

# The pipeline's own limit (StableDiffusion3Pipeline.check_inputs).
MAX_SEQUENCE_LENGTH = 512
_CLIP_TOKENS = 77


class SD3:
    """A folder of Stable Diffusion 3 as workflows need it. LoadError if a pipeline would not take it.

    shifts: whether the pipeline shifts the timesteps with the picture's size, if the scheduler does.
    noises: whether it adds noise to a picture. steps: the rule for the number of steps.
    """

    def __init__(
        self,
        folder: DiffusersFolder,
        dtype: str | None,
        *,
        shifts: bool = True,
        noises: bool = False,
    ):
        check_dtype(dtype)
        self.folder = folder
        self.options: dict[str, Any] = {"dtype": dtype} if dtype else {}
        self.transformer_config = folder.config("transformer")
        self.vae_config = folder.config("vae")
        self.channels = self.transformer_config["in_channels"]
        self.patch = self.transformer_config["patch_size"]
        self.factor = 2 ** (len(self.vae_config["block_out_channels"]) - 1)
        self.default_side = self.transformer_config["sample_size"] * self.factor
        self.has_t5 = bool((folder.index.get("text_encoder_3") or [None])[0])
        self.shifts = shifts
        self.loras = Loras(folder)
        self.scheduler = folder.scheduler

        def usual(num_steps: int) -> Any:
            return self._scheduled(num_steps, self.default_side, self.default_side, None)[0]

        check_scheduler(
            folder,
            usual,
            one_a_step=False,
            noises=noises,
            hint="" if shifts else "set use_dynamic_shifting to False",
        )
        self.steps = Steps(usual)

    # -- rules of parameters -------------------------------------------------------------------

    @cached_property
    def prompt(self) -> Prompt:
        # Without T5 the model sees what CLIP sees.
        return Prompt(
            max_tokens="max_sequence_length" if self.has_t5 else _CLIP_TOKENS,
            count=TokenCounter(self.folder, "tokenizer_3" if self.has_t5 else "tokenizer"),
        )

    @cached_property
    def negative_prompt(self) -> Prompt:
        return replace(self.prompt, may_be_empty=True)

    def side(
        self,
        sizes: tuple[int, ...] | None,
        *configs: Mapping[str, Any],
        multiple: int = 1,
    ) -> OneOf | Multiple:
        """Of height and width in pixels: as far as position embeddings (the ControlNets' too) reach.

        multiple: of which the pipeline wants it besides.
        """
        if sizes:
            return OneOf(sizes)
        token = self.factor * self.patch
        embedded = [self.transformer_config, *configs]
        longest = min(c["pos_embed_max_size"] for c in embedded if c.get("pos_embed_max_size"))
        unit = math.lcm(token, multiple)
        return Multiple(unit, unit, token * longest // unit * unit)

    # -- composing -----------------------------------------------------------------------------

    def text(
        self,
        prompt: Any,
        negative_prompt: Any,
        num_images: int,
        max_sequence_length: int,
        guidance_scale: float,
        split: bool,
        loras: Any = (),
    ) -> Text:
        source = self.folder.source
        clip_l = ClipLText(source, **adapted(self.options, loras, "text_encoder"))
        clip_g = ClipGText(source, **adapted(self.options, loras, "text_encoder_2"))
        third = adapted(self.options, loras, "text_encoder_3")
        t5 = T5Text(source, **third) if self.has_t5 else None

        def encoded(words: Any) -> tuple[Any, Any]:
            joined: tuple[Any, Any] = join_text(
                tuple(clip_l(words, num_images)),
                tuple(clip_g(words, num_images)),
                t5 and t5(words, num_images, max_sequence_length),
                max_sequence_length,
                self.transformer_config["joint_attention_dim"],
            )
            return joined

        return text_of(encoded(prompt), lambda: encoded(negative_prompt), guidance_scale, split)

    def schedule(
        self, like: Any, num_steps: int, height: int, width: int, strength: float | None = None
    ) -> tuple[Any, range]:
        """A request's scheduler, and its timesteps that are taken."""
        scheduler, first = self._scheduled(num_steps, height, width, strength)
        steps = range(first, len(scheduler.timesteps))
        made = make_scheduler(
            *self.scheduler, num_steps, self._tokens(height, width), strength, like
        )
        return made, steps

    def _scheduled(
        self, num_steps: int, height: int, width: int, strength: float | None
    ) -> tuple[Any, int]:
        return scheduled(*self.scheduler, num_steps, self._tokens(height, width), strength)

    def _tokens(self, height: int, width: int) -> int | None:
        unit = self.factor * self.patch
        return (height // unit) * (width // unit) if self.shifts else None

    def picture(
        self,
        latents: Any,
        scheduler: Any,
        steps: range,
        text: Text,
        loras: Any,
        output_type: str,
        *,
        each_forward: Callable[[int, int, dict[str, Any]], dict[str, Any]] = lambda *_: {},
        after_step: Callable[[Any, Any, int], Any] = lambda latents, *_: latents,
        shifted: bool = True,
    ) -> Any:
        """Images of latents that the steps have denoised.

        each_forward: what else the transformer gets, from the step, the forward's number and what it
        gets anyway. after_step: the latents to go on with, from those, the scheduler and the step.
        shifted: see VaeDecoder.
        """
        options = adapted(self.options, loras, "transformer")
        transformer = SD3Transformer(self.folder.source, **options)
        for step in steps:
            predicted = []
            for number, (embeds, pooled) in enumerate(text.forwards):
                common = dict(
                    latents=latents,
                    timestep=nth_timestep(scheduler, step),
                    guidance_scale=text.batch_scale,
                    prompt_embeds=embeds,
                    pooled_prompt_embeds=pooled,
                )
                predicted.append(transformer(**common, **each_forward(step, number, common)))
            latents, scheduler = scheduler_step(scheduler, step, text.guided(predicted), latents)
            latents = after_step(latents, scheduler, step)
        pixels = VaeDecoder(self.folder.source, **self.options)(latents, shifted)
        return finish_pixels(pixels, output_type, self.factor, "the SD3 VAE")


# Types of parameters that are the same for every folder.
Guidance = Annotated[Static[float], Range(0, 100)]
Share = Annotated[Static[float], Strength()]
Images = Annotated[int, Range(1, MAX_IMAGES)]
Length = Annotated[int, Range(1, MAX_SEQUENCE_LENGTH)]
Output = Static[Literal["pil", "pt"]]
