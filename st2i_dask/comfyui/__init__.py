"""ComfyUI workflows, as `Save (API Format)` exports them, run here by the Diffusers models they name.

    wf = from_comfyui("portrait_api.json", models={"sd_xl_base_1.0.safetensors": "/models/sdxl"})
    image = wf.submit(client, tenant="ann", prompt="another prompt").result()

The picture is what the Diffusers pipeline gives for these settings. ComfyUI itself draws its noise
otherwise, so its own picture for that seed is another one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..workflow import Workflow
from .graph import read_graph
from .nodes import evaluate
from .translate import translate


def from_comfyui(
    source: str | Path | Mapping[str, Any],
    *,
    models: Mapping[str, str | Path] | None = None,
    images: str | Path | None = None,
    name: str | None = None,
    dtype: str | None = None,
) -> Workflow:
    """The workflow of an API-format export; its values are the defaults of the workflow's parameters.

    source: a JSON file, or what it holds. models: for every checkpoint, ControlNet and LoRA file that
        it names, the Diffusers folder, hub id or (LoRA) safetensors file to use. images: the folder of
        the files that it loads; by default that of the JSON file. name: the workflow's name; by default
        the file's. dtype: as of `st2i.load`.

    LoadError, before anything is loaded, for nodes without a counterpart here (all of them by name), for
    models that are not given (all of them), and for settings that the model's workflow has not.
    """
    graph = read_graph(source)
    if isinstance(source, (str, os.PathLike)):
        images = Path(source).parent if images is None else images
        name = Path(source).stem if name is None else name
    return translate(evaluate(graph), dict(models or {}), images, name or "comfyui", dtype)
