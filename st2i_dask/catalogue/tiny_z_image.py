"""A tiny Z-Image pipeline with random weights, without and with a ControlNet; nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .tiny_parts import FLOW, autoencoder, without_zeros
from .tiny_qwen import qwen_config, qwen_tokenizer


def save_z_image(path: str | Path, **options: Any) -> Path:
    """Build a ZImagePipeline and save it as a Diffusers folder; options of `z_image`.

    float32, 1.6 MB: a layer of 1 MB has the same size in every Z-Image model.
    """
    path = Path(path)
    z_image(**options).save_pretrained(path, safe_serialization=True)
    return path


def save_z_image_controlnet(
    path: str | Path, *, inpainting: bool = False, control: Any = None, **options: Any
) -> Path:
    """The folder of `save_z_image` as that of a pipeline with a ControlNet.

    control: options of `z_image_controlnet`. inpainting: of a ZImageControlNetInpaintPipeline.
    """
    path = save_z_image(path, **options)
    z_image_controlnet(**(control or {})).save_pretrained(path / "controlnet")
    file = path / "model_index.json"
    name = "ZImageControlNetInpaintPipeline" if inpainting else "ZImageControlNetPipeline"
    index = {**json.loads(file.read_text()), "_class_name": name}
    index["controlnet"] = ["diffusers", "ZImageControlNetModel"]
    file.write_text(json.dumps(index, indent=2))
    return path


def z_image(*, seed: int = 0, layers: int = 3, dynamic: bool = False) -> Any:
    """A ZImagePipeline, VAE factor 2. dynamic: timesteps are shifted with the image size."""
    import torch
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        ZImagePipeline,
        ZImageTransformer2DModel,
    )
    from transformers import Qwen3Model

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformer = ZImageTransformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=layers,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=32,
            axes_dims=[4, 6, 6],
            axes_lens=[1024, 64, 64],
        )
        # Zero as made: padding would not matter.
        for token in (transformer.x_pad_token, transformer.cap_pad_token):
            torch.nn.init.normal_(token, std=0.5)
        vae = autoencoder(**FLOW)
        text_encoder = Qwen3Model(qwen_config())
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=1.0 if dynamic else 3.0, use_dynamic_shifting=dynamic
        ),
        vae=vae,
        text_encoder=text_encoder.eval(),  # type: ignore[no-untyped-call]
        tokenizer=qwen_tokenizer(),
        transformer=transformer.eval(),
    )


def z_image_controlnet(
    *,
    seed: int = 1,
    places: tuple[int, ...] = (0, 2),
    channels: int = 4,
    refiner: str | None = None,
) -> Any:
    """A ZImageControlNetModel none of whose weights are zero, without what it shares with a transformer.

    places: of the transformer's layers that it adds to. channels: of its input; 9 takes a mask and a
    picture beside the control image. refiner: "control_layers" or "control_noise_refiner", of version 2.
    """
    import torch
    from diffusers import ZImageControlNetModel

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        controlnet = ZImageControlNetModel(
            control_layers_places=list(places),
            control_refiner_layers_places=[0],
            control_in_dim=channels,
            add_control_noise_refiner=refiner,
            dim=32,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
        )
        return without_zeros(controlnet)
