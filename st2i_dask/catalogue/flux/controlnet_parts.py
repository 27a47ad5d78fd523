"""The models and glue that a ControlNet adds to the FLUX.1 workflows.

The order of calls and every dtype follow `FluxControlNetPipeline.__call__`.
"""

from operator import itemgetter
from types import SimpleNamespace
from typing import Any

from ...glue import glue
from ...model_fn import ModelFn
from ..controlnets import check_same_dtype, load_controlnet
from ..denoising import resumed
from ..input_image import restore
from ..part import PipelinePart
from ..residuals import publishing, tap
from . import parts
from .parts import VaeDecoder, guidance_of

CONTROLNET = "FluxControlNetModel"
DOUBLES, SINGLES = parts.DOUBLES[0], parts.SINGLES[0]


class VaeEncoder(PipelinePart):
    """Control image to packed latents (images, tokens, channels * 4), and the generator after the draw.

    generator_state: the pipeline goes on to draw the initial noise from the same generator.
    """

    parts = VaeDecoder.parts

    def setup_io(self) -> None:
        self.add_input("control_image")
        self.add_input("generator_state")
        self.add_input("num_images")
        self.add_input("height")
        self.add_input("width")
        self.add_output("control_latents")
        self.add_output("next_state")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        from diffusers import FluxPipeline
        from diffusers.pipelines.flux.pipeline_flux_controlnet import retrieve_latents

        vae = pipeline.vae
        image = prepare_image(
            inputs["control_image"],
            inputs["num_images"],
            inputs["height"],
            inputs["width"],
            pipeline.vae_scale_factor,
            vae,
        )
        generator = resumed(inputs["generator_state"])
        latents = retrieve_latents(vae.encode(image), generator=generator)
        latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        packed = FluxPipeline._pack_latents(latents, *latents.shape)
        return {"control_latents": packed, "next_state": generator.get_state()}


class FluxControlNet(ModelFn):
    """The residuals of one denoising step, published block by block.

    Outputs: lists with one tensor (images, tokens, width) for each double and each single block; None where
    the model has none. model_path: the model's own folder or hub id; with the option `part`, a
    pipeline's that holds it as that part.
    """

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_input("timestep")
        self.add_input("guidance_scale", optional=True)
        self.add_input("pooled_prompt_embeds")
        self.add_input("prompt_embeds")
        self.add_input("text_ids")
        self.add_input("image_ids")
        self.add_input("control")
        self.add_input("control_mode", optional=True)
        self.add_input("conditioning_scale")
        self.add_output(DOUBLES)
        self.add_output(SINGLES)

    def load_model(self, model_path: str | None) -> dict[str, Any]:
        controlnet = load_controlnet(model_path, self.options, CONTROLNET)
        # Blocks give (text tokens, image tokens).
        image = itemgetter(1)
        tap(controlnet.transformer_blocks, controlnet.controlnet_blocks, DOUBLES, image)
        singles = controlnet.controlnet_single_blocks
        tap(controlnet.single_transformer_blocks, singles, SINGLES, image)
        return {"controlnet": controlnet}

    def execute(self, model_components: Any, **inputs: Any) -> dict[str, Any]:
        import torch

        controlnet = model_components["controlnet"]
        latents, mode = inputs["latents"], inputs["control_mode"]
        check_same_dtype(self.model_path, controlnet, latents.dtype)
        if mode is not None:
            mode = torch.tensor(mode, device=latents.device, dtype=torch.long).view(1, 1)
            mode = mode.expand(latents.shape[0], 1)
        lengths = {
            DOUBLES: len(controlnet.controlnet_blocks),
            SINGLES: len(controlnet.controlnet_single_blocks),
        }
        with publishing(inputs["conditioning_scale"], lengths) as residuals:
            controlnet(
                hidden_states=latents,
                controlnet_cond=inputs["control"],
                controlnet_mode=mode,
                conditioning_scale=inputs["conditioning_scale"],
                timestep=inputs["timestep"] / 1000,
                guidance=guidance_of(controlnet, inputs["guidance_scale"], latents),
                pooled_projections=inputs["pooled_prompt_embeds"],
                encoder_hidden_states=inputs["prompt_embeds"],
                txt_ids=inputs["text_ids"],
                img_ids=inputs["image_ids"],
                joint_attention_kwargs={},
                return_dict=False,
            )
        return {output: residuals.get(output) for output in lengths}


@glue
def prepare_image(
    image: Any, num_images: int, height: int, width: int, vae_scale_factor: int, like: Any
) -> Any:
    """The control image for each image, (images, 3, height, width) in about [-1, 1], in the dtype and
    device of `like`."""
    from diffusers import FluxControlNetPipeline
    from diffusers.image_processor import VaeImageProcessor

    # prepare_image reads nothing else of a pipeline.
    helper = SimpleNamespace(
        image_processor=VaeImageProcessor(vae_scale_factor=vae_scale_factor * 2)
    )
    return FluxControlNetPipeline.prepare_image(
        helper, restore(image), width, height, num_images, num_images, like.device, like.dtype
    )
