"""The workflow of a whole pipeline: its parameters are those of the pipeline's `__call__`."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import secrets
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version as package_version
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import dask
from dask._task_spec import Task

from ..async_client import awaitable
from ..columns import rows
from ..display import table_html
from ..errors import ParameterError
from ..outputs import is_tensor
from ..parameters import SEED_RANGE
from ..quoting import quoted
from ..submission import admit
from ..tenants import DEFAULT_TENANT, check_tenant
from ..trace_context import current_context
from .orchestration import ORCHESTRATION, orchestrate
from .pipeline_request import PipelineRequest
from .shell import PipelineSource

if TYPE_CHECKING:
    from distributed import Client, Future

OUTPUT_TYPES = ("pil", "pt", "np", "latent")
_PLAIN = (str, int, float, bool)


class Made(NamedTuple):
    """A checked request. data: a pickled PipelineRequest."""

    tenant: str
    data: bytes


class PipelineWorkflow:
    """Any Diffusers pipeline as a workflow. Make one with `st2i.from_pipeline`."""

    def __init__(self, source: PipelineSource, name: str):
        cls = source.load_class()
        self.name = name
        self.source = source
        self.description = (inspect.getdoc(cls) or "").partition("\n")[0]
        parameters = list(inspect.signature(cls.__call__).parameters.values())[1:]
        #: Of the pipeline's `__call__`; `seed` stands for its generator.
        self.parameters = {
            p.name: p for p in parameters if p.name not in ("generator", "return_dict")
        }
        #: Names what is run, in every image's metadata.
        self.version = hashlib.sha256(repr(source).encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"<workflow {self.name}, a {self.source.pipeline_class[1]}>"

    def _repr_html_(self) -> str:
        seed = ("seed", "int, default 0")
        rows = [seed, *((name, _described(p)) for name, p in self.parameters.items())]
        title = f"{self.name}: a {self.source.pipeline_class[1]}"
        return table_html(title, ("parameter", "type, default"), rows)

    def submit(
        self, client: Client, *, tenant: str = DEFAULT_TENANT, seed: int = 0, **arguments: Any
    ) -> Future:
        """Submit one request for a tenant; returns at once with a Dask future of the result; in the
        event loop of an asynchronous client with an awaitable of it.

        seed: of the CPU generator that the pipeline gets, and of torch's global one. arguments: of the
        pipeline's `__call__`. The result is the `images` that it gives: a GeneratedImage, or with
        output_type "pt", "np" or "latent" a tensor or array without the batch dimension; of several
        images a list, or a batch.
        """
        return _submit_one(client, self.name, self.request(tenant, seed, **arguments))

    def map(
        self,
        client: Client,
        prompts: Iterable[str],
        *,
        tenant: str = DEFAULT_TENANT,
        seed: int | Iterable[int] | None = None,
        each: Mapping[str, Iterable[Any]] | None = None,
        **arguments: Any,
    ) -> list[Future]:
        """Submit one request per prompt. All are checked before any is submitted.

        seed: one for all, or one per prompt; None: 0. each: of other arguments one value per prompt, by
        name. ParameterError for fewer values than prompts, and for more, of which only one more is taken.
        """
        try:
            each_request = rows(prompts, seed, each, arguments)
        except ParameterError as error:
            raise ParameterError(f"workflow {self.name!r}: {error}") from None
        return _submit(client, self.name, [self.request(tenant, **row) for row in each_request])

    def request(self, tenant: str = DEFAULT_TENANT, seed: int = 0, **arguments: Any) -> Made:
        """A checked request as it travels; nothing is sent. ParameterError names what is wrong."""
        check_tenant(tenant)
        try:
            self._check(seed, arguments)
        except ParameterError as error:
            raise ParameterError(f"workflow {self.name!r}: {error}") from None
        plain = {n: v for n, v in arguments.items() if isinstance(v, _PLAIN)}
        about = {
            "workflow": self.name,
            "version": self.version,
            "prompt": plain.get("prompt"),
            "seed": seed,
            "steps": plain.get("num_inference_steps"),
            "size": None,  # known when the image is
            "tenant": tenant,
            "parameters": {**plain, "seed": seed},
            "software": f"st2i_dask {package_version('st2i_dask')}",
        }
        about = {name: value for name, value in about.items() if value is not None}
        made = PipelineRequest(self.name, tenant, self.source, seed, arguments, about)
        try:
            return Made(tenant, cloudpickle.dumps(made, protocol=5))
        except Exception as error:
            raise ParameterError(
                f"workflow {self.name!r}: the parameters cannot be sent to workers: {error}; pass "
                "plain values, images, arrays and tensors"
            ) from error

    def _check(self, seed: Any, arguments: Mapping[str, Any]) -> None:
        if type(seed) is not int:
            raise ParameterError(f"seed={quoted(seed)} has type {type(seed).__name__}, wanted int")
        SEED_RANGE.check("seed", seed)
        if "generator" in arguments:
            raise ParameterError("generator stays with the request; give seed, a whole number")
        known = ["seed", *self.parameters]
        for name, value in arguments.items():
            if name == "previews" and name not in self.parameters:
                raise ParameterError(
                    "a pipeline of from_pipeline is one whole and shows no previews; leave previews out, "
                    "or where st2i.load knows the family, submit(client, ..., previews=2) of that"
                )
            if name not in self.parameters:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise ParameterError(
                    f"no parameter {quoted(name)}; {hint}it takes: {', '.join(known)}"
                )
            _check_value(name, value)
        for name, parameter in self.parameters.items():
            plain = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if plain and parameter.default is parameter.empty and name not in arguments:
                raise ParameterError(f"parameter {name!r} is missing; it takes: {', '.join(known)}")
        output_type = arguments.get("output_type", "pil")
        if output_type not in OUTPUT_TYPES:
            raise ParameterError(
                f"output_type={quoted(output_type)} is not one of {', '.join(OUTPUT_TYPES)}"
            )


@awaitable
def _submit_one(client: Client, name: str, request: Made) -> Future:
    return _submit(client, name, [request])[0]


@awaitable
def _submit(client: Client, name: str, requests: Sequence[Made]) -> list[Future]:
    admit(client, (request.tenant for request in requests))
    label = "".join(c if c.isalnum() or c in "._@" else "_" for c in f"pipeline@{name}")
    tasks: dict[str, Task] = {}
    annotations: dict[str, dict[str, Any]] = {}
    context = {"trace": found} if (found := current_context()) else {}
    for tenant, data in requests:
        key = f"{label}-{secrets.token_hex(8)}"
        tasks[key] = Task(key, orchestrate, key, data)
        annotations[key] = {"tenant": tenant, "workflow": name, **context}
    # The scheduler calls an annotation's value with each key.
    with dask.annotate(**{ORCHESTRATION: annotations.get}):
        futures: list[Future] = client.get(tasks, list(tasks), sync=False)
    return futures


def _described(parameter: inspect.Parameter) -> str:
    kind = inspect.formatannotation(parameter.annotation)
    parts = [] if parameter.annotation is parameter.empty else [kind]
    if parameter.default is not parameter.empty:
        parts.append(f"default {parameter.default!r}")
    return ", ".join(parts)


def _check_value(name: str, value: Any) -> None:
    if name.startswith("callback") and value is not None and not name.endswith("inputs"):
        raise ParameterError(
            f"{name} is a function of this process, and the request runs on workers; leave it out"
        )
    for item in _leaves(value):
        if callable(item):
            raise ParameterError(
                f"{name} holds {item!r}, which is code; a pipeline takes values here: numbers, "
                "strings, images, arrays, tensors"
            )
        if is_tensor(item) and item.device.type != "cpu":
            raise ParameterError(
                f"{name} is a tensor on {item.device}; pass it on the CPU: {name}.cpu()"
            )
        if type(item).__name__ == "Generator" and type(item).__module__.startswith("torch"):
            raise ParameterError(f"{name} is a generator; give seed, a whole number")


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
