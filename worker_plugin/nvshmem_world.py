"""Joining an NVSHMEM world: told by the scheduler with whom, bounded in time, and once per process.

Imported only where a CUDA device is to be used. The library may hang for ever when another process is
missing, so what enters it runs in a daemon thread that nobody joins. Whatever goes wrong, the worker
goes on without this heap: tensors then take the other transports.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .nvshmem_cuda import Cuda
from .nvshmem_heap import NvshmemHeap
from .nvshmem_library import Library, NvshmemError, Packages

logger = logging.getLogger(__name__)

# How long to wait before the scheduler is asked again after a question failed, seconds.
_RETRY_S = 1.0
# How many questions to the scheduler may fail in a row.
_RETRIES = 10


class Process:
    """What this process has made of its only chance. `threads`: those that entered the library."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self.tried = False
        self.heap: NvshmemHeap | None = None
        self.warned = False
        self.threads: list[threading.Thread] = []


PROCESS = Process()


class Member:
    """A worker's way into a world and its watch on it. Event loop only.

    worker: Dask's. device: index of the CUDA device. nbytes: the arena; the smallest one that is
    offered counts for all members. attach_s: how long the library may take. A process that has a heap
    already hands out that one, as it is.
    """

    def __init__(
        self,
        worker: Any,
        *,
        device: int,
        nbytes: int,
        kind: str = "best_fit",
        attach_s: float = 60.0,
        process: Process = PROCESS,
        packages: Callable[[], Packages] = Packages.real,
        cuda: Callable[[int], Cuda] = Cuda,
    ) -> None:
        self._worker = worker
        self._device = device
        self._nbytes = nbytes
        self._kind = kind
        self._attach_s = attach_s
        self._process = process
        self._packages = packages
        self._cuda = cuda
        self._generation = 0
        self._outcome: asyncio.Future[NvshmemHeap | None] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Offer this process, and go on from there."""
        self._outcome = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="st2i-nvshmem-world")

    async def heap_within(self, seconds: float) -> NvshmemHeap | None:
        """The heap; None: there will be none, or there is none yet. Never raises."""
        assert self._outcome is not None
        await asyncio.wait([self._outcome], timeout=seconds)
        return self._outcome.result() if self._outcome.done() else None

    async def withdraw(self, why: str) -> None:
        """Stop, and tell the others: they need not wait for this process."""
        self.stop()
        with suppress(Exception):
            await asyncio.wait_for(self._failed(why), _RETRIES * _RETRY_S)

    def stop(self) -> None:
        """No heap from now on. One that is there stays with the process, for the next member, and is
        to be closed by whoever has it. The library is not finalised: that needs every PE, alive and
        at the same time."""
        if self._task is not None:
            self._task.cancel()
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(None)

    # -- inside ------------------------------------------------------------------------------------

    async def _run(self) -> None:
        assert self._outcome is not None
        heap, why = None, ""
        try:
            heap = await self._heap()
        except (NvshmemError, TimeoutError) as error:
            why = str(error)
        except Exception as error:  # Dask's, CuPy's: whatever it is, serving goes on
            why = f"{type(error).__name__}: {error}"
        if not self._outcome.done():
            self._outcome.set_result(heap)
        if heap is None:
            self._warn(f"this worker has no NVSHMEM heap and uses other transports: {why}")
            with suppress(Exception):
                await self._failed(why)
            return
        ended = await self._end()
        heap.sever(ended)
        self._warn(
            f"this worker's NVSHMEM world has ended and it uses other transports: {ended}; "
            "restart the workers (client.restart()) to form a new one"
        )

    async def _heap(self) -> NvshmemHeap:
        process = self._process
        if process.heap is not None:
            self._generation = process.heap.address.place[0]
            process.heap.reopen()
            return process.heap
        if process.tried:
            raise NvshmemError("this process has tried before, and can once; restart the worker")
        library = Library(await self._thread(self._packages, self._attach_s))
        standing = await self._joined()
        process.tried = True
        self._generation = generation = standing["generation"]
        if standing["mints"]:
            uid = await self._thread(library.mint, self._attach_s)
            standing = await self._ask("minted", generation=generation, uid=uid)
        if standing["generation"] != generation or standing["uid"] is None:
            raise NvshmemError(f"the world has ended: {standing['why']}; restart the workers")

        def attach() -> NvshmemHeap:
            cuda = self._cuda(self._device)
            pe, n_pes, name = standing["pe"], standing["n_pes"], standing["uid"]
            library.attach(name, pe, n_pes, self._device, standing["nbytes"])
            return NvshmemHeap(
                library,
                cuda,
                name=uuid.uuid5(uuid.NAMESPACE_OID, name.hex()).hex,
                generation=generation,
                pe=pe,
                n_pes=n_pes,
                kind=self._kind,
            )

        attaching = asyncio.ensure_future(self._thread(attach, self._attach_s))
        ending = asyncio.ensure_future(self._end())
        try:
            await asyncio.wait([attaching, ending], return_when=asyncio.FIRST_COMPLETED)
            if not attaching.done():
                raise NvshmemError(f"the world has ended: {ending.result()}; restart the workers")
            heap: NvshmemHeap = attaching.result()
        finally:
            attaching.cancel()
            ending.cancel()
        process.heap = heap
        await self._ask("attached", generation=generation)
        return heap

    async def _joined(self) -> dict[str, Any]:
        while True:
            standing = await self._ask("join", worker=self._worker.address, nbytes=self._nbytes)
            if standing["phase"] in ("attaching", "up"):
                return standing
            if standing["phase"] == "ended":
                raise NvshmemError(f"{standing['why']}; restart the worker")

    async def _end(self) -> str:
        """Why the world has ended, once it has."""
        while True:
            try:
                standing = await self._ask("watch")
            except OSError as error:
                return f"the scheduler does not answer ({error})"
            if standing["phase"] not in ("attaching", "up"):
                return standing["why"] or "the scheduler does not know of it any more"

    async def _ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        for attempt in range(_RETRIES):
            try:
                question = getattr(self._worker.scheduler, f"st2i_world_{what}")
                return dict(await question(process=self._process.name, **arguments))
            except OSError:
                if attempt == _RETRIES - 1:
                    raise
                await asyncio.sleep(_RETRY_S)
        raise AssertionError

    async def _failed(self, why: str) -> None:
        await self._worker.scheduler.st2i_world_failed(
            process=self._process.name, generation=self._generation, why=why
        )

    async def _thread(self, work: Callable[[], Any], seconds: float) -> Any:
        """What may hang for ever, without hanging with it."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()

        def deliver(result: Any, error: BaseException | None) -> None:
            if outcome.done():
                return  # given up
            if error is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(result)

        def run() -> None:
            result, error = None, None
            try:
                result = work()
            except BaseException as caught:
                error = caught
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(deliver, result, error)

        thread = threading.Thread(target=run, name="st2i-nvshmem", daemon=True)
        self._process.threads.append(thread)
        thread.start()
        try:
            return await asyncio.wait_for(outcome, seconds)
        except TimeoutError:
            raise NvshmemError(
                f"NVSHMEM was not done in {seconds:g} s: a worker of the world is gone or cannot be "
                "reached; see NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME for machines with several "
                "networks, then restart the workers"
            ) from None

    def _warn(self, text: str) -> None:
        if not self._process.warned:
            self._process.warned = True
            logger.warning("%s", text[:1].upper() + text[1:])

    def _check(self) -> None:
        assert (self._outcome is None) == (self._task is None)
        if self._outcome is not None and self._outcome.done():
            heap = self._outcome.result()
            assert heap is None or heap is self._process.heap
        assert self._process.heap is None or self._process.tried
