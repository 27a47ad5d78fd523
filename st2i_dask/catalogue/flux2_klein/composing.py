"""What all FLUX.2 Klein workflows compose: texts, the denoising loop; and what their parameters are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from ...errors import LoadError
from ...parameters import Static
from ...rules import Multiple, OneOf, Prompt, Range
from ..denoising import guided, scheduler_step, timestep
from ..folder import DiffusersFolder, check_dtype
from ..lora import Loras, adapted
from ..pictures import finish_pixels
from ..scheduler_check import Steps, check_scheduler
from ..spread import MAX_IMAGES
from .parts import ChatCounter, KleinTransformer, QwenText, VaeDecoder, make_scheduler

# The pipeline's own (tokenizer_max_length).
MAX_SEQUENCE_LENGTH = 512
# Pixels per side.
MAX_SIDE = 4096
#: Layers of the text encoder whose results the transformer was trained with.
LAYERS = (9, 18, 27)

# At most 1: there is no second forward, as in the pipelines.
Guidance = Annotated[Static[float], Range(0, 100)]
Length = Annotated[int, Range(1, MAX_SEQUENCE_LENGTH)]
NumImages = Annotated[Static[int], Range(1, MAX_IMAGES)]
Spread = Static[bool]
Output = Static[Literal["pil", "pt"]]


@dataclass(frozen=True)
class Texts:
    """A request's texts as its transformer takes them; the negative one None without guidance."""

    embeds: Any
    ids: Any
    negative_embeds: Any = None
    negative_ids: Any = None


@dataclass(frozen=True)
class Start:
    """What denoising starts from, inside a workflow: latents, their ids, the scheduler and the steps that
    are taken."""

    latents: Any
    latent_ids: Any
    schedule: Any
    steps: range


class KleinBase:
    """A folder of FLUX.2 Klein as workflows need it: what they read from its configuration, and compose
    alike.

    options: of its ModelFns. channels: of the VAE's latents. multiple: pixels of a token's side.
    distilled: made for few steps, without guidance. default_side: pixels. side, steps: the rules for
    height and width, and for the number of steps. layers: of the text encoder, whose results are used.
    """

    def __init__(
        self,
        folder: DiffusersFolder,
        dtype: str | None,
        sizes: tuple[int, ...] | None = None,
        layers: Sequence[int] = LAYERS,
    ):
        check_dtype(dtype)
        self.source = folder.source
        self.options: dict[str, Any] = {"dtype": dtype} if dtype else {}
        self.distilled = bool(folder.index.get("is_distilled"))
        transformer = folder.config("transformer")
        self.channels: int = transformer["in_channels"] // 4
        self.vae_scale_factor: int = 2 ** (len(folder.config("vae")["block_out_channels"]) - 1)
        self.multiple = self.vae_scale_factor * 2
        self.scheduler = folder.scheduler

        def scheduled(steps: int) -> Any:
            return make_scheduler(*self.scheduler, steps, 256, "cpu")

        check_scheduler(folder, scheduled, noises=True)
        self.steps = Steps(scheduled)
        self.loras = Loras(folder)
        self.layers = tuple(layers)
        _check_layers(folder, self.layers, transformer["joint_attention_dim"])
        self.default_steps = 4 if self.distilled else 50
        self.default_side = 128 * self.vae_scale_factor  # default_sample_size of the pipelines
        self.side: Any = OneOf(sizes) if sizes else Multiple(self.multiple, self.multiple, MAX_SIDE)
        self.prompt = Prompt(
            max_tokens="max_sequence_length", count=ChatCounter(folder, "tokenizer")
        )

    # -- composing -----------------------------------------------------------------------------

    def texts(
        self,
        prompt: Any,
        guidance_scale: float | None,
        max_sequence_length: int,
        num_images: int,
        loras: Any,
    ) -> Texts:
        """The prompt through the encoder; with guidance also the empty one."""
        encoder = QwenText(self.source, **adapted(self.options, loras, "text_encoder"))
        layers = list(self.layers)
        made = encoder(prompt, max_sequence_length, layers, num_images)
        if self.distilled or guidance_scale is None or guidance_scale <= 1:
            return Texts(made.prompt_embeds, made.text_ids)
        # The pipelines take no other negative prompt.
        empty = encoder("", max_sequence_length, layers, num_images)
        return Texts(made.prompt_embeds, made.text_ids, empty.prompt_embeds, empty.text_ids)

    def picture(
        self,
        start: Start,
        texts: Texts,
        guidance_scale: float | None,
        loras: Any,
        size: tuple[Any, Any],
        output_type: str,
        *,
        references: Mapping[str, Any] = MappingProxyType({}),
        after: Callable[[int, Any, Any], Any] | None = None,
    ) -> Any:
        """The images of a request.

        With guidance a step is two invocations of the transformer, which do not wait for each other.
        size: height and width; None: as the ids have them. references: the transformer's inputs for
        reference pictures. after: composes what happens to the latents after a step; it is called with
        the step, the scheduler and the latents.
        """
        transformer = KleinTransformer(self.source, **adapted(self.options, loras, "transformer"))
        latents, schedule = start.latents, start.schedule
        for step in start.steps:
            common = dict(
                latents=latents,
                timestep=timestep(schedule, step, latents),
                latent_ids=start.latent_ids,
                **references,
            )
            noise_pred = transformer(**common, prompt_embeds=texts.embeds, text_ids=texts.ids)
            if texts.negative_embeds is not None:
                unwanted = transformer(
                    **common, prompt_embeds=texts.negative_embeds, text_ids=texts.negative_ids
                )
                noise_pred = guided(noise_pred, unwanted, guidance_scale)
            latents, schedule = scheduler_step(schedule, step, noise_pred, latents)
            if after is not None:
                latents = after(step, schedule, latents)
        pixels = VaeDecoder(self.source, **self.options)(latents, start.latent_ids, *size)
        return finish_pixels(pixels, output_type, self.multiple, "the FLUX.2 VAE")


def _check_layers(folder: DiffusersFolder, layers: Sequence[int], width: int) -> None:
    text = folder.config("text_encoder")
    depth, made = text["num_hidden_layers"], text["hidden_size"] * len(layers)
    if not layers or not all(0 <= layer <= depth for layer in layers):
        raise LoadError(
            f"{folder.source!r}: text_encoder_out_layers={tuple(layers)}, but its text encoder has "
            f"{depth} layers; give the ones that the transformer was trained with"
        )
    if made != width:
        raise LoadError(
            f"{folder.source!r}: text_encoder_out_layers={tuple(layers)} give embeddings of {made} "
            f"numbers, the transformer takes {width}; use the text encoder it was trained with"
        )
