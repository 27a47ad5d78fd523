"""Tiny FLUX pipelines with a ControlNet in all its forms, and the unmodified pipeline of each."""

from __future__ import annotations

import functools

import torch

from st2i_dask.catalogue import tiny

# Workers run one torch thread each; the reference must sum in the same order.
torch.set_num_threads(1)

FORMS = {
    "dev": dict(guidance=True, control_guidance=True, layers=(3, 4), control_layers=(2, 3)),
    "doubles": dict(guidance=True, layers=(3, 2), control_layers=(2, 0)),
    "schnell": dict(guidance=False, control_layers=(1, 1)),
    "pixels": dict(guidance=True, layers=(3, 2), control_layers=(2, 0), pixels=True),
    "union": dict(guidance=False, control_guidance=True, modes=4),
}


def save_all(root):
    """A folder for every form, by form."""
    return {form: tiny.save_flux_controlnet(root / form, **FORMS[form]) for form in FORMS}


@functools.cache
def reference(folder, dtype):
    from diffusers import FluxControlNetPipeline

    pipeline = FluxControlNetPipeline.from_pretrained(folder, dtype=getattr(torch, dtype))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def save_net(path, **options):
    """A folder with one ControlNet alone, made like the one of `tiny.flux_controlnet(**options)`."""
    tiny.flux_controlnet(**options).controlnet.save_pretrained(path)
    return path


@functools.cache
def several_reference(cls, folder, nets, dtype):
    """The unmodified pipeline of this class with the ControlNets of these folders."""
    import diffusers

    dtype = getattr(torch, dtype)
    base = diffusers.FluxPipeline.from_pretrained(folder, dtype=dtype)
    loaded = [diffusers.FluxControlNetModel.from_pretrained(net, dtype=dtype) for net in nets]
    parts = {name: part for name, part in base.components.items() if part is not None}
    controlnet = loaded if len(loaded) > 1 else loaded[0]
    pipeline = getattr(diffusers, cls)(**parts, controlnet=controlnet)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
