"""A synthetic cluster of any size: a real policy, driven by events; executors only pretend to work."""

from __future__ import annotations

import heapq
import random
from typing import Any

from scheduler_plugin import events as ev
from scheduler_plugin.instructions import Dispatch
from scheduler_plugin.journal import Journal
from scheduler_plugin.outline import Outline, chain
from scheduler_plugin.policy import FairPolicy
from scheduler_plugin.settings import Settings

FAMILIES = 6
STEPS = 6
LAYERS = 24


class Crowd:
    """Tenants that always have `open_requests` requests each, on executors that are always busy.

    executors: how many, or their addresses. mean_s: seconds of an invocation.
    """

    def __init__(
        self,
        executors: int | list[str],
        tenants: int,
        *,
        now: float = 0.0,
        open_requests: int = 2,
        mean_s: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._random = random.Random(seed)
        heavy = {f"tenant-{n:04d}": 3.0 for n in range(0, tenants, 50)}
        self.policy = FairPolicy(Settings(slack_s=1.0, weights=heavy, default_cap=None))
        self.journal = Journal()
        if isinstance(executors, int):
            executors = [f"tcp://10.0.{n // 250}.{n % 250}:40000" for n in range(executors)]
        self.executors = executors
        self._outlines = [_outline(family) for family in range(FAMILIES)]
        self._seconds: dict[str, float] = {}  # by key, of what runs
        self._ends: list[tuple[float, int, Dispatch]] = []
        self._mean_s = mean_s
        self._requests = self._dispatches = 0
        for executor in executors:
            self._tell(ev.ExecutorJoined(now, executor, 8 << 30))
        for number in range(tenants):
            for _ in range(open_requests):
                self._submit(now, f"tenant-{number:04d}")
        self._dispatch(now)

    def advance(self, now: float) -> int:
        """Everything that happens until `now`; how many invocations ended."""
        ended = 0
        while self._ends and self._ends[0][0] <= now:
            at, _, run = heapq.heappop(self._ends)
            self._end(at, run)
            self._dispatch(at)
            ended += 1
        return ended

    def _end(self, now: float, run: Dispatch) -> None:
        took = self._seconds.pop(run.key)
        load_s = 0.2 * took if run.position in (0, 1) else 0.0
        used = ev.Measured(load_s, 0.7 * took, 0.05 * took)
        self._tell(ev.Completed(now, run.key, used, free_bytes=8 << 30))
        if run.position + 1 < STEPS:
            self._ready(now, run.request, run.position + 1)
        else:
            self._tell(ev.RequestClosed(now, run.request))
            self._submit(now, run.tenant)

    def _dispatch(self, now: float) -> None:
        while (decision := self.policy.next_decision(now)) is not None:
            self.journal.dispatched(decision, now)
            took = self._mean_s * self._random.uniform(0.5, 1.5)
            self._seconds[decision.key] = took
            self._dispatches += 1
            heapq.heappush(self._ends, (now + took, self._dispatches, decision))

    def _submit(self, now: float, tenant: str) -> None:
        self._requests += 1
        name = f"{self._random.getrandbits(64):016x}"
        outline = self._outlines[self._requests % FAMILIES]
        self._tell(ev.RequestSubmitted(now, name, tenant, outline))
        self._ready(now, name, 0)

    def _tell(self, event: ev.Event) -> None:
        self.policy.handle(event)
        self.journal.happened(event)

    def _ready(self, now: float, request: str, position: int) -> None:
        key = f"step-{position:03d}-{request}"
        self._tell(ev.InvocationReady(now, key, request, position, 1 << 20))


def holdings(executor: str) -> dict[str, Any]:
    """What such an executor would answer, see worker_plugin.holdings."""
    chance = random.Random(executor)
    arena, used = 4 << 30, chance.randrange(1 << 30)
    rows = []
    for family in chance.sample(range(FAMILIES), 3):
        there = chance.randrange(LAYERS + 1)
        rows.append(
            {
                "model": f"Denoiser@family-{family}",
                "model_key": f"denoiser-{family}",
                "layers": LAYERS,
                "resident_layers": there,
                "nbytes": LAYERS << 26,
                "resident_bytes": there << 26,
                "by_layer": "1" * there + "0" * (LAYERS - there),
                "runs": 100,
                "hits": 80,
                "loads": 12 * there,
                "load_s": 0.1 * there,
                "stalled_s": 0.02 * there,
            }
        )
    weights = sum(row["resident_bytes"] for row in rows)
    inside = min(weights // 2, arena - used)
    return {
        "arena": {
            "kind": "host",
            "nbytes": arena,
            "used": used,
            "peak": used,
            "weights": inside,
            "fallbacks": 0,
            "fallback_bytes": 0,
        },
        "framework": {"nbytes": 12 << 30, "weights": weights - inside},
        "models": rows,
    }


def _outline(family: int) -> Outline:
    steps = [("TextEncoder", f"text-{family}", "77")]
    steps += [("Denoiser", f"unet-{family}", "1024x1024")] * (STEPS - 2)
    steps += [("Decoder", f"vae-{family}", "1024x1024")]
    return chain(f"family-{family}", steps)
