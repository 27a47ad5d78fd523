"""The models and glue of the FLUX.1 workflows.

The order of calls and every dtype follow `FluxPipeline.__call__`; what it computes in helpers of its
own is called from there.
"""

from types import SimpleNamespace
from typing import Any

from ...errors import LoadError
from ...glue import glue
from ..denoising import resumed
from ..folder import DiffusersFolder
from ..part import PipelinePart
from ..residuals import summed

#: ControlNets that one step can take.
MAX_CONTROLNETS = 4
_NUMBERED = ["", *(f"_{number}" for number in range(2, MAX_CONTROLNETS + 1))]
#: Inputs of the transformer, one for each ControlNet.
DOUBLES = tuple(f"controlnet_block_samples{number}" for number in _NUMBERED)
SINGLES = tuple(f"controlnet_single_block_samples{number}" for number in _NUMBERED)


class ClipText(PipelinePart):
    """Prompt to CLIP's pooled embedding for each image, (images, pooled_projection_dim)."""

    parts = frozenset({"text_encoder", "tokenizer"})

    def setup_io(self) -> None:
        self.add_input("prompt")
        self.add_input("num_images", optional=True)
        self.add_output("pooled_prompt_embeds")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        pooled = pipeline._get_clip_prompt_embeds(
            prompt=[inputs["prompt"]],
            num_images_per_prompt=inputs["num_images"] or 1,
            device=pipeline.text_encoder.device,
        )
        return {"pooled_prompt_embeds": pooled}


class T5Text(PipelinePart):
    """Prompt to T5's embeddings for each image, (images, max_sequence_length, joint_attention_dim)."""

    parts = frozenset({"text_encoder_2", "tokenizer_2"})

    def setup_io(self) -> None:
        self.add_input("prompt")
        self.add_input("max_sequence_length")
        self.add_input("num_images", optional=True)
        self.add_output("prompt_embeds")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        encoder = pipeline.text_encoder_2
        embeds = pipeline._get_t5_prompt_embeds(
            prompt=[inputs["prompt"]],
            num_images_per_prompt=inputs["num_images"] or 1,
            max_sequence_length=inputs["max_sequence_length"],
            device=encoder.device,
            dtype=encoder.dtype,
        )
        return {"prompt_embeds": embeds}


class FluxTransformer(PipelinePart):
    """One denoising step: packed latents (images, tokens, channels) to the predicted velocity.

    The residuals of ControlNets are callback inputs: each is fetched after the block it is added to,
    and those of several are summed in the ControlNets' order. residuals_lengths: how many there are for
    double and single blocks; None: as many as the ControlNet has.
    """

    parts = frozenset({"transformer"})

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_input("timestep")
        self.add_input("guidance_scale", optional=True)
        self.add_input("pooled_prompt_embeds")
        self.add_input("prompt_embeds")
        self.add_input("text_ids")
        self.add_input("image_ids")
        for names in zip(DOUBLES, SINGLES, strict=True):
            for name in names:
                self.add_input(name, callback=True, optional=True)
        self.add_input("controlnet_blocks_repeat", optional=True)
        self.add_input("residuals_lengths", optional=True)
        self.add_output("noise_pred")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        transformer = pipeline.transformer
        latents = inputs["latents"]
        guidance = guidance_of(transformer, inputs["guidance_scale"], latents)
        lengths = inputs["residuals_lengths"] or (None, None)
        doubles, singles = (
            summed([inputs[name] for name in names if inputs.get(name) is not None], length)
            for names, length in zip((DOUBLES, SINGLES), lengths, strict=True)
        )
        with transformer.cache_context("cond"):
            noise_pred = transformer(
                hidden_states=latents,
                timestep=inputs["timestep"] / 1000,
                guidance=guidance,
                pooled_projections=inputs["pooled_prompt_embeds"],
                encoder_hidden_states=inputs["prompt_embeds"],
                txt_ids=inputs["text_ids"],
                img_ids=inputs["image_ids"],
                controlnet_block_samples=doubles,
                controlnet_single_block_samples=singles,
                controlnet_blocks_repeat=bool(inputs["controlnet_blocks_repeat"]),
                joint_attention_kwargs={},
                return_dict=False,
            )[0]
        return {"noise_pred": noise_pred}


