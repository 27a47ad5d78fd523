"""The log of tasks on a worker, with the fields of the scheduler's log: stimulus_id, request, tenant, key.

DEBUG for each task's begin and end, INFO for one that failed. The stimulus of a begin is the dispatch as
the scheduler's log names it, that of an end the completion.
"""

from __future__ import annotations

import logging
from typing import Any

from st2i_dask.request import ANNOTATION

logger = logging.getLogger(__name__)

_ENDS = ("memory", "error", "rescheduled", "cancelled")


class TaskLog:
    """One per worker. `transitioned` on the event loop, `fields` in any thread."""

    def __init__(self, worker: Any):
        self._worker = worker
        self._begun: dict[str, str] = {}  # by key: the stimulus that began what runs

    def transitioned(self, key: Any, start: str, finish: str) -> None:
        """A task of this worker has another state."""
        if not logger.isEnabledFor(logging.INFO):
            self._begun.clear()
            return
        if finish == "executing" and start != "long-running":
            fields = self.fields(key)
            if fields and logger.isEnabledFor(logging.DEBUG):
                fields["stimulus_id"] = self._begun[key] = self._stimulus(key, "compute-task")
                logger.debug("%s begins", key, extra=fields)
        elif start in ("executing", "long-running") and finish in _ENDS:
            fields = self.fields(key)
            if fields:
                # Dask writes down what ended it after this call.
                self._worker.loop.add_callback(self._ended, key, finish, fields)

    def fields(self, key: Any) -> dict[str, Any]:
        """What records about an invocation say; empty for any other task."""
        task = self._worker.state.tasks.get(key)
        annotation = ((task.annotations if task is not None else None) or {}).get(ANNOTATION)
        if not isinstance(annotation, dict):
            return {}
        fields = {
            "request": annotation.get("request"),
            "tenant": annotation.get("tenant"),
            "key": key,
        }
        if key in self._begun:
            fields["stimulus_id"] = self._begun[key]
        return fields

    def _ended(self, key: Any, finish: str, fields: dict[str, Any]) -> None:
        self._begun.pop(key, None)
        level = logging.INFO if finish == "error" else logging.DEBUG
        if logger.isEnabledFor(level):
            fields["stimulus_id"] = self._stimulus(key, "executing", "long-running")
            logger.log(level, "%s ends in state %s", key, finish, extra=fields)

    def _stimulus(self, key: Any, *what: str) -> str:
        """Of the latest line of Dask's log of the worker that says one of these of the key."""
        for line in reversed(self._worker.state.log):
            if line[0] == key and line[1] in what:
                return str(line[-2])
        return ""
