"""The models and glue that ControlNets add to the Stable Diffusion 3 workflows.

The order of calls and every dtype follow `StableDiffusion3ControlNetPipeline.__call__`.
"""

from operator import itemgetter
from types import SimpleNamespace
from typing import Any

from ...glue import glue
from ...model_fn import ModelFn
from ..both_prompts import doubled
from ..controlnets import check_same_dtype, load_controlnet
from ..folder import load_parts
from ..input_image import restore
from ..residuals import publishing, tap
from .parts import RESIDUALS

CONTROLNET = "SD3ControlNetModel"
BLOCKS = RESIDUALS[0]


class SD3ControlNet(ModelFn):
    """The residuals of one denoising step, published block by block: tensors (batch, tokens, width).

    guidance_scale: with one, the batch holds latents and embeddings for both prompts. prompt_embeds:
    None for a ControlNet that reads no prompt. zero_pooled: whether it gets zeros as pooled embeddings.

    model_path: the model's own folder or hub id; with the option `part`, a pipeline's that holds it as
    that part. Option `base`: the pipeline whose transformer lends its position embedding.
    """

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_input("timestep")
        self.add_input("guidance_scale", optional=True)
        self.add_input("prompt_embeds", optional=True)
        self.add_input("pooled_prompt_embeds")
        self.add_input("zero_pooled")
        self.add_input("control")
        self.add_input("conditioning_scale")
        self.add_output(BLOCKS)

    def load_model(self, model_path: str | None) -> dict[str, Any]:
        import torch

        controlnet = load_controlnet(model_path, self.options, CONTROLNET)
        if base := self.options.get("base"):
            dtype = self.options.get("dtype")
            transformer = load_parts(base, {"transformer"}, dtype).transformer
            with torch.no_grad():
                embedding = controlnet._get_pos_embed_from_transformer(transformer)
            controlnet.pos_embed = embedding.to(controlnet.dtype)
        # Blocks give (text tokens, image tokens), or image tokens where there is no text.
        pick = itemgetter(1) if controlnet.context_embedder is not None else lambda made: made
        tap(controlnet.transformer_blocks, controlnet.controlnet_blocks, BLOCKS, pick)
        return {"controlnet": controlnet}

    def execute(self, model_components: Any, **inputs: Any) -> dict[str, Any]:
        import torch

        controlnet = model_components["controlnet"]
        latents = doubled(inputs["latents"], inputs["guidance_scale"])
        check_same_dtype(self.model_path, controlnet, latents.dtype)
        pooled = inputs["pooled_prompt_embeds"]
        if inputs["zero_pooled"]:
            pooled = torch.zeros_like(pooled)
        lengths = {BLOCKS: len(controlnet.controlnet_blocks)}
        with publishing(inputs["conditioning_scale"], lengths) as residuals:
            controlnet(
                hidden_states=latents,
                timestep=inputs["timestep"].expand(latents.shape[0]),
                encoder_hidden_states=inputs["prompt_embeds"],
                pooled_projections=pooled,
                controlnet_cond=inputs["control"],
                conditioning_scale=inputs["conditioning_scale"],
                return_dict=False,
            )
        return {BLOCKS: residuals[BLOCKS]}


@glue
def prepare_control(
    image: Any, num_images: int, height: int, width: int, factor: int, for_both: bool
) -> Any:
    """The control image in about [-1, 1], (images, 3, height, width).

    for_both: twice as many, for both prompts in a batch.
    """
    from diffusers import StableDiffusion3ControlNetPipeline
    from diffusers.image_processor import VaeImageProcessor

    # The VAE's dtype and device come later.
    return StableDiffusion3ControlNetPipeline.prepare_image(
        SimpleNamespace(image_processor=VaeImageProcessor(vae_scale_factor=factor)),
        restore(image),
        width,
        height,
        num_images,
        num_images,
        None,
        None,
        do_classifier_free_guidance=for_both,
    )


@glue
def half_of(batch: Any, number: int) -> Any:
    """The negative prompt's half of a batch (0) or the prompt's (1)."""
    return batch.chunk(2)[number]
