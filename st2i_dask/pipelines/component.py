"""A component of a pipeline as a ModelFn: whatever its pipeline calls on it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ..catalogue.checkpoint import check_checkpoint
from ..catalogue.component_check import LIBRARIES, check_component
from ..catalogue.folder import read_folder, stored_dtype
from ..catalogue.part import PipelinePart
from ..errors import LoadError
from .travel import put_together, take_apart


class Component(PipelinePart):
    """One call of one component, or of a module inside it.

    call: bytes, `pack_call`. tensors: those of its arguments that travel by themselves.

    parts: what has to be loaded for it; nearly always the component alone. options: dtype; casts, the
    dtypes to which the pipeline has converted the component since it was loaded, in order.
    """

    def __init__(self, source: str, component: str, parts: Sequence[str], **options: Any):
        self.component = component
        self.parts = frozenset(parts)
        super().__init__(source, name=_name(component), **options)

    def setup_io(self) -> None:
        self.add_input("call")
        self.add_input("tensors")
        self.add_output("form")
        self.add_output("made")

    # A final one; what is loaded here differs from other parts only by the conversions.
    def load_model(self, model_path: str | None) -> dict[str, Any]:  # type: ignore[misc]
        import torch

        try:
            components = super().load_model(model_path)
        except LoadError:
            # There are pipelines that cannot be made with some of their components.
            if len(self.parts) > 1:
                raise
            dtype = self.options.get("dtype")
            components = {"pipeline": load_alone(str(model_path), self.component, dtype)}
        for dtype in self.options.get("casts", ()):
            getattr(components["pipeline"], self.component).to(dtype=getattr(torch, dtype))
        return components

    def run(self, pipeline: Any, **inputs: Any) -> Mapping[str, Any]:
        path, method, form, sources, small = pickle.loads(inputs["call"])
        large = inputs["tensors"]
        # Copies: the same tensors may go into other calls, and a component may write into its own.
        tensors = [
            (large[number] if is_large else small.values[number]).clone()
            for is_large, number in sources
        ]
        args, kwargs = put_together(form, tensors)
        module = getattr(pipeline, self.component)
        if path:
            module = module.get_submodule(path)
        # Called, not its forward: weights come in before a module runs.
        function = module if method == "forward" else getattr(module, method)
        result = without_cache(function(*args, **kwargs))
        form, tensors = take_apart(
            result, f"what {described(self.component, path, method)} returned"
        )
        return {"form": form, "made": tensors}


def load_alone(source: str, part: str, dtype: str | None) -> Any:
    """On a worker: one component by its own class, as attribute of a namespace."""
    import torch
    from diffusers.pipelines.pipeline_loading_utils import simple_get_class_obj

    folder = read_folder(source, {part})
    cls: Any = simple_get_class_obj(*folder.index[part])
    made_by_diffusers = hasattr(cls, "load_config")
    check_checkpoint(folder.path / part, source)
    if folder.index[part][0] in LIBRARIES and issubclass(cls, torch.nn.Module):
        check_component(cls, folder.config(part), folder.path / part, source)
    of_dtype = {
        "torch_dtype" if made_by_diffusers else "dtype": getattr(
            torch, dtype or stored_dtype(folder)
        )
    }
    try:
        model = cls.from_pretrained(str(folder.path / part), **of_dtype)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise LoadError(
            f"{source!r}: {part} cannot be loaded: {error}; check that the folder is whole and "
            "visible on every worker"
        ) from error
    return SimpleNamespace(**{part: model.eval()})


def without_cache(result: Any) -> Any:
    """A text model's output without its keys and values, which are large and no pipeline reads."""
    if getattr(result, "past_key_values", None) is not None and hasattr(result, "to_tuple"):
        result["past_key_values"] = ()  # in its place: others are read by number
    return result


def described(component: str, path: str, method: str) -> str:
    """The call as one would write it."""
    where = f"{component}.{path}" if path else component
    return where if method == "forward" else f"{where}.{method}"


def _name(component: str) -> str:
    """As dashboards show it: a class's name. text_encoder_2 is TextEncoder2."""
    return "".join(word.capitalize() for word in component.split("_"))
