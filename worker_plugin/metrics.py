"""The worker's figures on its /metrics page, from the statistics of arena, transports and weights."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING

from st2i_dask.metrics_page import label

from .tensor_store import TensorStore
from .weights import WeightStore

if TYPE_CHECKING:
    from prometheus_client.core import Metric

#: Most models with a label of their own, by resident bytes; the others are summed under `OTHER`.
MODELS = 50
OTHER = "(other)"


class WorkerCollector:
    """For prometheus_client. worker: its address, as Dask and the scheduler name it. Event loop only."""

    def __init__(self, worker: str, store: TensorStore, models: WeightStore):
        self._worker = worker
        self._store = store
        self._models = models
        self._version = version("st2i_dask")

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        about = GaugeMetricFamily(
            "st2i_worker_info",
            "Dask's address of the worker, its device, and what its arena is made of.",
            labels=["worker", "version", "device", "arena"],
        )
        kind = self._store.arena.heap.address.kind
        here = (self._worker, self._version, self._models.device, kind)
        about.add_metric([label(text) for text in here], 1)
        yield about
        yield from self._arena()
        yield from self._transports()
        yield from self._weights()
        yield from self._per_model()

    def _arena(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        arena = self._store.arena.statistics()
        family = GaugeMetricFamily(
            "st2i_arena_bytes", "Bytes of the worker's arena by use.", labels=["use"]
        )
        free = max(0, arena.nbytes - arena.used - arena.weights)
        for use, nbytes in (("tensors", arena.used), ("weights", arena.weights), ("free", free)):
            family.add_metric([use], nbytes)
        yield family
        yield GaugeMetricFamily(
            "st2i_arena_peak_bytes", "Most bytes that tensors have taken at once.", value=arena.peak
        )
        for name, about, value in (
            ("fallbacks", "Tensors that found no room in the arena.", arena.fallbacks),
            ("fallback_bytes", "Bytes of these tensors.", arena.fallback_bytes),
        ):
            yield CounterMetricFamily(f"st2i_arena_{name}", about, value=value)

    def _transports(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily

        pulls = CounterMetricFamily(
            "st2i_pulls",
            "Tensors by the way they came; comm is counted by who sends.",
            labels=["way"],
        )
        moved = CounterMetricFamily("st2i_pulled_bytes", "Bytes of these.", labels=["way"])
        for way, (count, nbytes) in self._store.transports.statistics().items():
            pulls.add_metric([way], count)
            moved.add_metric([way], nbytes)
        yield from (pulls, moved)

    def _weights(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        by_region, host = self._models.statistics()
        totals = self._models.residency.totals
        resident = GaugeMetricFamily(
            "st2i_weights_resident_bytes",
            "Bytes of layers in memory, by region.",
            labels=["region"],
        )
        for region, nbytes in by_region.items():
            resident.add_metric([region], nbytes)
        yield resident
        tier = GaugeMetricFamily(
            "st2i_host_tier_bytes",
            "Bytes of model files: open ones, and of these what stays mapped in this process.",
            labels=["state"],
        )
        tier.add_metric(["open"], host.nbytes)
        tier.add_metric(["mapped"], host.warm)
        yield tier
        for name, about, value in (
            (
                "memory_budget_bytes",
                "Budget for weights, tensors, activations.",
                self._models.memory,
            ),
            ("memory_free_bytes", "What weights and tensors leave.", self._models.free_bytes()),
            ("host_tier_files", "Files of models that are open.", host.files),
        ):
            yield GaugeMetricFamily(f"st2i_{name}", about, value=value)
        for name, about, value in (
            ("weights_runs", "Invocations that took a model.", totals.runs),
            ("weights_hits", "Those that found all of it in memory.", totals.hits),
            ("weights_reads", "Models read by load_model.", totals.reads),
            ("weights_read_seconds", "Seconds that took.", totals.read_s),
            ("weights_loads", "Layers copied into memory.", totals.loads),
            ("weights_loaded_bytes", "Bytes of these layers.", totals.loaded_bytes),
            ("weights_load_seconds", "Seconds that took.", totals.load_s),
            ("weights_stall_seconds", "Seconds invocations waited for layers.", totals.stalled_s),
            ("weights_evictions", "Layers that went.", totals.evictions),
            ("weights_evicted_bytes", "Bytes of these layers.", totals.evicted_bytes),
            ("host_tier_copied_bytes", "Bytes copied from files of models.", host.copied),
            ("host_tier_closed_files", "Files closed, as all were over the budget.", host.closed),
        ):
            yield CounterMetricFamily(f"st2i_{name}", about, value=value)

    def _per_model(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        nbytes: dict[str, list[int]] = {}
        for row in self._models.models():
            both = nbytes.setdefault(label(row["model"]), [0, 0])
            both[0] += row["resident_bytes"]
            both[1] += row["nbytes"] - row["resident_bytes"]
        named = heapq.nlargest(MODELS, nbytes, key=nbytes.__getitem__)
        rest = [0, 0]
        for name in nbytes.keys() - named:
            rest = [a + b for a, b in zip(rest, nbytes.pop(name), strict=True)]
        if any(rest):
            both = nbytes.setdefault(OTHER, [0, 0])
            nbytes[OTHER] = [a + b for a, b in zip(rest, both, strict=True)]
        family = GaugeMetricFamily(
            "st2i_model_bytes",
            "Bytes of a model's layers: in memory, or to be loaded when it runs.",
            labels=["model", "state"],
        )
        for name, (resident, absent) in nbytes.items():
            family.add_metric([name, "resident"], resident)
            family.add_metric([name, "absent"], absent)
        yield family
