"""What is resident of each model, what it saved and what is still to load: figures for the scheduler
and for people. Kept by `WeightStore`, under its lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .lease import Timing
from .prefix import exposed_s
from .profiles import Profile, ProfileKey, Profiles
from .skeletons import ModelWeights


@dataclass
class _Figures:
    """Of one model's weights. runs: invocations. hits: those that found every layer resident. loads:
    layers copied in. load_s: seconds that took. stalled_s: seconds that runs waited for it."""

    resident: list[bool]
    bucket: str = ""
    began_whole: bool = False
    began_with_prefix: bool = False
    runs: int = 0
    hits: int = 0
    loads: int = 0
    load_s: float = 0.0
    stalled_s: float = 0.0
    # None: to be worked out again
    missing: float | None = None
    derived: tuple[Profile | None, int | None] | None = None


@dataclass
class WeightTotals:
    """Of all models since the worker began to serve, also of those that are gone; they only grow.

    runs: invocations. hits: those that found all layers resident. reads: models read by load_model, and
    the seconds that took. loads: layers copied in, their bytes, and the seconds that took. stalled_s: seconds
    that runs waited for layers. evictions: layers that went, and their bytes.
    """

    runs: int = 0
    hits: int = 0
    reads: int = 0
    read_s: float = 0.0
    loads: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    stalled_s: float = 0.0
    evictions: int = 0
    evicted_bytes: int = 0


class Residency:
    def __init__(self, profiles: Profiles, device: str):
        self.totals = WeightTotals()
        self._profiles = profiles
        self._device = device_kind(device)
        self._figures: dict[str, _Figures] = {}
        #: Changes whenever `missing` may have.
        self.version = 0

    def key(self, weights: ModelWeights, bucket: str) -> ProfileKey:
        return ProfileKey(weights.architecture, weights.dtype, self._device, bucket)

    # Events

    def leased(self, resident: Sequence[Sequence[bool]], read_s: float) -> None:
        """A lease begins, with these layers resident. read_s: seconds in which its model was read for
        it, 0 if it was there."""
        self.totals.runs += 1
        self.totals.hits += all(map(all, resident))
        self.totals.reads += read_s > 0
        self.totals.read_s += read_s

    def again(self, several: Sequence[ModelWeights]) -> None:
        """Another invocation uses a lease that holds all layers."""
        self.totals.runs += 1
        self.totals.hits += 1
        for weights in several:
            figures = self._of(weights)
            figures.runs += 1
            figures.hits += 1

    def begins(self, weights: ModelWeights, bucket: str, resident: Sequence[bool]) -> None:
        """A run of it begins, with these layers resident."""
        figures = self._of(weights)
        figures.runs += 1
        figures.hits += all(resident)
        if figures.bucket != bucket:
            figures.bucket, figures.derived = bucket, None
            self._change(figures)
        figures.began_whole = all(resident)
        profile, prefix = self._known(weights, figures)
        figures.began_with_prefix = (
            prefix is not None
            and profile is not None
            and all(resident[layer] for layer in profile.order[:prefix])
        )

    def ends(
        self, weights: ModelWeights, bucket: str, timing: Timing | None, stalled_s: float
    ) -> int | None:
        """A run of it has ended. How many first layers, roots not counted, hide the other loads."""
        figures = self._of(weights)
        figures.stalled_s += stalled_s
        if weights.table is None:
            return None
        # A run that had nothing to load says nothing of loading.
        if timing is not None or not figures.began_whole:
            self._profiles.observe_run(
                self.key(weights, bucket),
                timing.compute_s() if timing is not None else None,
                timing.order if timing is not None else (),
                stalled_s if figures.began_with_prefix else None,
            )
            if timing is not None:
                figures.derived = None
                self._change(figures)
        _, prefix = self._known(weights, figures)
        return None if prefix is None else max(0, prefix - len(weights.roots))

    def loaded(self, weights: ModelWeights, layer: int, seconds: float) -> None:
        figures = self._of(weights)
        figures.resident[layer] = True
        self._change(figures)
        if weights.table is not None:
            figures.loads += 1
            figures.load_s += seconds
            self.totals.loads += 1
            self.totals.loaded_bytes += weights.sizes[layer]
            self.totals.load_s += seconds
            figures.derived = None
            key = self.key(weights, figures.bucket)
            self._profiles.observe_load(key, layer, seconds, len(weights.sizes))

    def evicted(self, weights: ModelWeights, layer: int) -> None:
        figures = self._of(weights)
        figures.resident[layer] = False
        self.totals.evictions += 1
        self.totals.evicted_bytes += weights.sizes[layer]
        self._change(figures)

    def forget(self, weights: ModelWeights) -> None:
        if self._figures.pop(weights.id, None) is not None:
            self.version += 1

    # Questions

    def missing(self, several: Sequence[ModelWeights]) -> float:
        """Share of the seconds that a run would wait for if nothing were resident, 0 to 1; by bytes
        where they were not measured."""
        shares = [(self._missing(weights), weights.nbytes) for weights in several]
        total = sum(nbytes for _, nbytes in shares)
        return sum(share * nbytes for share, nbytes in shares) / total if total else 0.0

    def figures(self, several: Sequence[ModelWeights]) -> dict[str, Any]:
        """runs, hits, loads (layers), load_s, stalled_s of a model with these weights."""
        found = [self._of(weights) for weights in several]
        return {
            "runs": max((f.runs for f in found), default=0),
            "hits": min((f.hits for f in found), default=0),
            "loads": sum(f.loads for f in found),
            "load_s": sum(f.load_s for f in found),
            "stalled_s": max((f.stalled_s for f in found), default=0.0),
        }

    def _known(self, weights: ModelWeights, figures: _Figures) -> tuple[Profile | None, int | None]:
        """Its profile for the present bucket and the prefix that follows; kept until there is news."""
        if figures.derived is None:
            key = self.key(weights, figures.bucket)
            figures.derived = self._profiles.get(key), self._profiles.prefix(key)
        return figures.derived

    def _missing(self, weights: ModelWeights) -> float:
        figures = self._of(weights)
        if figures.missing is None:
            figures.missing = self._work_out(weights, figures)
        return figures.missing

    def _work_out(self, weights: ModelWeights, figures: _Figures) -> float:
        profile, _ = self._known(weights, figures)
        if weights.table is not None and profile is not None:
            load = [profile.load_s[layer] for layer in profile.order]
            compute = [profile.compute_s[layer] for layer in profile.order]
            whole = exposed_s(load, compute, [False] * len(load))
            there = [figures.resident[layer] for layer in profile.order]
            if whole > 0.0:
                return min(1.0, exposed_s(load, compute, there) / whole)
        absent = sum(
            size for size, there in zip(weights.sizes, figures.resident, strict=True) if not there
        )
        return absent / weights.nbytes

    def _change(self, figures: _Figures) -> None:
        figures.missing = None
        self.version += 1

    def _of(self, weights: ModelWeights) -> _Figures:
        figures = self._figures.get(weights.id)
        if figures is None:
            figures = self._figures[weights.id] = _Figures([False] * len(weights.sizes))
        return figures


def device_kind(device: str) -> str:
    """ "cpu", or the name of the CUDA device: measurements of one kind hold for all of it."""
    if device == "cpu":
        return device
    import torch

    return str(torch.cuda.get_device_name(device))
