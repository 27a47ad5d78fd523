"""What is under way in the simulator: open requests and dispatched tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from scheduler_plugin.instructions import Dispatch

from .workflows import Workflow


class Arrival(NamedTuple):
    """A request: when it arrives (s) and whose it is; a tenant asks for one workflow."""

    at: float
    tenant: str


class Request:
    """An open request."""

    __slots__ = (
        *("arrived", "blocks", "device_s", "given", "name", "open", "tenant", "users", "waits"),
        "workflow",
    )

    def __init__(self, name: str, tenant: str, workflow: Workflow, arrived: float) -> None:
        self.name, self.tenant, self.workflow, self.arrived = name, tenant, workflow, arrived
        self.waits = [len(p.deps) for p in workflow.positions]  # inputs that are missing
        self.given: list[list[str]] = [[] for _ in workflow.positions]  # executors with the result
        self.open = len(workflow.positions)
        self.device_s = 0.0
        # Only where tensors are simulated: executor, offset, bytes by position, and who still needs it.
        self.blocks: dict[int, list[tuple[str, int, int]]] = {}
        self.users: list[int] | None = None


@dataclass(slots=True)
class Task:
    """A dispatched task of one or more steps. first_s: of its first step, the pull and loads included;
    next_s: of each later one. over: it has ended, or another entry of the heap stands for it."""

    decision: Dispatch
    request: Request
    started: float
    steps: int
    transfer_s: float
    stalled_s: float
    first_s: float
    next_s: float
    over: bool = False

    @property
    def ends(self) -> float:
        return self.started + self.first_s + (self.steps - 1) * self.next_s

    @property
    def compute_s(self) -> float:
        first_s = self.first_s - self.stalled_s - self.transfer_s
        return max(0.0, first_s + (self.steps - 1) * self.next_s)

    def steps_at(self, now: float) -> int:
        """Steps that are done or begun then, one at least."""
        since = now - self.started - self.first_s
        if since <= 0 or self.next_s <= 0:
            return 1 if self.next_s > 0 else self.steps
        return min(self.steps, 1 - int(-since // self.next_s))
