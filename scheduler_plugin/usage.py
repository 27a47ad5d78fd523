"""What every tenant has used: invocations, requests and device seconds. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TenantUsage:
    """Totals of one tenant since the plugin started. Seconds are device seconds."""

    invocations: int = 0
    load: float = 0.0
    compute: float = 0.0
    transfer: float = 0.0

    @property
    def device_seconds(self) -> float:
        return self.load + self.compute + self.transfer


class UsageTotals:
    """Adds up completions by tenant."""

    def __init__(self) -> None:
        self.tenants: dict[str, TenantUsage] = {}

    def completed(
        self, tenant: str, load: float, compute: float, transfer: float, invocations: int = 1
    ) -> None:
        """A task is done; one that ran several steps counts as that many invocations."""
        usage = self.tenants.setdefault(tenant, TenantUsage())
        usage.invocations += invocations
        usage.load += load
        usage.compute += compute
        usage.transfer += transfer

    def _check(self) -> None:
        for usage in self.tenants.values():
            assert usage.invocations > 0
            assert min(usage.load, usage.compute, usage.transfer) >= 0
