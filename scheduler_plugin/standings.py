"""The answer to `st2i_prospects`: what the policy knows, and what only workers and orchestrators do.

A task of several steps tells the scheduler of them when it ends; until then its worker is asked. The
request of an orchestrator is in none of the policy's books: it is the sum of its calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection
from typing import Any

from .component_calls import ComponentCalls
from .policy import FairPolicy
from .prospects import prospects
from .requests import Run

logger = logging.getLogger(__name__)

# Seconds that workers may take to say how far they are.
_ANSWER_S = 1.0


class Standings:
    """Event loop only."""

    def __init__(self, scheduler: Any, policy: FairPolicy, calls: ComponentCalls) -> None:
        self._scheduler, self._policy, self._calls = scheduler, policy, calls

    async def of(self, requests: Collection[str], now: float) -> dict[str, dict[str, Any]]:
        """Rows of those that are open, see `Prospect`. total is None for an orchestrator's."""
        asked = set(requests)
        runs = {
            key: invocation.run
            for key, invocation in self._policy._fleet.multi_step.items()
            if invocation.request.name in asked and invocation.run is not None
        }
        steps = await self._steps(runs)
        under_way: Counter[str] = Counter()
        for key, run in runs.items():
            # Of one that has ended meanwhile, the policy knows all steps.
            invocation = self._policy._fleet.multi_step.get(key)
            if invocation is not None and invocation.run is run and key in steps:
                under_way[invocation.request.name] += steps[key]
        found = prospects(self._policy, asked, now, under_way)
        for name, owner in self._calls.owners(asked - found.keys()).items():
            found[name] = self._orchestrated(owner, now)
        return found

    async def _steps(self, runs: dict[str, Run]) -> dict[str, int]:
        """Steps done by tasks that run, by key."""
        workers = {run.dispatch.executor for run in runs.values()}
        answers = await asyncio.gather(*map(self._ask, workers))
        return {key: done for answer in answers for key, done in answer.items()}

    async def _ask(self, worker: str) -> dict[str, int]:
        try:
            async with asyncio.timeout(_ANSWER_S):
                found: dict[str, int] = await self._scheduler.rpc(worker).st2i_steps()
                return found
        except Exception as error:  # it is busy, or about to leave
            logger.debug("no steps from %s: %r", worker, error)
            return {}

    def _orchestrated(self, owner: str, now: float) -> dict[str, Any]:
        done, under_way = self._calls.count(owner)
        rows = list(prospects(self._policy, under_way, now).values())
        waiting = not done and rows and all(row["place"] is not None for row in rows)
        place = min(row["place"] for row in rows) if waiting else None
        return {"done": done, "total": None, "place": place, "wait_s": None}
