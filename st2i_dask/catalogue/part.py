"""A part of a Diffusers pipeline as a ModelFn: some of its components, loaded by Diffusers itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any, final

from ..model_fn import ModelFn
from .folder import load_parts


class PipelinePart(ModelFn):
    """A ModelFn whose component is a pipeline with only some parts loaded.

    Subclasses name their `parts` and define `run`. Those with the same parts, folder and options are one
    model to the platform, whatever they do with it: a VAE that encodes and decodes is loaded once.

    options: dtype.
    """

    parts: frozenset[str] = frozenset()

    @cached_property
    def model_key(self) -> str:
        what = [sorted(self.parts), self.model_path, self.options]
        return f"{PipelinePart.__module__}|{json.dumps(what, sort_keys=True)}"

    @final
    def load_model(self, model_path: str | None) -> dict[str, Any]:
        dtype = self.options.get("dtype")
        return {"pipeline": load_parts(str(model_path), set(self.parts), dtype)}

    @final
    def execute(self, model_components: Mapping[str, Any], **inputs: Any) -> Mapping[str, Any]:
        return self.run(model_components["pipeline"], **inputs)

    def run(self, pipeline: Any, **inputs: Any) -> Mapping[str, Any]:
        """Outputs by name; `pipeline` has the components that are named in `parts`, the others None."""
        raise TypeError(f"{type(self).__name__} must define run()")
