"""The glue and rules of Stable Diffusion XL workflows that start from an image.

The order of random draws and every dtype follow the `__call__` of StableDiffusionXLImg2ImgPipeline and
StableDiffusionXLInpaintPipeline; what they compute in helpers of their own is called from there.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from ...errors import ParameterError
from ...glue import glue
from ...rules import NOTHING, Range
from ..denoising import resumed
from ..input_image import InputImage, InputImages

# Latents of the VAE; an image with as many channels is taken for latents.
LATENTS = 4


@dataclass(frozen=True)
class SizedImage(InputImage):
    """Rule: one RGB image that sets the size of the result unless height and width are given."""

    least: int = 1
    most: int = 4096

    def check(self, name: str, value: Any, values: Mapping[str, Any] = NOTHING) -> None:
        super().check(name, value, values)
        if None not in (values.get("height"), values.get("width")):
            return
        height, width = size_of(value)
        if not (self.least <= min(height, width) and max(height, width) <= self.most):
            raise ParameterError(
                f"{name} has {width}x{height} pixels, and the result its size; allowed: {self.least} to "
                f"{self.most} a side; resize it"
            )


@dataclass(frozen=True)
class SizedImages:
    """Rule: a list of `count` images as `image` allows them, all of one size once rounded down to
    multiples of `multiple` pixels, unless height and width are given."""

    takes_pictures: ClassVar[bool] = True
    count: int
    image: SizedImage
    multiple: int

    def check(self, name: str, value: Any, values: Mapping[str, Any] = NOTHING) -> None:
        self._list.check(name, value, values)
        if None not in (values.get("height"), values.get("width")):
            return
        for number, each in enumerate(value):
            self.image.check(f"{name}[{number}]", each, values)
        sizes = {tuple(side // self.multiple for side in size_of(each)) for each in value}
        if len(sizes) > 1:
            raise ParameterError(
                f"{name} holds images of several sizes, and the result has theirs; resize them, or give "
                "height and width"
            )

    def carry(self, name: str, value: Any, values: Mapping[str, Any]) -> Any:
        return self._list.carry(name, value, values)

    def describe(self) -> str:
        return self._list.describe()

    @property
    def _list(self) -> InputImages:
        return InputImages(self.count, self.count, self.image.max_bytes)


def size_of(image: Any) -> tuple[int, int]:
    """(height, width) of an image as it is given."""
    if isinstance(image, np.ndarray):
        shape = image.shape[1:] if image.ndim == 4 else image.shape
        return shape[0], shape[1]
    if hasattr(image, "shape"):
        return image.shape[-2], image.shape[-1]
    return image.height, image.width


@dataclass(frozen=True)
class Strength:
    """Rule: above 0 to 1, and at least one of `num_steps`, a parameter of the same workflow, is left."""

    def check(self, name: str, value: Any, values: Mapping[str, Any] = NOTHING) -> None:
        Range(0, 1).check(name, value)
        num_steps = values.get("num_steps")
        # As the pipelines count (StableDiffusionXLImg2ImgPipeline.get_timesteps).
        if num_steps is not None and int(num_steps * value) < 1:
            raise ParameterError(
                f"{name}={value!r} leaves none of {num_steps} steps; give at least "
                f"{1 / num_steps:.4g}, or more steps"
            )

    def describe(self) -> str:
        return "above 0 to 1, and at least one step"


@glue(outputs=2)
def start_from_image(
    image_latents: Any, generator_state: Any, scheduler: Any, first: int, num_images: int, like: Any
) -> tuple[Any, Any]:
    """An image's latents with the noise of the first timestep, (num_images, 4, height, width), and the
    generator's state after the draw."""
    from diffusers import StableDiffusionXLImg2ImgPipeline

    generator = resumed(generator_state)
    latents = StableDiffusionXLImg2ImgPipeline.prepare_latents(
        # What has as many channels as latents have is not encoded again.
        SimpleNamespace(
            vae=SimpleNamespace(config=SimpleNamespace()), scheduler=copy.deepcopy(scheduler)
        ),
        image_latents,
        scheduler.timesteps[first : first + 1].repeat(num_images),
        1,
        num_images,
        like.dtype,
        like.device,
        generator,
    )
    return latents, generator.get_state()


@glue(outputs=4)
def start_inpainting(
    image_latents: Any,
    generator_state: Any,
    scheduler: Any,
    first: int,
    strength: float,
    num_images: int,
    height: int,
    width: int,
    factor: int,
    like: Any,
) -> tuple[Any, Any, Any, Any]:
    """Latents to begin with, the noise in them, the image's for each picture, and the generator's state
    after the draw.

    image_latents: None: not needed, the latents are all noise.
    """
    import torch
    from diffusers import StableDiffusionXLInpaintPipeline

    generator = resumed(generator_state)
    # An image of three channels is encoded only if it is asked for.
    image = torch.empty(1, 3, 1, 1) if image_latents is None else image_latents
    made = StableDiffusionXLInpaintPipeline.prepare_latents(
        SimpleNamespace(vae_scale_factor=factor, scheduler=copy.deepcopy(scheduler)),
        num_images,
        LATENTS,
        height,
        width,
        like.dtype,
        like.device,
        generator,
        image=image,
        timestep=scheduler.timesteps[first : first + 1].repeat(num_images),
        is_strength_max=strength == 1.0,
        return_noise=True,
        return_image_latents=image_latents is not None,
    )
    latents, noise, *repeated = made
    return latents, noise, repeated[0] if repeated else None, generator.get_state()


@glue(outputs=2)
def mask_latents(
    mask: Any,
    masked_latents: Any,
    num_images: int,
    height: int,
    width: int,
    factor: int,
    for_both: bool,
    like: Any,
) -> tuple[Any, Any]:
    """The mask (images, 1, height / factor, width / factor), and the masked image's latents or None.

    for_both: twice as many, for both prompts in a batch.
    """
    from diffusers import StableDiffusionXLInpaintPipeline

    made: tuple[Any, Any] = StableDiffusionXLInpaintPipeline.prepare_mask_latents(
        SimpleNamespace(vae_scale_factor=factor),
        mask,
        masked_latents,
        num_images,
        height,
        width,
        like.dtype,
        like.device,
        None,
        for_both,
    )
    return made
