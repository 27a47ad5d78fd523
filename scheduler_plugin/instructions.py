"""What the policy wants done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Estimate(NamedTuple):
    """Device seconds an invocation is expected to take on the chosen executor."""

    load_s: float
    compute_s: float
    transfer_s: float

    @property
    def total_s(self) -> float:
        return self.load_s + self.compute_s + self.transfer_s


class Producer(NamedTuple):
    """Where a callback input comes from: task key and the executor that runs (or ran) it."""

    position: int
    key: str
    executor: str


class Dispatch(NamedTuple):
    """Run `key` on `executor`, `steps` denoising steps of it (1 for anything else).

    members: further executors that it holds until it ends, for its model to use with the first.
    """

    key: str
    executor: str
    tenant: str
    request: str
    position: int
    estimate: Estimate
    steps: int = 1
    producers: tuple[Producer, ...] = ()
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RaiseYield:
    """Another tenant waits: ask the multi-step task to hand back after its current step."""

    key: str
    executor: str
    stimulus_id: str = field(default="", kw_only=True)


@dataclass(frozen=True, slots=True)
class Unblock:
    """`key` runs and may be waiting for a producer that is gone: tell it at once."""

    key: str
    executor: str
    producer: str
    stimulus_id: str = field(default="", kw_only=True)


Instruction = RaiseYield | Unblock
