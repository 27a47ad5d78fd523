"""The models and glue of the Stable Diffusion XL workflows.

The order of calls and every dtype follow `StableDiffusionXLPipeline.__call__`; what it computes in
helpers of its own is called from there.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ...glue import glue
from ..both_prompts import doubled, halved
from ..denoising import own_scheduler, resumed
from ..part import PipelinePart
from ..residuals import summed

#: ControlNets that one step can take.
MAX_CONTROLNETS = 4
#: Inputs of the UNet, one for each ControlNet.
RESIDUALS = ("residuals", *(f"residuals_{number}" for number in range(2, MAX_CONTROLNETS + 1)))


class _ClipText(PipelinePart):
    """Prompt to hidden states (images, 77, width) and pooled embedding (images, width) or None."""

    encoder, tokenizer = "", ""
    pools = False

    def setup_io(self) -> None:
        self.add_input("prompt")
        self.add_input("num_images")
        self.add_output("embeds")
        self.add_output("pooled")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        import torch
        from diffusers import StableDiffusionXLPipeline

        encoder = getattr(pipeline, self.encoder)
        helper = SimpleNamespace(
            tokenizer=None,
            tokenizer_2=getattr(pipeline, self.tokenizer),
            text_encoder=None,
            text_encoder_2=encoder,
            config=SimpleNamespace(force_zeros_for_empty_prompt=False),
        )
        embeds, _, pooled, _ = StableDiffusionXLPipeline.encode_prompt(
            helper,
            inputs["prompt"],
            device=encoder.device,
            num_images_per_prompt=inputs["num_images"],
            do_classifier_free_guidance=False,
            # What is given is not asked of the encoder; this one's is of no use.
            pooled_prompt_embeds=None if self.pools else torch.zeros(1, 1),
        )
        return {"embeds": embeds, "pooled": pooled if self.pools else None}


class ClipLText(_ClipText):
    __doc__ = _ClipText.__doc__
    parts = frozenset({"text_encoder", "tokenizer"})
    encoder, tokenizer = "text_encoder", "tokenizer"


class ClipGText(_ClipText):
    __doc__ = _ClipText.__doc__
    parts = frozenset({"text_encoder_2", "tokenizer_2"})
    encoder, tokenizer = "text_encoder_2", "tokenizer_2"
    pools = True


class SDXLUnet(PipelinePart):
    """One denoising step: latents (images, channels, height, width) to the predicted noise.

    latents: scaled as the scheduler wants them. guidance_scale: with one, embeddings and time_ids hold
    the negative prompt's and then the prompt's, and both go through the UNet in one batch. inpainting:
    mask and masked image, more channels of what the UNet gets, as many times as the embeddings.
    ControlNets' residuals are callback inputs: the UNet asks for them after its own down blocks, and
    the ControlNets' own are added in their order.
    """

    parts = frozenset({"unet"})

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_input("timestep")
        self.add_input("guidance_scale", optional=True)
        self.add_input("prompt_embeds")
        self.add_input("pooled_prompt_embeds")
        self.add_input("time_ids")
        self.add_input("inpainting", optional=True)
        for name in RESIDUALS:
            self.add_input(name, callback=True, optional=True)
        self.add_output("noise_pred")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        import torch

        scale = inputs["guidance_scale"]
        latents = doubled(inputs["latents"], scale)
        if inputs["inpainting"] is not None:
            latents = torch.cat([latents, *inputs["inpainting"]], dim=1)
        residuals = summed([inputs[name] for name in RESIDUALS if inputs[name] is not None])
        noise_pred = pipeline.unet(
            latents,
            inputs["timestep"],
            encoder_hidden_states=inputs["prompt_embeds"],
            added_cond_kwargs={
                "text_embeds": inputs["pooled_prompt_embeds"],
                "time_ids": inputs["time_ids"],
            },
            # The UNet takes as many as it has down blocks; the last one is the middle's.
            down_block_additional_residuals=residuals,
            mid_block_additional_residual=None if residuals is None else _Last(residuals),
            return_dict=False,
        )[0]
        return {"noise_pred": halved(noise_pred, scale)}


class _Last:
    """The last of a sequence, fetched when it is added to a tensor."""

    def __init__(self, items: Any):
        self._items = items

    def __radd__(self, tensor: Any) -> Any:
        return tensor + self._items[len(self._items) - 1]


@glue(outputs=2)
def join_text(clip_l: tuple[Any, Any] | None, clip_g: tuple[Any, Any]) -> tuple[Any, Any]:
    """Embeddings (images, 77, width) and pooled embeddings. clip_l: None: there is no such encoder."""
    import torch

    embeds, pooled = clip_g
    return embeds if clip_l is None else torch.concat([clip_l[0], embeds], dim=-1), pooled


@glue
def zeros(like: Any) -> Any:
    """An empty negative prompt's embeddings."""
    import torch

    return torch.zeros_like(like)


