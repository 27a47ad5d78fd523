"""Where there is no page, or nothing to print it with."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from weakref import ref

import pytest
from distributed.http.routing import RoutingApplication

from st2i_dask import metrics_page
from st2i_dask.metrics_page import MetricsPage, label


class Nothing:
    def collect(self):
        return []


def test_without_prometheus_client_nothing_is_touched(monkeypatch):
    monkeypatch.setattr(metrics_page, "find_spec", lambda name: None)
    page = MetricsPage(object(), Nothing())
    page.open()
    page.close()


def test_a_dask_without_the_page_is_said(caplog):
    page = MetricsPage(SimpleNamespace(http_application=RoutingApplication([])), Nothing())
    page.open()
    page.close()
    assert "no /metrics page" in caplog.text


def test_a_closed_page_lets_its_collector_go_at_once():
    """Not when the garbage collector comes: a worker's collector holds its arena."""
    pytest.importorskip("prometheus_client")
    from distributed.http.worker.prometheus.core import PrometheusHandler

    rule = SimpleNamespace(target=PrometheusHandler)
    router = SimpleNamespace(wildcard_router=SimpleNamespace(rules=[rule]))
    collector = Nothing()
    page, alive = MetricsPage(SimpleNamespace(http_application=router), collector), ref(collector)
    page.open()
    assert issubclass(rule.target, PrometheusHandler)
    assert rule.target is not PrometheusHandler
    del collector
    gc.disable()
    try:
        page.close()
        assert rule.target is PrometheusHandler
        assert alive() is None
    finally:
        gc.enable()


def test_labels_are_of_bounded_length_and_can_be_written():
    assert label("ann") == "ann"
    assert label("x\ud800y") == "x?y"
    assert len(label("ü" * 1000)) == 120
