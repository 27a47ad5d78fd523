"""The RPCs by which workers form a world: questions that wait for their answer, up to a bound.

A worker asks to join and asks again while the answer is that it waits; as a member it watches its
generation in the same way. So no message can be lost, and a scheduler that restarted is noticed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from .world import Phase, Standing, World

logger = logging.getLogger(__name__)


class WorldService:
    """Bridges one `World`. Event loop only.

    expected: how many workers could offer themselves now; a world is formed at once when all have.
    gather_s, attach_s: see World. hold_s: how long a question may wait before it is answered with
    what is.

    Register `handlers` with the scheduler, call `left` when a worker goes, `stop` at the end. Every
    handler but `st2i_world_failed` answers a Standing as a dict.
    """

    def __init__(
        self,
        expected: Callable[[], int],
        *,
        gather_s: float = 5.0,
        attach_s: float = 60.0,
        hold_s: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.world = World(gather_s=gather_s, attach_s=attach_s)
        self._expected = expected
        self._hold_s = hold_s
        self._clock = clock
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self._logged = 0  # the last generation that the log knows of

    @property
    def handlers(self) -> dict[str, Callable[..., Any]]:
        return {
            "st2i_world_join": self.join,
            "st2i_world_minted": self.minted,
            "st2i_world_attached": self.attached,
            "st2i_world_watch": self.watch,
            "st2i_world_failed": self.failed,
        }

    # -- hooks -------------------------------------------------------------------------------------

    def left(self, worker: str) -> None:
        self.world.leave(self._clock(), worker)
        self._tell()

    def stop(self) -> None:
        """Every question that waits is answered."""
        self._stopped = True
        self._tell()

    # -- RPC ---------------------------------------------------------------------------------------

    async def join(self, process: str, worker: str, nbytes: int) -> dict[str, Any]:
        """Answers when the process has to mint, can attach, or never will; phase "waiting": ask
        again."""
        self.world.offer(self._clock(), process, worker, nbytes, self._expected())
        self._tell()
        return await self._once(
            process,
            lambda s: s.mints or s.uid is not None or s.phase in (Phase.ENDED, Phase.UNKNOWN),
        )

    async def minted(self, process: str, generation: int, uid: bytes) -> dict[str, Any]:
        self.world.minted(process, generation, uid)
        self._tell()
        return asdict(self.world.standing(process))

    async def attached(self, process: str, generation: int) -> dict[str, Any]:
        self.world.attached(process, generation)
        self._tell()
        return asdict(self.world.standing(process))

    async def watch(self, process: str) -> dict[str, Any]:
        """Answers when the process belongs to a living generation no more."""
        return await self._once(process, lambda s: s.phase not in (Phase.ATTACHING, Phase.UP))

    async def failed(self, process: str, generation: int, why: str) -> None:
        """`why` ends the generation for all its members; generation 0: takes an offer back."""
        self.world.failed(self._clock(), process, generation, why)
        self._tell()

    # -- inside ------------------------------------------------------------------------------------

    async def _once(self, process: str, ready: Callable[[Standing], bool]) -> dict[str, Any]:
        """The standing as soon as it is `ready`, or as it is after a while."""
        until = self._clock() + self._hold_s
        while not self._stopped:
            standing = self.world.standing(process)
            left = until - self._clock()
            if ready(standing) or left <= 0:
                return asdict(standing)
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                continue
        return asdict(Standing(Phase.ENDED, why="the scheduler's plugin stops"))

    def _tell(self) -> None:
        """After every event: wake those who wait, and set the clock for what is due next."""
        if self.world.generation > self._logged:
            self._logged = self.world.generation
            logger.info(
                "NVSHMEM world: generation %s forms with %s processes",
                self._logged,
                self.world.size,
            )
        self._changed.set()
        self._changed = asyncio.Event()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.world.deadline
        if deadline is not None and not self._stopped:
            delay = max(deadline - self._clock(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self.world.tick(self._clock())
        self._tell()

    def _check(self) -> None:
        self.world._check()
        due = self.world.deadline is not None and not self._stopped
        assert (self._timer is not None) == due
        assert not self._changed.is_set()
