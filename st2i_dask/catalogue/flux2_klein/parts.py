"""The models and glue of the FLUX.2 Klein workflows.

The order of calls and every dtype follow `Flux2KleinPipeline.__call__`; what it computes in helpers of
its own is called from there. Latents are packed, (images, tokens, channels): a token is 2x2 of the VAE's
latents. Ids are (images, tokens, 4): time, row, column, place in a text.
"""

from types import SimpleNamespace
from typing import Any

from ...glue import glue
from ..denoising import resumed
from ..input_image import restore
from ..part import PipelinePart
from ..token_count import TokenCounter


class QwenText(PipelinePart):
    """Prompt to embeddings for each image, (images, max_sequence_length, layers * width), and their ids.

    layers: the text encoder's layers whose results are used.
    """

    parts = frozenset({"text_encoder", "tokenizer"})

    def setup_io(self) -> None:
        self.add_input("prompt")
        self.add_input("max_sequence_length")
        self.add_input("layers")
        self.add_input("num_images")
        self.add_output("prompt_embeds")
        self.add_output("text_ids")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        embeds, ids = pipeline.encode_prompt(
            prompt=inputs["prompt"],
            device=pipeline.text_encoder.device,
            num_images_per_prompt=inputs["num_images"],
            max_sequence_length=inputs["max_sequence_length"],
            text_encoder_out_layers=tuple(inputs["layers"]),
        )
        return {"prompt_embeds": embeds, "text_ids": ids}


class KleinTransformer(PipelinePart):
    """One denoising step: latents to the predicted velocity, in the same shape.

    reference_latents, reference_ids: tokens of other pictures, that the model looks at.
    """

    parts = frozenset({"transformer"})

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_input("timestep")
        self.add_input("latent_ids")
        self.add_input("prompt_embeds")
        self.add_input("text_ids")
        self.add_input("reference_latents", optional=True)
        self.add_input("reference_ids", optional=True)
        self.add_output("noise_pred")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        import torch

        transformer = pipeline.transformer
        latents, ids = inputs["latents"], inputs["latent_ids"]
        tokens = latents.size(1)
        if inputs["reference_latents"] is not None:
            latents = torch.cat([latents, inputs["reference_latents"]], dim=1)
            ids = torch.cat([ids, inputs["reference_ids"]], dim=1)
        with transformer.cache_context("cond"):
            noise_pred = transformer(
                hidden_states=latents.to(transformer.dtype),
                timestep=inputs["timestep"] / 1000,
                guidance=None,
                encoder_hidden_states=inputs["prompt_embeds"],
                txt_ids=inputs["text_ids"],
                img_ids=ids,
                joint_attention_kwargs=None,
                return_dict=False,
            )[0]
        return {"noise_pred": noise_pred[:, :tokens]}


class VaeDecoder(PipelinePart):
    """Latents to pixels in about [-1, 1], (images, 3, height, width).

    height, width: in pixels; without them they are read from the ids.
    """

    parts = frozenset({"vae"})

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_input("latent_ids")
        self.add_input("height", optional=True)
        self.add_input("width", optional=True)
        self.add_output("pixels")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        import torch

        vae, pipeline = pipeline.vae, around(pipeline.vae)
        multiple = pipeline.vae_scale_factor * 2
        rows, columns = (
            inputs[side] if inputs[side] is None else inputs[side] // multiple
            for side in ("height", "width")
        )
        latents = pipeline._unpack_latents_with_ids(
            inputs["latents"], inputs["latent_ids"], rows, columns
        )
        mean = vae.bn.running_mean.view(1, -1, 1, 1).to(latents.device, latents.dtype)
        std = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps).to(
            latents.device, latents.dtype
        )
        latents = pipeline._unpatchify_latents(latents * std + mean)
        return {"pixels": vae.decode(latents, return_dict=False)[0]}


