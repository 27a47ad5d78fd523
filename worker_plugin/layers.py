"""Divides a model into layers: the units in which weights come and go.

A layer is what one forward call needs: an item of a ModuleList (a transformer block), or a child beside
such lists. The division reads the tree of modules only; it asks nothing of their authors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .adapters import base_parameters

if TYPE_CHECKING:
    from torch import nn

#: The layer of parameters that belong to no module that could be hooked.
ROOT = ""


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters that are in memory together.

    name: of its first module in the model; "" for the root layer, which is needed for the whole run.
    modules: whose forward calls need it; none for the root layer. parameters: each Parameter object
    once, under its first name in the model.
    """

    name: str
    modules: tuple[nn.Module, ...]
    parameters: tuple[tuple[str, nn.Parameter], ...]


def divide(module: nn.Module) -> list[Layer]:
    """The layers of a model, in order of definition, the root layer first; every parameter is in
    exactly one. Of a model with adapters, the layers that it has without them.

    An item of the first list of modules met from the top is a layer; a child that contains lists is
    descended into; any other child is a layer. Parameters directly in what was descended into form the
    root layer. Layers that share memory are one layer, with the modules of all. Memory tells only while
    parameters have their own: divide a model before its parameters are rebound. Nothing is changed.
    """
    found = _Merging()
    for name, child in _units(module, ""):
        found.add(name, child)
    return found.layers()


def _units(container: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    """Modules that are layers, and parameters of what is descended into."""
    yield from ((prefix + name, p) for name, p in container._parameters.items() if p is not None)
    # Not named_children: it leaves out a module that is there twice, and so may be its parameters'
    # only callable place.
    for name, child in container._modules.items():
        if child is None:
            continue
        if not _is_callable(child) or (_is_callable(container) and _contains_lists(child)):
            yield from _units(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def _is_callable(module: nn.Module) -> bool:
    """Lists, dictionaries and bare holders of parameters have no forward: no hook of theirs runs."""
    from torch import nn

    return type(module).forward is not nn.Module.forward


def _contains_lists(module: nn.Module) -> bool:
    from torch import nn

    return any(isinstance(part, nn.ModuleList) for part in module.modules())


class _Merging:
    """Layers under construction; those that turn out to share memory become one."""

    def __init__(self) -> None:
        self._owner: dict[Any, str] = {}  # memory -> name of the layer, possibly merged since
        self._into: dict[str, str] = {}  # merged layer -> where to
        self._modules: dict[str, dict[int, Any]] = {ROOT: {}}
        self._parameters: dict[str, dict[int, tuple[str, Any]]] = {ROOT: {}}

    def add(self, name: str, unit: Any) -> None:
        from torch import nn

        if isinstance(unit, nn.Parameter):
            layer, parameters = ROOT, iter([(name, unit)])
        else:
            layer, parameters = name, base_parameters(unit, name)
            self._modules[layer] = {id(unit): unit}
            self._parameters[layer] = {}
        for place, parameter in parameters:
            layer = self._merge(self._owner.setdefault(_memory(parameter), layer), layer)
            self._parameters[layer].setdefault(id(parameter), (place, parameter))

    def _merge(self, one: str, other: str) -> str:
        """Both as one layer; the earlier one, of which the root is the first."""
        one, other = self._find(one), self._find(other)
        if one == other:
            return one
        order = list(self._modules)
        first, second = sorted((one, other), key=order.index)
        self._into[second] = first
        self._modules[first] |= self._modules.pop(second)
        for key, entry in self._parameters.pop(second).items():
            self._parameters[first].setdefault(key, entry)
        return first

    def _find(self, name: str) -> str:
        while name in self._into:
            name = self._into[name]
        return name

    def layers(self) -> list[Layer]:
        return [
            # What the root shares with a module stays for the whole run anyway.
            Layer(
                name,
                () if name == ROOT else tuple(self._modules[name].values()),
                tuple(parameters.values()),
            )
            for name, parameters in self._parameters.items()
            if parameters
        ]


def _memory(parameter: nn.Parameter) -> Any:
    """Equal for parameters in the same memory."""
    nbytes = parameter.numel() * parameter.element_size()
    address = parameter.data_ptr() if nbytes and parameter.device.type != "meta" else 0
    return (str(parameter.device), address, nbytes) if address else id(parameter)
