"""Whether a component is what its configuration says: found without memory, before anything is read.

The libraries fill in what a configuration lacks and make up weights that no file has: of an empty one they
would build a model of their own default size, with random weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import LoadError
from .checkpoint import stored_elements
from .config_kinds import check_kinds, check_layers, check_rotary, check_signature
from .weights_fit import check_weights_fit, needed, read_shapes

if TYPE_CHECKING:
    from .folder import DiffusersFolder

LIBRARIES = ("diffusers", "transformers")
# Some checkpoints leave out weights that no pipeline uses, such as a text model's head.
_SPARED = 1.25
# Tensors that a model may be made of: so many times as many as the files hold, and a few; or without
# files, several times those of the largest models. A configuration of a million layers ends here.
_TIMES, _FEW = 8, 1000
_MOST = 10_000


def check_components(folder: DiffusersFolder, parts: set[str] | None = None) -> None:
    """LoadError for a component that is not what its configuration says; see `check_component`.

    parts: None: all but the ControlNet.
    """
    import torch

    for part, value in folder.index.items():
        named = isinstance(value, list) and len(value) == 2
        if part.startswith("_") or not named or not all(isinstance(name, str) for name in value):
            continue
        if parts is not None and part not in parts:
            continue
        library, class_name = value
        # What composes a workflow checks it beside its base; several have a class that is not exported.
        if part == "controlnet" and (parts is None or class_name.startswith("Multi")):
            continue
        cls = component_class(folder.source, part, library, class_name)
        if issubclass(cls, torch.nn.Module):
            config, path = folder.config(part), folder.path / part
            # The pipelines of flow-matching models add it to latents.
            if class_name == "AutoencoderKL" and "transformer" in folder.index:
                check_kinds("shifted vae", config, path / "config.json", folder.source)
            check_component(cls, config, path, folder.source)


def component_class(source: str, part: str, library: str, class_name: str) -> Any:
    """LoadError for one that is of neither library, or that the library does not have."""
    if library not in LIBRARIES:
        raise LoadError(
            f"{source!r}: model_index.json has {part}={[library, class_name]!r}, wanted a class of "
            f"{' or '.join(LIBRARIES)}; copy the file again"
        )
    found = getattr(importlib.import_module(library), class_name, None)
    if not isinstance(found, type):
        raise LoadError(
            f"{source!r}: model_index.json has {part}={[library, class_name]!r}, but this "
            f"{library} has no such class; copy the file again, or install a newer {library}"
        )
    return found


def check_component(cls: Any, config: Mapping[str, Any], folder: Path, source: str) -> None:
    """LoadError with the configuration's file for values of another kind, for one that no model can be
    built of, and for a model whose weights are not those that lie beside it.

    cls: a model's class of Diffusers or transformers. Costs milliseconds, and up to a second for a model
    of many layers. Where no safetensors files are here, as those of a hub, only the values are checked.
    """
    file = folder / "config.json"
    if hasattr(cls, "config_class") and "model_type" not in config:
        raise LoadError(f"{source!r}: {file} does not say 'model_type'; copy the file again")
    check_layers(config, file, source)
    if not hasattr(cls, "config_class"):
        check_signature(cls, config, file, source)
        check_rotary(cls.__name__, config, file, source)
    shapes = read_shapes(cls, folder)
    most = _MOST if shapes is None else _TIMES * len(shapes) + _FEW
    try:
        model = without_memory(cls, config, most)
    except LoadError:
        raise
    except _TooManyError as error:
        beside = "" if shapes is None else f", but the files beside it hold {len(shapes):,}"
        raise LoadError(
            f"{source!r}: {file} says a {cls.__name__} of more than {most:,} tensors{beside}; copy the "
            "folder again"
        ) from error
    except Exception as error:  # whatever the library meets first
        if isinstance(error, (NotImplementedError, RuntimeError)) and "meta" in str(error):
            return  # it computes with values while it is built
        raise LoadError(
            f"{source!r}: no {cls.__name__} can be built as {file} says "
            f"({type(error).__name__}: {str(error)[:200]}); copy the file again"
        ) from error
    said = sum(parameter.numel() for _, parameter in needed(model))
    stored = stored_elements(folder)
    if stored is not None and said > _SPARED * stored:
        raise LoadError(
            f"{source!r}: {file} says a {cls.__name__} of {said:,} weights, but the files beside it "
            f"hold {stored:,}; copy the folder again"
        )
    if shapes is not None:
        check_weights_fit(model, shapes, file, source)


class _TooManyError(Exception):
    """A model is made of more tensors than it may be."""


def without_memory(cls: Any, config: Mapping[str, Any], most: int = _MOST) -> Any:
    """The model on torch's device meta: names and shapes, no values. An error for one that is made of
    more than `most` tensors."""
    import torch
    from torch.overrides import TorchFunctionMode

    making = {
        torch.empty,
        torch.zeros,
        torch.ones,
        torch.rand,
        torch.randn,
        torch.full,
        torch.tensor,
    }

    class Counting(TorchFunctionMode):  # of this thread only
        made = 0

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function in making:
                self.made += 1
                if self.made > most:
                    raise _TooManyError
            return function(*args, **(kwargs or {}))

    with torch.device("meta"), Counting():
        if hasattr(cls, "from_config"):
            return cls.from_config(config)
        return cls(cls.config_class.from_dict(config))
