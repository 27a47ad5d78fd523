"""Whether a model's weights are those of the files beside it: by name and shape, before any is read.

The libraries rename what old versions have written, leave out what is tied, and make up what is missing.
Names are compared as the loading library itself would translate them; what cannot be translated is not
judged here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import LoadError
from .checkpoint import stored_shapes

Shape = tuple[int, ...]

# Their configurations have fewer layers than the files on purpose: "clip skip".
_SHORTENED = ("CLIPText",)
_NAMES = 3  # that a message names


def read_shapes(cls: Any, folder: Path) -> dict[str, Shape] | None:
    """Of the tensors that `cls.from_pretrained(folder)` reads, by their names in the files. None: not
    all are here, or the class or its configuration loads in a way of its own."""
    names = ["diffusion_pytorch_model.safetensors.index.json"]
    names.append("diffusion_pytorch_model.safetensors")
    if hasattr(cls, "config_class"):  # of transformers, which asks for the index last
        names = ["model.safetensors", "model.safetensors.index.json"]
    for name in names:
        if (folder / name).is_file():
            return stored_shapes(folder, name) if _loads_as_usual(cls) else None
    return None


def check_weights_fit(model: Any, stored: Mapping[str, Shape], file: Path, source: str) -> None:
    """LoadError with component, parameter and shapes, for a weight whose shape is another one in the
    files, that they lack, or for whole layers of theirs that the model does not have.

    model: on any device. stored: see `read_shapes`. file: the configuration that it was built of.
    """
    found = _as_loaded(model, stored)
    if found is None:
        return
    wanted = model.state_dict()
    part, cls = file.parent.name, type(model).__name__
    says = f"{source!r}: {file} says a {cls} whose"
    others = [
        name
        for name, tensor in wanted.items()
        if found.get(name) is not None and found[name] != tuple(tensor.shape)
    ]
    if others:
        name = others[0]
        raise LoadError(
            f"{says} {name!r} has the shape {list(wanted[name].shape)}, but in the files beside it that "
            f"of the {part} has {list(found[name] or ())}{_more(others)}; copy the folder again"
        )
    missing = [names[0] for names, _ in needed(model) if not any(name in found for name in names)]
    if missing:
        name = missing[0]
        raise LoadError(
            f"{says} {name!r} has the shape {list(wanted[name].shape)}, but the files of the {part} "
            f"beside it do not have it{_more(missing)}; copy the folder again"
        )
    if cls.startswith(_SHORTENED):
        return
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    extra = [
        name
        for name in found
        if name not in wanted and not any(re.search(each, name) for each in ignored)
    ]
    for layers, number, has in _absent_layers(model, extra):
        raise LoadError(
            f"{source!r}: {file} says a {cls} with {has} of {layers!r}, but the files of the {part} "
            f"beside it hold '{layers}.{number}', which it would compute without; copy the folder again"
        )


def _loads_as_usual(cls: Any) -> bool:
    """Whether its library's common code loads it."""
    from diffusers import ModelMixin
    from transformers import PreTrainedModel

    usual = [base.from_pretrained.__func__ for base in (ModelMixin, PreTrainedModel)]
    return getattr(getattr(cls, "from_pretrained", None), "__func__", None) in usual


def _as_loaded(model: Any, stored: Mapping[str, Shape]) -> Mapping[str, Shape | None] | None:
    """The files' tensors by the model's names; a shape is None where several are made into others."""
    try:
        if hasattr(model, "config_class"):
            return _as_transformers_does(model, stored)
        renamed = dict(stored)
        model._fix_state_dict_keys_on_load(renamed)
        return renamed
    except Exception:  # a version that does it in another way
        return None


def _as_transformers_does(model: Any, stored: Mapping[str, Shape]) -> dict[str, Shape | None]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    wanted = model.state_dict()
    found: dict[str, Shape | None] = {}
    for name, shape in stored.items():
        prefix = model.base_model_prefix
        new, converted = rename_source_key(name, renamings, converters, prefix, wanted)
        if new not in wanted and name in wanted:
            new, converted = name, None
        targets = [new]
        if converted is not None:
            # It may make several of one; which, only it knows.
            targets = [
                new.replace(first, each)
                for rule in converters
                if converted in rule.source_patterns
                for first in rule.target_patterns[:1]
                for each in rule.target_patterns
            ]
        for target in (new, *targets):
            found[target] = None if converted is not None else shape
    return found


def needed(model: Any) -> Iterable[tuple[list[str], Any]]:
    """The parameters that have to be in a model's files, each with its names; tied ones have several."""
    groups: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(parameter, []).append(name)
    tied = getattr(model, "all_tied_weights_keys", None)
    tied = tied if isinstance(tied, Mapping) else {}
    spared = [
        re.compile(each) for each in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    ]
    # Pipelines read what is before the words, and some checkpoints leave out the words' matrix.
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    words = set(head.parameters()) if head is not None else set()
    for parameter, names in groups.items():
        names += [tied[name] for name in names if name in tied]
        names += [target for target, origin in tied.items() if origin in names]
        if len(names) == 1 and parameter in words:
            continue
        if not any(each.search(name) for each in spared for name in names):
            yield names, parameter


def _absent_layers(model: Any, names: Iterable[str]) -> Iterable[tuple[str, str, int]]:
    """Of names that the model does not have, those in lists of modules that end before them: the list's
    place, the number in it, and how many it has."""
    from torch.nn import ModuleList

    for name in names:
        module, parts = model, name.split(".")
        for place, part in enumerate(parts):
            inside = module._modules.get(part)
            if inside is not None:
                module = inside
                continue
            if isinstance(module, ModuleList) and part.isdigit() and int(part) >= len(module):
                yield ".".join(parts[:place]), part, len(module)
            break


def _more(names: list[str]) -> str:
    if len(names) == 1:
        return ""
    shown = ", ".join(map(repr, names[1:_NAMES]))
    rest = len(names) - _NAMES
    return f" (so it is with {shown}{f' and {rest} more' if rest > 0 else ''})"
