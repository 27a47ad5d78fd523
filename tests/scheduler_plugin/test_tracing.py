"""OpenTelemetry spans of requests on live clusters, read with the SDK's own exporters."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import dask.config
import pytest
from distributed import Client, LocalCluster
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import st2i_dask as st2i
from scheduler_plugin import tracing
from st2i_dask.config import DEFAULTS
from st2i_dask.trace_context import current_context

from ..st2i_dask.odd_pipelines import save
from ..st2i_dask.test_from_pipeline import CASES
from .live import chain, fan, hooks, idle, plugin_of, rest, serving, until

ON = {"st2i.traces.enabled": True}
_from_environment = tracing._from_environment


@pytest.fixture(scope="module")
def provider():
    provider = TracerProvider(shutdown_on_exit=False)
    provider.exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(provider.exporter))
    return provider


@pytest.fixture(scope="module")
def client(provider):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "_from_environment", lambda: provider)
        patch.setattr(provider, "shutdown", lambda: None)
        with serving(2, config=ON) as client:
            yield client


@pytest.fixture
def spans(client, provider):
    """Ended spans, after all that runs has ended."""

    def ended():
        traces = plugin_of(client).traces
        until(lambda: idle(client) and not traces._runs and not traces._requests)
        return provider.exporter.get_finished_spans()

    provider.exporter.clear()
    return ended


@pytest.fixture
def environment(monkeypatch):
    """OTEL_* hold, and nothing else."""
    monkeypatch.setattr(tracing, "_from_environment", _from_environment)
    for variable in ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


def by_name(spans, prefix):
    return [span for span in spans if span.name.startswith(prefix)]


def test_a_request_is_a_span_with_one_per_run_in_it(client, spans):
    before = time.time_ns()
    hooks["x"] = lambda value: time.sleep(0.05)
    assert fan.submit(client, value=0.0, label="x", width=2, tenant="ann").result() == 6.0
    after = time.time_ns()
    found = spans()
    (request,) = by_name(found, "request")
    runs = by_name(found, "run")
    assert request.name == "request live-fan"
    assert request.parent is None
    assert request.attributes["st2i.tenant"] == "ann"
    assert request.attributes["st2i.outcome"] == "done"
    assert request.attributes["st2i.invocations"] == 5
    assert sum(run.attributes["st2i.steps"] for run in runs) == 5
    slack = 20_000_000  # between clocks, ns
    assert before - slack <= request.start_time <= request.end_time <= after + slack
    workers = set(client.scheduler_info(n_workers=-1)["workers"])
    total = 0.0
    for run in runs:
        assert run.parent.span_id == request.context.span_id
        assert run.context.trace_id == request.context.trace_id
        assert request.start_time <= run.start_time < run.end_time <= request.end_time
        assert run.attributes["st2i.worker"] in workers
        assert run.attributes["st2i.outcome"] == "done"
        assert run.attributes["st2i.fn"] == "Step"
        assert run.attributes["st2i.wait_seconds"] >= 0
        seconds = run.attributes["st2i.compute_seconds"]
        assert (
            0.05 * run.attributes["st2i.steps"]
            <= seconds
            <= (run.end_time - run.start_time) / 1e9 + 0.02
        )
        total += seconds
    assert request.attributes["st2i.compute_seconds"] == pytest.approx(total)


def test_it_lies_in_the_clients_span(client, provider, spans):
    tracer = provider.get_tracer("client")
    with tracer.start_as_current_span("from a notebook") as outer:
        future = chain.submit(client, value=0.0, tenant="bob")
    alone = chain.submit(client, value=0.0, tenant="bob")
    client.gather([future, alone])
    requests = {span.attributes["st2i.request"]: span for span in by_name(spans(), "request")}
    inside = requests[future.key.rpartition("-")[2]]
    assert inside.parent.span_id == outer.get_span_context().span_id
    assert inside.parent.is_remote
    assert inside.context.trace_id == outer.get_span_context().trace_id
    assert requests[alone.key.rpartition("-")[2]].parent is None
    assert current_context() == {}


@pytest.mark.parametrize(
    "trace", ["x", {"traceparent": 3}, {"traceparent": "00-zz"}, {"a": "b" * 10_000}]
)
def test_whatever_a_client_sends_for_a_context_is_no_harm(trace):
    assert tracing._extracted(trace) == {}


def test_failures_and_cancellations_are_told(client, spans):
    def fail(value):
        raise RuntimeError("as the test wants")

    hooks["bad"] = fail
    failing = chain.submit(client, value=0.0, label="bad")
    with pytest.raises(RuntimeError):
        failing.result()
    failing.cancel()
    hooks["slow"] = lambda value: time.sleep(0.2)
    slow = chain.submit(client, value=0.0, label="slow")
    until(lambda: plugin_of(client).policy._fleet.running)
    slow.cancel()
    del slow, failing
    found = spans()
    outcomes = sorted((span.name, span.attributes["st2i.outcome"]) for span in found)
    assert outcomes == [
        ("request live-chain", "cancelled"),
        ("request live-chain", "failed"),
        ("run Step", "cancelled"),
        ("run Step", "failed"),
    ]
    for span in found:
        failed = span.attributes["st2i.outcome"] == "failed"
        assert (span.status.status_code is StatusCode.ERROR) == failed
        if span.name == "run Step" and not failed:
            assert span.end_time - span.start_time >= 150_000_000, "until its executor was free"


def test_a_lost_run_and_the_one_in_its_place(client, spans):
    hooks["once"] = lambda value: (hooks.pop("once", None), time.sleep(0.5))
    future = chain.submit(client, value=0.0, label="once", steps=1)
    until(lambda: "once" not in hooks)
    (running,) = plugin_of(client).policy._fleet.running
    worker = next(w for w in client.cluster.workers.values() if w.address == running)
    client.sync(worker.close, nanny=False)
    assert future.result() == 1.0
    runs = by_name(spans(), "run")
    assert [run.attributes["st2i.outcome"] for run in runs] == ["lost", "done"]
    assert runs[0].attributes["st2i.worker"] != runs[1].attributes["st2i.worker"]
    assert runs[0].parent.span_id == runs[1].parent.span_id


@pytest.mark.slow
def test_a_pipelines_calls_lie_in_one_span(client, provider, spans, tmp_path):
    workflow = st2i.from_pipeline(save("FluxPipeline", tmp_path / "flux"))
    with provider.get_tracer("client").start_as_current_span("outside") as outer:
        future = workflow.submit(client, tenant="ann", **CASES["FluxPipeline"])
    future.result(timeout=60)
    found = spans()
    (pipeline,) = by_name(found, "pipeline")
    assert pipeline.parent.span_id == outer.get_span_context().span_id
    assert pipeline.attributes["st2i.tenant"] == "ann"
    assert pipeline.attributes["st2i.outcome"] == "done"
    assert pipeline.attributes["st2i.request"] == future.key
    calls = by_name(found, "request")
    assert len(calls) > 2
    for call in calls:
        assert call.parent.span_id == pipeline.context.span_id
        assert pipeline.start_time <= call.start_time <= call.end_time <= pipeline.end_time
    assert not plugin_of(client).traces._owners


@contextmanager
def collector():
    """An OTLP receiver; its port, and the spans it gets as (service, name, attributes)."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers["Content-Encoding"] == "gzip":
                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = {a.key: a.value.string_value for a in resource.resource.attributes}
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        attributes = {a.key: a.value.string_value for a in span.attributes}
                        got.append((service["service.name"], span.name, attributes))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    got = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_port, got
        finally:
            server.shutdown()
            thread.join()


