"""The scheduler's figures on its /metrics page, from counters that are kept anyway.

Bounded whatever users do: at most `TENANTS` tenants and `WORKFLOWS` workflows have labels of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING

from st2i_dask.metrics_page import label

from .metrics_counts import NAMES, OTHER, REQUESTS, RUNS, Counts
from .metrics_tenants import TenantLabels
from .policy import FairPolicy
from .usage import TenantUsage, UsageTotals

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_AT = {name: number for number, name in enumerate(NAMES)}
_PARTS = ("load", "compute", "transfer")
# A tenant's row: what is counted, device seconds by part, invocations, and all device seconds charged.
_SECONDS, _INVOCATIONS, _SERVICE = len(NAMES), len(NAMES) + len(_PARTS), len(NAMES) + 4


class SchedulerCollector:
    """For prometheus_client. collect: O(tenants ever seen), as labels go to the most served. Event
    loop only."""

    def __init__(self, policy: FairPolicy, counts: Counts, usage: UsageTotals):
        self._policy = policy
        self._counts = counts
        self._usage = usage
        self._labels = TenantLabels()
        self._version = version("st2i_dask")

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        about = GaugeMetricFamily(
            "st2i_scheduler_info", "Version of st2i_dask that serves here.", labels=["version"]
        )
        about.add_metric([self._version], 1)
        yield about
        yield from self._now()
        yield from self._tenants()
        yield from self._histograms()

    def _now(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        policy, book = self._policy, self._policy._book
        executors, idle = len(policy._placement), policy.idle_executors
        family = GaugeMetricFamily(
            "st2i_executors",
            "Workers that serve. Busy ones run an invocation, finish a cancelled one, run a plain "
            "Dask task, or take no tasks now.",
            labels=["state"],
        )
        family.add_metric(["idle"], idle)
        family.add_metric(["busy"], executors - idle)
        yield family
        for name, about, value in (
            ("queued_invocations", "Invocations that are ready and wait.", policy.queued),
            ("running_invocations", "Invocations that run.", len(policy._fleet.running)),
            (
                "draining_invocations",
                "Cancelled invocations that have not ended: no thread can be stopped.",
                len(policy._fleet.draining),
            ),
            (
                "open_requests",
                "Requests that somebody wants, done ones included.",
                len(book.requests),
            ),
            ("active_tenants", "Tenants with work.", len(policy.ledger.active())),
            ("slack_seconds", "How far a tenant's vTime may be ahead.", policy.settings.slack_s),
        ):
            yield GaugeMetricFamily(f"st2i_{name}", about, value=value)

    def _tenants(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        rows = self._counters()
        for name, about, at in (
            ("submitted_requests", "Requests taken in.", _AT["submitted"]),
            ("refused_requests", "Requests over the tenant's cap.", _AT["refused"]),
            ("dispatches", "Runs sent to an executor; one may have many steps.", _AT["dispatches"]),
            ("yields", "Runs asked to hand back, as another tenant waits.", _AT["yields"]),
            ("lost_results", "Results lost with their worker and wanted.", _AT["lost_results"]),
            ("invocations", "Invocations done, each step of a run one.", _INVOCATIONS),
            ("service_seconds", "Device seconds charged for runs that ended in any way.", _SERVICE),
        ):
            family = CounterMetricFamily(f"st2i_tenant_{name}", about, labels=["tenant"])
            for tenant, row in rows.items():
                family.add_metric([label(tenant)], row[at])
            yield family
        for name, about, key, values, first in (
            ("device_seconds", "Device seconds of runs done.", "part", _PARTS, _SECONDS),
            ("runs", "Runs that have ended.", "outcome", RUNS, _AT["runs_done"]),
            ("requests", "Requests that are over.", "outcome", REQUESTS, _AT["requests_done"]),
        ):
            family = CounterMetricFamily(f"st2i_tenant_{name}", about, labels=["tenant", key])
            for tenant, row in rows.items():
                for at, value in enumerate(values, first):
                    family.add_metric([label(tenant), value], row[at])
            yield family
        vtime = GaugeMetricFamily(
            "st2i_tenant_vtime_seconds",
            "Device seconds charged, by weight, since the tenant first came or lifted to the others; "
            "estimates of what runs included. The other tenants have no common one.",
            labels=["tenant"],
        )
        weight = GaugeMetricFamily("st2i_tenant_weight", "Share of the device.", labels=["tenant"])
        for tenant in self._labels.tenants:
            vtime.add_metric([label(tenant)], self._policy.ledger.vtime(tenant))
            weight.add_metric([label(tenant)], self._policy.ledger.weight(tenant))
        yield from (vtime, weight)
        yield from self._standings(OTHER in rows)

    def _counters(self) -> dict[str, list[float]]:
        counts, usage = self._counts, self._usage.tenants
        served = {tenant: t.service_s for tenant, t in self._policy.ledger.totals().items()}
        for tenant in (*counts.tenants, *usage):
            served.setdefault(tenant, 0.0)
        none, unused = [0] * len(NAMES), TenantUsage()

        def row(tenant: str) -> list[float]:
            used = usage.get(tenant, unused)
            return [
                *counts.tenants.get(tenant, none),
                *(used.load, used.compute, used.transfer, used.invocations),
                served[tenant],
            ]

        used = list(usage.values())
        total = [
            *counts.all,
            *(sum(u.load for u in used), sum(u.compute for u in used)),
            *(sum(u.transfer for u in used), sum(u.invocations for u in used)),
            sum(served.values()),
        ]
        return self._labels.counters(served, row, total)

    def _standings(self, others: bool) -> Iterator[Metric]:
        """Requests and invocations now; only tenants with work have a row in the book."""
        from prometheus_client.core import GaugeMetricFamily

        standings = self._policy._book.standings
        requests = GaugeMetricFamily(
            "st2i_tenant_open_requests",
            "Requests not over: queued ones have not started, running ones have.",
            labels=["tenant", "state"],
        )
        invocations = GaugeMetricFamily(
            "st2i_tenant_open_invocations",
            "Invocations that wait for an executor, or run.",
            labels=["tenant", "state"],
        )
        named = set(self._labels.tenants)
        rest = [0, 0, 0, 0]
        for tenant, s in standings.items():
            if tenant not in named:
                now = (s.waiting, s.started, s.ready, s.running)
                rest = [a + b for a, b in zip(rest, now, strict=True)]
        rows = {}
        for tenant in self._labels.tenants:
            s = self._policy._book.standing(tenant)
            rows[tenant] = [s.waiting, s.started, s.ready, s.running]
        if others:
            rows[OTHER] = rest
        for tenant, row in rows.items():
            for family, (queued, running) in ((requests, row[:2]), (invocations, row[2:])):
                family.add_metric([label(tenant), "queued"], queued)
                family.add_metric([label(tenant), "running"], running)
        yield from (requests, invocations)

    def _histograms(self) -> Iterator[Metric]:
        from prometheus_client.core import HistogramMetricFamily

        counts = self._counts
        for name, about, histogram in (
            ("decision", "Time a dispatch decision took.", counts.decision),
            ("queue_wait", "Time an invocation waited between ready and dispatch.", counts.wait),
        ):
            yield HistogramMetricFamily(
                f"st2i_{name}_seconds",
                about,
                buckets=list(histogram.buckets()),
                sum_value=histogram.sum,
            )
        family = HistogramMetricFamily(
            "st2i_request_latency_seconds",
            "Time between submit and result, of requests done.",
            labels=["workflow"],
        )
        for workflow, histogram in counts.latency.items():
            family.add_metric([workflow], list(histogram.buckets()), histogram.sum)
        yield family
