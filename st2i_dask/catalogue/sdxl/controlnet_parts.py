"""The model and glue that ControlNets add to the Stable Diffusion XL workflows.

The order of calls and every dtype follow `StableDiffusionXLControlNetPipeline.__call__`.
"""

from types import SimpleNamespace
from typing import Any

from ...glue import glue
from ...model_fn import ModelFn
from ..both_prompts import doubled
from ..controlnets import check_same_dtype, load_controlnet
from ..input_image import restore
from .parts import draw_latents

CONTROLNET = "ControlNetModel"


class SDXLControlNet(ModelFn):
    """The residuals of one denoising step: a list of tensors (batch, channels, height, width), one for
    each result of the UNet's down blocks, and the middle's.

    latents, guidance_scale, embeddings, time_ids: those of the UNet.

    model_path: the model's own folder or hub id; with the option `part`, a pipeline's that holds it as
    that part.
    """

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_input("timestep")
        self.add_input("guidance_scale", optional=True)
        self.add_input("prompt_embeds")
        self.add_input("pooled_prompt_embeds")
        self.add_input("time_ids")
        self.add_input("control")
        self.add_input("conditioning_scale")
        self.add_output("residuals")

    def load_model(self, model_path: str | None) -> dict[str, Any]:
        return {"controlnet": load_controlnet(model_path, self.options, CONTROLNET)}

    def execute(self, model_components: Any, **inputs: Any) -> dict[str, Any]:
        controlnet = model_components["controlnet"]
        latents = doubled(inputs["latents"], inputs["guidance_scale"])
        check_same_dtype(self.model_path, controlnet, latents.dtype)
        down, middle = controlnet(
            latents,
            inputs["timestep"],
            encoder_hidden_states=inputs["prompt_embeds"],
            controlnet_cond=inputs["control"].to(device=latents.device, dtype=latents.dtype),
            conditioning_scale=inputs["conditioning_scale"],
            added_cond_kwargs={
                "text_embeds": inputs["pooled_prompt_embeds"],
                "time_ids": inputs["time_ids"],
            },
            return_dict=False,
        )
        return {"residuals": [*down, middle]}


@glue
def prepare_control(
    image: Any,
    num_images: int,
    height: int | None,
    width: int | None,
    factor: int,
    for_both: bool,
) -> Any:
    """The control image (images, 3, height, width), float32; without sizes in its own, rounded down.

    for_both: twice as many, for both prompts in a batch.
    """
    from diffusers import StableDiffusionXLControlNetPipeline
    from diffusers.image_processor import VaeImageProcessor

    # As `StableDiffusionXLControlNetPipeline.__init__` makes it.
    processor = VaeImageProcessor(vae_scale_factor=factor, do_convert_rgb=True, do_normalize=False)
    # The model's dtype and device come later.
    return StableDiffusionXLControlNetPipeline.prepare_image(
        SimpleNamespace(control_image_processor=processor),
        restore(image),
        width,
        height,
        num_images,
        num_images,
        None,
        None,
        do_classifier_free_guidance=for_both,
    )


@glue(outputs=2)
def draw_latents_for(
    control: Any,
    generator_state: Any,
    scheduler: Any,
    like: Any,
    num_images: int,
    channels: int,
    factor: int,
) -> tuple[Any, Any]:
    """`draw_latents` of a picture of the control image's size."""
    height, width = control.shape[-2:]
    drawn: tuple[Any, Any] = draw_latents(
        generator_state, scheduler, like, num_images, height, width, channels, factor
    )
    return drawn