def test_spans_go_where_the_environment_says(environment):
    with collector() as (port, got):
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        environment.setenv("OTEL_SERVICE_NAME", "my-images")
        with serving(1, config=ON) as client:
            assert chain.submit(client, value=0.0, tenant="zoe").result() == 3.0
            rest(client)
    assert {service for service, _, _ in got} == {"my-images"}
    assert {name for _, name, _ in got} == {"request live-chain", "run Step"}
    assert {attributes["st2i.tenant"] for _, _, attributes in got} == {"zoe"}


def test_an_exporter_that_is_not_installed_is_refused(environment):
    environment.setenv("OTEL_TRACES_EXPORTER", "pigeon")
    with pytest.raises(st2i.AttachError, match=r"'pigeon' is not installed .* which has console"):
        tracing.Provider()


def test_a_client_that_attaches_hears_what_is_missing(environment):
    environment.setenv("OTEL_TRACES_EXPORTER", "pigeon")
    with (
        dask.config.set(ON),
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        with pytest.raises(st2i.AttachError, match="'pigeon' is not installed"):
            st2i.attach(client)
        environment.setenv("OTEL_TRACES_EXPORTER", "none")
        st2i.attach(client)
        assert chain.submit(client, value=0.0).result() == 3.0


def test_without_the_extra_the_cure_is_said():
    code = "import sys; sys.modules['opentelemetry.sdk'] = None; import scheduler_plugin.tracing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "is missing on the scheduler; pip install 'st2i_dask[otel]'" in done.stderr


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "OTLPSpanExporter"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, None),
        ({"OTEL_TRACES_EXPORTER": "none"}, ""),
    ],
)
def test_otlp_is_the_default(environment, variables, name):
    for variable, value in variables.items():
        environment.setenv(variable, value)
    if name is None:
        with pytest.raises(st2i.AttachError, match="otlp_proto_grpc"):
            tracing.Provider()
        return
    provider = tracing.Provider()
    processors = provider._provider._active_span_processor._span_processors
    provider.close()
    assert [type(p.span_exporter).__name__ for p in processors] == ([name] if name else [])


def test_off_nothing_of_it_is_imported():
    code = (
        "import sys, scheduler_plugin.plugin, worker_plugin.plugin, st2i_dask.submission as s\n"
        "from st2i_dask.trace_context import current_context\n"
        "assert current_context() == {}\n"
        "print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"


def test_it_is_off_unless_configured():
    assert DEFAULTS["traces"] == {"enabled": False}
    with serving(1, config={"st2i.traces.enabled": False}) as client:
        assert chain.submit(client, value=0.0).result() == 3.0
        assert plugin_of(client).traces is None
