"""The OpenTelemetry span within which a request is submitted, as it travels with the request (W3C).

Nothing is imported for it: who has a span has imported OpenTelemetry.
"""

from __future__ import annotations

import sys


def current_context() -> dict[str, str]:
    """traceparent and tracestate of the caller's span; empty where there is none."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or not trace.get_current_span().get_span_context().is_valid:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier
