"""The models and glue of the Stable Diffusion 3 workflows.

The order of calls and every dtype follow `StableDiffusion3Pipeline.__call__`; what it computes in
helpers of its own is called from there.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ...glue import glue
from ..both_prompts import doubled, halved
from ..denoising import generator_of, resumed
from ..part import PipelinePart
from ..residuals import summed

#: ControlNets that one step can take.
MAX_CONTROLNETS = 4
#: Inputs of the transformer, one for each ControlNet.
RESIDUALS = (
    "block_controlnet_hidden_states",
    *(f"block_controlnet_hidden_states_{number}" for number in range(2, MAX_CONTROLNETS + 1)),
)


class _ClipText(PipelinePart):
    """Prompt to hidden states (images, 77, width) and pooled embedding (images, width)."""

    encoder, tokenizer = "", ""

    def setup_io(self) -> None:
        self.add_input("prompt")
        self.add_input("num_images")
        self.add_output("embeds")
        self.add_output("pooled")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        from diffusers import StableDiffusion3Pipeline

        encoder = getattr(pipeline, self.encoder)
        helper = SimpleNamespace(
            tokenizer=getattr(pipeline, self.tokenizer),
            tokenizer_2=None,
            text_encoder=encoder,
            text_encoder_2=None,
            tokenizer_max_length=pipeline.tokenizer.model_max_length,
        )
        embeds, pooled = StableDiffusion3Pipeline._get_clip_prompt_embeds(
            helper,
            prompt=[inputs["prompt"]],
            num_images_per_prompt=inputs["num_images"],
            device=encoder.device,
        )
        return {"embeds": embeds, "pooled": pooled}


class ClipLText(_ClipText):
    __doc__ = _ClipText.__doc__
    parts = frozenset({"text_encoder", "tokenizer"})
    encoder, tokenizer = "text_encoder", "tokenizer"


class ClipGText(_ClipText):
    __doc__ = _ClipText.__doc__
    # The pipeline pads for both encoders to the length of the first tokenizer.
    parts = frozenset({"text_encoder_2", "tokenizer_2", "tokenizer"})
    encoder, tokenizer = "text_encoder_2", "tokenizer_2"


class T5Text(PipelinePart):
    """Prompt to T5's embeddings, (images, max_sequence_length, joint_attention_dim)."""

    parts = frozenset({"text_encoder_3", "tokenizer_3"})

    def setup_io(self) -> None:
        self.add_input("prompt")
        self.add_input("num_images")
        self.add_input("max_sequence_length")
        self.add_output("embeds")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        encoder = pipeline.text_encoder_3
        embeds = pipeline._get_t5_prompt_embeds(
            prompt=[inputs["prompt"]],
            num_images_per_prompt=inputs["num_images"],
            max_sequence_length=inputs["max_sequence_length"],
            device=encoder.device,
            dtype=encoder.dtype,
        )
        return {"embeds": embeds}


class SD3Transformer(PipelinePart):
    """One denoising step: latents (images, channels, height, width) to the predicted velocity.

    guidance_scale: with one, embeddings hold the negative prompt's and then the prompt's, and both go
    through the transformer in one batch. inpainting: mask and masked image, more channels of what the
    transformer gets, as many times as the embeddings. The residuals of ControlNets are callback inputs:
    each is fetched after the block it is added to, and the ControlNets' own are added in their order.
    residuals_length: how many there are; None: as many as the ControlNet has.
    """

    parts = frozenset({"transformer"})

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_input("timestep")
        self.add_input("guidance_scale", optional=True)
        self.add_input("prompt_embeds")
        self.add_input("pooled_prompt_embeds")
        self.add_input("inpainting", optional=True)
        for name in RESIDUALS:
            self.add_input(name, callback=True, optional=True)
        self.add_input("residuals_length", optional=True)
        self.add_output("noise_pred")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        import torch

        scale = inputs["guidance_scale"]
        latents = doubled(inputs["latents"], scale)
        timestep = inputs["timestep"].expand(latents.shape[0])
        if inputs["inpainting"] is not None:
            latents = torch.cat([latents, *inputs["inpainting"]], dim=1)
        residuals = [inputs[name] for name in RESIDUALS if inputs[name] is not None]
        noise_pred = pipeline.transformer(
            hidden_states=latents,
            timestep=timestep,
            encoder_hidden_states=inputs["prompt_embeds"],
            pooled_projections=inputs["pooled_prompt_embeds"],
            block_controlnet_hidden_states=summed(residuals, inputs["residuals_length"]),
            return_dict=False,
        )[0]
        return {"noise_pred": halved(noise_pred, scale)}


