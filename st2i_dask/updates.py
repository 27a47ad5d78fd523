"""What becomes of requests while somebody waits for them: place in the queue, steps, previews, end.

One message to the scheduler asks for all of them, a few times a second at most, and less often where the
answer takes long.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .errors import ParameterError
from .request import request_id
from .submission import previews_of, steps_of

if TYPE_CHECKING:
    from distributed import Client, Future
    from PIL.Image import Image

logger = logging.getLogger(__name__)

# Seconds: between two questions, at least and at most; for an answer. A question may use this part of
# the time.
_EVERY_S, _SELDOM_S, _ANSWER_S, _PART = 0.25, 5.0, 10.0, 0.02
# Seconds between looks whether the client's event loop is still there.
_LOOK_S = 1.0
# Of more requests than these only the first that are not over are asked about.
_ASKED = 100


@dataclass(frozen=True, slots=True)
class Update:
    """What is known of a request at a moment.

    number: which of the futures, from 0. request: the future's key.
    state: "queued", "running", and at last the future's status ("finished", "error", "cancelled").
    place: of those that wait, from 1; None when it is not known, and once it runs.
    done, total: steps, which are its calls of models: one or two for each denoising step, and those of
        text encoders and decoder. total is None as long as nobody knows.
    wait_s: seconds until its result, estimated; None when nobody knows.
    preview: the newest one, if the request was submitted with some.
    """

    number: int
    request: str
    state: str
    place: int | None = None
    done: int = 0
    total: int | None = None
    wait_s: float | None = None
    preview: Image | None = field(default=None, compare=False, repr=False)

    @property
    def over(self) -> bool:
        """Whether it is the last one of its request."""
        return self.state not in ("queued", "running")


async def updates(futures: Future | Iterable[Future]) -> AsyncIterator[Update]:
    """An `Update` whenever something is new about one of the requests, until all are over.

    In any event loop: the one of an asynchronous client, or another beside an ordinary client's.
    What comes while the loop's body works is put together. Leaving the loop cancels nothing; requests of a
    client that closes end as "cancelled". Of more
    than 100 requests only the first 100 that are not over are told of; of none the loop ends at once.
    ParameterError for anything but futures of one client.
    """
    listed = checked(futures)
    if not listed:
        return
    watch = Watch(listed)
    try:
        while changes := await watch.from_coroutine():
            for update in changes:
                yield update
    finally:
        watch.end()


def checked(futures: Future | Iterable[Future]) -> list[Future]:
    """As a list, which may be empty. ParameterError for anything but futures of one client."""
    from distributed import Future

    listed = list(futures) if isinstance(futures, Iterable) else [futures]
    strange = [f for f in listed if not isinstance(f, Future)]
    if strange:
        what = f"got {strange[0]!r}"
    elif len({id(f.client) for f in listed}) > 1:
        what = f"got {len(listed)} of several clients"
    else:
        return listed
    raise ParameterError(f"{what}; give futures of one client, as submit and map return them")


class Watch:
    """Watches requests, one at least. `changes` runs on the client's event loop, one call at a time.

    Another thread may close the client, and its event loop ends at any moment of a call, which then never
    answers. Whoever asks from outside of the loop looks whether it is there.
    """

    def __init__(self, futures: Sequence[Future]) -> None:
        self.futures = list(futures)
        self.client: Client = self.futures[0].client
        self._open = list(range(len(self.futures)))
        self._last: dict[int, Update] = {}
        self._shown: dict[int, int] = {}  # by number: previews that were taken
        self._every_s = 0.0  # at first at once
        self._news: asyncio.Event | None = None
        self._waiting: list[asyncio.Task[None]] = []

    async def changes(self) -> list[Update]:
        """What is new, waiting for it; an empty list once all have ended and that was told."""
        if self._news is None:
            self._news = asyncio.Event()
            # Dask's own `wait` asks the default client, which may be another.
            states = [future._state for future in self.futures]
            self._waiting = [asyncio.create_task(self._wait_for(state)) for state in states]
        while self._open:
            await self._pause()
            changes = await self._look()
            if changes:
                return changes
        return []

    async def from_coroutine(self) -> list[Update]:
        """`changes`, in any event loop."""
        if asyncio.get_running_loop() is self._loop:
            return await self.changes()
        asked = self._begin()
        answer = asyncio.wrap_future(asked)
        try:
            while not answer.done():
                await asyncio.wait([answer], timeout=_LOOK_S)
                if self._loop.is_closed():
                    break
            return self._end_of(asked)
        finally:
            answer.cancel()

    def from_thread(self) -> list[Update]:
        """`changes`, in any thread but the loop's own."""
        asked = self._begin()
        try:
            while not asked.done():
                concurrent.futures.wait([asked], timeout=_LOOK_S)
                if self._loop.is_closed():
                    break
            return self._end_of(asked)
        finally:
            asked.cancel()

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        loop: asyncio.AbstractEventLoop = self.client.loop.asyncio_loop
        return loop

    def _begin(self) -> concurrent.futures.Future[list[Update]]:
        """A call of `changes`; a cancelled one where there is no loop any more."""
        changes = self.changes()
        try:
            return asyncio.run_coroutine_threadsafe(changes, self._loop)
        except RuntimeError:
            changes.close()
            none: concurrent.futures.Future[list[Update]] = concurrent.futures.Future()
            none.cancel()
            return none

    def _end_of(self, asked: concurrent.futures.Future[list[Update]]) -> list[Update]:
        """What it gives, or when it ended with its loop what is left to say: nobody can know more."""
        if asked.done() and not asked.cancelled():
            return asked.result()
        left, self._open = self._open, []
        updates = []
        for number in left:
            future = self.futures[number]
            last = self._last.get(number) or Update(
                number, str(future.key), "queued", total=steps_of(future)
            )
            state = "cancelled" if future.status == "pending" else future.status
            done = last.total or last.done if state == "finished" else last.done
            updates.append(replace(last, state=state, place=None, done=done, wait_s=None))
        return updates

    def end(self) -> None:
        """Hold on to nothing any more. Any thread."""
        self.client.loop.add_callback(self._let_go)

    def _let_go(self) -> None:
        for task in self._waiting:
            task.cancel()
        self._waiting.clear()

    async def _wait_for(self, state: Any) -> None:
        await state.wait()
        assert self._news is not None
        self._news.set()

    async def _pause(self) -> None:
        """Until one of them is over, or it is time to ask."""
        assert self._news is not None
        try:
            async with asyncio.timeout(self._every_s):
                await self._news.wait()
        except TimeoutError:
            pass
        self._news.clear()

    async def _look(self) -> list[Update]:
        asked = [n for n in self._open if self.futures[n].status == "pending"][:_ASKED]
        rows = await self._ask([request_id(self.futures[n].key) for n in asked])
        over = [n for n in self._open if self.futures[n].status != "pending"]
        changes = []
        for number in sorted({*over, *asked}):
            last = self._last.get(number)
            update = await self._update(number, rows)
            if last is None or update != last or update.preview is not last.preview:
                self._last[number] = update
                changes.append(update)
        ended = {update.number for update in changes if update.over}
        self._open = [number for number in self._open if number not in ended]
        return changes

    async def _update(self, number: int, rows: dict[str, Any]) -> Update:
        future, last = self.futures[number], self._last.get(number)
        key, status = str(future.key), future.status
        row = rows.get(request_id(key))
        done, total = (last.done, last.total) if last is not None else (0, steps_of(future))
        preview = await self._newest_preview(number)
        if preview is None and last is not None:
            preview = last.preview
        if status != "pending":
            done = total if status == "finished" and total is not None else done
            return Update(number, key, status, None, done, total, None, preview)
        if row is None:  # its tasks are on their way there, or its result is on the way here
            state = last.state if last is not None else "queued"
            return Update(number, key, state, None, done, total, None, preview)
        state = "running" if row["place"] is None else "queued"
        done, total = row["done"], row["total"]
        return Update(number, key, state, row["place"], done, total, row["wait_s"], preview)

    async def _newest_preview(self, number: int) -> Image | None:
        """One that is there and was not taken."""
        shown = previews_of(self.futures[number])
        taken = self._shown.get(number, 0)
        there = [n for n in range(taken, len(shown)) if shown[n].future.status == "finished"]
        if not there:
            return None
        self._shown[number] = there[-1] + 1
        newest = shown[there[-1]]
        try:
            found = await self.client.gather([newest.future], errors="skip", asynchronous=True)
        except Exception as error:  # of many kinds when the client closes
            logger.debug("no preview of %s: %r", self.futures[number].key, error)
            return None
        return found[0].values[newest.export].image if found else None

    async def _ask(self, names: list[str]) -> dict[str, Any]:
        """Rows of those that the scheduler knows, see `scheduler_plugin.prospects`; none if it cannot
        say: the futures tell the end all the same."""
        if not names:
            return {}
        start = time.monotonic()
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await self.client.scheduler.st2i_prospects(requests=names)
        except Exception as error:  # of many kinds when the connection goes
            logger.debug("no news of %d requests: %r", len(names), error)
            answer = None
        if answer is None:  # also where the cluster serves no workflows
            self._every_s = min(_SELDOM_S, 2 * max(self._every_s, _EVERY_S))
            return {}
        took = time.monotonic() - start
        self._every_s = min(_SELDOM_S, max(_EVERY_S, took / _PART))
        rows: dict[str, Any] = answer
        return rows
