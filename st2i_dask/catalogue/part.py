"""A part of a Diffusers pipeline as a ModelFn: some of its components, loaded by Diffusers itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import PurePath
from typing import Any, final

from ..model_fn import ModelFn
from .folder import load_parts, read_folder
from .lora_files import read_ahead
from .lora_fit import unet_config
from .lora_loading import load_adapters


class PipelinePart(ModelFn):
    """A ModelFn whose component is a pipeline with only some parts loaded.

    Subclasses name their `parts` and define `run`. Those with the same parts, folder and options are one
    model to the platform, whatever they do with it: a VAE that encodes and decodes is loaded once.

    options: dtype; those of `lora.adapted`: adapters (source, identity, scale) that the model runs with,
    and files that its worker reads ahead. One model with adapters serves any scales.
    """

    parts: frozenset[str] = frozenset()

    @cached_property
    def model_key(self) -> str:
        options = {**self.options}
        options.pop("ahead", None)
        if adapters := options.pop("adapters", None):
            options["adapters"] = [identity for _, identity, _ in adapters]
        what = [sorted(self.parts), self.model_path, options]
        return f"{PipelinePart.__module__}|{json.dumps(what, sort_keys=True)}"

    def __repr__(self) -> str:
        names = [PurePath(source).name for source, _, _ in self.options.get("adapters", ())]
        return f"{self.name}({', '.join([repr(self.model_path), *names])})"

    @final
    def load_model(self, model_path: str | None) -> dict[str, Any]:
        dtype = self.options.get("dtype")
        pipeline = load_parts(str(model_path), set(self.parts), dtype)
        components = {"pipeline": pipeline}
        if adapters := self.options.get("adapters"):
            loadable = [p for p in pipeline._lora_loadable_modules if p in self.parts]
            unet = unet_config(read_folder(str(model_path)))
            components["adapters"] = load_adapters(pipeline, loadable, adapters, unet)
        return components

    @final
    def execute(self, model_components: Mapping[str, Any], **inputs: Any) -> Mapping[str, Any]:
        read_ahead(self.options.get("ahead", ()))
        pipeline = model_components["pipeline"]
        adapters = self.options.get("adapters")
        if not adapters:
            return self.run(pipeline, **inputs)
        with model_components["adapters"].scaled([scale for _, _, scale in adapters]):
            return self.run(pipeline, **inputs)

    def run(self, pipeline: Any, **inputs: Any) -> Mapping[str, Any]:
        """Outputs by name; `pipeline` has the components that are named in `parts`, the others None."""
        raise TypeError(f"{type(self).__name__} must define run()")
