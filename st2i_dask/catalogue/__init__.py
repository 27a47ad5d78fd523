"""The catalogue: ready-made workflows for families of Diffusers pipelines.

`load` reads a Diffusers folder (or hub id), finds its family and gives a workflow for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import LoadError
from ..workflow import Workflow
from . import flux, flux_controlnet
from .folder import PACKAGED, DiffusersFolder, read_folder

#: Families by the pipeline class that model_index.json names.
FAMILIES: dict[str, Callable[..., Workflow]] = {
    "FluxPipeline": flux.flux_workflow,
    "FluxControlNetPipeline": flux_controlnet.flux_controlnet_workflow,
}

#: The same for a folder and a ControlNet that lies elsewhere.
CONTROLLED: dict[str, Callable[..., Workflow]] = dict.fromkeys(
    FAMILIES, flux_controlnet.flux_controlnet_workflow
)

_loaded: dict[tuple[Any, ...], Workflow] = {}


def load(
    source: str | Path,
    *,
    name: str | None = None,
    dtype: str | None = None,
    controlnet: str | Path | None = None,
    **defaults: Any,
) -> Workflow:
    """The workflow of a Diffusers pipeline.

    source: a folder with model_index.json (visible under the same path on every worker), a hub id,
        or the name of a packaged model (`shapes`).
    name: the workflow's name; by default the folder's.
    dtype: "float32", "bfloat16" or "float16"; by default the one the weights are stored in, and
        float32 for packaged models.
    controlnet: folder or hub id of a ControlNet to run with the pipeline, in place of one that the
        folder may hold.
    defaults: other default values of the workflow's parameters (num_steps=8, height=512, ...).

    Loading twice with the same arguments gives the same workflow. Only configuration files and
    tokenizers are read here; weights are loaded on workers. LoadError when the folder is missing,
    incomplete or of a family that is not supported.
    """
    source = str(source)
    controlnet = None if controlnet is None else str(controlnet)
    key = (source, name, dtype, controlnet, repr(sorted(defaults.items())))
    if key not in _loaded:
        folder = read_folder(source)
        families = FAMILIES if controlnet is None else CONTROLLED
        family = families.get(folder.pipeline_class)
        if family is None:
            what = "" if controlnet is None else " and takes no ControlNet here"
            raise LoadError(
                f"{source!r} is a {folder.pipeline_class}{what}; supported: {', '.join(families)}"
            )
        if source in PACKAGED:
            defaults = {**PACKAGED[source], **defaults}
            dtype = dtype or "float32"
        if controlnet is not None:
            defaults["controlnet"] = controlnet
        name = name or _name(folder, dtype, controlnet)
        _loaded[key] = family(folder, name=name, dtype=dtype, **defaults)
    return _loaded[key]


def _name(folder: DiffusersFolder, dtype: str | None, controlnet: str | None) -> str:
    base = Path(folder.source).name
    if controlnet is not None:
        base += f"+{Path(controlnet).name}"
    if dtype is None or folder.source in PACKAGED:
        return base
    return f"{base}:{dtype}"
