"""Sees through adapters: the parameters of a base model, under the names they have without any.

PEFT puts a module of its own in the place of one that it adapts, which it keeps as `base_layer` beside
the adapters' matrices. The base's parameters are those of the model without adapters, so both are the
same weights; the matrices are none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def is_adapted(module: nn.Module) -> bool:
    """Whether PEFT has put it in the place of its `base_layer`. PEFT is not imported for it."""
    return "base_layer" in module._modules and hasattr(module, "adapter_layer_names")


def base_parameters(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
    """`named_parameters` of the module as it is without adapters; shared ones wherever they are."""
    while is_adapted(module):
        base = module._modules["base_layer"]
        assert base is not None
        module = base
    start = f"{prefix}." if prefix else ""
    yield from ((start + name, p) for name, p in module._parameters.items() if p is not None)
    for name, child in module._modules.items():
        if child is not None:
            yield from base_parameters(child, start + name)


def adapter_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Those of the adapters in a model."""
    for part in module.modules():
        if is_adapted(part):
            yield from (p for p in part._parameters.values() if p is not None)
            for name, child in part._modules.items():
                if name != "base_layer" and child is not None:
                    yield from child.parameters()
