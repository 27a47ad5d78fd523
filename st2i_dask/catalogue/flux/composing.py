"""What all FLUX.1 workflows compose: texts, the denoising loop, pixels; and what their parameters are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ...parameters import Static
from ...rules import Multiple, OneOf, Prompt, Range
from ..denoising import guided, scheduler_step, timestep
from ..folder import DiffusersFolder, check_dtype
from ..lora import Loras, adapted
from ..pictures import finish_pixels
from ..scheduler_check import Steps, check_scheduler
from ..spread import MAX_IMAGES
from .parts import (
    ClipText,
    FluxTransformer,
    T5Text,
    TokenCounter,
    VaeDecoder,
    make_scheduler,
    text_ids,
)

# The pipelines' own limit (check_inputs).
MAX_SEQUENCE_LENGTH = 512
# Pixels per side; FLUX.1 itself is trained up to about two megapixels.
MAX_SIDE = 4096

Guidance = Annotated[float, Range(0, 100)]
# At most 1: there is no second forward, as in the pipelines.
TrueCfg = Annotated[Static[float], Range(0, 100)]
Length = Annotated[int, Range(1, MAX_SEQUENCE_LENGTH)]
NumImages = Annotated[Static[int], Range(1, MAX_IMAGES)]
Spread = Static[bool]
Output = Static[Literal["pil", "pt"]]


@dataclass(frozen=True)
class Texts:
    """A request's texts as its transformer takes them; the negative ones None without true CFG."""

    pooled: Any
    embeds: Any
    ids: Any
    negative_pooled: Any = None
    negative_embeds: Any = None
    true_cfg_scale: float = 1.0


@dataclass(frozen=True)
class Start:
    """What denoising starts from, inside a workflow: packed latents, their ids, the scheduler and the
    steps that are taken."""

    latents: Any
    image_ids: Any
    schedule: Any
    steps: range


class FluxBase:
    """A folder of FLUX.1 as workflows need it: what they read from its configuration, and compose alike.

    flow_sigmas: whether the pipeline lets a scheduler that can make flow sigmas itself do so. noises:
    whether it adds noise to a picture.

    options: of its ModelFns. channels: of the latents. guided: whether there is a guidance embedding
    (dev). default_side: pixels. side, steps: the rules for height and
    width, and for the number of steps.
    """

    def __init__(
        self,
        folder: DiffusersFolder,
        dtype: str | None,
        sizes: tuple[int, ...] | None = None,
        *,
        flow_sigmas: bool = False,
        noises: bool = False,
    ):
        check_dtype(dtype)
        self.source = folder.source
        self.options: dict[str, Any] = {"dtype": dtype} if dtype else {}
        self.transformer_config = folder.config("transformer")
        self.channels: int = self.transformer_config["in_channels"] // 4
        self.guided = bool(self.transformer_config.get("guidance_embeds"))
        self.vae_scale_factor: int = 2 ** (len(folder.config("vae")["block_out_channels"]) - 1)
        self.scheduler = folder.scheduler

        def scheduled(steps: int) -> Any:
            return make_scheduler(*self.scheduler, steps, 256, "cpu", flow_sigmas=flow_sigmas)

        check_scheduler(folder, scheduled, noises=noises)
        self.steps = Steps(scheduled)
        self.default_steps = 28 if self.guided else 4
        self.default_side = 128 * self.vae_scale_factor  # default_sample_size of the pipelines
        # A token is 2x2 latents.
        multiple = self.vae_scale_factor * 2
        self.side: Any = OneOf(sizes) if sizes else Multiple(multiple, multiple, MAX_SIDE)
        tokens = TokenCounter(folder)
        limit = "max_sequence_length"
        self.loras = Loras(folder)
        self.prompt = Prompt(max_tokens=limit, count=tokens)
        self.negative_prompt = Prompt(max_tokens=limit, count=tokens, may_be_empty=True)

    # -- composing -----------------------------------------------------------------------------

    def texts(
        self,
        prompt: Any,
        negative_prompt: Any,
        true_cfg_scale: float,
        max_sequence_length: int,
        num_images: int,
        loras: Any,
    ) -> Texts:
        """The prompt through both encoders, and the negative one with true CFG: as in the pipeline where
        there is a negative prompt, be it empty, and a scale above 1."""
        clip = ClipText(self.source, **adapted(self.options, loras, "text_encoder"))
        t5 = T5Text(self.source, **adapted(self.options, loras, "text_encoder_2"))
        pooled = clip(prompt, num_images)
        embeds = t5(prompt, max_sequence_length, num_images)
        ids = text_ids(embeds, pooled)
        if negative_prompt is None or true_cfg_scale <= 1:
            return Texts(pooled, embeds, ids)
        return Texts(
            pooled,
            embeds,
            ids,
            clip(negative_prompt, num_images),
            t5(negative_prompt, max_sequence_length, num_images),
            true_cfg_scale,
        )

    def picture(
        self,
        start: Start,
        texts: Texts,
        guidance_scale: Any,
        loras: Any,
        height: int,
        width: int,
        output_type: str,
        *,
        control: Callable[[int, dict[str, Any]], dict[str, Any]] | None = None,
        after: Callable[[int, Any, Any], Any] | None = None,
    ) -> Any:
        """The images of a request.

        With true CFG a step is two invocations of the transformer, which do not wait for each other.
        control: composes the ControlNets of a step and gives the transformer's other inputs; it is
            called with the step and with what both have in common.
        after: composes what happens to the latents after a step; it is called with the step, the
            scheduler and the latents.
        """
        transformer = FluxTransformer(self.source, **adapted(self.options, loras, "transformer"))
        latents, schedule = start.latents, start.schedule
        for step in start.steps:
            common = dict(
                latents=latents,
                timestep=timestep(schedule, step, latents),
                guidance_scale=guidance_scale,
                pooled_prompt_embeds=texts.pooled,
                prompt_embeds=texts.embeds,
                text_ids=texts.ids,
                image_ids=start.image_ids,
            )
            more = control(step, common) if control is not None else {}
            noise_pred = transformer(**common, **more)
            if texts.negative_embeds is not None:
                negative = dict(
                    pooled_prompt_embeds=texts.negative_pooled, prompt_embeds=texts.negative_embeds
                )
                unwanted = transformer(**{**common, **negative}, **more)
                noise_pred = guided(noise_pred, unwanted, texts.true_cfg_scale)
            latents, schedule = scheduler_step(schedule, step, noise_pred, latents)
            if after is not None:
                latents = after(step, schedule, latents)
        pixels = VaeDecoder(self.source, **self.options)(latents, height, width)
        return finish_pixels(pixels, output_type, self.vae_scale_factor * 2, "the FLUX VAE")
