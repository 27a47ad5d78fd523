"""ModelFn: a stateless function around one model; the unit of loading, scaling and charging.

A subclass declares its inputs and outputs (`setup_io`), loads its components (`load_model`) and
runs them (`execute`), as in section 4 of the ServerlessT2I paper. The platform decides where and
when each of these happens.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from .errors import ComposeError
from .fingerprint import of_class
from .symbol import Outputs, Symbol
from .trace import current_trace

#: The most executors that one invocation may use at once.
GANG_LIMIT = 16


@dataclass(frozen=True)
class Input:
    name: str
    callback: bool = False
    optional: bool = False


class ModelFn:
    """One model as a function. Stateless: the same inputs always give the same outputs.

    model_path: a Diffusers folder, a hub id, or whatever `load_model` understands; it must mean the
        same on every worker.
    name: what dashboards show; the class name by default.
    options: JSON values that `load_model` reads from `self.options` (dtype, variant, ...).

    Instances with the same class, model path and options are one model to the platform: loaded once
    per worker, whatever number of workflows and tenants use it.
    """

    #: The most executors that one invocation can use at once, 1 to GANG_LIMIT: a class attribute, or a
    #: property of the options. It gets those that nothing else would take, often none beside its own.
    gang: int = 1

    def __init__(self, model_path: str | None = None, *, name: str | None = None, **options: Any):
        if isinstance(model_path, (Symbol, Outputs)):
            raise ComposeError(
                f"{type(self).__name__}(...) makes the function, it does not call it: write "
                f"{type(self).__name__}(model_path)(inputs...)"
            )
        self.model_path = None if model_path is None else str(model_path)
        self.name = name or type(self).__name__
        self.options = options
        self.inputs: dict[str, Input] = {}
        self.outputs: tuple[str, ...] = ()
        self.setup_io()
        if not self.outputs:
            raise ComposeError(
                f"ModelFn {self.name!r} declares no output; call self.add_output(...) in setup_io"
            )
        self._check_execute()
        self._check_gang()
        try:
            self._options_json: str = json.dumps(options, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise ComposeError(
                f"ModelFn {self.name!r}: options {options!r} cannot be carried to a worker "
                f"({error}); use plain strings, numbers, lists and dicts"
            ) from None

    # -- to override ---------------------------------------------------------------------------

    def setup_io(self) -> None:
        """Declare inputs and outputs with `add_input` and `add_output`."""
        raise ComposeError(f"{type(self).__name__} must define setup_io()")

    def load_model(self, model_path: str | None) -> Mapping[str, Any]:
        """The model's components by name, on the CPU. Runs once per worker, off the event loop."""
        return {}

    def execute(self, model_components: Mapping[str, Any], **inputs: Any) -> Mapping[str, Any]:
        """Outputs by name. Every declared input is passed; an optional one that is absent is None.

        Inputs are immutable: other invocations, also a later retry of this one, read the same
        objects. Runs under `torch.no_grad()` in the executor's thread.
        """
        raise ComposeError(f"{type(self).__name__} must define execute()")

    def soon(self) -> Sequence[ModelFn]:
        """Models that another invocation of the same request runs after this one, and that take long to
        load. The worker that runs this one may load them meanwhile."""
        return ()

    # -- declarations --------------------------------------------------------------------------

    @final
    def add_input(self, name: str, *, callback: bool = False, optional: bool = False) -> None:
        """Declare an input. `callback`: needed only midway through `execute`."""
        self._check_new(name)
        self.inputs[name] = Input(name, callback, optional)

    @final
    def add_output(self, name: str) -> None:
        """Declare an output; `execute` must return it."""
        self._check_new(name)
        self.outputs += (name,)

    def _check_execute(self) -> None:
        """ComposeError if `execute` cannot take the declared inputs."""
        parameters = inspect.signature(self.execute).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return
        known = [p.name for p in parameters][1:]  # the first one takes the components
        required = [p.name for p in parameters if p.default is p.empty][1:]
        unknown = [name for name in self.inputs if name not in known]
        undeclared = [name for name in required if name not in self.inputs]
        if unknown or undeclared:
            what = f"takes no {unknown[0]!r}" if unknown else f"wants {undeclared[0]!r}"
            raise ComposeError(
                f"ModelFn {self.name!r}: execute {what}; its parameters after the components must "
                f"be the declared inputs: {', '.join(self.inputs) or 'none'}"
            )

    def _check_gang(self) -> None:
        if type(self.gang) is not int or not 1 <= self.gang <= GANG_LIMIT:
            raise ComposeError(
                f"ModelFn {self.name!r}: gang is {self.gang!r}; give the most executors that one "
                f"invocation can use at once, a whole number from 1 to {GANG_LIMIT}"
            )

    def _check_new(self, name: str) -> None:
        if not isinstance(name, str) or not name.isidentifier():
            raise ComposeError(
                f"ModelFn {self.name!r}: {name!r} cannot name an input or output; "
                "use a Python identifier"
            )
        if name in self.inputs or name in self.outputs:
            raise ComposeError(f"ModelFn {self.name!r} declares {name!r} twice; keep one")

    # -- identity ------------------------------------------------------------------------------

    @cached_property
    def model_key(self) -> str:
        """Names the loaded model: class, code, path and options. Equal keys share one copy."""
        cls = type(self)
        where = f"{cls.__module__}.{cls.__qualname__}"
        return f"{where}|{of_class(cls, ModelFn)}|{self.model_path}|{self._options_json}"

    def __repr__(self) -> str:
        return f"{self.name}({self.model_path!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "model_key": self.model_key}

    # -- composing -----------------------------------------------------------------------------

    @final
    def __call__(self, *args: Any, **kwargs: Any) -> Symbol | Outputs:
        """Inside a workflow: one invocation, its outputs symbolic. Nothing runs here."""
        if "_options_json" not in self.__dict__:
            raise ComposeError(
                f"ModelFn {type(self).__name__} has an __init__ of its own that does not call "
                "super().__init__(model_path, **options); leave it out and read self.options"
            )
        trace = current_trace()
        if trace is None:
            raise ComposeError(
                f"ModelFn {self.name!r} was called outside a workflow; call it in a function "
                "decorated with @st2i.workflow"
            )
        self._check_gang()
        return trace.add_invocation(self, args, kwargs)
