"""A part of a Diffusers pipeline as a ModelFn: some of its components, loaded by Diffusers itself."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import PurePath
from typing import Any, final

from ..model_fn import ModelFn
from . import blueprints
from .blueprints import Blueprint
from .folder import load_parts, read_folder
from .lora_files import read_ahead
from .lora_fit import unet_config
from .lora_loading import load_adapters

#: Components that take the most adapters, and the longest to load.
DENOISERS = frozenset({"transformer", "unet"})


def identifying(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a model is known by: of adapters neither scales, nor what is read ahead."""
    made = {name: value for name, value in options.items() if name not in ("ahead", "soon")}
    if adapters := made.pop("adapters", None):
        made["adapters"] = [identity for _, identity, _ in adapters]
    return made


class PipelinePart(ModelFn):
    """A ModelFn whose component is a pipeline with only some parts loaded.

    Subclasses name their `parts` and define `run`. Those with the same parts, folder and options are one
    model to the platform, whatever they do with it: a VAE that encodes and decodes is loaded once.

    options: dtype; those of `lora.adapted`: adapters (source, identity, scale) that the model runs with,
    files that its worker reads ahead, and the part with adapters that it makes ready. One model with
    adapters serves any scales.
    """

    parts: frozenset[str] = frozenset()

    @cached_property
    def model_key(self) -> str:
        what = [sorted(self.parts), self.model_path, identifying(self.options)]
        return f"{PipelinePart.__module__}|{json.dumps(what, sort_keys=True)}"

    def __repr__(self) -> str:
        names = [PurePath(source).name for source, _, _ in self.options.get("adapters", ())]
        return f"{self.name}({', '.join([repr(self.model_path), *names])})"

    def soon(self) -> Sequence[ModelFn]:
        """The denoiser with its adapters, where it can be loaded while others run: once the worker has had
        it before, with whatever adapters."""
        if not (wanted := self.options.get("soon")):
            return ()
        part, dtype = wanted["part"], self.options.get("dtype")
        blueprint = blueprints.find(str(self.model_path), part, dtype)
        if blueprint is None:
            return ()
        options = {"dtype": dtype} if dtype else {}
        made = _OnlyLoaded(self.model_path, name=part, adapters=wanted["adapters"], **options)
        made.parts, made.blueprint = frozenset({part}), blueprint
        return (made,)

    @final
    def load_model(self, model_path: str | None) -> dict[str, Any]:
        pipeline = self._pipeline(str(model_path), self.options.get("dtype"))
        components = {"pipeline": pipeline}
        if adapters := self.options.get("adapters"):
            loadable = [p for p in pipeline._lora_loadable_modules if p in self.parts]
            unet = unet_config(read_folder(str(model_path)))
            components["adapters"] = load_adapters(pipeline, loadable, adapters, unet)
        return components

    def _pipeline(self, source: str, dtype: str | None) -> Any:
        part = next(iter(self.parts))
        if part not in DENOISERS or len(self.parts) > 1:
            return load_parts(source, set(self.parts), dtype)
        if found := self._blueprint(source, part, dtype):
            return found.pipeline()
        since_ns = time.time_ns()
        pipeline = load_parts(source, {part}, dtype)
        blueprints.keep(pipeline, source, part, dtype, since_ns)
        return pipeline

    def _blueprint(self, source: str, part: str, dtype: str | None) -> Blueprint | None:
        return blueprints.find(source, part, dtype)

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


class _OnlyLoaded(PipelinePart):
    """Stands for any with the same parts, folder and options. Loading it changes nothing of the process."""

    blueprint: Blueprint

    def setup_io(self) -> None:
        self.add_output("nothing")

    def _blueprint(self, *_: Any) -> Blueprint:
        return self.blueprint
