"""OpenTelemetry spans, made on the scheduler from what the journal tells: workers need nothing for it.

A span per request, from submit to result, within the caller's span if its client sent one along; in it
one per run, from dispatch to end, with the worker's seconds as attributes. A pipeline's request has a span
too, in which the requests that its component calls are lie. Times are the scheduler's wall clock.

Only imported where the configuration says so (`st2i.traces.enabled`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points, version
from os import environ
from typing import Any

from st2i_dask.errors import AttachError
from st2i_dask.pipelines.orchestration import ORCHESTRATION

try:
    from opentelemetry import context as contexts
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise AttachError(
        f"st2i.traces.enabled is true, and {error.name} is missing on the scheduler; "
        "pip install 'st2i_dask[otel]', or set it to false"
    ) from error

from .journal import RequestRecord, RunRecord, Watcher

_ERROR = trace.StatusCode.ERROR


class RequestTraces(Watcher):
    """Watches a journal. Event loop only.

    annotation_of: what its client has written on a request, by the request's name. owner_of: the key of
    the pipeline's task that a request is a component call of. AttachError: see Provider.
    """

    def __init__(
        self,
        annotation_of: Callable[[str], Mapping[str, Any]],
        owner_of: Callable[[str], str | None],
    ):
        self._provider = Provider()
        self._tracer = self._provider.get_tracer("st2i_dask", version("st2i_dask"))
        self._annotation_of = annotation_of
        self._owner_of = owner_of
        self._offset = 0.0  # of the wall clock to the journal's, seconds
        self._requests: dict[str, Any] = {}  # open spans by request
        self._runs: dict[RunRecord, Any] = {}
        self._owners: dict[str, Any] = {}  # by key of a pipeline's task

    # -- of pipelines ------------------------------------------------------------------------------

    def tasks_submitted(self, tasks: Iterable[Any]) -> None:
        """Dask's states of any tasks: those of pipelines get a span."""
        for ts in tasks:
            about = (ts.annotations or {}).get(ORCHESTRATION)
            if isinstance(about, dict):  # written by a client
                workflow = str(about.get("workflow"))[:200]
                attributes = {
                    "st2i.request": str(ts.key),
                    "st2i.tenant": str(about.get("tenant"))[:200],
                    "st2i.workflow": workflow,
                }
                self._owners[ts.key] = self._tracer.start_span(
                    f"pipeline {workflow}", _extracted(about.get("trace")), attributes=attributes
                )

    def task_over(self, key: Any, state: str) -> None:
        """Any task is in memory, erred or forgotten."""
        span = self._owners.pop(key, None)
        if span is not None:
            outcome = {"memory": "done", "erred": "failed"}.get(state, "cancelled")
            _end(span, outcome, None)

    # -- Watcher -----------------------------------------------------------------------------------

    def submitted(self, request: RequestRecord) -> None:
        self._offset = time.time() - time.monotonic()
        owner = self._owners.get(self._owner_of(request.name) or "")
        within = (
            trace.set_span_in_context(owner, contexts.Context())
            if owner is not None
            else _extracted(self._annotation_of(request.name).get("trace"))
        )
        self._requests[request.name] = self._tracer.start_span(
            f"request {request.outline.workflow}",
            within,
            start_time=self._ns(request.submitted),
            attributes={
                "st2i.request": request.name,
                "st2i.tenant": request.tenant,
                "st2i.workflow": request.outline.workflow,
                "st2i.invocations": len(request.outline),
                "st2i.stimulus_id": request.stimulus_id,
            },
        )

    def dispatched(self, run: RunRecord) -> None:
        request = self._requests.get(run.request.name)
        if request is None:
            return  # over: a result of it is made again
        step = run.step
        self._runs[run] = self._tracer.start_span(
            f"run {step.fn}",
            trace.set_span_in_context(request, contexts.Context()),
            start_time=self._ns(run.started),
            attributes={
                "st2i.request": run.request.name,
                "st2i.tenant": run.request.tenant,
                "st2i.key": run.key,
                "st2i.position": run.position,
                "st2i.fn": step.fn,
                "st2i.model": step.model,
                "st2i.bucket": step.bucket,
                "st2i.worker": run.executor,
                "st2i.members": list(run.members),
                "st2i.wait_seconds": run.started - run.ready,
                "st2i.stimulus_id": run.stimulus_id,
            },
        )

    def yielding(self, run: RunRecord) -> None:
        if run in self._runs:
            self._runs[run].add_event("asked to hand back")

    def run_over(self, run: RunRecord) -> None:
        span = self._runs.pop(run, None)
        if span is None:
            return
        span.set_attribute("st2i.steps", run.steps)
        if run.used is not None:
            span.set_attribute("st2i.load_seconds", run.used.load_s)
            span.set_attribute("st2i.compute_seconds", run.used.compute_s)
            span.set_attribute("st2i.transfer_seconds", run.used.transfer_s)
        assert run.over is not None
        _end(span, run.outcome, self._ns(run.over))

    def request_over(self, request: RequestRecord) -> None:
        span = self._requests.pop(request.name, None)
        if span is not None:
            assert request.over is not None
            span.set_attribute("st2i.load_seconds", request.load_s)
            span.set_attribute("st2i.compute_seconds", request.compute_s)
            span.set_attribute("st2i.transfer_seconds", request.transfer_s)
            _end(span, request.outcome, self._ns(request.over))

    def close(self) -> None:
        """End what is open: the scheduler stops serving."""
        for spans in (self._runs, self._requests, self._owners):
            for span in spans.values():
                _end(span, "cut off", None)
            spans.clear()  # type: ignore[attr-defined]
        self._provider.close()

    def _ns(self, now: float) -> int:
        return int((now + self._offset) * 1e9)


