"""How long one dispatch decision takes: 1,000 tenants, 256 executors, more and more queued.

A decision is everything between "an executor is idle" and "this invocation goes there": both layers,
placement, the charge, and the book-keeping of the dispatch. Completions and arrivals are not timed.
All tenants are within the slack, so that every lane competes: the dearest case.
"""

from __future__ import annotations

import random
from statistics import median
from time import perf_counter

from scheduler_plugin import events as ev
from scheduler_plugin.instructions import Dispatch
from scheduler_plugin.outline import Outline, chain
from scheduler_plugin.policy import FairPolicy
from scheduler_plugin.settings import Settings

TENANTS = 1_000
EXECUTORS = 256
FAMILIES = 8


def run(repeats: int = 5, decisions: int = 400) -> dict[str, float]:
    """Median microseconds per decision: `us_1k`, `us_10k`, `us_100k`, and how many lanes compete."""
    found: dict[str, float] = {}
    benches = {name: _Bench(queued) for name, queued in _SIZES}
    for name, bench in benches.items():
        found[f"lanes_{name}"] = float(bench.lanes)
    times: dict[str, list[float]] = {name: [] for name in benches}
    for _ in range(repeats):  # interleaved: a busy machine slows all sizes alike
        for name, bench in benches.items():
            times[name].append(median(bench.decide(decisions)))
    for name, medians in times.items():
        found[f"us_{name}"] = 1e6 * median(medians)
    return found


_SIZES = (("1k", 1_000), ("10k", 10_000), ("100k", 100_000))


class _Bench:
    """A saturated cluster in steady state: one ends, its successor or a new request is ready."""

    def __init__(self, queued: int) -> None:
        self._random = random.Random(queued)
        settings = Settings(slack_s=1e9, default_cap=None)
        self.policy = FairPolicy(settings)
        self._outlines = [_outline(family) for family in range(FAMILIES)]
        self._now = 0.0
        self._requests = 0
        self._running: list[Dispatch] = []
        for executor in range(EXECUTORS):
            models = {f"unet-{(executor + m) % FAMILIES}": 0.0 for m in range(3)}
            self.policy.handle(ev.ExecutorJoined(0.0, f"tcp://{executor}", 10**9, models))
        tenants = [f"tenant-{number}" for number in range(TENANTS)]
        for number in range(queued + EXECUTORS):
            self._submit(tenants[number % TENANTS])
        while (decision := self.policy.next_decision(self._now)) is not None:
            self._running.append(decision)
        for _ in range(2 * EXECUTORS):  # into steady state
            self._turn()

    @property
    def lanes(self) -> int:
        return self.policy._chooser.lanes  # type: ignore[attr-defined, no-any-return]

    def decide(self, decisions: int) -> list[float]:
        """Seconds that each of some decisions took."""
        return [self._turn() for _ in range(decisions)]

    def _turn(self) -> float:
        """One invocation ends, one becomes ready, one decision is made and timed."""
        self._now += 1e-3 * self._random.random()
        running = self._running
        at = self._random.randrange(len(running))
        running[at], running[-1] = running[-1], running[at]
        done = running.pop()
        seconds = done.estimate.compute_s * self._random.uniform(0.99, 1.01)
        self.policy.handle(
            ev.Completed(self._now, done.key, ev.Measured(0.0, seconds, 0.0), free_bytes=10**9)
        )
        if done.position + 1 < len(self._outlines[0]):
            self._ready(done.request, done.position + 1)
        else:
            self.policy.handle(ev.RequestClosed(self._now, done.request))
            self._submit(done.tenant)
        started = perf_counter()
        decision = self.policy.next_decision(self._now)
        took = perf_counter() - started
        assert decision is not None
        running.append(decision)
        return took

    def _submit(self, tenant: str) -> None:
        self._now += 1e-3 * self._random.random()
        self._requests += 1
        name = f"request-{self._requests}"
        outline = self._outlines[self._requests % FAMILIES]
        self.policy.handle(ev.RequestSubmitted(self._now, name, tenant, outline))
        self._ready(name, 0)

    def _ready(self, request: str, position: int) -> None:
        key = f"{request}-{position}"
        self.policy.handle(ev.InvocationReady(self._now, key, request, position, 1 << 20))


def _outline(family: int) -> Outline:
    steps = [("TextEncoder", f"text-{family}", "77")]
    steps += [("Denoiser", f"unet-{family}", "1024x1024")] * 8
    steps += [("Decoder", f"vae-{family}", "1024x1024")]
    return chain(f"family-{family}", steps)
