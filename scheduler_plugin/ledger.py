"""The vTime ledger: who has been charged how many device seconds.

    vTime of a tenant = its charged device seconds / its weight     (paper section 6)

Rules of this file:
1. The estimate is charged at dispatch and replaced by what was really used when the run ends, however
   it ends: completion, failure, loss and cancellation differ only in what was used.
2. A tenant that becomes active (it had no ready, running or blocked invocation) is lifted to
   max(own vTime, min vTime of the other active tenants): never lowered. If nobody else is active the
   vTime of the tenant that left last stands in for that minimum, as in VTC: otherwise whoever ran
   alone for an hour would afterwards owe that hour to the first newcomer.
3. A tenant that becomes ready after having had nothing ready keeps at most slack + L_max of credit
   against any other active tenant, L_max being the largest charge of one dispatch, all executors
   of its gang included. A tenant whose DAG is blocked is not returning, so rule 2 does not touch it;
   but without this limit a trickle of blocked requests would save up unbounded priority, and
   |W_f - W_g| <= 2 (slack + L_max) would fail from the moment both are backlogged. It is never lifted
   above a tenant that has something ready: where somebody's runs took longer than estimated, the most charged tenant is far ahead of
   everybody, and that is its own debt, not the newcomer's. Who stays ready is never lifted.
4. A tenant without activity keeps only its totals.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from st2i_dask.errors import PolicyError

#: Up to that many a built-in function is faster than NumPy.
FEW = 64


@dataclass(slots=True, eq=False)
class _Account:
    tenant: str
    settled_v: float = 0.0  # vTime seconds of ended runs, and lifts
    pending_v: float = 0.0  # vTime seconds of estimates still in flight
    pending: int = 0
    service_s: float = 0.0  # device seconds really used, not divided by the weight
    slot: int = -1  # index among the active tenants, -1 when inactive


@dataclass(slots=True, eq=False)
class _Charge:
    account: _Account
    weight: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Total:
    """What is kept of a tenant: vTime (s) and device seconds really used."""

    vtime_s: float
    service_s: float


class VTimeLedger:
    """vTimes of all tenants. Constant time per operation, but for O(active tenants) in NumPy when
    a tenant becomes active or ready."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._charges: dict[int, _Charge] = {}
        self._next_charge = 0
        # By slot: the active tenants, their vTimes, largest charges, and whether they are ready.
        self._active: list[str] = []
        self._v, self._largest = array("d"), array("d")
        self._ready = bytearray()
        self._left_at = 0.0
        self._weights: Mapping[str, float] = {}
        self._default_weight = 1.0

    # Settings and questions

    def set_weights(self, weights: Mapping[str, float], default: float) -> None:
        """Weights of charges made from now on; charges in flight keep theirs."""
        self._weights, self._default_weight = weights, default

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, self._default_weight)

    def vtime(self, tenant: str) -> float:
        """vTime in seconds, estimates in flight included; 0 for a tenant never seen."""
        account = self._accounts.get(tenant)
        return account.settled_v + account.pending_v if account else 0.0

    def service(self, tenant: str) -> float:
        """Device seconds really used by runs that have ended."""
        account = self._accounts.get(tenant)
        return account.service_s if account else 0.0

    def of(self, tenants: Iterable[str]) -> list[tuple[float, float]]:
        """`vtime` and `service` of each."""
        accounts, unseen = self._accounts, _Account("")
        found = [accounts.get(tenant, unseen) for tenant in tenants]
        return [(a.settled_v + a.pending_v, a.service_s) for a in found]

    def is_active(self, tenant: str) -> bool:
        account = self._accounts.get(tenant)
        return account is not None and account.slot >= 0

    def is_ready(self, tenant: str) -> bool:
        """Whether it was said, by `set_ready`, to have something ready."""
        account = self._accounts.get(tenant)
        return account is not None and account.slot >= 0 and bool(self._ready[account.slot])

    def active(self) -> list[str]:
        return list(self._active)

    def least(self, *, ready: bool = False) -> float:
        """vTime of the least-served active tenant; ready: of those with something ready, from which the
        slack counts. inf where there is none. Seconds."""
        if not ready:
            return _least(self._v)
        who = np.frombuffer(self._ready, np.bool_) if self._ready else False
        return float(np.min(self._v, where=who, initial=math.inf))

    def largest_charge(self) -> float:
        """L_max: the largest vTime charge of one dispatch, all executors that it held included, since
        its tenant became active, s."""
        return _most(self._largest)

    def totals(self) -> dict[str, Total]:
        return {
            tenant: Total(account.settled_v + account.pending_v, account.service_s)
            for tenant, account in self._accounts.items()
        }

    # Coming and going

    def activate(self, tenant: str) -> float:
        """The tenant has work again: lift it (rule 2). Its vTime afterwards, seconds."""
        account = self._accounts.setdefault(tenant, _Account(tenant))
        if account.slot >= 0:
            raise PolicyError(
                f"tenant {tenant!r} is already active; activate it only when it had no work"
            )
        floor = _least(self._v) if self._active else self._left_at
        account.settled_v = max(account.settled_v, floor)
        account.slot = len(self._active)
        self._active.append(tenant)
        self._v.append(account.settled_v)
        self._largest.append(0.0)
        self._ready.append(False)
        return account.settled_v

    def deactivate(self, tenant: str) -> None:
        """The tenant has no work left. PolicyError while one of its runs is in flight."""
        account = self._of_active(tenant)
        if account.pending:
            raise PolicyError(
                f"tenant {tenant!r} has {account.pending} charges in flight; settle them first"
            )
        self._left_at = account.settled_v
        last, v = self._active.pop(), self._v.pop()
        largest, ready = self._largest.pop(), self._ready.pop()
        if last != tenant:
            slot = self._accounts[last].slot = account.slot
            self._active[slot], self._v[slot] = last, v
            self._largest[slot], self._ready[slot] = largest, ready
        account.slot = -1

    def limit_credit(self, tenant: str, slack_s: float) -> float:
        """The tenant is about to become ready: at most slack + L_max behind anybody, but not lifted
        above anybody ready (rule 3). Its vTime, s."""
        account = self._of_active(tenant)
        floor = _most(self._v) - _most(self._largest) - slack_s
        own = account.settled_v + account.pending_v
        if floor > own:
            floor = min(floor, self.least(ready=True))
        if floor > own:
            account.settled_v += floor - own
            own = account.settled_v + account.pending_v
            self._v[account.slot] = own
        return own

    def set_ready(self, tenant: str, ready: bool) -> None:
        """The tenant has something ready from now on, or nothing any more."""
        self._ready[self._of_active(tenant).slot] = ready

    # Charging

    def charge(self, tenant: str, seconds: float, *, unit_s: float | None = None) -> int:
        """Charge an estimate at dispatch; the number to settle it with.

        unit_s: the part of it that cannot be interrupted (one step of a multi-step task), seconds.
        """
        account = self._of_active(tenant)
        _check_charge(seconds)
        weight = self._weights.get(tenant, self._default_weight)
        number = self._next_charge
        self._next_charge += 1
        self._charges[number] = _Charge(account, weight, seconds)
        account.pending += 1
        self._move(account, seconds / weight)
        self._enlarge(account, (seconds if unit_s is None else unit_s) / weight)
        return number

    def revise(self, number: int, seconds: float) -> None:
        """Replace the estimate of a run still in flight by a better one."""
        charge = self._charge(number)
        _check_charge(seconds)
        self._move(charge.account, (seconds - charge.seconds) / charge.weight)
        charge.seconds = seconds

    def settle(self, number: int, used_s: float, *, unit_s: float | None = None) -> str:
        """The run has ended: keep what was really used, give the rest back. The tenant charged."""
        charge = self._charge(number)
        _check_charge(used_s)
        del self._charges[number]
        account, weight = charge.account, charge.weight
        account.pending -= 1
        account.settled_v += used_s / weight
        account.service_s += used_s
        self._move(account, -charge.seconds / weight)
        self._enlarge(account, (used_s if unit_s is None else unit_s) / weight)
        return account.tenant

    def estimate_in_flight(self, number: int) -> float:
        """Seconds now charged for a run in flight, not divided by the weight."""
        return self._charge(number).seconds

    def _move(self, account: _Account, delta_v: float) -> None:
        account.pending_v += delta_v
        if not account.pending:
            account.pending_v = 0.0  # also ends any rounding error
        self._v[account.slot] = account.settled_v + account.pending_v

    def _enlarge(self, account: _Account, charge_v: float) -> None:
        if charge_v > self._largest[account.slot]:
            self._largest[account.slot] = charge_v

    def _of_active(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None or account.slot < 0:
            raise PolicyError(f"tenant {tenant!r} is not active; activate it before charging it")
        return account

    def _charge(self, number: int) -> _Charge:
        charge = self._charges.get(number)
        if charge is None:
            raise PolicyError(f"charge {number} is not in flight; settle or revise a charge once")
        return charge

    def _check(self) -> None:
        n = len(self._active)
        pending: dict[str, list[float]] = {}
        for charge in self._charges.values():
            assert charge.seconds >= 0
            assert charge.weight > 0
            pending.setdefault(charge.account.tenant, []).append(charge.seconds / charge.weight)
        for tenant, account in self._accounts.items():
            assert account.tenant == tenant
            mine = pending.pop(tenant, [])
            assert account.pending == len(mine)
            assert math.isclose(account.pending_v, math.fsum(mine), rel_tol=1e-6, abs_tol=1e-6)
            assert account.service_s >= 0
            assert math.isfinite(account.settled_v)
            if account.slot >= 0:
                assert self._active[account.slot] == tenant
                assert self._v[account.slot] == account.settled_v + account.pending_v
            else:
                assert not mine, f"{tenant} is inactive with charges in flight"
        assert not pending
        assert len(set(self._active)) == n
        assert n == len(self._v) == len(self._largest) == len(self._ready)


def _least(seconds: array[float]) -> float:
    """The smallest; inf of none."""
    if len(seconds) <= FEW:
        return min(seconds, default=math.inf)
    return float(np.frombuffer(seconds).min())


def _most(seconds: array[float]) -> float:
    """The largest; 0 of none."""
    if len(seconds) <= FEW:
        return max(seconds, default=0.0)
    return float(np.frombuffer(seconds).max())


def _check_charge(seconds: float) -> None:
    if not 0.0 <= seconds < math.inf:
        raise PolicyError(f"a charge of {seconds!r} s; give a finite number of seconds >= 0")
