"""The models that a ControlNet adds to the Qwen-Image workflow.

The order of calls and every dtype follow `QwenImageControlNetPipeline.__call__`.
"""

from __future__ import annotations

from operator import itemgetter
from types import SimpleNamespace
from typing import Any

from ...model_fn import ModelFn
from ..controlnets import check_same_dtype, load_controlnet
from ..denoising import generator_of
from ..input_image import restore
from ..part import PipelinePart
from ..residuals import publishing, tap
from .parts import VaeDecoder, latent_statistics

CONTROLNET = "QwenImageControlNetModel"
RESIDUALS = "controlnet_block_samples"


class ControlEncoder(PipelinePart):
    """Control image to packed latents (images, tokens, channels * 4), and the generator after the draw.

    generator_state: the pipeline goes on to draw the initial noise from the same generator.
    """

    parts = VaeDecoder.parts

    def setup_io(self) -> None:
        self.add_input("control_image")
        self.add_input("seed")
        self.add_input("height")
        self.add_input("width")
        self.add_input("num_images")
        self.add_output("control_latents")
        self.add_output("generator_state")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        from diffusers import QwenImageControlNetPipeline as Controlled
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_controlnet import retrieve_latents

        vae, num_images = pipeline.vae, inputs["num_images"]
        # prepare_image reads nothing else of a pipeline.
        helper = SimpleNamespace(image_processor=pipeline.image_processor)
        image = Controlled.prepare_image(
            helper,
            restore(inputs["control_image"]),
            inputs["width"],
            inputs["height"],
            num_images,
            num_images,
            vae.device,
            vae.dtype,
        )
        generator = generator_of(inputs["seed"])
        latents = retrieve_latents(vae.encode(image.unsqueeze(2)), generator=generator)
        mean, inverse_std = latent_statistics(vae)
        latents = ((latents - mean) * inverse_std).permute(0, 2, 1, 3, 4)
        images, _, channels, rows, columns = latents.shape
        packed = Controlled._pack_latents(latents, images, channels, rows, columns)
        return {
            "control_latents": packed.to(vae.dtype),
            "generator_state": generator.get_state(),
        }


class QwenImageControlNet(ModelFn):
    """The residuals of one denoising step, published block by block.

    controlnet_block_samples: a list with one tensor (images, tokens, width) for each of its blocks.
    model_path: the model's own folder or hub id; with the option `part`, a pipeline's that holds it as
    that part.
    """

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_input("timestep")
        self.add_input("prompt_embeds")
        self.add_input("shape")
        self.add_input("control")
        self.add_input("conditioning_scale")
        self.add_output(RESIDUALS)

    def load_model(self, model_path: str | None) -> dict[str, Any]:
        controlnet = load_controlnet(model_path, self.options, CONTROLNET)
        # Blocks give (text tokens, image tokens).
        blocks = controlnet.transformer_blocks
        tap(blocks, controlnet.controlnet_blocks, RESIDUALS, itemgetter(1))
        return {"controlnet": controlnet}

    def execute(self, model_components: Any, **inputs: Any) -> dict[str, Any]:
        controlnet, latents = model_components["controlnet"], inputs["latents"]
        check_same_dtype(self.model_path, controlnet, latents.dtype)
        scale = inputs["conditioning_scale"]
        with publishing(scale, {RESIDUALS: len(controlnet.controlnet_blocks)}) as residuals:
            controlnet(
                hidden_states=latents,
                controlnet_cond=inputs["control"],
                conditioning_scale=scale,
                timestep=inputs["timestep"] / 1000,
                encoder_hidden_states=inputs["prompt_embeds"],
                encoder_hidden_states_mask=None,
                img_shapes=[(1, *inputs["shape"])],
                return_dict=False,
            )
        return {RESIDUALS: residuals[RESIDUALS]}
