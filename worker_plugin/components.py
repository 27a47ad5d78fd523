"""Looking through the components that `load_model` returned, and that pipelines among them have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .adapters import adapter_parameters, is_adapted


def parts(components: Mapping[str, Any]) -> list[Any]:
    """The components; in place of a pipeline those that it has."""
    found: list[Any] = []
    for value in components.values():
        inner = getattr(value, "components", None)
        found += inner.values() if isinstance(inner, Mapping) and inner else [value]
    return found


def modules(components: Mapping[str, Any]) -> list[Any]:
    """Every torch module among the components, once; those of pipelines too."""
    found: dict[int, Any] = {}
    for part in parts(components):
        if hasattr(part, "register_forward_pre_hook") and hasattr(part, "parameters"):
            found[id(part)] = part
    return list(found.values())


def is_compiled(components: Mapping[str, Any]) -> bool:
    """Whether torch compiles any module of it."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        for part in modules(components)
        for module in part.modules()
    )


def has_adapters(components: Mapping[str, Any]) -> bool:
    """Whether a module has adapters, which are small beside it but not the same in each skeleton."""
    return any(is_adapted(m) for part in modules(components) for m in part.modules())


def release_adapters(components: Mapping[str, Any]) -> None:
    """Let go of the memory of adapters that nobody uses any more. Their modules may be parts of cycles
    (Diffusers' own hooks are), which wait for the garbage collector."""
    for part in modules(components):
        for parameter in adapter_parameters(part):
            parameter.data = parameter.data.new_empty(0)
