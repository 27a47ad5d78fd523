"""What each task of some requests took, as the scheduler hears it."""

from __future__ import annotations

from typing import Any, NamedTuple

from distributed import SchedulerPlugin

from ..request import ANNOTATION

METER = "st2i-meter"


class Done(NamedTuple):
    """A task that is done. nbytes: of its results, by position: of several where steps ran ahead.

    stopped: when its thread was done (s, the worker's clock); load_s, compute_s, transfer_s: of the device,
    in all. pull_s: that its worker waited for inputs from others.
    """

    request: str
    position: int
    fn: str
    model: str
    bucket: str
    worker: str
    stopped: float
    load_s: float
    compute_s: float
    transfer_s: float
    pull_s: float
    nbytes: dict[int, int]

    @property
    def device_s(self) -> float:
        return self.load_s + self.compute_s + self.transfer_s

    @property
    def step_s(self) -> float:
        """Of one of its invocations, loads left out."""
        return (self.compute_s + self.transfer_s) / len(self.nbytes)


class Meter(SchedulerPlugin):
    """Notes the tasks of one tenant. On the scheduler's event loop."""

    name = METER

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.done: list[Done] = []

    async def start(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def transition(self, key: Any, start: str, finish: str, *args: Any, **message: Any) -> None:
        if (start, finish) != ("processing", "memory"):
            return
        note = (self._scheduler.tasks[key].annotations or {}).get(ANNOTATION)
        report = (message.get("metadata") or {}).get(ANNOTATION)
        if not isinstance(note, dict) or note.get("tenant") != self.tenant or not report:
            return
        position, spans = note["position"], message["startstops"]
        nbytes = [message["nbytes"], *report.get("ahead", {}).values()]
        self.done.append(
            Done(
                note["request"],
                position,
                note["fn"],
                note["model"],
                note["bucket"],
                message["worker"],
                max(span["stop"] for span in spans if span["action"] == "compute"),
                report["load"],
                report["compute"],
                report["transfer"],
                sum(s["stop"] - s["start"] for s in spans if s["action"] == "transfer"),
                {position + n: size for n, size in enumerate(nbytes)},
            )
        )


def done(dask_scheduler: Any) -> list[Done]:
    """What the meter has noted, on the scheduler."""
    noted: list[Done] = dask_scheduler.plugins[METER].done
    return noted
