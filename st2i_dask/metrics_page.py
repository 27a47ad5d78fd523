"""Figures of ours on the /metrics page that a Dask scheduler or worker serves already.

Dask's handlers print one registry per process, on every page of the process. Ours are collected per server,
and printed after it on the page of that server alone: several in one process neither clash nor mix.
For that the page's handler is replaced by one that extends it, and put back at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any, Protocol

logger = logging.getLogger(__name__)

#: Longest label value, characters.
LABEL_LENGTH = 120


class Collector(Protocol):
    """collect: prometheus_client's metric families, as they are now. Event loop only."""

    def collect(self) -> Any: ...


class MetricsPage:
    """The page of one server, from `open` to `close`. Event loop only."""

    def __init__(self, server: Any, collector: Collector):
        self._server = server
        #: None once it is closed. Handlers ask for it here: as classes they stay until the garbage
        #: collector comes, and with them would an arena.
        self.collector: Collector | None = collector
        self._replaced: list[tuple[Any, Any, Any]] = []  # rule, Dask's handler, ours

    def open(self) -> None:
        """Nothing happens where prometheus_client is missing: Dask serves no figures there either."""
        if find_spec("prometheus_client") is None:
            return
        for rule in self._server.http_application.wildcard_router.rules:
            plain = rule.target
            if isinstance(plain, type) and _is_metrics(plain):
                rule.target = _extended(plain, self)
                self._replaced.append((rule, plain, rule.target))
        if not self._replaced:
            logger.warning("this Dask has no /metrics page that is known; no figures there")

    def close(self) -> None:
        for rule, plain, ours in self._replaced:
            if rule.target is ours:
                rule.target = plain
        self._replaced.clear()
        self.collector = None


def _is_metrics(handler: type) -> bool:
    return any(
        base.__name__ == "PrometheusHandler" and base.__module__.startswith("distributed.http.")
        for base in handler.__mro__
    )


class _Collected:
    """A registry of what was collected. The text is made elsewhere, beside the event loop."""

    def __init__(self, families: Iterable[Any]):
        self._families = list(families)

    def collect(self) -> Iterable[Any]:
        return self._families


def _extended(plain: type, page: MetricsPage) -> type:
    from distributed.utils import offload
    from prometheus_client import generate_latest

    class Extended(plain):  # type: ignore[misc]
        async def get(self) -> None:
            super().get()
            collector = page.collector
            if collector is None:
                return
            try:
                self.write(await offload(generate_latest, _Collected(collector.collect())))
            except Exception:  # Dask's own figures are served whatever ours do
                logger.exception("figures of st2i_dask left out of /metrics")

    return Extended


def label(text: str) -> str:
    """A label value that any page can hold, of bounded length. Quotes are the page's business."""
    return text.encode("utf-8", "replace").decode()[:LABEL_LENGTH]
