"""Hollow components: models of the right class and configuration, without weights.

A pipeline's own `__call__` runs with them. It may ask for their class, configuration, dtype and device,
look at the modules inside and read buffers that lie in files (a VAE's statistics); calling one, or a
module inside it, is handed to the orchestrator of the thread.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from ..errors import LoadError, OutputError

#: Methods, beside its modules' forward, that a component runs where its weights are.
REMOTE = (
    *("encode", "decode", "generate", "encode_image", "encode_text"),
    *("get_text_features", "get_image_features"),
)


class Caller(Protocol):
    """Who carries out component calls."""

    device: Any

    def call(
        self,
        component: str,
        path: str,
        method: str,
        casts: tuple[str, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any: ...


_thread = threading.local()


@contextlib.contextmanager
def calling(caller: Caller) -> Iterator[None]:
    """While the body runs, hollow components in this thread hand their calls to `caller`."""
    _thread.caller = caller
    try:
        yield
    finally:
        del _thread.caller


def _caller() -> Caller:
    caller: Caller | None = getattr(_thread, "caller", None)
    if caller is None:
        raise OutputError("a hollow component was called outside of a request")
    return caller


class _Remote:
    """A method of a module, by its place in a component."""

    def __init__(self, component: str, path: str, method: str):
        self._called = component, path, method
        self.owner: Any = None  # the top module, which knows its conversions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        casts = casts_of(self.owner) if self.owner is not None else ()
        return _caller().call(*self._called, casts, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Remote:
        return self


def hollow(
    cls: type, folder: Path, component: str, dtype: str, with_weights: Callable[[], Path]
) -> Any:
    """The component of that folder, as `cls.from_pretrained` would give it but for its weights.

    with_weights: gives the folder with all files, for one whose buffers lie among them.
    Not thread-safe: torch's defaults change meanwhile.
    """
    import torch
    from accelerate import init_empty_weights

    try:
        with init_empty_weights(include_buffers=False):
            model = _from_config(cls, folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(
            f"{str(folder)!r}: {cls.__name__} cannot be made from its configuration: {error}; "
            "copy the folder again"
        ) from error
    # Weights that a constructor made of others, outside of any parameter's registration.
    model = model.to(device="meta") if _is_real(model) else model
    _cast(model, getattr(torch, dtype))
    _read_buffers(model, with_weights, getattr(torch, dtype))
    for path, module in model.named_modules():
        module.forward = _Remote(component, path, "forward")
    for method in REMOTE:
        if callable(getattr(model, method, None)):
            setattr(model, method, _Remote(component, "", method))
    model.__class__ = hollow_class(cls)
    return model.eval()


def for_request(model: Any) -> Any:
    """A hollow component of a request's own: conversions of it are not seen by others."""
    own = copy.copy(model)
    for name in ("forward", *REMOTE):
        remote = own.__dict__.get(name)
        if isinstance(remote, _Remote):
            mine = own.__dict__[name] = copy.copy(remote)
            mine.owner = own
    own.__dict__["_st2i_casts"] = ()
    return own


def casts_of(model: Any) -> tuple[str, ...]:
    """The dtypes to which the pipeline has converted it since it was loaded."""
    casts: tuple[str, ...] = model.__dict__.get("_st2i_casts", ())
    return casts


@functools.cache
def hollow_class(cls: type) -> type:
    """A subclass that is where the orchestrator's device is, and whose conversions are noted."""
    import torch

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A model is moved by its own name for a dtype or device; the rest of the arguments are torch's.
        dtype = kwargs.get("dtype")
        for value in args:
            dtype = value if isinstance(value, torch.dtype) else dtype
        if dtype is not None and dtype != self.dtype:
            _convert(self, dtype)
        return self

    return type(
        cls.__name__,
        (cls,),
        {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "device": property(lambda self: _caller().device),
            "to": to,
            "float": lambda self: to(self, torch.float32),
            "half": lambda self: to(self, torch.float16),
            "bfloat16": lambda self: to(self, torch.bfloat16),
            "cpu": lambda self: self,
            "cuda": lambda self, device=None: self,
        },
    )


def _convert(model: Any, dtype: Any) -> None:
    """Convert a request's own hollow component; the modules in it were shared until now."""
    for name in ("_modules", "_parameters", "_buffers"):
        model.__dict__[name] = copy.deepcopy(model.__dict__[name])
    _cast(model, dtype)
    for module in model.modules():
        remote = module.__dict__.get("forward")
        if isinstance(remote, _Remote):
            mine = module.__dict__["forward"] = copy.copy(remote)
            mine.owner = model
    casts = (*casts_of(model), str(dtype).removeprefix("torch."))
    model.__dict__["_st2i_casts"] = casts


def _from_config(cls: Any, folder: Path) -> Any:
    if hasattr(cls, "load_config"):  # Diffusers
        return cls.from_config(cls.load_config(str(folder)))
    config = cls.config_class.from_pretrained(str(folder))  # transformers
    return cls._from_config(config) if hasattr(cls, "_from_config") else cls(config)


def _is_real(model: Any) -> bool:
    return any(not parameter.is_meta for parameter in model.parameters())


def _cast(model: Any, dtype: Any) -> None:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _read_buffers(model: Any, with_weights: Callable[[], Path], dtype: Any) -> None:
    """Buffers that lie in the folder's files get their values from there, as the libraries do it."""
    from safetensors import safe_open

    parameters = {name for name, _ in model.named_parameters()}
    wanted = set(model.state_dict()) - parameters
    if not wanted:
        return
    for file in sorted(with_weights().glob("*.safetensors")):
        with safe_open(str(file), "pt") as tensors:
            for name in wanted & set(tensors.keys()):
                value = tensors.get_tensor(name)
                path, _, own = name.rpartition(".")
                value = value.to(dtype) if value.is_floating_point() else value
                model.get_submodule(path)._buffers[own] = value.clone()
