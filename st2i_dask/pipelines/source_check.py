"""What a pipeline is made of, found and checked on the client: nothing is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..catalogue.folder import DiffusersFolder, check_dtype, read_folder
from ..errors import LoadError
from .shell import PipelineSource


def source_of(given: Any, dtype: str | None) -> PipelineSource:
    """Of a folder, a hub id, or a pipeline that was loaded from one. LoadError if it cannot serve."""
    check_dtype(dtype)
    if isinstance(given, (str, Path)):
        return _source(read_folder(str(given)), None, dtype)
    if not (hasattr(given, "components") and hasattr(given, "config")):
        raise LoadError(
            f"{type(given).__name__} is no Diffusers pipeline; give a folder, a hub id or a "
            "pipeline that was loaded from one"
        )
    source = str(given.config.get("_name_or_path") or "")
    if not source:
        raise LoadError(
            f"this {type(given).__name__} was not loaded from anywhere, and workers load it by "
            "themselves; save it with save_pretrained(folder) and give the folder"
        )
    folder = read_folder(source)
    _check_loaded(given, folder)
    return _source(folder, given, dtype or _dtype_of(given))


def _source(folder: DiffusersFolder, pipeline: Any, dtype: str | None) -> PipelineSource:
    import diffusers

    if pipeline is not None:
        cls = type(pipeline)
    else:
        cls = getattr(diffusers, folder.pipeline_class, None)
    if not (isinstance(cls, type) and issubclass(cls, diffusers.DiffusionPipeline)):
        raise LoadError(
            f"{folder.source!r} is a {folder.pipeline_class}, which diffusers "
            f"{diffusers.__version__} has not; install the release that the folder was made with"
        )
    scheduler, settings, absent = None, {}, set()
    if pipeline is not None:
        absent = {name for name, value in pipeline.components.items() if value is None}
        scheduler = _scheduler_of(pipeline)
        settings = {
            name: value
            for name, value in pipeline.config.items()
            if not name.startswith("_") and not isinstance(value, (list, tuple))
        }
    return PipelineSource(
        folder.source,
        (cls.__module__, cls.__qualname__),
        dtype,
        _models(folder, absent),
        tuple(sorted(name for name in absent if _has(folder, name))),
        scheduler,
        json.dumps(settings, sort_keys=True),
    )


def _has(folder: DiffusersFolder, part: str) -> bool:
    value = folder.index.get(part)
    return not part.startswith("_") and isinstance(value, list) and value[0] is not None


def _models(folder: DiffusersFolder, absent: set[str]) -> tuple[str, ...]:
    """The components that are models. LoadError for one that is neither a model nor a plain tool."""
    import torch
    from diffusers.pipelines.pipeline_loading_utils import simple_get_class_obj

    models = []
    for part, value in folder.index.items():
        if part in absent or not _has(folder, part):
            continue
        try:
            cls = simple_get_class_obj(*value)
        except (AttributeError, ImportError, TypeError, ValueError) as error:
            raise LoadError(
                f"{folder.source!r}: component {part!r} is a {value[1]} of {value[0]}, which is not "
                f"to be had here ({error}); install the releases that the folder was made with"
            ) from error
        if issubclass(cls, torch.nn.Module):
            _check_model(folder, part)
            models.append(part)
        elif not _is_tool(cls):
            raise LoadError(
                f"{folder.source!r}: component {part!r} is a {cls.__name__}, which is no torch "
                "module; from_pipeline takes pipelines whose models are torch modules"
            )
    return tuple(models)


#: What a pipeline holds beside its models: plain code that runs with the glue.
_TOOLS = (
    *("SchedulerMixin", "PreTrainedTokenizerBase", "ProcessorMixin", "BaseImageProcessor"),
    *("ImageProcessingMixin", "FeatureExtractionMixin", "ConfigMixin"),
)


def _is_tool(cls: type) -> bool:
    names = {base.__name__ for base in cls.__mro__}
    return bool(names & set(_TOOLS)) and not any("Onnx" in name for name in names)


def _check_model(folder: DiffusersFolder, part: str) -> None:
    if "quantization_config" in folder.config(part):
        raise LoadError(
            f"{folder.source!r}: {part} is quantised, which from_pipeline does not load; use a "
            "folder in one of the plain dtypes"
        )


def _check_loaded(pipeline: Any, folder: DiffusersFolder) -> None:
    """Workers load the folder: what was changed since would be missing."""
    import torch

    for name, value in pipeline.components.items():
        if not isinstance(value, torch.nn.Module):
            continue
        where = str(getattr(value, "name_or_path", "") or "")
        where = str(value.config.get("_name_or_path", where)) if _is_dict(value) else where
        if not _has(folder, name) or Path(where).name not in (name, Path(folder.source).name):
            raise LoadError(
                f"the pipeline's {name} comes from {where or 'memory'!r} and not from "
                f"{folder.source!r}; save the pipeline with save_pretrained(folder) and give that "
                "folder"
            )
        changes = [
            what
            for what, has in (
                ("adapters", bool(getattr(value, "peft_config", None))),
                ("tiling", bool(getattr(value, "use_tiling", False))),
                ("slicing", bool(getattr(value, "use_slicing", False))),
            )
            if has
        ]
        if changes:
            raise LoadError(
                f"the pipeline's {name} was changed after loading ({', '.join(changes)}), and "
                "workers load it anew; take that back"
            )


def _is_dict(model: Any) -> bool:
    return hasattr(getattr(model, "config", None), "items")


def _dtype_of(pipeline: Any) -> str:
    model = getattr(pipeline, "transformer", None) or getattr(pipeline, "unet", None)
    dtype = str((model or pipeline).dtype).removeprefix("torch.")
    check_dtype(dtype)
    return dtype


def _scheduler_of(pipeline: Any) -> tuple[str, str, str] | None:
    scheduler = getattr(pipeline, "scheduler", None)
    if scheduler is None:
        return None
    config = {name: value for name, value in scheduler.config.items() if name[0] != "_"}
    cls = type(scheduler)
    return cls.__module__, cls.__qualname__, json.dumps(config, default=_plain)


def _plain(value: Any) -> Any:
    """Arrays in a configuration, as lists."""
    return value.tolist()
