"""Whether an adapter fits a pipeline: found from headers and configurations, before anything is run.

The pipeline's own `lora_state_dict` translates the file's keys, of tensors without memory; each key
must then name a matrix of a module that the base model has, and fit it.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..errors import LoadError
from .checkpoint import INTEGER, find_file_fault
from .component_check import component_class, without_memory
from .files_state import FilesState
from .folder import DiffusersFolder

_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])\.(?P<what>weight|bias)")
# Kinds of adapters that are no plain LoRA, by what is in their keys. DoRA: Diffusers would leave out its
# magnitudes and draw something else.
_OTHER_KINDS = {"dora_scale": "DoRA", "magnitude_vector": "DoRA", "lokr_": "LoKr", "hada_": "LoHa"}
_NAMES = 3  # of keys that a message names

_lock = threading.Lock()
_fitting: dict[tuple[str, str, FilesState], tuple[str, ...]] = {}
_shapes: dict[tuple[str, FilesState, str], dict[str, tuple[int, ...]]] = {}
_LIMIT = 1024


def touched(folder: DiffusersFolder, path: Path, identity: str) -> tuple[str, ...]:
    """Names of the components that the adapter changes, sorted. LoadError when it does not fit.

    identity: of the file's content. Costs milliseconds for a small model and up to a second for a
    large one; nothing for an adapter that was looked at before.
    """
    key = identity, folder.source, folder.state
    with _lock:
        known = _fitting.get(key)
    if known is not None:
        return known
    fault = find_file_fault(path)
    if fault is not None:
        raise LoadError(f"adapter {fault}")
    found = _touched(folder, path)
    with _lock:
        if len(_fitting) >= _LIMIT:
            _fitting.clear()
        _fitting[key] = found
    return found


def convert(pipeline_class: Any, source: Any, unet: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """A file's tensors, network alphas (or None) and metadata (or None) as Diffusers names them.

    source: path or dict of tensors. unet: configuration of the pipeline's UNet, if it has one.
    """
    takes = inspect.signature(pipeline_class.lora_state_dict).parameters
    options: dict[str, Any] = {"return_lora_metadata": True}
    if "return_alphas" in takes:
        options["return_alphas"] = True
    if unet is not None:
        options["unet_config"] = SimpleNamespace(**unet)
    found = pipeline_class.lora_state_dict(source, **options)
    return found if len(found) == 3 else (found[0], None, found[1])


def unet_config(folder: DiffusersFolder) -> dict[str, Any] | None:
    return folder.config("unet") if "unet" in folder.index else None


def _touched(folder: DiffusersFolder, path: Path) -> tuple[str, ...]:
    import diffusers

    pipeline_class = getattr(diffusers, folder.pipeline_class)
    takes = list(getattr(pipeline_class, "_lora_loadable_modules", ()))
    if not takes:
        raise LoadError(f"{folder.source!r}: a {folder.pipeline_class} takes no adapters")
    state = _converted(folder, pipeline_class, path)
    denoiser = next(part for part in takes if not part.startswith("text_encoder"))
    of_part: dict[str, dict[str, Any]] = {}
    loose: dict[str, Any] = {}
    for key, tensor in state.items():
        first, _, rest = key.partition(".")
        if first in takes:
            of_part.setdefault(first, {})[rest] = tensor
        elif first in folder.index:
            raise LoadError(
                f"adapter {path} changes {first!r} ({key}); a {folder.pipeline_class} takes "
                f"adapters for {', '.join(takes)}"
            )
        else:
            loose[key] = tensor
    for part, tensors in of_part.items():
        _check_fit(folder, part, tensors, path)
    # The pipeline leaves out what has no component's name; an adapter of another family has nothing else.
    if loose or not of_part:
        _check_fit(folder, denoiser, loose, path)
    if not of_part:
        raise LoadError(
            f"adapter {path} has no key that begins with one of {', '.join(takes)}; a "
            f"{folder.pipeline_class} would not load anything of it: save it with Diffusers"
        )
    return tuple(sorted(of_part))


def _converted(folder: DiffusersFolder, pipeline_class: Any, path: Path) -> dict[str, Any]:
    tensors = _without_memory(path)
    for mark, kind in _OTHER_KINDS.items():
        if any(mark in key for key in tensors):
            raise LoadError(f"adapter {path} is a {kind}; only LoRA is supported here")
    unet = unet_config(folder)
    try:
        return dict(convert(pipeline_class, tensors, unet)[0])
    except Exception:
        pass  # some formats are told apart by their values
    try:
        return dict(convert(pipeline_class, str(path), unet)[0])
    except Exception as error:
        raise LoadError(
            f"adapter {path} is none that a {folder.pipeline_class} can read "
            f"({type(error).__name__}: {str(error)[:200]}); use one made for this family"
        ) from error


def _without_memory(path: Path) -> dict[str, Any]:
    """Tensors on the device meta; numbers (alphas) as they are."""
    import torch
    from safetensors import safe_open

    found = {}
    with safe_open(str(path), "pt") as file:
        for key in file.keys():  # noqa: SIM118
            entry = file.get_slice(key)
            shape, dtype = entry.get_shape(), str(entry.get_dtype())
            if prod(shape) <= 1:
                found[key] = file.get_tensor(key)
            elif dtype in INTEGER:
                raise LoadError(
                    f"adapter {path} stores {key!r} as {dtype}, but a floating-point dtype is "
                    "expected; save it as float32, bfloat16 or float16"
                )
            else:
                found[key] = torch.empty(shape, device="meta")
    return found


def _check_fit(folder: DiffusersFolder, part: str, tensors: dict[str, Any], path: Path) -> None:
    """LoadError unless every tensor is a matrix for a module of that component."""
    shapes = _module_shapes(folder, part)
    class_name = folder.index[part][1]
    try:
        tensors = _named(shapes, part, tensors)
    except ValueError:
        raise LoadError(
            f"adapter {path} has {_some(list(tensors))} for {part}, in no format that is known"
        ) from None
    other = [key for key in tensors if not _MATRIX.fullmatch(key)]
    if other:
        raise LoadError(
            f"adapter {path} has {_some(other)} for {part}: no matrix of a LoRA; it would change "
            "the model itself, whose weights are shared: use one without"
        )
    matrices: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, tensor in tensors.items():
        named = _MATRIX.fullmatch(key)
        assert named is not None
        if named["what"] == "weight":
            matrices.setdefault(named["module"], {})[named["which"]] = tuple(tensor.shape)
    absent = [module for module in matrices if module not in shapes]
    if absent:
        raise LoadError(
            f"adapter {path} changes {_some(absent)}, which the {part} of {folder.source!r}, a "
            f"{class_name}, does not have; use an adapter made for this model"
        )
    for module, pair in matrices.items():
        if not _fits(shapes[module], pair):
            raise LoadError(
                f"adapter {path} has matrices {pair.get('A')} and {pair.get('B')} for {module}, "
                f"whose weight is {shapes[module]} in the {part} of {folder.source!r}; use an "
                "adapter made for this model"
            )


def _named(shapes: Mapping[str, Any], part: str, tensors: dict[str, Any]) -> dict[str, Any]:
    """As the component's own loader renames them."""
    from diffusers.utils import (
        convert_state_dict_to_diffusers,
        convert_state_dict_to_peft,
        convert_unet_state_dict_to_peft,
    )

    if part.startswith("text_encoder"):
        tensors = convert_state_dict_to_peft(convert_state_dict_to_diffusers(dict(tensors)))
        if "text_model" not in shapes:
            tensors = {key.removeprefix("text_model."): t for key, t in tensors.items()}
    elif tensors and "lora_A" not in next(iter(tensors)):
        tensors = convert_unet_state_dict_to_peft(dict(tensors))
    return tensors


def _fits(weight: tuple[int, ...], pair: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether B x A has the shape of a linear layer's or convolution's weight."""
    a, b = pair.get("A", ()), pair.get("B", ())
    if len(weight) < 2 or len(a) != len(weight) or len(b) != len(weight):
        return False
    rank = a[0]
    return b[:2] == (weight[0], rank) and a[1:] == weight[1:] and rank > 0


def _module_shapes(folder: DiffusersFolder, part: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of a component's modules by name; () for modules without one."""
    key = folder.source, folder.state, part
    with _lock:
        known = _shapes.get(key)
    if known is None:
        library, class_name = folder.index[part]
        cls = component_class(folder.source, part, library, class_name)
        model = without_memory(cls, folder.config(part))
        known = {
            name: tuple(getattr(getattr(module, "weight", None), "shape", ()))
            for name, module in model.named_modules()
        }
        with _lock:
            if len(_shapes) >= _LIMIT:
                _shapes.clear()
            _shapes[key] = known
    return known


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(map(repr, names[:_NAMES])) + more
