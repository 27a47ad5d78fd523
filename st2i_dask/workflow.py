"""Workflows: orchestrator functions that compose ModelFns, parsed once into a DAG."""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import version as package_version
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import cloudpickle

from .columns import rows
from .dag import build
from .display import table_html
from .errors import ComposeError, ParameterError, RegistrationError
from .fingerprint import of_dag
from .fusion import fuse
from .parameters import Parameter, bind, declared
from .plan import pack
from .references import Reference, references
from .request import Composed, Request, build_request
from .tenants import DEFAULT_TENANT, check_tenant
from .trace import InvocationNode, Trace, current_trace, tracing

if TYPE_CHECKING:
    from distributed import Client, Future

    from .model_fn import ModelFn

# Combinations of static parameters kept per workflow.
_COMPOSED_LIMIT = 64


class Workflow:
    """A registered workflow. Make one with `@st2i.workflow`; submit with `submit` and `map`."""

    def __init__(self, function: Callable[..., Any], name: str, version: str | None):
        self.function = function
        self.name = name
        self.description = (inspect.getdoc(function) or "").partition("\n")[0]
        self.parameters: tuple[Parameter, ...] = declared(function, name)
        self._version = version
        # With what the function's global names stood for: a re-run notebook cell changes them.
        self._composed: OrderedDict[tuple[Any, ...], tuple[Composed, list[Reference]]] = (
            OrderedDict()
        )
        self._lock = threading.Lock()
        functools.update_wrapper(self, function)

    def __repr__(self) -> str:
        takes = (p.name if p.required else f"{p.name}={p.default!r}" for p in self.parameters)
        return f"<workflow {self.name}({', '.join(takes)})>"

    def _repr_html_(self) -> str:
        rows = [(p.name, p.describe()) for p in self.parameters]
        return table_html(self.title, ("parameter", "type, default, rule"), rows)

    @property
    def title(self) -> str:
        """Its name and, if there is one, its description."""
        return f"{self.name}: {self.description}" if self.description else self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Inside another workflow: composed in place. Elsewhere a workflow is submitted."""
        if current_trace() is None:
            raise ComposeError(
                f"workflow {self.name!r} was called outside a workflow; run it with "
                f"{self.name}.submit(client, ...)"
            )
        try:
            inspect.signature(self.function).bind(*args, **kwargs)
        except TypeError as error:
            raise ComposeError(
                f"workflow {self.name!r} inside another: {error}; it takes: "
                f"{', '.join(p.name for p in self.parameters)}"
            ) from None
        return self.function(*args, **kwargs)

    def bind(self, **values: Any) -> tuple[Composed, dict[str, Any], dict[str, Any]]:
        """Check all parameters: (composed DAG, data parameters, all parameters by name)."""
        static, data = bind(self.parameters, values, self.name)
        everything = {p.name: {**static, **data}[p.name] for p in self.parameters}
        return self.compose(static), data, everything

    def compose(self, static: Mapping[str, Any]) -> Composed:
        """The composed DAG for these static parameters, cached. ComposeError if it is wrong."""
        key = tuple((name, type(value), _hashable(value)) for name, value in static.items())
        with self._lock:
            known = self._composed.get(key)
            if known is not None and all(r.holds() for r in known[1]):
                self._composed.move_to_end(key)
                return known[0]
        # Looked up first: what changes while composing is composed again next time.
        used = references(self.function)
        composed = self._compose(static)
        with self._lock:
            self._composed[key] = composed, used
            while len(self._composed) > _COMPOSED_LIMIT:
                self._composed.popitem(last=False)
        return composed

    def _compose(self, static: Mapping[str, Any]) -> Composed:
        with tracing(Trace(self.name)) as trace:
            arguments = {
                parameter.name: static[parameter.name]
                if parameter.name in static
                else trace.parameter(parameter.name)
                for parameter in self.parameters
            }
            result = self.function(**arguments)
        dag = build(trace, result)
        program = fuse(dag)
        packed = pack(dag, program)
        invocations = [node for node in dag.nodes if isinstance(node, InvocationNode)]
        return Composed(
            self.name,
            self._version or of_dag(dag),
            program,
            packed,
            tuple(_label(node.model_fn) for node in invocations),
            tuple(node.model_fn.name for node in invocations),
            tuple(node.model_fn.model_key for node in invocations),
            _bucket(static),
        )

    def request(self, tenant: str = DEFAULT_TENANT, **values: Any) -> Request:
        """The Dask graph of one request; everything is checked, nothing is sent."""
        check_tenant(tenant)
        composed, data, everything = self.bind(**values)
        about: dict[str, Any] = {
            "workflow": self.name,
            "version": composed.version,
            "prompt": everything.get("prompt"),
            "seed": everything.get("seed"),
            "steps": everything.get("num_steps"),
            "size": None,  # known when the image is
            "tenant": tenant,
            "parameters": {
                n: told
                for n, v in everything.items()
                if isinstance(told := getattr(v, "about", v), _PLAIN)
            },
            "software": f"st2i_dask {_version()}",
        }
        return build_request(
            composed, data, tenant=tenant, about={k: v for k, v in about.items() if v is not None}
        )

    def submit(
        self,
        client: Client,
        *,
        tenant: str = DEFAULT_TENANT,
        previews: int = 0,
        **parameters: Any,
    ) -> Future:
        """Submit one request for a tenant; returns at once with a Dask future of the result.

        In the event loop of an asynchronous client: `future = await workflow.submit(client, ...)`, and so
        with `map`. What is wrong with the request is raised before there is anything to await.

        previews: so many pictures of what it has between its steps, evenly spread, for whoever watches
            it (`st2i.progress`, `st2i.updates`). Each costs a run of the decoder; the result stays the
            same. ComposeError for a workflow that repeats no step.
        """
        from .submission import submit_request

        if not previews:
            return submit_request(client, self.request(tenant, **parameters))
        from .previews import preview_tasks, previewed

        shown = previewed(self, previews, **parameters)
        request = shown.request(tenant, **parameters)
        return submit_request(client, request, preview_tasks(shown, request, **parameters))

    def map(
        self,
        client: Client,
        prompts: Iterable[str],
        *,
        tenant: str = DEFAULT_TENANT,
        seed: int | Iterable[int] | None = None,
        each: Mapping[str, Iterable[Any]] | None = None,
        **parameters: Any,
    ) -> list[Future]:
        """Submit one request per prompt, in one message. All are checked before any is submitted.

        seed: one for all, or one per prompt; None: the workflow's own default.
        each: of other parameters one value per prompt, by name: `each={"control_image": edges}`.

        ParameterError for fewer values than prompts, and for more, of which only one more is taken.
        """
        from .submission import submit_requests

        try:
            each_request = rows(prompts, seed, each, parameters)
        except ParameterError as error:
            raise ParameterError(f"workflow {self.name!r}: {error}") from None
        return submit_requests(client, [self.request(tenant, **row) for row in each_request])


@cache
def _version() -> str:
    """Of this package. Reading it takes longer than all the rest of a request."""
    return package_version("st2i_dask")


# What metadata can say of a parameter; of others, what their `about` says.
_PLAIN = (str, int, float, bool)


# Static parameters that say how many invocations there are, not what one costs.
_NO_COST = frozenset({"num_steps", "spread"})


def _bucket(static: Mapping[str, Any]) -> str:
    """What decides the cost of one invocation: sizes and the other static parameters, not steps.

    A scale that steers the composition turns something on or off and makes the rest no dearer: of floats
    only 0 and 1, which turn things off, are told apart from the others.
    """
    rest = {name: value for name, value in sorted(static.items()) if name not in _NO_COST}
    width, height = rest.pop("width", None), rest.pop("height", None)
    size = [f"{width}x{height}"] if width and height else []
    deciding = {
        name: value
        for name, value in rest.items()
        if not isinstance(value, float) or value in (0.0, 1.0)
    }
    return " ".join(size + [f"{name}={value}" for name, value in deciding.items()])


def _hashable(value: Any) -> Any:
    """The value itself, or its pickled bytes: a representation may leave things out."""
    try:
        hash(value)
    except TypeError:
        return cloudpickle.dumps(value)
    return value


def _label(model_fn: ModelFn) -> str:
    """Name and model, as Dask's key_split keeps them: no hyphen, first a letter."""
    path = model_fn.model_path
    name = f"{model_fn.name}@{PurePath(path).name}" if path else model_fn.name
    label = "".join(c if c.isalnum() or c in "._@" else "_" for c in name)
    return label if label[:1].isalpha() else f"m{label}"


