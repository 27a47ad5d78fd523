"""A tiny FLUX pipeline's adapters, by format, and the unmodified pipeline with them."""

from __future__ import annotations

import functools

import torch

from st2i_dask.catalogue import tiny_lora

# Workers run one torch thread each; the reference must sum in the same order.
torch.set_num_threads(1)


def save_adapters(root, folder):
    """Adapters of the FLUX folder, by format."""
    base = reference(folder, "float32", ())
    both = ("transformer", "text_encoder")
    return {
        "peft": tiny_lora.save_lora(root / "peft.safetensors", base, parts=both),
        "half": tiny_lora.save_lora(root / "half.safetensors", base, seed=9, dtype="bfloat16"),
        "alpha": tiny_lora.save_lora(root / "alpha.safetensors", base, rank=3, alpha=9.0, seed=1),
        "old": tiny_lora.save_old_lora(root / "old.safetensors", base, seed=2),
        "kohya": tiny_lora.save_kohya_flux_lora(root / "kohya.safetensors", base, seed=3),
        "text": tiny_lora.save_lora(root / "t.safetensors", base, parts=both[1:], strength=1.0),
    }


@functools.cache
def reference(folder, dtype, adapters, pipeline_class="FluxPipeline"):
    """The unmodified pipeline with these (file, scale) loaded."""
    import diffusers

    pipeline = getattr(diffusers, pipeline_class).from_pretrained(
        folder, dtype=getattr(torch, dtype)
    )
    pipeline.set_progress_bar_config(disable=True)
    names = [f"n{number}" for number in range(len(adapters))]
    for name, (file, _) in zip(names, adapters, strict=True):
        pipeline.load_lora_weights(str(file), adapter_name=name)
    if names:
        pipeline.set_adapters(names, [scale for _, scale in adapters])
    return pipeline


COMMON = dict(prompt="a cat", height=32, width=32)


def expected(pipeline, *, seed=0, num_steps=2, num_images=1, **parameters):
    images = pipeline(
        **{**COMMON, **parameters},
        num_inference_steps=num_steps,
        num_images_per_prompt=num_images,
        output_type="pt",
        generator=torch.Generator("cpu").manual_seed(seed),
    ).images
    return images if num_images > 1 else images[0]
