"""What is compared: ours, and monolithic functions with three kinds of caching, behind one interface.

A system says how a workflow is cut into tasks, what of its weights is shared and evicted together, how
the weight cache behaves, and who is next. Everything else is the same for all: requests, devices,
memory, links, placement, estimates (every system starts with the true costs in its cost model).

    ours     model functions; layers, a prefix kept, loads behind compute (Eq. 2)
    pipelined  the same, but nothing is kept between runs: prefix 0
    mcache   monolithic; single models are cached, shared by all workflows that use them
    wcache   monolithic; whole workflows are cached, nothing is shared
    nocache  monolithic; nothing stays on the device between requests

What favours the rivals: no process start or import is charged; a model's copies of MCache are shared
between workflows, base models of adapters too; memory that our arena uses for tensors is theirs for
weights; each may use FIFO, SJF or VTC, and comparisons take the best of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from scheduler_plugin.candidates import Chooser
from scheduler_plugin.rivals import chooser
from scheduler_plugin.settings import Settings
from worker_plugin.weight_cache import Mode

from ..errors import ParameterError
from .device import Catalogue, Kept
from .workflows import Workflow, monolith
from .workload import Workload


@dataclass(frozen=True)
class System:
    """mode: of the weight cache. whole: a workflow is one task. order: fair, fifo, sjf or vtc."""

    name: str
    mode: Mode
    whole: bool
    order: str = "fair"
    settings: Settings = field(default_factory=Settings)

    def __hash__(self) -> int:
        return hash((self.name, self.order, self.settings.slack_s))

    @property
    def chooser(self) -> Callable[[Any, float], Chooser]:
        return chooser(self.order)

    def with_order(self, order: str) -> System:
        """Another scheduler on the same system."""
        chooser(order)
        return replace(self, order=order)

    def with_slack(self, slack_s: float) -> System:
        return replace(self, settings=self.settings.with_changes(slack_s=slack_s))

    def tasks_of(self, workflow: Workflow) -> Workflow:
        """The workflow as this system cuts it."""
        return monolith(workflow) if self.whole else workflow

    def catalogue(self, workload: Workload) -> Catalogue:
        """Weights and tasks of all workflows."""
        tasks: dict[str, tuple[Kept, ...]] = {}
        for workflow in workload.workflows.values():
            if not self.whole:
                for position in workflow.positions:
                    tasks[position.model] = self._kept(workload, position.models)
            else:
                unit = "" if self.mode == "mcache" else workflow.name
                tasks[workflow.name] = self._kept(workload, workflow.models, unit)
        return Catalogue(workload.profile, tasks, self.mode)

    @staticmethod
    def _kept(workload: Workload, models: Sequence[str], unit: str = "") -> tuple[Kept, ...]:
        """unit: what has all of them for its own; empty: each is shared, and evicted by itself."""
        found: dict[str, Kept] = {}
        for model in models:
            weights = workload.profile.weights_of(model)
            name = f"{unit}:{weights}" if unit else weights
            found.setdefault(name, Kept(name, model, unit or weights))
        return tuple(found.values())

    def compute_s(self, workload: Workload) -> Mapping[tuple[str, str], float]:
        """Seconds of compute of one invocation, by (workflow, task)."""
        profile = workload.profile
        found: dict[tuple[str, str], float] = {}
        for workflow in workload.workflows.values():
            if self.whole:
                found[workflow.name, workflow.name] = workflow.device_s(profile)
            else:
                for position in workflow.positions:
                    compute_s = profile.model(position.models[-1]).compute_s
                    found[workflow.name, position.model] = compute_s
        return found

    def weight_bytes(self, workload: Workload) -> int:
        """Of an executor's memory for weights."""
        return workload.profile.weight_bytes - (0 if self.whole else workload.profile.tensor_bytes)


OURS = System("ours", "elastic", False)
PIPELINED = System("pipelined", "pipelined", False)
MCACHE = System("mcache", "mcache", True, "fifo")
WCACHE = System("wcache", "wcache", True, "fifo")
NOCACHE = System("nocache", "nocache", True, "fifo")
RIVALS = (MCACHE, WCACHE, NOCACHE)
SYSTEMS = {s.name: s for s in (OURS, PIPELINED, *RIVALS)}
ORDERS = ("fifo", "sjf", "vtc")


def system(name: str) -> System:
    """The system of this name. ParameterError lists the names."""
    found = SYSTEMS.get(name)
    if found is None:
        raise ParameterError(f"no system is called {name!r}; there are {', '.join(SYSTEMS)}")
    return found