def guidance_of(model: Any, scale: float, latents: Any) -> Any:
    """Guidance as a transformer or ControlNet takes it, (batch,) float32; None if it has none."""
    import torch

    if not model.config.guidance_embeds:
        return None
    return torch.full([1], scale, device=latents.device, dtype=torch.float32).expand(
        latents.shape[0]
    )


class VaeDecoder(PipelinePart):
    """Packed latents to pixels in about [-1, 1], (images, 3, height, width)."""

    parts = frozenset({"vae"})

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_input("height")
        self.add_input("width")
        self.add_output("pixels")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        vae = pipeline.vae
        latents = pipeline._unpack_latents(
            inputs["latents"], inputs["height"], inputs["width"], pipeline.vae_scale_factor
        )
        latents = (latents / vae.config.scaling_factor) + vae.config.shift_factor
        return {"pixels": vae.decode(latents, return_dict=False)[0]}


@glue(outputs=3)
def prepare(
    prompt_embeds: Any,
    generator_state: Any,
    num_images: int,
    num_steps: int,
    height: int,
    width: int,
    channels: int,
    vae_scale_factor: int,
    scheduler_class: str,
    scheduler_config: dict[str, Any],
    controlled: bool = False,
) -> tuple[Any, Any, Any]:
    """Packed noise (images, tokens, channels * 4), its ids (tokens, 3), and the request's own scheduler.

    Both tensors have the embeddings' dtype and device; the noise comes from a CPU generator, on every
    device. controlled: as the pipelines with a ControlNet set their timesteps.
    """
    from diffusers import FluxPipeline

    # prepare_latents reads nothing else of a pipeline.
    helper = SimpleNamespace(
        vae_scale_factor=vae_scale_factor,
        _pack_latents=FluxPipeline._pack_latents,
        _prepare_latent_image_ids=FluxPipeline._prepare_latent_image_ids,
    )
    latents, image_ids = FluxPipeline.prepare_latents(
        helper,
        num_images,
        channels,
        height,
        width,
        prompt_embeds.dtype,
        prompt_embeds.device,
        resumed(generator_state),
    )
    scheduler = make_scheduler(
        scheduler_class,
        scheduler_config,
        num_steps,
        latents.shape[1],
        latents.device,
        flow_sigmas=not controlled,
    )
    if not controlled:
        scheduler.set_begin_index(0)
    return latents, image_ids, scheduler


def make_scheduler(
    class_name: str,
    config: dict[str, Any],
    num_steps: int,
    tokens: int,
    device: Any,
    *,
    flow_sigmas: bool,
) -> Any:
    """A request's scheduler, its timesteps shifted with the number of tokens of an image.

    flow_sigmas: a scheduler that makes flow sigmas itself does; else they are evenly spaced.
    """
    import diffusers
    import numpy as np
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps

    scheduler = getattr(diffusers, class_name).from_config(config)
    config = scheduler.config
    mu = calculate_shift(
        tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", 1.15),
    )
    sigmas: Any = np.linspace(1.0, 1 / num_steps, num_steps)
    if flow_sigmas and config.get("use_flow_sigmas"):
        sigmas = None
    retrieve_timesteps(scheduler, num_steps, device, sigmas=sigmas, mu=mu)
    return scheduler


@glue
def text_ids(prompt_embeds: Any, pooled_prompt_embeds: Any) -> Any:
    """Zero position ids of the text tokens, in the CLIP encoder's dtype (`encode_prompt`)."""
    import torch

    return torch.zeros(prompt_embeds.shape[1], 3).to(
        device=prompt_embeds.device, dtype=pooled_prompt_embeds.dtype
    )


class TokenCounter:
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
