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