class VaeEncoder(PipelinePart):
    """Pixels (images, 3, height, width) to latents drawn from their distribution, and the generator's
    state after the draw.

    pixels: as the pipeline's image processor gives them. shifted: False leaves out the VAE's shift, as
    the pipeline does for some ControlNets.
    """

    parts = frozenset({"vae"})

    def setup_io(self) -> None:
        self.add_input("pixels")
        self.add_input("generator_state")
        self.add_input("shifted")
        self.add_output("latents")
        self.add_output("generator_state_after")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        vae, generator = pipeline.vae, resumed(inputs["generator_state"])
        pixels = inputs["pixels"].to(device=vae.device, dtype=vae.dtype)
        latents = vae.encode(pixels).latent_dist.sample(generator)
        shift = vae.config.shift_factor if inputs["shifted"] else 0
        latents = (latents - shift) * vae.config.scaling_factor
        return {"latents": latents, "generator_state_after": generator.get_state()}


class VaeDecoder(PipelinePart):
    """Latents to pixels in about [-1, 1], (images, 3, height, width).

    shifted: False as in inpainting, where the pipeline leaves the shift out.
    """

    parts = VaeEncoder.parts

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_input("shifted")
        self.add_output("pixels")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        vae = pipeline.vae
        latents = inputs["latents"] / vae.config.scaling_factor
        if inputs["shifted"]:
            latents = latents + vae.config.shift_factor
        return {"pixels": vae.decode(latents, return_dict=False)[0]}


@glue(outputs=2)
def join_text(
    clip_l: tuple[Any, Any],
    clip_g: tuple[Any, Any],
    t5: Any,
    max_sequence_length: int,
    joint_attention_dim: int,
) -> tuple[Any, Any]:
    """Embeddings (images, 77 + max_sequence_length, joint_attention_dim) and pooled embeddings.

    clip_l, clip_g: embeds and pooled of each. t5: None: the pipeline has no such encoder; zeros.
    """
    from diffusers import StableDiffusion3Pipeline

    helper: Any = SimpleNamespace(text_encoder=None, text_encoder_2=None)
    helper._get_clip_prompt_embeds = lambda *, clip_model_index, **_: (clip_l, clip_g)[
        clip_model_index
    ]
    if t5 is None:
        images = clip_l[0].shape[0]
        without = SimpleNamespace(
            text_encoder_3=None,
            text_encoder=SimpleNamespace(dtype=clip_l[0].dtype),
            transformer=SimpleNamespace(
                config=SimpleNamespace(joint_attention_dim=joint_attention_dim)
            ),
        )
        t5 = StableDiffusion3Pipeline._get_t5_prompt_embeds(
            without, [""], images, max_sequence_length, clip_l[0].device
        )
    helper._get_t5_prompt_embeds = lambda **_: t5
    embeds, _, pooled, _ = StableDiffusion3Pipeline.encode_prompt(
        helper, [""], None, None, device=t5.device, do_classifier_free_guidance=False
    )
    return embeds, pooled


@glue
def draw_latents(
    seed: int, like: Any, num_images: int, height: int, width: int, channels: int, factor: int
) -> Any:
    """Noise (images, channels, height / factor, width / factor) in the dtype and device of `like`."""
    return noise_of(generator_of(seed), like, num_images, height, width, channels, factor)


def noise_of(
    generator: Any, like: Any, num_images: int, height: int, width: int, channels: int, factor: int
) -> Any:
    """Noise as `StableDiffusion3Pipeline.prepare_latents` draws it."""
    from diffusers import StableDiffusion3Pipeline

    return StableDiffusion3Pipeline.prepare_latents(
        SimpleNamespace(vae_scale_factor=factor),
        num_images,
        channels,
        height,
        width,
        like.dtype,
        like.device,
        generator,
    )


@glue
def make_scheduler(
    class_name: str,
    config: Mapping[str, Any],
    num_steps: int,
    tokens: int | None,
    strength: float | None,
    like: Any,
) -> Any:
    """A request's scheduler with its timesteps set, on the device of `like`."""
    return scheduled(class_name, config, num_steps, tokens, strength, like.device)[0]


def scheduled(
    class_name: str,
    config: Mapping[str, Any],
    num_steps: int,
    tokens: int | None,
    strength: float | None,
    device: Any = "cpu",
) -> tuple[Any, int]:
    """A scheduler with its timesteps set, and the first of them to take.

    tokens: of the picture, where the pipeline shifts the timesteps with their number if the scheduler
    does. strength: of image to image: the share of the steps that are taken.
    """
    import diffusers
    from diffusers.pipelines.stable_diffusion_3 import pipeline_stable_diffusion_3 as of_pipeline

    scheduler = getattr(diffusers, class_name).from_config(config)
    config, options = scheduler.config, {}
    if tokens is not None and config.get("use_dynamic_shifting", None):
        options["mu"] = of_pipeline.calculate_shift(
            tokens,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.16),
        )
    of_pipeline.retrieve_timesteps(scheduler, num_steps, device, **options)
    if strength is None:
        return scheduler, 0
    taken, _ = diffusers.StableDiffusion3Img2ImgPipeline.get_timesteps(
        SimpleNamespace(scheduler=scheduler), num_steps, strength, device
    )
    return scheduler, len(scheduler.timesteps) - len(taken)
