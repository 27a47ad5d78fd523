"""FLUX.1 text to image, bit-identical to `diffusers.FluxPipeline`.

Both forms: dev (a guidance embedding, timesteps shifted with the image size) and schnell (neither).
The order of calls and every dtype follow `FluxPipeline.__call__`; what it computes in helpers of its
own is called from there.
"""

import copy
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from ..errors import LoadError
from ..glue import glue
from ..image import check_pixels
from ..model_fn import ModelFn
from ..parameters import Static
from ..rules import Multiple, OneOf, Prompt, Range
from ..workflow import Workflow, workflow
from .folder import DiffusersFolder, check_dtype, load_parts

# The pipeline's own limit (FluxPipeline.check_inputs).
MAX_SEQUENCE_LENGTH = 512
# Pixels per side; FLUX.1 itself is trained up to about two megapixels.
MAX_SIDE = 4096


class _FluxPart(ModelFn):
    """A ModelFn whose component is a FluxPipeline with only some parts loaded."""

    parts: frozenset[str] = frozenset()

    def load_model(self, model_path: str | None) -> dict[str, Any]:
        dtype = self.options.get("dtype")
        return {"pipeline": load_parts(str(model_path), set(self.parts), dtype)}


class ClipText(_FluxPart):
    """Prompt to CLIP's pooled embedding, (1, pooled_projection_dim)."""

    parts = frozenset({"text_encoder", "tokenizer"})

    def setup_io(self) -> None:
        self.add_input("prompt")
        self.add_output("pooled_prompt_embeds")

    def execute(self, model_components: Any, **inputs: Any) -> dict[str, Any]:
        pipeline = model_components["pipeline"]
        pooled = pipeline._get_clip_prompt_embeds(
            prompt=[inputs["prompt"]], device=pipeline.text_encoder.device
        )
        return {"pooled_prompt_embeds": pooled}


class T5Text(_FluxPart):
    """Prompt to T5's embeddings, (1, max_sequence_length, joint_attention_dim)."""

    parts = frozenset({"text_encoder_2", "tokenizer_2"})

    def setup_io(self) -> None:
        self.add_input("prompt")
        self.add_input("max_sequence_length")
        self.add_output("prompt_embeds")

    def execute(self, model_components: Any, **inputs: Any) -> dict[str, Any]:
        pipeline = model_components["pipeline"]
        encoder = pipeline.text_encoder_2
        embeds = pipeline._get_t5_prompt_embeds(
            prompt=[inputs["prompt"]],
            max_sequence_length=inputs["max_sequence_length"],
            device=encoder.device,
            dtype=encoder.dtype,
        )
        return {"prompt_embeds": embeds}


class FluxTransformer(_FluxPart):
    """One denoising step: packed latents (1, tokens, channels) to the predicted velocity."""

    parts = frozenset({"transformer"})

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_input("timestep")
        self.add_input("guidance_scale", optional=True)
        self.add_input("pooled_prompt_embeds")
        self.add_input("prompt_embeds")
        self.add_input("text_ids")
        self.add_input("image_ids")
        self.add_output("noise_pred")

    def execute(self, model_components: Any, **inputs: Any) -> dict[str, Any]:
        import torch

        transformer = model_components["pipeline"].transformer
        latents = inputs["latents"]
        guidance = None
        if transformer.config.guidance_embeds:
            guidance = torch.full(
                [1], inputs["guidance_scale"], device=latents.device, dtype=torch.float32
            ).expand(latents.shape[0])
        with transformer.cache_context("cond"):
            noise_pred = transformer(
                hidden_states=latents,
                timestep=inputs["timestep"] / 1000,
                guidance=guidance,
                pooled_projections=inputs["pooled_prompt_embeds"],
                encoder_hidden_states=inputs["prompt_embeds"],
                txt_ids=inputs["text_ids"],
                img_ids=inputs["image_ids"],
                joint_attention_kwargs={},
                return_dict=False,
            )[0]
        return {"noise_pred": noise_pred}


class VaeDecoder(_FluxPart):
    """Packed latents to pixels in about [-1, 1], (1, 3, height, width)."""

    parts = frozenset({"vae"})

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_input("height")
        self.add_input("width")
        self.add_output("pixels")

    def execute(self, model_components: Any, **inputs: Any) -> dict[str, Any]:
        pipeline = model_components["pipeline"]
        vae = pipeline.vae
        latents = pipeline._unpack_latents(
            inputs["latents"], inputs["height"], inputs["width"], pipeline.vae_scale_factor
        )
        latents = (latents / vae.config.scaling_factor) + vae.config.shift_factor
        return {"pixels": vae.decode(latents, return_dict=False)[0]}


