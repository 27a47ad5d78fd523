"""The models and glue that inpainting adds to the FLUX.2 Klein workflows.

The order of calls and every dtype follow `Flux2KleinInpaintPipeline.__call__`.
"""

from types import SimpleNamespace
from typing import Any

from ...glue import glue
from ..input_image import restore
from ..part import PipelinePart
from .parts import VaeDecoder, make_scheduler


class PictureEncoder(PipelinePart):
    """The picture's latents for each image; and tokens and ids of it and of the reference to look at.

    image, image_reference: in their own sizes.
    """

    parts = VaeDecoder.parts

    def setup_io(self) -> None:
        self.add_input("image")
        self.add_input("image_reference", optional=True)
        self.add_input("num_images")
        self.add_output("image_latents")
        self.add_output("reference_latents")
        self.add_output("reference_ids")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        import torch
        from diffusers import Flux2KleinInpaintPipeline

        vae, images = pipeline.vae, inputs["num_images"]
        # What encodes is the inpainting pipeline's own.
        inpaint = Flux2KleinInpaintPipeline(
            scheduler=None, vae=vae, text_encoder=None, tokenizer=None, transformer=None
        )

        def preprocessed(name: str, resize_mode: str) -> Any:
            size = size_of(inputs[name], pipeline.vae_scale_factor * 2)
            return inpaint.image_processor.preprocess(
                restore(inputs[name]), *size, resize_mode=resize_mode
            )

        image = preprocessed("image", "default").to(device=vae.device, dtype=vae.dtype)
        latents = inpaint._encode_vae_image(image=image, generator=None)  # it draws nothing
        latents = torch.cat([latents] * images, dim=0)
        references = [latents]
        if inputs["image_reference"] is not None:
            references.append(preprocessed("image_reference", "crop"))
        reference_latents, ids = inpaint.prepare_image_latents(
            references, images, None, vae.device, vae.dtype
        )
        return {
            "image_latents": inpaint._pack_latents(latents),
            "reference_latents": reference_latents,
            "reference_ids": ids,
        }


def size_of(image: Any, multiple: int) -> tuple[int, int]:
    """Height and width of what is made of a picture (height, width, 3): multiples, rounded down."""
    return image.shape[0] // multiple * multiple, image.shape[1] // multiple * multiple


@glue(outputs=2)
def size_of_picture(image: Any, multiple: int) -> tuple[int, int]:
    """`size_of`, in a workflow."""
    return size_of(image, multiple)


@glue(outputs=2)
def prepare_from_image(
    image_latents: Any,
    noise: Any,
    num_steps: int,
    strength: float,
    scheduler_class: str,
    scheduler_config: dict[str, Any],
) -> tuple[Any, Any]:
    """The picture under the noise, and the request's own scheduler.

    The scheduler begins with the step that `strength` leaves first.
    """
    from diffusers import Flux2KleinInpaintPipeline

    scheduler = make_scheduler(
        scheduler_class, scheduler_config, num_steps, noise.shape[1], noise.device
    )
    timesteps, _ = Flux2KleinInpaintPipeline.get_timesteps(
        SimpleNamespace(scheduler=scheduler), num_steps, strength, noise.device
    )
    timestep = timesteps[:1].repeat(noise.shape[0])
    return scheduler.scale_noise(image_latents, timestep, noise), scheduler


@glue
def prepare_mask(
    mask_image: Any, height: int, width: int, vae_scale_factor: int, latents: Any
) -> Any:
    """A mask for latents, (images, tokens, 1) in their dtype: 1 where the picture is drawn anew."""
    from diffusers import Flux2KleinInpaintPipeline
    from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor

    processor = Flux2ImageProcessor(
        vae_scale_factor=vae_scale_factor * 2,
        do_normalize=False,
        do_binarize=True,
        do_convert_rgb=False,
        do_convert_grayscale=True,
    )
    mask = processor.preprocess(restore(mask_image), height=height, width=width)
    # prepare_mask_latents reads nothing else of a pipeline.
    helper = SimpleNamespace(
        vae_scale_factor=vae_scale_factor, _pack_latents=Flux2KleinInpaintPipeline._pack_latents
    )
    return Flux2KleinInpaintPipeline.prepare_mask_latents(
        helper, mask, 1, latents.shape[0], height, width, latents.dtype, latents.device
    )