class ReferenceEncoder(PipelinePart):
    """Pictures, each in its own size, to the tokens of all of them for each image, and their ids."""

    parts = VaeDecoder.parts

    def setup_io(self) -> None:
        self.add_input("images")
        self.add_input("num_images")
        self.add_output("reference_latents")
        self.add_output("reference_ids")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        vae, pipeline = pipeline.vae, around(pipeline.vae)
        multiple = pipeline.vae_scale_factor * 2
        images = []
        for image in map(restore, inputs["images"]):
            pipeline.image_processor.check_image_input(image)
            height, width = (side // multiple * multiple for side in (image.height, image.width))
            images.append(
                pipeline.image_processor.preprocess(
                    image, height=height, width=width, resize_mode="crop"
                )
            )
        latents, ids = pipeline.prepare_image_latents(
            images=images,
            batch_size=inputs["num_images"],
            generator=None,  # it draws nothing
            device=vae.device,
            dtype=vae.dtype,
        )
        return {"reference_latents": latents, "reference_ids": ids}


def around(vae: Any) -> Any:
    """A Flux2KleinPipeline with this VAE alone, whatever the folder's own pipeline is."""
    from diffusers import Flux2KleinPipeline

    return Flux2KleinPipeline(
        scheduler=None, vae=vae, text_encoder=None, tokenizer=None, transformer=None
    )


@glue(outputs=2)
def size_like(images: list[Any], height: int | None, width: int | None, multiple: int) -> Any:
    """Height and width in pixels; where they are not given, the first picture's."""
    rows, columns = (side // multiple * multiple for side in images[0].shape[:2])
    return height or rows, width or columns


@glue(outputs=2)
def draw_noise(
    prompt_embeds: Any,
    generator_state: Any,
    num_images: int,
    height: int,
    width: int,
    channels: int,
    vae_scale_factor: int,
) -> tuple[Any, Any]:
    """Noise as latents in the embeddings' dtype and device, and its ids."""
    from diffusers import Flux2KleinPipeline

    # prepare_latents reads nothing else of a pipeline.
    helper = SimpleNamespace(
        vae_scale_factor=vae_scale_factor,
        _prepare_latent_ids=Flux2KleinPipeline._prepare_latent_ids,
        _pack_latents=Flux2KleinPipeline._pack_latents,
    )
    drawn: tuple[Any, Any] = Flux2KleinPipeline.prepare_latents(
        helper,
        num_images,
        channels,
        height,
        width,
        prompt_embeds.dtype,
        prompt_embeds.device,
        resumed(generator_state),
    )
    return drawn


@glue
def prepare_scheduler(
    latents: Any, num_steps: int, scheduler_class: str, scheduler_config: dict[str, Any]
) -> Any:
    """The request's own scheduler with its timesteps set."""
    scheduler = make_scheduler(
        scheduler_class, scheduler_config, num_steps, latents.shape[1], latents.device
    )
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)
    return scheduler


def make_scheduler(
    class_name: str, config: dict[str, Any], num_steps: int, tokens: int, device: Any
) -> Any:
    """A scheduler whose timesteps are shifted with the number of tokens of an image, and of steps."""
    import diffusers
    import numpy as np
    from diffusers.pipelines.flux2.pipeline_flux2_klein import (
        compute_empirical_mu,
        retrieve_timesteps,
    )

    scheduler = getattr(diffusers, class_name).from_config(config)
    sigmas: Any = np.linspace(1.0, 1 / num_steps, num_steps)
    if scheduler.config.get("use_flow_sigmas"):
        sigmas = None
    mu = compute_empirical_mu(image_seq_len=tokens, num_steps=num_steps)
    retrieve_timesteps(scheduler, num_steps, device, sigmas=sigmas, mu=mu)
    return scheduler


class ChatCounter(TokenCounter):
    """Length of a prompt in the chat template, as the text encoder is given it."""

    def __call__(self, text: str) -> int:
        chat = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        return len(self.tokenizer(chat, verbose=False).input_ids)
