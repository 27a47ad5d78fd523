"""A member's part in a gang: it runs the leader's invocations too, with the leader's inputs.

It runs in the worker's task thread, so it takes its turn with whatever else runs there, and leases the
model like any invocation.
"""

from __future__ import annotations

import logging
import pickle
import threading
from typing import TYPE_CHECKING, Any

from st2i_dask.gang import in_gang
from st2i_dask.model_fn import ModelFn

from .executor import Executor
from .gang_line import Line
from .lease import Lease
from .rings import Circle, GangBroken, Ring, RingAddress

if TYPE_CHECKING:
    from .gangs import Gangs

logger = logging.getLogger(__name__)

#: How long a member waits for its leader's next step, seconds. The leader's end is seen at once.
STEP_SECONDS = 600.0
# How long what a leader has ended may look like a loss, seconds: its word is on the way.
_NEWS_SECONDS = 1.0


class Member:
    """`run` in a task thread, the others on the event loop."""

    def __init__(
        self,
        gangs: Gangs,
        executor: Executor,
        line: Line,
        model_fn: bytes,
        names: dict[str, str],
        leader: str,
    ):
        """model_fn: pickled. names: see `WeightStore.lease`. leader: its address."""
        self._gangs = gangs
        self._executor = executor
        self._line = line
        self._model_fn = model_fn
        self._names = names
        self._leader = leader
        self._changed = threading.Condition()
        self._why: str | None = None  # its part is over
        self._number = 0  # of the circle that the leader wants; 0: none
        self._ring: Ring | None = None
        self._begun: tuple[int, list[Any]] | None = None
        self._future: Any = None
        #: Nothing of it runs, and nothing will.
        self.has_ended = False

    def start(self) -> None:
        """RuntimeError: the worker is closing."""
        self._future = self._gangs.worker.executor.submit(self.run)

    def heard(self, message: dict[str, Any]) -> None:
        """A message of the leader. OSError: no arena."""
        with self._changed:
            if "form" in message:
                self._number, self._begun = message["form"], None
                self._ring = self._gangs.ring()
                answer = {"formed": self._number, "ring": tuple(self._ring.address())}
                self._gangs.worker.loop.add_callback(self._line.say, answer)
            elif message.get("begin") == self._number:
                self._begun = message["rank"], message["rings"]
            elif "broken" in message:
                self._number, self._ring, self._begun = 0, None, None
            self._changed.notify_all()

    def end(self, why: str) -> None:
        """Its part is over, at the latest when what it computes between two exchanges is done."""
        with self._changed:
            if self._why is None:
                self._why = why
                self._changed.notify_all()
        self._line.close()
        if self._future is None or self._future.cancel():
            self.has_ended = True
            self._gangs.left(self, has_changed=False)

    # -- thread ------------------------------------------------------------------------------------

    def run(self) -> None:
        loop, models = self._gangs.worker.loop, self._executor.models
        version = models.residency.version
        try:
            model_fn: ModelFn = pickle.loads(self._model_fn)
            with self._executor.helping(model_fn, **self._names) as lease:
                loop.add_callback(self._line.say, {"ready": lease.version})
                while (circle := self._next_circle()) is not None:
                    self._serve(circle, model_fn, lease)
        except BaseException as error:
            if self._why is None:
                logger.warning("its part in a gang of %s failed", self._leader, exc_info=True)
                failed = {"failed": f"{type(error).__name__}: {error}"}
                loop.add_callback(self._line.say, failed)
        finally:
            loop.add_callback(self._ended, models.residency.version != version)

    def _ended(self, has_changed: bool) -> None:
        self.has_ended = True
        self._ring = self._begun = None
        self._gangs.left(self, has_changed)

    def _next_circle(self) -> Circle | None:
        """The one that the leader wants; None: its part is over."""
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._why is not None or self._begun is not None, STEP_SECONDS
            )
            if self._why is not None:
                return None
            if not there or self._begun is None or self._ring is None:
                raise GangBroken(f"the leader wanted nothing for {STEP_SECONDS:g} s")
            (rank, rings), self._begun = self._begun, None
            number, own = self._number, self._ring
        others = [
            self._gangs.reader(address, RingAddress(*ring), lambda: self._check_wanted(number))
            for other, (address, ring) in enumerate(rings)
            if other != rank
        ]
        return Circle(rank, own, others, number, self._executor.on_device)

    def _serve(self, circle: Circle, model_fn: ModelFn, lease: Lease) -> None:
        """Steps, until the leader wants this circle no more."""
        try:
            while True:
                circle.publish(None)
                inputs = circle.collect(STEP_SECONDS)[0]
                with in_gang(circle):
                    model_fn.execute(lease.components, **inputs)
        except GangBroken:
            lease.timings.clear()  # no measure of the model
            with self._changed:
                told = self._changed.wait_for(
                    lambda: self._why is not None or self._number != circle.number, _NEWS_SECONDS
                )
            if not told:
                raise

    def _check_wanted(self, number: int) -> None:
        if self._why is not None or self._number != number:
            raise GangBroken(self._why or "the leader has ended it")
