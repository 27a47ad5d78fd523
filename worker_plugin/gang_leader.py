"""A gang as its leader runs it: members join, run each step with it, and are left behind when they fail.

Every step can be run alone, as the leader has all its inputs: what a member does wrong costs a step's
time and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
from distributed.comm import connect

from st2i_dask.callback import CallbackFuture
from st2i_dask.gang import in_gang
from st2i_dask.model_fn import ModelFn

from .gang_line import Line
from .lease import Lease
from .rings import Circle, GangBroken, RingAddress

if TYPE_CHECKING:
    from .gangs import Gangs

logger = logging.getLogger(__name__)

#: How long the first step of a task waits for members to be ready, seconds, from when the leader is.
#: Those that come later take part from the next step on.
JOIN_SECONDS = 2.0
#: How long a member may take to answer a message, seconds.
ANSWER_SECONDS = 5.0


class _Asked:
    """A worker that was asked to be a member."""

    def __init__(self, address: str):
        self.address = address
        self.line: Line | None = None
        self.version: str | None = None  # of its weights, once it is ready
        self.ring: RingAddress | None = None  # in the circle that is being formed
        self.lost: str | None = None  # why

    @property
    def is_ready(self) -> bool:
        return self.lost is None and self.version is not None


class Leader:
    """Use it in a `with`, in the task's thread. `execute` and the with in that thread."""

    def __init__(
        self, gangs: Gangs, addresses: Sequence[str], model_fn: ModelFn, names: dict[str, str]
    ):
        self._gangs = gangs
        self._loop = gangs.worker.loop
        self._model_fn = model_fn
        self._names = names
        self._asked = [_Asked(address) for address in addresses]
        self._changed = threading.Condition()
        self._talks: set[asyncio.Future[None]] = set()  # event loop only
        self._is_over = False  # event loop only
        self._join_by: float | None = None
        self._circle: Circle | None = None
        self._team: list[_Asked] = []  # of the circle, by rank, the leader left out
        self._number = 0
        #: Addresses of members that have run a step to its end.
        self.served: set[str] = set()

    def __enter__(self) -> Leader:
        self._loop.add_callback(self._open)
        return self

    def __exit__(self, *error: object) -> None:
        self._circle = None
        self._loop.add_callback(self._close)

    def execute(
        self, lease: Lease, alone: Callable[..., Any], components: Any, **inputs: Any
    ) -> Any:
        """What `alone(components, **inputs)` gives: with the members that there are, else alone.

        lease: the leader's, in this thread; members with other weights are left out.
        """
        callback = any(isinstance(value, CallbackFuture) for value in inputs.values())
        circle = None if callback else self._formed(lease.version)
        if circle is not None:
            try:
                circle.publish(inputs)
                circle.collect()
                with in_gang(circle):
                    made = alone(components, **inputs)
                self.served |= {member.address for member in self._team}
                return made
            except GangBroken as error:
                lease.timings.clear()  # no measure of the model
                self._break(error)
            except BaseException:
                self._break(None)
                raise
        return alone(components, **inputs)

    # -- the task's thread -------------------------------------------------------------------------

    def _formed(self, version: str) -> Circle | None:
        """The circle of all that are ready; None: nobody is."""
        with self._changed:
            if self._join_by is None:
                self._join_by = time.monotonic() + JOIN_SECONDS
            self._await(lambda m: m.is_ready, self._asked, self._join_by)
            for member in self._asked:
                if member.is_ready and member.version != version:
                    self._leave_behind(member, "it has other weights of the model")
            team = [member for member in self._asked if member.is_ready]
            if team != self._team or self._circle is None:
                try:
                    self._circle = self._form(team)
                except OSError as error:  # attached anew meanwhile
                    logger.info("no gang: %s", error)
                    self._circle = None
            return self._circle

    def _form(self, team: list[_Asked]) -> Circle | None:
        """A new circle, without those that do not answer. Holds the lock; waiting lets go of it.
        OSError: no arena."""
        while team:
            self._number += 1
            own = self._gangs.ring()
            for member in team:
                member.ring = None
                self._say(member, {"form": self._number})
            self._await(lambda m: m.ring is not None, team, time.monotonic() + ANSWER_SECONDS)
            for member in team:
                if member.ring is None and member.lost is None:
                    self._leave_behind(member, f"no answer for {ANSWER_SECONDS:g} s")
            if all(member.lost is None for member in team):
                break
            team = [member for member in team if member.lost is None]
        self._team = team
        if not team:
            return None
        rings = [(self._gangs.worker.address, tuple(own.address()))]
        rings += [(m.address, tuple(m.ring)) for m in team if m.ring is not None]
        others = []
        for rank, member in enumerate(team, 1):
            self._say(member, {"begin": self._number, "rank": rank, "rings": rings})
            assert member.ring is not None
            check = partial(self._check_there, team)
            others.append(self._gangs.reader(member.address, member.ring, check))
        return Circle(0, own, others, self._number, self._gangs.on_device)

    def _check_there(self, team: list[_Asked]) -> None:
        for rank, member in enumerate(team, 1):
            if member.lost is not None:
                raise GangBroken(member.lost, rank)

    def _break(self, error: GangBroken | None) -> None:
        """The step is run no further together. error: why; None: it failed here."""
        with self._changed:
            self._circle = None
            if error is not None and error.rank:
                self._leave_behind(self._team[error.rank - 1], str(error))
            if error is not None:
                logger.warning("%s: a step is run again, alone: %s", self._model_fn.name, error)
            for member in self._team:
                if member.lost is None:
                    self._say(member, {"broken": self._number})

    def _leave_behind(self, member: _Asked, why: str) -> None:
        if member.lost is None:
            member.lost = why
            self._log_loss(member)
            if member.line is not None:
                self._loop.add_callback(member.line.close)

    def _log_loss(self, member: _Asked) -> None:
        where = self._model_fn.name, member.address, member.lost
        logger.warning("%s goes on without %s: %s", *where)

    def _await(
        self, is_there: Callable[[_Asked], bool], members: list[_Asked], deadline: float
    ) -> None:
        """Until that holds for all that are not lost. Holds the lock; waiting lets go of it."""
        self._changed.wait_for(
            lambda: all(m.lost is not None or is_there(m) for m in members),
            max(0.0, deadline - time.monotonic()),
        )

    def _say(self, member: _Asked, message: dict[str, Any]) -> None:
        assert member.line is not None
        self._loop.add_callback(member.line.say, message)

    # -- event loop --------------------------------------------------------------------------------

    def _open(self) -> None:
        self._gangs.leads(self)
        for member in self._asked:
            if not self._is_over:
                self._talks.add(asyncio.ensure_future(self._talk(member)))

    def _close(self) -> None:
        self.dissolve("the task is over")
        self._gangs.led(self)

    def dissolve(self, why: str) -> None:
        """Whatever runs goes on alone."""
        self._is_over = True
        with self._changed:
            for member in self._asked:
                member.lost = member.lost or why
            self._changed.notify_all()
        for talk in self._talks:
            talk.cancel()
        self._talks.clear()

    async def _talk(self, member: _Asked) -> None:
        """Ask one worker, and hear what it says, until one of both ends."""
        try:
            comm = await connect(
                member.address, timeout=ANSWER_SECONDS, **self._gangs.worker.connection_args
            )
            try:
                member.line = Line(comm)
                await member.line.say(
                    {
                        "op": "st2i_assist",
                        "model_fn": cloudpickle.dumps(self._model_fn),
                        "names": self._names,
                        "who": self._gangs.worker.address,
                    }
                )
                while True:
                    message = await comm.read() or {}  # nothing: it does not know the question
                    with self._changed:
                        if "ready" in message:
                            member.version = message["ready"]
                        elif "formed" not in message:
                            why = message.get("failed", "it refuses")
                            break
                        elif message["formed"] == self._number:
                            member.ring = RingAddress(*message["ring"])
                        self._changed.notify_all()
            finally:
                comm.abort()
        except Exception as error:
            why = f"its worker has gone: {error}"
        with self._changed:
            if member.lost is None:
                member.lost = why
                self._log_loss(member)
            self._changed.notify_all()