def time_ids(
    unet: Mapping[str, Any],
    height: int,
    width: int,
    text_width: int,
    dtype: Any,
    scores: tuple[float, float] | None,
) -> tuple[Any, Any]:
    """Sizes and crops as the UNet takes them, (1, 6) or with scores (1, 5): the prompt's, and the
    negative prompt's. ValueError if the UNet takes none of that length.

    scores: aesthetic ones, for a pipeline that wants them. text_width: of the pooled embedding.
    """
    from diffusers import StableDiffusionXLImg2ImgPipeline

    linear = SimpleNamespace(in_features=unet["projection_class_embeddings_input_dim"])
    helper = SimpleNamespace(
        config=SimpleNamespace(requires_aesthetics_score=scores is not None),
        unet=SimpleNamespace(
            config=SimpleNamespace(addition_time_embed_dim=unet["addition_time_embed_dim"]),
            add_embedding=SimpleNamespace(linear_1=linear),
        ),
    )
    size, corner = (height, width), (0, 0)
    made: tuple[Any, Any] = StableDiffusionXLImg2ImgPipeline._get_add_time_ids(
        helper, size, corner, size, *(scores or (0, 0)), size, corner, size, dtype, text_width
    )
    return made


@glue(outputs=2)
def make_time_ids(
    unet: Mapping[str, Any],
    latents: Any,
    factor: int,
    text_width: int,
    scores: tuple[float, float] | None,
    like: Any,
) -> tuple[Any, Any]:
    """`time_ids` of a picture for each of its latents."""
    height, width = latents.shape[-2] * factor, latents.shape[-1] * factor
    positive, negative = time_ids(unet, height, width, text_width, like.dtype, scores)
    count = latents.shape[0]
    return (
        positive.to(like.device).repeat(count, 1),
        negative.to(like.device).repeat(count, 1),
    )


@glue(outputs=2)
def draw_latents(
    generator_state: Any,
    scheduler: Any,
    like: Any,
    num_images: int,
    height: int,
    width: int,
    channels: int,
    factor: int,
) -> tuple[Any, Any]:
    """Noise (images, channels, height / factor, width / factor) as strong as the scheduler starts with,
    in the dtype and device of `like`; and the generator's state after the draw."""
    from diffusers import StableDiffusionXLPipeline

    generator = resumed(generator_state)
    latents = StableDiffusionXLPipeline.prepare_latents(
        SimpleNamespace(vae_scale_factor=factor, scheduler=scheduler),
        num_images,
        channels,
        height,
        width,
        like.dtype,
        like.device,
        generator,
    )
    return latents, generator.get_state()


@glue(outputs=2)
def scale_input(scheduler: Any, step: int, latents: Any) -> tuple[Any, Any]:
    """Latents as the UNet takes them, and the scheduler, which notes that it was asked."""
    scheduler = own_scheduler(scheduler)
    return scheduler.scale_model_input(latents, scheduler.timesteps[step]), scheduler


@glue(outputs=3)
def noisy_step(
    scheduler: Any, step: int, noise_pred: Any, latents: Any, generator_state: Any
) -> tuple[Any, Any, Any]:
    """Latents after the step of a scheduler that adds noise, and the states for the next one."""
    from diffusers import StableDiffusionXLPipeline

    scheduler, generator = own_scheduler(scheduler), resumed(generator_state)
    # Its eta is the pipeline's, 0, where the scheduler's own may be another one.
    options = StableDiffusionXLPipeline.prepare_extra_step_kwargs(
        SimpleNamespace(scheduler=scheduler), generator, eta=0.0
    )
    timestep = scheduler.timesteps[step]
    latents = scheduler.step(noise_pred, timestep, latents, **options, return_dict=False)[0]
    return latents, scheduler, generator.get_state()


@glue
def make_scheduler(
    class_name: str,
    config: Mapping[str, Any],
    num_steps: int,
    strength: float | None,
    begins: bool,
    like: Any,
) -> Any:
    """A request's scheduler with its timesteps set, on the device of `like`."""
    return scheduled(class_name, config, num_steps, strength, begins, like.device)[0]


def scheduled(
    class_name: str,
    config: Mapping[str, Any],
    num_steps: int,
    strength: float | None,
    begins: bool = True,
    device: Any = "cpu",
) -> tuple[Any, int]:
    """A scheduler with its timesteps set, and the first of them to take.

    strength: of image to image: the share of the steps that are taken. begins: without one: whether the
    pipeline says that it begins with the first.
    """
    import diffusers
    from diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl import (
        retrieve_timesteps,
    )

    scheduler = getattr(diffusers, class_name).from_config(config)
    retrieve_timesteps(scheduler, num_steps, device)
    if strength is not None:
        taken, _ = diffusers.StableDiffusionXLImg2ImgPipeline.get_timesteps(
            SimpleNamespace(scheduler=scheduler), num_steps, strength, device
        )
        return scheduler, len(scheduler.timesteps) - len(taken)
    if begins and hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)
    return scheduler, 0
