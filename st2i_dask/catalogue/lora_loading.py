"""Adapters on a worker: loaded beside a base model, never into its weights, and set to a request's scales.

The base's weights stay the ones of the file, shared with every other model that has them. Adapters are
active side by side, as `set_adapters` of the pipeline makes them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import LoadError
from .lora_files import identity_of, locate
from .lora_fit import convert

#: How long a run waits for others of the same model with other scales, seconds.
WAIT_SECONDS = 600.0


class LoadedAdapters:
    """The adapters of a loaded model. Thread-safe."""

    def __init__(self, layers: Sequence[Any], names: Sequence[str]):
        self._layers, self._names = layers, names
        self._changed = threading.Condition()
        self._users = 0
        self._scales: tuple[float, ...] | None = None

    def within(self, module: Any) -> LoadedAdapters:
        """Those of one module, where the rest of the model is not needed."""
        mine = {id(each) for each in module.modules()}
        return LoadedAdapters([layer for layer in self._layers if id(layer) in mine], self._names)

    @contextmanager
    def scaled(self, scales: Sequence[float]) -> Iterator[None]:
        """The model has these scales in the body. Runs with equal ones may overlap, others wait."""
        wanted = tuple(scales)
        with self._changed:
            if not self._changed.wait_for(
                lambda: not self._users or self._scales == wanted, WAIT_SECONDS
            ):
                raise LoadError(
                    f"the model was in use with other scales of its adapters for {WAIT_SECONDS:g} s; "
                    "run fewer threads per worker"
                )
            if self._scales != wanted:
                self._scales = None  # until all are set
                for layer in self._layers:
                    for name, scale in zip(self._names, wanted, strict=True):
                        layer.set_scale(name, scale)
                self._scales = wanted
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()


def load_adapters(
    pipeline: Any,
    parts: Sequence[str],
    adapters: Sequence[tuple[str, str, float]],
    unet: Mapping[str, Any] | None,
) -> LoadedAdapters:
    """Put adapters (source, identity, scale) into these components of a pipeline, and activate them.

    What of them is for other components is left out. unet: configuration of the whole pipeline's.
    LoadError when a file is another one than was submitted, or does not load.
    """
    from peft.tuners import tuners_utils
    from peft.tuners.tuners_utils import BaseTunerLayer

    # PEFT's own changes how all threads of the process make parameters.
    tuners_utils.init_empty_weights = _without_memory
    names = []
    for source, identity, _ in adapters:
        path = locate(source)[1]
        if identity_of(path) != identity:
            raise LoadError(
                f"adapter {source!r} is another file here than it was when the request was submitted; "
                "submit again, and give a new version a new name"
            )
        # No name of a module contains it, which Diffusers looks for in keys.
        names.append(f"adapter_{identity}")
        try:
            _load(pipeline, parts, str(path), names[-1], unet)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise LoadError(f"adapter {source!r} cannot be loaded: {error}") from error
    pipeline.set_adapters(names, [1.0] * len(names))
    layers = [
        module
        for part in parts
        for module in getattr(pipeline, part).modules()
        if isinstance(module, BaseTunerLayer)
    ]
    return LoadedAdapters(layers, names)


def _without_memory() -> Any:
    """Context: new modules of this thread have no memory and no first values; a file will give both."""
    import torch
    from torch.overrides import TorchFunctionMode

    class WithoutMemory(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if getattr(function, "__module__", None) == "torch.nn.init":
                return args[0] if args else kwargs["tensor"]
            if function is torch.empty:
                return function(*args, **{**(kwargs or {}), "device": "meta"})
            return function(*args, **(kwargs or {}))

    return WithoutMemory()


def _load(
    pipeline: Any, parts: Sequence[str], path: str, name: str, unet: Mapping[str, Any] | None
) -> None:
    # What `load_lora_weights` does, of which other components than these would need to be loaded.
    state, alphas, metadata = convert(type(pipeline), path, unet)
    for part in parts:
        mine = {key: tensor for key, tensor in state.items() if key.startswith(f"{part}.")}
        if not mine:
            continue
        for key, tensor in mine.items():
            if not tensor.float().isfinite().all():
                raise ValueError(f"{key} has numbers that are not finite (NaN or infinite)")
        common: dict[str, Any] = dict(
            network_alphas=alphas,
            adapter_name=name,
            metadata=metadata,
            low_cpu_mem_usage=True,
            _pipeline=pipeline,
        )
        model = getattr(pipeline, part)
        if part.startswith("text_encoder"):
            type(pipeline).load_lora_into_text_encoder(
                mine, text_encoder=model, prefix=part, lora_scale=pipeline.lora_scale, **common
            )
        else:
            model.load_lora_adapter(mine, prefix=part, **common)
