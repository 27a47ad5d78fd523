"""ControlNets beside a model: where they lie, whether they fit it, and how a worker loads one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import LoadError
from .folder import DiffusersFolder, load_component, read_component, read_folder, stored_dtype


@dataclass(frozen=True)
class Net:
    """One ControlNet. part: of the model's folder `source`; None: it has a folder of its own."""

    source: str
    part: str | None
    config: Mapping[str, Any]

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Those of its ModelFn, with these."""
        return {**({"part": self.part} if self.part else {}), **options}


def find_nets(
    folder: DiffusersFolder,
    controlnets: Sequence[str],
    most: int,
    parts: Sequence[str] = ("controlnet",),
) -> list[Net]:
    """The ControlNets of these folders or hub ids; of none: those that the folder holds as `parts`.

    LoadError for more than `most`.
    """
    count = len(controlnets or parts)
    if count > most:
        limit = "one ControlNet" if most == 1 else f"at most {most} ControlNets"
        raise LoadError(f"{folder.source!r} takes {limit} at a time, not {count}; leave some out")
    if not controlnets:
        return [Net(folder.source, part, folder.config(part)) for part in parts]
    found = [read_component(source) for source in controlnets]
    return [Net(each.source, None, each.config) for each in found]


def check_class(net: Net, supported: str, hint: str = "") -> None:
    """LoadError unless it is a ControlNet of that class."""
    if net.config.get("_class_name") != supported:
        raise LoadError(
            f"{net.source!r}: the ControlNet is a {net.config.get('_class_name')}; supported: "
            f"{supported}{hint}"
        )


def check_shared(
    net: Net, model: Mapping[str, Any], names: Iterable[str], what: str = "transformer"
) -> None:
    """LoadError unless it has of these what the model's configuration has. what: the model, for errors."""
    for name in names:
        check_equal(net, name, net.config.get(name), model.get(name), what)


def check_equal(net: Net, name: str, its: Any, wanted: Any, what: str = "transformer") -> None:
    if its != wanted:
        raise LoadError(
            f"{net.source!r}: the ControlNet has {name}={its}, the {what} {wanted}; use a ControlNet "
            "made for this model"
        )


def load_controlnet(model_path: str | None, options: Mapping[str, Any], class_name: str) -> Any:
    """On a worker: the ControlNet of a folder or hub id; with the option `part` a pipeline's that holds
    it as that part, by default in the dtype that the pipeline is stored in."""
    source, dtype = str(model_path), options.get("dtype")
    if part := options.get("part"):
        folder = read_folder(source, {part})
        source, dtype = str(folder.path / part), dtype or stored_dtype(folder)
    return load_component(source, class_name, dtype)


def check_same_dtype(model_path: str | None, controlnet: Any, dtype: Any) -> None:
    """On a worker: LoadError unless the ControlNet computes in the pipeline's dtype."""
    if controlnet.dtype != dtype:
        raise LoadError(
            f"the ControlNet {model_path!r} is {controlnet.dtype}, the pipeline {dtype}; give both one: "
            "st2i.load(..., dtype='bfloat16')"
        )
