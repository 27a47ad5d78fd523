"""Asks executors what they hold, at a modest pace, while somebody looks.

A round a second, of at most `PER_ROUND` executors, those first that were not asked for longest; none is
asked twice within `AGAIN_SECONDS`. 200 executors are asked every 20 s, two every other second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from .. import glance
from ..watch import Watch

ROUND_SECONDS = 1.0
AGAIN_SECONDS = 2.0
PER_ROUND = 10
#: An executor that does not answer within this is shown as silent.
PATIENCE_SECONDS = 2.0


class Asking:
    """Event loop only. wanted: whether there is still somebody who looks."""

    def __init__(
        self,
        scheduler: Any,
        watch: Watch,
        clock: Callable[[], float],
        wanted: Callable[[], bool],
    ) -> None:
        self._scheduler = scheduler
        self._watch = watch
        self._clock = clock
        self._wanted = wanted
        self._asked: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, unless it goes on already."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._rounds())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _rounds(self) -> None:
        while self._wanted() and self._watch.policy is not None:
            executors = glance.executors(self._watch.policy)
            there = set(executors)
            self._watch.facts.keep(there)
            self._asked = {e: at for e, at in self._asked.items() if e in there}
            await asyncio.gather(*map(self._ask, self._due(executors)))
            await asyncio.sleep(ROUND_SECONDS)

    def _due(self, executors: list[str]) -> list[str]:
        now = self._clock()
        due = [e for e in executors if now - self._asked.get(e, -AGAIN_SECONDS) >= AGAIN_SECONDS]
        due.sort(key=lambda executor: self._asked.get(executor, -1.0))
        return due[:PER_ROUND]

    async def _ask(self, executor: str) -> None:
        facts = self._watch.facts
        self._asked[executor] = self._clock()
        try:
            answer = await asyncio.wait_for(
                self._scheduler.rpc(executor).st2i_holdings(), PATIENCE_SECONDS
            )
        except TimeoutError:
            facts.no_answer(executor, f"no answer within {PATIENCE_SECONDS:g} s")
        except Exception as error:  # whatever it says: it is for people to read
            facts.no_answer(executor, f"{type(error).__name__}: {error}"[:200])
        else:
            if answer is None:
                facts.no_answer(executor, "it does not serve now")
            else:
                facts.answer(self._clock(), executor, answer)