class Registry:
    """Workflows of this process by name."""

    def __init__(self) -> None:
        self._workflows: dict[str, Workflow] = {}

    def add(self, workflow: Workflow, replace: bool) -> None:
        known = self._workflows.get(workflow.name)
        if known is not None and not replace and not _same_definition(known, workflow):
            raise RegistrationError(
                f"a workflow named {workflow.name!r} is already registered (defined in "
                f"{known.function.__code__.co_filename}); choose another name with "
                "@st2i.workflow(name=...), or replace it with replace=True"
            )
        self._workflows[workflow.name] = workflow

    def __iter__(self) -> Any:
        return iter(sorted(self._workflows.values(), key=lambda w: w.name))

    def get(self, name: str) -> Workflow | None:
        return self._workflows.get(name)


#: Workflows registered in this process.
workflows = Registry()


def _same_definition(a: Workflow, b: Workflow) -> bool:
    """The same lines evaluated again (a re-run notebook cell, a reloaded module)."""
    one, other = a.function, b.function
    if _interactive(one, other):
        return one.__qualname__ == other.__qualname__
    return (
        one.__code__ == other.__code__
        and one.__code__.co_filename == other.__code__.co_filename
        and repr(one.__defaults__) == repr(other.__defaults__)
        and repr(one.__kwdefaults__) == repr(other.__kwdefaults__)
        and not one.__closure__
    )


def _interactive(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Whether both come from notebook cells or a prompt: defining a name again is work there."""
    files = [function.__code__.co_filename for function in (one, other)]
    return (
        one.__module__ == other.__module__ == "__main__"
        and not any(map(os.path.exists, files))
        and (files[0] != files[1] or files[0] == "<stdin>")
    )


def workflow(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    version: str | None = None,
    replace: bool = False,
) -> Any:
    """Register an orchestrator function as a workflow.

    The function runs once per combination of static parameters, symbolically: it calls ModelFns and
    glue and returns one value.

    name: unique in this process; the function's name by default.
    version: goes into every image's metadata; by default a digest of what is composed.
    replace: take the name over from another workflow.
    """
    if function is None:
        return functools.partial(workflow, name=name, version=version, replace=replace)
    made = Workflow(function, name or function.__name__, version)
    workflows.add(made, replace)
    return made