def _end(span: Any, outcome: str | None, at: int | None) -> None:
    span.set_attribute("st2i.outcome", str(outcome))
    if outcome in ("failed", "lost"):
        span.set_status(_ERROR)
    span.end(at)


def _extracted(carrier: Any) -> Any:
    """The context that a client has sent; an empty one for whatever is none."""
    if isinstance(carrier, dict) and all(
        type(v) is str and len(v) < 1000 for v in carrier.values()
    ):
        return TraceContextTextMapPropagator().extract(carrier, contexts.Context())
    return contexts.Context()


class Provider:
    """Where spans go: to the process's own provider, if it has one; else as OTEL_* of the environment
    say. AttachError when an exporter that they name is not installed."""

    def __init__(self) -> None:
        found = trace.get_tracer_provider()
        self._is_ours = isinstance(found, trace.ProxyTracerProvider)
        self._provider: Any = _from_environment() if self._is_ours else found

    def get_tracer(self, name: str, version: str) -> Any:
        return self._provider.get_tracer(name, version)

    def close(self) -> None:
        """Send what is left, and end the thread that sends; nothing is done to a provider of others."""
        if self._is_ours:
            self._provider.shutdown()


def _from_environment() -> TracerProvider:
    resource = Resource.create({"service.name": environ.get("OTEL_SERVICE_NAME", "st2i")})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for name in environ.get("OTEL_TRACES_EXPORTER", "otlp").split(","):
        if name.strip() not in ("", "none"):
            provider.add_span_processor(BatchSpanProcessor(_exporter(name.strip())))
    return provider


def _exporter(name: str) -> Any:
    if name == "otlp":
        variables = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
        protocol = next((environ[v] for v in variables if v in environ), "http/protobuf")
        name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    known = {point.name: point for point in entry_points(group="opentelemetry_traces_exporter")}
    if name not in known:
        raise AttachError(
            f"traces: exporter {name!r} is not installed on the scheduler, which has "
            f"{', '.join(sorted(known)) or 'none'}; install its package (for otlp "
            "opentelemetry-exporter-otlp-proto-http or -grpc), or name another one in "
            "OTEL_TRACES_EXPORTER"
        )
    return known[name].load()()
