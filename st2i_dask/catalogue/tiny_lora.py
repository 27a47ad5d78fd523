"""Tiny LoRA adapters with random matrices, none of them zero, in the formats that loaders meet.

`save_lora` writes what Diffusers saves today, for any pipeline; the others write what Kohya's scripts and
Diffusers of old save, for FLUX.1 or SDXL.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Modules that are adapted by default, in any family; of a name's end.
TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "q_proj", "v_proj")


def save_lora(
    path: str | Path,
    pipeline: Any,
    *,
    parts: Sequence[str] = ("transformer",),
    targets: Sequence[str] = TARGETS,
    rank: int = 4,
    alpha: float | None = None,
    seed: int = 0,
    dtype: str = "float32",
    strength: float = 0.2,
) -> Path:
    """An adapter for components of a pipeline: `part.module.lora_A.weight`. strength: of its matrices.

    alpha: written as Diffusers does, into the file's metadata; None: the rank.
    """
    tensors, metadata = {}, {"format": "pt"}
    about: dict[str, Any] = {}
    for number, part in enumerate(parts):
        pairs = matrices(getattr(pipeline, part), targets, rank, seed + number, dtype, strength)
        for module, (down, up) in pairs.items():
            tensors[f"{part}.{module}.lora_A.weight"] = down
            tensors[f"{part}.{module}.lora_B.weight"] = up
        about |= {
            f"{part}.{key}": value
            for key, value in dict(r=rank, lora_alpha=alpha, target_modules=list(pairs)).items()
        }
    if alpha is not None:
        metadata["lora_adapter_metadata"] = json.dumps(about, sort_keys=True)
    return _save(path, tensors, metadata)


def save_old_lora(path: str | Path, pipeline: Any, *, alpha: float = 2.0, **options: Any) -> Path:
    """An adapter for a FLUX.1 transformer as Diffusers of old names it, with an alpha per module."""
    import torch

    tensors = {}
    for module, (down, up) in matrices(pipeline.transformer, TARGETS, **options).items():
        tensors[f"transformer.{module}.lora.down.weight"] = down
        tensors[f"transformer.{module}.lora.up.weight"] = up
        tensors[f"transformer.{module}.alpha"] = torch.tensor(alpha)
    return _save(path, tensors, {"format": "pt"})


def save_kohya_flux_lora(
    path: str | Path, pipeline: Any, *, alpha: float = 2.0, texts: bool = True, **options: Any
) -> Path:
    """An adapter for FLUX.1 as Kohya's scripts name it: fused qkv, alphas. texts: for CLIP too."""
    import torch

    tensors: dict[str, Any] = {}

    def add(name: str, down: Any, up: Any) -> None:
        tensors[f"{name}.lora_down.weight"] = down
        tensors[f"{name}.lora_up.weight"] = up
        tensors[f"{name}.alpha"] = torch.tensor(alpha)

    targets = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.2", "proj_out")
    pairs = matrices(pipeline.transformer, targets, **options)
    for i in range(len(pipeline.transformer.transformer_blocks)):
        block, name = f"transformer_blocks.{i}", f"lora_unet_double_blocks_{i}"
        ups = [pairs[f"{block}.attn.to_{which}"][1] for which in "qkv"]
        add(f"{name}_img_attn_qkv", pairs[f"{block}.attn.to_q"][0], torch.cat(ups))
        add(f"{name}_img_attn_proj", *pairs[f"{block}.attn.to_out.0"])
        add(f"{name}_img_mlp_2", *pairs[f"{block}.ff.net.2"])
    for i in range(len(pipeline.transformer.single_transformer_blocks)):
        proj = pairs[f"single_transformer_blocks.{i}.proj_out"]
        add(f"lora_unet_single_blocks_{i}_linear2", *proj)
    if texts:
        for module, pair in matrices(
            pipeline.text_encoder,
            ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
            **options,
        ).items():
            name = module.removeprefix("text_model.").replace(".", "_")
            add(f"lora_te1_text_model_{name}", *pair)
    return _save(path, tensors, {"ss_network_module": "networks.lora_flux"})


def save_kohya_sdxl_lora(
    path: str | Path, pipeline: Any, *, alpha: float = 2.0, **options: Any
) -> Path:
    """An adapter for an SDXL UNet and its text encoders as Kohya's scripts name them."""
    import torch

    tensors: dict[str, Any] = {}
    models = {"unet": pipeline.unet, "te1": pipeline.text_encoder, "te2": pipeline.text_encoder_2}
    texts = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
    for prefix, model in models.items():
        targets = ("to_q", "to_k", "to_v", "to_out.0") if prefix == "unet" else texts
        for module, (down, up) in matrices(model, targets, **options).items():
            start = "" if prefix == "unet" else "text_model_"
            name = f"lora_{prefix}_{start}{module.removeprefix('text_model.').replace('.', '_')}"
            tensors[f"{name}.lora_down.weight"] = down
            tensors[f"{name}.lora_up.weight"] = up
            tensors[f"{name}.alpha"] = torch.tensor(alpha)
    return _save(path, tensors, {"ss_network_module": "networks.lora"})


def matrices(
    model: Any,
    targets: Sequence[str],
    rank: int = 4,
    seed: int = 0,
    dtype: str = "float32",
    strength: float = 0.2,
) -> dict[str, tuple[Any, Any]]:
    """Random down (rank, in) and up (out, rank) by name of each linear layer and convolution of a model
    whose name ends in a target."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None or weight.dim() not in (2, 4):
            continue
        if not any(name == target or name.endswith("." + target) for target in targets):
            continue
        shapes = (rank, *weight.shape[1:]), (weight.shape[0], rank, *[1] * (weight.dim() - 2))
        down, up = (torch.randn(shape, generator=generator) * strength for shape in shapes)
        found[name] = down.to(getattr(torch, dtype)), up.to(getattr(torch, dtype))
    return found


def _save(path: str | Path, tensors: dict[str, Any], metadata: dict[str, str]) -> Path:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    return Path(path)
