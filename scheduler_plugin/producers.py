"""Callback inputs as Dask's scheduler sees them: which tasks make them, and where those are."""

from __future__ import annotations

from typing import Any

from st2i_dask.request import ANNOTATION

from .intake import Intake
from .policy import FairPolicy
from .requests import State


class Producers:
    """The tasks that make the callback inputs of other tasks. Event loop only."""

    def __init__(self, scheduler: Any, policy: FairPolicy, intake: Intake):
        self._scheduler = scheduler
        self._policy = policy
        self._intake = intake

    def needed_again(self, ts: Any) -> list[Any]:
        """Producers that have run and whose results Dask has let go since.

        Nothing but this task would have them made again, and Dask knows no edge to it: the callback
        edge becomes an ordinary one.
        """
        return [
            self._scheduler.tasks[key]
            for key in self._keys(ts)
            if self._policy.state(key) is State.DONE
            and self._scheduler.tasks[key].state == "released"
        ]

    def name(self, ts: Any) -> None:
        """Tell the worker where the task's callback inputs are made: in its annotation."""
        keys = self._keys(ts)
        if not keys:
            return
        producers = {}
        for key in keys:
            producer = self._scheduler.tasks[key]
            holders = [producer.processing_on] if producer.processing_on else producer.who_has or ()
            for holder in list(holders)[:1]:
                producers[key] = holder.address
        annotation = {**ts.annotations[ANNOTATION], "producers": producers}
        ts.annotations = {**ts.annotations, ANNOTATION: annotation}

    def _keys(self, ts: Any) -> list[Any]:
        positions = ts.annotations[ANNOTATION]["callbacks"]
        return self._intake.keys_at(ts.key, positions) if positions else []
