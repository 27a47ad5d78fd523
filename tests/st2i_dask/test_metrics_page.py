"""Where there is no page, or nothing to print it with."""

from __future__ import annotations

from types import SimpleNamespace

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


def test_labels_are_of_bounded_length_and_can_be_written():
    assert label("ann") == "ann"
    assert label("x\ud800y") == "x?y"
    assert len(label("ü" * 1000)) == 120
