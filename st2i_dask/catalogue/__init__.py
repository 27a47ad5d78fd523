"""The catalogue: ready-made workflows for families of Diffusers pipelines.

`load` reads a Diffusers folder (or hub id), finds its family and gives a workflow for it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import LoadError
from ..quoting import quoted
from ..workflow import Workflow, workflow
from .component_check import check_components
from .families import TEXT, Builder, find
from .files_state import FilesState, files_state
from .folder import PACKAGED, DiffusersFolder, check_one_dtype, read_folder
from .form import check_defaults
from .narrowed import with_defaults

#: With the states of the folders that they were made of.
_loaded: dict[tuple[Any, ...], tuple[Workflow, list[FilesState]]] = {}


def load(
    source: str | Path,
    *,
    task: str | None = None,
    name: str | None = None,
    dtype: str | None = None,
    controlnet: str | Path | Sequence[str | Path] | None = None,
    scheduler: Mapping[str, Any] | None = None,
    **defaults: Any,
) -> Workflow:
    """The workflow of a Diffusers pipeline.

    source: a folder with model_index.json (visible under the same path on every worker), a hub id,
        or the name of a packaged model (`shapes`).
    task: "text-to-image", "image-to-image" or "inpainting"; by default what the folder's own pipeline
        does.
    name: the workflow's name; by default made of the folder's, the task and the ControlNets.
    dtype: "float32", "bfloat16" or "float16"; by default the one the weights are stored in, and
        float32 for packaged models.
    controlnet: folder or hub id of a ControlNet to run with the pipeline, or a list of several, in
        place of those that the folder may hold.
    scheduler: changes to the configuration of the folder's scheduler; {"_class_name":
        "EulerDiscreteScheduler"} takes another class, with what the two have in common.
    defaults: other default values of the workflow's parameters (num_steps=8, height=512, ...).

    Loading twice with the same arguments gives the same workflow, as long as the files of local folders
    are the same. Only configuration files, tokenizers and the headers of weights are read here; weights
    are loaded on workers. LoadError when the folder is missing,
    incomplete or of a family that is not supported.
    """
    source = str(source)
    if isinstance(controlnet, (str, os.PathLike)):
        controlnet = [controlnet]
    if not isinstance(controlnet, (list, tuple, type(None))):
        raise LoadError(
            f"controlnet={quoted(controlnet)} is no folder or hub id, nor a list of them"
        )
    if not isinstance(scheduler, (Mapping, type(None))):
        raise LoadError(
            f"scheduler={quoted(scheduler)} is no dictionary of changes; for another class give "
            "{'_class_name': 'EulerDiscreteScheduler'}"
        )
    controlnets = tuple(map(str, controlnet or ()))
    key = (source, task, name, dtype, controlnets, repr(scheduler), repr(sorted(defaults.items())))
    states = [files_state(Path(each)) for each in (source, *controlnets)]
    known, read = _loaded.get(key, (None, None))
    if known is None or read != states:
        folder = read_folder(source)
        controlled = bool(controlnets) or bool((folder.index.get("controlnet") or [None])[0])
        builder = find(source, folder.pipeline_class, task, controlled)
        check_components(folder)
        if scheduler:
            folder = folder.with_scheduler(scheduler)
        if source in PACKAGED:
            defaults = {**PACKAGED[source], **defaults}
            dtype = dtype or "float32"
        if controlnets:
            defaults["controlnets"] = controlnets
        name = name or _name(folder, task, dtype, controlnets)
        if dtype is None:
            check_one_dtype(folder, controlnets)
        known = _build(builder, folder, name, dtype, defaults)
        _loaded[key] = known, states
    return known


def _build(
    builder: Builder,
    folder: DiffusersFolder,
    name: str,
    dtype: str | None,
    defaults: dict[str, Any],
) -> Workflow:
    """With defaults of any of the workflow's parameters, also of those that its builder does not take."""
    taken = inspect.signature(builder).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return builder(folder, name=name, dtype=dtype, **defaults)
    own = {key: value for key, value in defaults.items() if key in taken}
    made = builder(folder, name=name, dtype=dtype, **own)
    others = {key: value for key, value in defaults.items() if key not in taken}
    if not others:
        return made
    check_defaults(folder.source, others, [parameter.name for parameter in made.parameters])
    changed: Workflow = workflow(name=name, replace=True)(with_defaults(made.function, others))
    return changed


def _name(
    folder: DiffusersFolder, task: str | None, dtype: str | None, controlnets: Sequence[str]
) -> str:
    base = "+".join([Path(folder.source).name, *(Path(each).name for each in controlnets)])
    if task not in (None, TEXT):
        base += f":{task}"
    if dtype is None or folder.source in PACKAGED:
        return base
    return f"{base}:{dtype}"
