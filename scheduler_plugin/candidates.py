"""A ready invocation, and the interface of everything that can choose among them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from .outline import CostKey, Outline


@dataclass(slots=True, eq=False)
class Candidate:
    """A ready invocation. It waits since its request was submitted: `since`, seconds; `order`
    numbers the requests in the order of their submission."""

    key: str
    tenant: str
    request: str
    outline: Outline
    position: int
    since: float
    order: int = 0
    cost_key: CostKey = field(init=False)

    def __post_init__(self) -> None:
        self.cost_key = self.outline.cost_keys[self.position]

    @property
    def model(self) -> str:
        return self.cost_key.model


class Outlook(Protocol):
    """What is expected of an invocation, seconds; asked once per kind of work, not per decision."""

    def path_s(self, outline: Outline, position: int) -> float:
        """Remaining critical path of the request, this invocation included."""

    def whole_s(self, outline: Outline) -> float:
        """Device seconds of a whole request, loads not counted."""

    def own_s(self, cost_key: CostKey) -> float:
        """Compute and transfer of the invocation itself."""

    def load_s(self, cost_key: CostKey) -> float:
        """Load of its whole model."""

    def missing(self, model: str) -> float:
        """Share of a model that is missing on the best idle executor."""


class Chooser(Protocol):
    """Which ready invocation is dispatched next. The fair queue is one; its rivals are others."""

    def add(self, candidate: Candidate, vtime_s: float) -> None:
        """It is ready; its tenant's vTime is given."""

    def discard(self, key: str) -> None:
        """It is not ready any more (dispatched, cancelled or blocked again)."""

    def choose(self, now: float, without: Collection[str] = ()) -> Candidate | None:
        """The next to dispatch, still in the queue; None when nothing is ready, or nothing that may
        go first needs another model than those in `without`."""

    def dispatched(self, candidate: Candidate) -> None:
        """It was dispatched; called just before it is discarded."""

    def set_vtime(self, tenant: str, vtime_s: float) -> None:
        """The tenant's vTime moved."""

    def tenant_left(self, tenant: str) -> None:
        """The tenant has no work left."""

    def refresh_outline(self, outline: Outline) -> None:
        """Estimates of this outline moved."""

    def refresh_models(self, models: Collection[str] | None) -> None:
        """Seconds to load these models (None: any) on the best idle executor moved."""

    def outline_left(self, outline: Outline) -> None:
        """No open request is of this outline any more."""

    def set_slack(self, slack_s: float) -> None:
        """The operator changed the slack."""

    def set_weights(self, weight: WeightOf) -> None:
        """The operator changed the weights."""

    def __len__(self) -> int: ...

    def __contains__(self, key: object) -> bool: ...

    def _check(self) -> None: ...


class WeightOf(Protocol):
    def __call__(self, tenant: str) -> float: ...
