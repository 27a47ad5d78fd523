"""Reading a /metrics page as Prometheus does, and the rules that `promtool check metrics` applies."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

UNITS = ("seconds", "bytes", "info")
#: Figures that count things have no unit; each is a noun that says what.
COUNTED = re.compile(
    r"st2i_(executors|(queued|running|draining)_invocations|open_requests|active_tenants|"
    r"tenant_(weight|open_requests|open_invocations|submitted_requests|refused_requests|dispatches|"
    r"yields|lost_results|invocations|runs|requests)|arena_fallbacks|pulls|host_tier_(files|closed_files)|"
    r"weights_(runs|hits|reads|loads|evictions))"
)


def page(server: Any) -> str:
    """The /metrics page of a Dask server in this process, or at a port of this machine."""
    port = server if isinstance(server, int) else server.http_server.port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return answer.read().decode()


def families(text: str) -> dict[str, Any]:
    """Our metric families by name (of counters without _total), as prometheus_client parses them."""
    found: dict[str, Any] = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("st2i_"):
            assert family.name not in found, f"{family.name} comes twice"
            found[family.name] = family
    return found


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Our samples by name and labels."""
    found = {}
    for family in families(text).values():
        for sample in family.samples:
            at = sample.name, tuple(sorted(sample.labels.items()))
            assert at not in found, f"{at} comes twice"
            found[at] = sample.value
    return found


def value(text: str, name: str, **labels: str) -> float:
    return samples(text)[name, tuple(sorted(labels.items()))]


def check(text: str) -> dict[str, Any]:
    """Our families, after every rule: HELP and TYPE, base units as suffixes, _total on counters only."""
    found = families(text)
    for name, family in found.items():
        assert re.fullmatch(r"st2i_[a-z0-9_]+", name), name
        assert not re.search(
            r"gauge|counter|histogram|summary|untyped|_(ms|kb|mb|min|hours)(_|$)", name
        )
        assert len(family.documentation) > 5, f"{name} has no HELP"
        assert family.documentation.endswith("."), name
        assert family.type in ("gauge", "counter", "histogram"), (name, family.type)
        exposed = f"{name}_total" if family.type == "counter" else name
        assert f"# TYPE {exposed} {family.type}\n" in text
        assert f"# HELP {exposed} " in text
        assert name.endswith(UNITS) or COUNTED.fullmatch(name), f"{name} has no unit"
        for sample in family.samples:
            assert sample.value >= 0, (name, sample)
            assert family.type != "gauge" or not sample.name.endswith(("_total", "_count", "_sum"))
        if family.type == "histogram":
            assert name.endswith("_seconds")
            _check_histogram(family)
    return found


def _check_histogram(family: Any) -> None:
    """Buckets grow to +Inf, which equals the count."""
    series: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for sample in family.samples:
        labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
        one = series.setdefault(labels, {"buckets": []})
        if sample.name.endswith("_bucket"):
            one["buckets"].append((float(sample.labels["le"]), sample.value))
        else:
            one[sample.name.rpartition("_")[2]] = sample.value
    for one in series.values():
        bounds, counts = zip(*one["buckets"], strict=True)
        assert list(bounds) == sorted(set(bounds))
        assert bounds[-1] == float("inf")
        assert list(counts) == sorted(counts)
        assert counts[-1] == one["count"]
        assert one["sum"] >= 0


def grew(before: str, after: str) -> None:
    """No counter of a page has decreased since an earlier look, and none has gone."""
    later = samples(after)
    kinds: Mapping[str, Any] = families(before)
    for family in kinds.values():
        if family.type == "gauge":
            continue
        for sample in family.samples:
            at = sample.name, tuple(sorted(sample.labels.items()))
            assert later[at] >= sample.value, at
