"""Stable Diffusion XL image to image with ControlNets, bit-identical to
`diffusers.StableDiffusionXLControlNetImg2ImgPipeline`; see `controlnet` for how they run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from ...errors import ParameterError
from ...parameters import Maybe, Static
from ...rules import NOTHING
from ...workflow import Workflow, workflow
from ..folder import DiffusersFolder
from ..given_picture import prepare_pixels
from ..spread import draw_images
from .composing import MAX_SIDE, SDXL, Guidance, Images, Output
from .controlnet import find_controls
from .image_parts import SizedImage, size_of
from .image_to_image import Share


@dataclass(frozen=True)
class LikeImage:
    """Rule: control images of the size of `image`, once rounded down to multiples of `multiple` pixels,
    unless height and width are given."""

    multiple: int

    def check(self, name: str, value: Any, values: Mapping[str, Any] = NOTHING) -> None:
        if values.get("image") is None:
            return
        control = value[0] if isinstance(value, (list, tuple)) else value
        asked = values.get("height"), values.get("width")
        its, wanted = (
            [ask or side // self.multiple for ask, side in zip(asked, size_of(each), strict=True)]
            for each in (control, values["image"])
        )
        if its != wanted:
            (height, width), (of_height, of_width) = size_of(control), size_of(values["image"])
            raise ParameterError(
                f"{name} has {width}x{height} pixels, image {of_width}x{of_height}; resize one, or give "
                "height and width"
            )

    def describe(self) -> str:
        return "as large as image"


def sdxl_controlnet_image_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    controlnets: tuple[str, ...] = (),
    num_steps: int = 50,
    height: int | None = None,
    width: int | None = None,
    guidance_scale: float = 5.0,
    strength: float = 0.8,
    sizes: tuple[int, ...] | None = None,
) -> Workflow:
    """The workflow of a Stable Diffusion XL folder with ControlNets that changes an image. Defaults are
    the pipeline's.

    height, width: None: those of the image, rounded down to what the VAE takes; all images then have one
        size.
    controlnets, sizes: as without an image. strength: the share of the steps that are taken.
    """
    sdxl = SDXL(folder, dtype, begins=False, scored=True, noises=True)
    controls = find_controls(sdxl, controlnets)
    side = sdxl.side(sizes)

    def compose(
        *,
        prompt: Annotated[str, sdxl.prompt],
        negative_prompt: Annotated[Maybe[str | None], sdxl.negative_prompt] = None,
        image: Annotated[Any, SizedImage(least=sdxl.factor, most=MAX_SIDE)],
        control_image: Annotated[Any, controls.images, LikeImage(sdxl.factor)],
        seed: int = 0,
        num_steps: Annotated[int, sdxl.steps] = num_steps,
        height: Annotated[Static[int | None], side] = height,
        width: Annotated[Static[int | None], side] = width,
        guidance_scale: Guidance = guidance_scale,
        strength: Share = strength,
        controlnet_conditioning_scale: Annotated[Any, controls.scales] = 0.8,
        control_guidance_start: Annotated[Static[Any], controls.bounds] = 0.0,
        control_guidance_end: Annotated[Static[Any], controls.bounds] = 1.0,
        num_images: Images = 1,
        spread: Static[bool] = False,
        loras: Annotated[Static[Any], sdxl.loras] = (),
        split_guidance: Static[bool] = False,
        output_type: Output = "pil",
    ) -> Any:
        """Stable Diffusion XL with ControlNets, image to image."""
        controls.check_windows(control_guidance_start, control_guidance_end)
        batch = 1 if spread else num_images
        text = sdxl.text(prompt, negative_prompt, batch, guidance_scale, split_guidance, loras)
        pixels = prepare_pixels(image, height, width, sdxl.factor)
        control = controls.prepared(control_image, batch, height, width, text)

        def draw(seed: Any, images: int) -> Any:
            start = sdxl.start_from_picture(pixels, seed, text.like, num_steps, strength, images)
            controlled = controls.composer(
                control,
                controlnet_conditioning_scale,
                start.steps,
                control_guidance_start,
                control_guidance_end,
            )
            return sdxl.picture(start, text, loras, output_type, each_forward=controlled)

        return draw_images(draw, seed, num_images, spread)

    made: Workflow = workflow(name=name, replace=True)(compose)
    return made
