"""The models that a ControlNet adds to the Z-Image workflows.

The order of calls and every dtype follow `ZImageControlNetPipeline.__call__` and that of
`ZImageControlNetInpaintPipeline`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from ...model_fn import ModelFn
from ...stream import stream
from ..controlnets import check_same_dtype
from ..folder import load_component, load_parts
from ..input_image import restore
from ..lora_loading import load_adapters
from ..part import PipelinePart, identifying
from .parts import VaeDecoder, model_inputs

CONTROLNET = "ZImageControlNetModel"


class ControlEncoder(PipelinePart):
    """Control image to what the ControlNet takes, (images, channels, 1, height, width) of latents.

    channels: those that the picture does not fill are zero.
    """

    parts = VaeDecoder.parts

    def setup_io(self) -> None:
        self.add_input("control_image")
        self.add_input("height")
        self.add_input("width")
        self.add_input("num_images")
        self.add_input("channels")
        self.add_output("control")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        import torch

        size = inputs["height"], inputs["width"], inputs["num_images"]
        control = encoded(pipeline, prepared(pipeline, inputs["control_image"], *size))
        images, channels = control.shape[:2]
        if channels != inputs["channels"]:
            rest = torch.zeros(images, inputs["channels"] - channels, *control.shape[2:])
            rest = rest.to(device=control.device, dtype=control.dtype)
            control = torch.cat([control, rest], dim=1)
        return {"control": control}


class InpaintingControlEncoder(PipelinePart):
    """Control image, mask and what is to be kept of the picture, as the ControlNet takes them."""

    parts = VaeDecoder.parts

    def setup_io(self) -> None:
        self.add_input("control_image")
        self.add_input("image")
        self.add_input("mask_image")
        self.add_input("height")
        self.add_input("width")
        self.add_input("num_images")
        self.add_output("control")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        import torch
        from diffusers.image_processor import VaeImageProcessor

        height, width, num_images = inputs["height"], inputs["width"], inputs["num_images"]
        size = height, width, num_images
        control = encoded(pipeline, prepared(pipeline, inputs["control_image"], *size))
        processor = VaeImageProcessor(
            vae_scale_factor=pipeline.vae_scale_factor,
            do_normalize=False,
            do_binarize=True,
            do_convert_grayscale=True,
        )
        mask = processor.preprocess(restore(inputs["mask_image"]), height=height, width=width)
        mask = mask.to(device=control.device, dtype=control.dtype)
        picture = prepared(pipeline, inputs["image"], *size)
        picture = encoded(pipeline, picture * (mask < 0.5))
        kept = torch.nn.functional.interpolate(1 - mask, size=picture.shape[-2:], mode="nearest")
        # The pipeline forgets to, and fails with several images.
        kept = kept.unsqueeze(2).repeat(num_images, 1, 1, 1, 1)
        return {"control": torch.cat([control, kept, picture], dim=1)}


def prepared(pipeline: Any, image: Any, height: int, width: int, num_images: int) -> Any:
    """The picture (images, 3, height, width) in about [-1, 1]."""
    from diffusers import ZImageControlNetPipeline

    # prepare_image reads nothing else of a pipeline.
    helper = SimpleNamespace(image_processor=pipeline.image_processor)
    vae = pipeline.vae
    return ZImageControlNetPipeline.prepare_image(
        helper, restore(image), width, height, num_images, num_images, vae.device, vae.dtype
    )


def encoded(pipeline: Any, image: Any) -> Any:
    """Its latents (images, channels, 1, height, width); nothing is drawn at random."""
    from diffusers.pipelines.z_image.pipeline_z_image_controlnet import retrieve_latents

    vae = pipeline.vae
    latents = retrieve_latents(vae.encode(image), sample_mode="argmax")
    return ((latents - vae.config.shift_factor) * vae.config.scaling_factor).unsqueeze(2)


class ZImageControlNet(ModelFn):
    """The residuals of one denoising step, published layer by layer.

    residuals: a list with one tensor (images, tokens, dim) for each of its layers. model_path: the
    ControlNet's own folder or hub id, and the option `base` the pipeline's; without that option, the
    folder of a pipeline that holds both. It has the first layers of the transformer too, with the
    transformer's adapters (the option `adapters`, see PipelinePart).
    """

    @cached_property
    def model_key(self) -> str:
        what = [self.model_path, identifying(self.options)]
        return f"{ZImageControlNet.__module__}|{json.dumps(what, sort_keys=True)}"

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_input("timestep")
        self.add_input("prompt_embeds")
        self.add_input("negative_prompt_embeds", optional=True)
        self.add_input("cfg_truncation", optional=True)
        self.add_input("control")
        self.add_input("conditioning_scale")
        self.add_output("residuals")

    def load_model(self, model_path: str | None) -> dict[str, Any]:
        from diffusers import ZImageControlNetModel

        base, dtype = self.options.get("base"), self.options.get("dtype")
        if base is None:
            pipeline = load_parts(str(model_path), {"controlnet", "transformer"}, dtype)
            controlnet = pipeline.controlnet
        else:
            controlnet = load_component(str(model_path), CONTROLNET, dtype)
            pipeline = load_parts(str(base), {"transformer"}, dtype)
            transformer = pipeline.transformer
            check_same_dtype(self.model_path, controlnet, transformer.dtype)
            controlnet = ZImageControlNetModel.from_transformer(controlnet, transformer)
        components = {"controlnet": controlnet}
        if adapters := self.options.get("adapters"):
            # What both have are the same modules: they take the adapters at once.
            loaded = load_adapters(pipeline, ["transformer"], adapters, None)
            components["adapters"] = loaded.within(controlnet)
        for layer in controlnet.control_layers:
            layer.register_forward_hook(_tell)
        return components

    def execute(self, model_components: Any, **inputs: Any) -> dict[str, Any]:
        controlnet, control = model_components["controlnet"], inputs["control"]
        latents, timestep, prompts = model_inputs(controlnet.dtype, **inputs)
        if len(latents) > len(control):
            control = control.repeat(2, 1, 1, 1, 1)
        scale = inputs["conditioning_scale"]
        layers = len(controlnet.control_layers)
        residuals = stream("residuals", layers)
        # In this form the same layers refine the control image first.
        refining = layers if controlnet.add_control_noise_refiner == "control_layers" else 0

        def publish(hint: Any) -> None:
            nonlocal refining
            if refining:
                refining -= 1
            else:
                residuals.append(hint * scale)

        scales = [scale for _, _, scale in self.options.get("adapters", ())]
        adapters = model_components["adapters"].scaled(scales) if scales else nullcontext()
        with _listening(publish), adapters:
            controlnet(latents, timestep, prompts, control, conditioning_scale=scale)
        return {"residuals": residuals.items}


#: Hooks stay on a model that several threads may share; each thread listens to its own run.
_listener: ContextVar[Callable[[Any], None] | None] = ContextVar("st2i-hints", default=None)


@contextmanager
def _listening(listener: Callable[[Any], None]) -> Iterator[None]:
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def _tell(layer: Any, args: Any, made: Any) -> None:
    """What a layer gives is what all before it gave, then its own hint, then its tokens."""
    listener = _listener.get()
    if listener is not None:
        listener(made[-2])
