"""A lease: a model in memory, as far as it is needed, for one invocation or several in a row."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from .skeletons import ModelWeights, Skeleton


class Lease:
    """components: what the ModelFn executes with. load_s: seconds it waited for loads so far, of which
    stalled_s for layers.

    Belongs to the thread that asked for it; hooks of other threads find it through the store.
    """

    def __init__(self, number: int, skeleton: Skeleton, bucket: str, outer: Lease | None = None):
        self.number = number
        self.skeleton = skeleton
        self.bucket = bucket
        #: The one within which this thread has asked for it.
        self.outer = outer
        #: Ids of the weights that it may run, in order.
        self.ids = dict.fromkeys(weights.id for weights in skeleton.weights)
        self.load_s = self.stalled_s = 0.0
        #: Of load_s, what invocations have taken on themselves.
        self.charged_s = 0.0
        #: Everything has been resident since the lease began, and stays so until it ends.
        self.held = False
        #: Everything is resident by now, and stays so: hooks have nothing more to do.
        self.is_free = False
        self.waits = False
        #: Somebody has written to its weights.
        self.is_spoilt = False
        #: An error of a load that it waits for.
        self.error: Exception | None = None
        #: Per weights id: seconds of each layer's first pass, if this lease measures them.
        self.timings: dict[str, Timing] = {}

    def stall(self, since: float) -> None:
        """It waited for a layer since that reading of time.perf_counter."""
        seconds = time.perf_counter() - since
        self.stalled_s += seconds
        self.load_s += seconds

    def charge(self) -> float:
        """The seconds of loads that no invocation was charged for yet."""
        seconds, self.charged_s = self.load_s - self.charged_s, self.load_s
        return seconds

    @property
    def version(self) -> str:
        """See `Skeleton.version`."""
        return self.skeleton.version

    @property
    def components(self) -> Mapping[str, Any]:
        return self.skeleton.components


class Timing:
    """Seconds that each layer computed, of the first pass; and the order of execution. On a CUDA
    device by events on the stream that computes."""

    def __init__(self, weights: ModelWeights, device: str):
        self.order: list[int] = list(weights.roots)
        self._layers = len(weights.sizes)
        self._is_cuda = device != "cpu"
        self._entered: dict[int, Any] = {}
        self._passed: dict[int, tuple[Any, Any]] = {}

    def enter(self, layer: int) -> None:
        self._entered[layer] = self._mark()

    def leave(self, layer: int) -> None:
        entered = self._entered.pop(layer, None)
        if entered is not None and layer not in self._passed:
            self.order.append(layer)
            self._passed[layer] = entered, self._mark()

    def compute_s(self) -> list[float]:
        """By layer; 0 for one that did not run. Waits for the device."""
        seconds = [0.0] * self._layers
        for layer, (start, end) in self._passed.items():
            if self._is_cuda:
                end.synchronize()
                seconds[layer] = start.elapsed_time(end) / 1000
            else:
                seconds[layer] = end - start
        return seconds

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