@glue(outputs=3)
def prepare(
    prompt_embeds: Any,
    seed: int,
    num_steps: int,
    height: int,
    width: int,
    channels: int,
    vae_scale_factor: int,
    scheduler_class: str,
    scheduler_config: dict[str, Any],
) -> tuple[Any, Any, Any]:
    """Initial latents, image ids, and the request's own scheduler with its timesteps set.

    Noise comes from a CPU generator seeded with `seed`, on every device.
    """
    import diffusers
    import numpy as np
    import torch
    from diffusers import FluxPipeline
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps

    # prepare_latents reads nothing else of a pipeline.
    helper = SimpleNamespace(
        vae_scale_factor=vae_scale_factor,
        _pack_latents=FluxPipeline._pack_latents,
        _prepare_latent_image_ids=FluxPipeline._prepare_latent_image_ids,
    )
    device = prompt_embeds.device
    latents, image_ids = FluxPipeline.prepare_latents(
        helper,
        1,
        channels,
        height,
        width,
        prompt_embeds.dtype,
        device,
        torch.Generator("cpu").manual_seed(seed),
    )
    scheduler = getattr(diffusers, scheduler_class).from_config(scheduler_config)
    config = scheduler.config
    sigmas = np.linspace(1.0, 1 / num_steps, num_steps)
    mu = calculate_shift(
        latents.shape[1],
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", 1.15),
    )
    retrieve_timesteps(
        scheduler,
        num_steps,
        device,
        sigmas=None if config.get("use_flow_sigmas") else sigmas,
        mu=mu,
    )
    scheduler.set_begin_index(0)
    return latents, image_ids, scheduler


@glue
def text_ids(prompt_embeds: Any, pooled_prompt_embeds: Any) -> Any:
    """Zero position ids of the text tokens, in the CLIP encoder's dtype (`encode_prompt`)."""
    import torch

    return torch.zeros(prompt_embeds.shape[1], 3).to(
        device=prompt_embeds.device, dtype=pooled_prompt_embeds.dtype
    )


@glue
def timestep(scheduler: Any, step: int, latents: Any) -> Any:
    """The timestep as the transformer gets it, (1,)."""
    return scheduler.timesteps[step].expand(latents.shape[0]).to(latents.dtype)


@glue(outputs=2)
def scheduler_step(scheduler: Any, step: int, noise_pred: Any, latents: Any) -> tuple[Any, Any]:
    """Latents after the step, and the scheduler's state for the next one."""
    # Inputs are immutable: a retry may read the same scheduler again.
    scheduler = copy.deepcopy(scheduler)
    latents = scheduler.step(noise_pred, scheduler.timesteps[step], latents, return_dict=False)[0]
    return latents, scheduler


@glue
def finish_pixels(pixels: Any, output_type: str, vae_scale_factor: int) -> Any:
    """Diffusers' own post-processing: a PIL image, or with "pt" a float tensor (3, H, W)."""
    from diffusers.image_processor import VaeImageProcessor

    check_pixels(pixels, lowest=-1.0, where="the FLUX VAE")
    processor = VaeImageProcessor(vae_scale_factor=vae_scale_factor * 2)
    return processor.postprocess(pixels, output_type=output_type)[0]


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
        return finish_pixels(vae(latents, h, w), out, vae_scale_factor)

    side: Any = (
        OneOf(sizes) if sizes else Multiple(vae_scale_factor * 2, vae_scale_factor * 2, MAX_SIDE)
    )
    default_side = 128 * vae_scale_factor  # FluxPipeline.default_sample_size
    height, width = height or default_side, width or default_side
    num_steps = num_steps or (28 if guided else 4)
    tokens = _TokenCounter(folder)

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


class _TokenCounter:
    """Prompt length as the T5 tokenizer counts it; the tokenizer is read on first use."""

    def __init__(self, folder: DiffusersFolder):
        self.folder = folder
        self._tokenizer: Any = None

    def __call__(self, prompt: str) -> int:
        if self._tokenizer is None:
            if "tokenizer_2" not in self.folder.index:
                raise LoadError(f"{self.folder.source!r} has no tokenizer_2; copy the folder again")
            self._tokenizer = self.folder.tokenizer("tokenizer_2")
        return len(self._tokenizer(prompt, verbose=False).input_ids)
