"""Charges: from estimates to the ledger, and from measurements back to estimates."""

from __future__ import annotations

import math

from .candidates import Chooser
from .cost_model import CostModel
from .critical_path import CriticalPaths
from .events import Completed, Measured
from .fleet import Fleet
from .instructions import Estimate
from .ledger import VTimeLedger
from .outline import CostKey, Outline
from .recent import RecentUse
from .requests import Invocation, Run
from .settings import Settings


class Charging:
    """Whatever changes a vTime goes through here, so that the chooser learns of it."""

    def __init__(
        self, settings: Settings, costs: CostModel, paths: CriticalPaths, fleet: Fleet
    ) -> None:
        self.ledger = VTimeLedger()
        self.recent = RecentUse()
        self.chooser: Chooser  # set by the policy, which builds it from the same estimates
        self._costs = costs
        self._paths = paths
        self._fleet = fleet
        self.set_settings(settings)

    def set_settings(self, settings: Settings) -> None:
        self._settings = settings
        self.ledger.set_weights(settings.weights, settings.default_weight)

    def estimate(
        self, key: CostKey, missing: float, pull_bytes: int, steps: int, group: int
    ) -> Estimate:
        """What a run is expected to take. missing: share of the model to load there, by the slowest of
        a gang; group: executors that compute together."""
        transfer_s = 0.0
        if pull_bytes:
            learned = self._costs.transfer_s(key)
            transfer_s = pull_bytes / self._settings.bandwidth if learned is None else learned
        load_s = self._costs.load_s(key) * missing if missing else 0.0
        return Estimate(load_s, self._costs.compute_s(key, group) * steps, transfer_s)

    def dispatched(self, run: Run) -> None:
        """Charge the estimate, once for each executor held."""
        tenant = run.dispatch.tenant
        run.charge = self.ledger.charge(
            tenant, run.device_s(run.estimate_s), unit_s=run.device_s(run.unit_s)
        )
        self._vtime_moved(tenant)

    def revise(self, run: Run, estimate_s: float) -> None:
        """Charge another estimate while it runs, once for each executor that it holds or has held."""
        run.estimate_s = estimate_s
        self._fleet.expect(run)
        device_s = run.device_s(estimate_s)
        if device_s != self.ledger.estimate_in_flight(run.charge):
            self.ledger.revise(run.charge, device_s)
            self._vtime_moved(run.dispatch.tenant)

    def settle(
        self,
        tenant: str,
        run: Run,
        used: Measured | None,
        now: float,
        steps: int,
        members: int | None = None,
    ) -> None:
        """Replace the estimate by what was measured, or else by the time since the dispatch; members:
        how many took part, if that is known."""
        if used is None:
            seconds = now - run.started
            unit_s = min(seconds, run.unit_s) if run.dispatch.steps > 1 else seconds
        else:
            seconds = used.total_s
            unit_s = seconds - used.compute_s * (1 - 1 / steps)
        device_s = run.device_s(seconds, members)
        unit_s = device_s if unit_s == seconds else run.device_s(unit_s, members)
        self.ledger.settle(run.charge, device_s, unit_s=unit_s)
        self.recent.add(now, tenant, device_s)
        self._vtime_moved(tenant)

    def learn(self, run: Run, event: Completed) -> None:
        """Learn what the run took. If an estimate moved, renew paths, lanes and open charges."""
        if run.departed or run.slowest > run.missing:
            return  # seconds of some of them, or of waiting for the load of another
        key = run.candidate.cost_key
        most = len(run.executors)
        moved = self._costs.observe(
            key,
            event.used,
            steps=event.steps,
            group=most if event.members is None else min(most, 1 + event.members),
            loaded_share=run.missing,
            pulled=run.pull_bytes > 0,
        )
        if moved:
            self._renew(self._paths.cost_moved(key), key)

    def replace_costs(self, costs: CostModel) -> None:
        """Take over what was learned elsewhere; renew paths, lanes and open charges."""
        self._costs.replace_with(costs)
        self._renew(self._paths.all_moved(), None)

    def _renew(self, outlines: list[Outline], moved: CostKey | None) -> None:
        """moved: the cost that these outlines use; None: every cost."""
        for outline in outlines:
            self.chooser.refresh_outline(outline)
        self.chooser.refresh_models(None)
        for invocation in self._fleet.running.values():
            self._revise(invocation, moved)

    def _revise(self, invocation: Invocation, moved: CostKey | None) -> None:
        run = invocation.run
        assert run is not None
        key = run.candidate.cost_key
        if run.dispatch.steps == 1 and (moved in (key, None) or not self._costs.is_measured(key)):
            group = len(run.executors)
            self.revise(run, self.estimate(key, run.slowest, run.pull_bytes, 1, group).total_s)

    def cut(self, invocation: Invocation, now: float) -> None:
        """Charge a multi-step run only for the steps it has done and the one it is in."""
        run = invocation.run
        assert run is not None
        estimate = run.dispatch.estimate
        step_s = estimate.compute_s / run.dispatch.steps
        before_s = run.unit_s - step_s  # load and transfer
        begun = math.ceil((now - run.started - before_s) / step_s) if step_s else 1
        seconds = before_s + step_s * max(1, begun)
        if seconds < run.estimate_s:
            self.revise(run, seconds)

    def activate(self, tenant: str, now: float) -> None:
        """The tenant has work. If it had none it is lifted; first, what others have charged for
        steps they may never run is cut, or the newcomer would be lifted by it."""
        if self.ledger.is_active(tenant):
            return
        for invocation in self._fleet.multi_step.values():
            self.cut(invocation, now)
        self.ledger.activate(tenant)

    def deactivate(self, tenant: str) -> None:
        """The tenant has no work left; nothing happens if that is known."""
        if self.ledger.is_active(tenant):
            self.ledger.deactivate(tenant)
            self.chooser.tenant_left(tenant)

    def becomes_ready(self, tenant: str) -> float:
        """The tenant has something ready after having had nothing. Its vTime, seconds."""
        vtime_s = self.ledger.limit_credit(tenant, self._settings.slack_s)
        self.ledger.set_ready(tenant, True)
        return vtime_s

    def _vtime_moved(self, tenant: str) -> None:
        self.chooser.set_vtime(tenant, self.ledger.vtime(tenant))

    def _check(self) -> None:
        self.ledger._check()
        for run in self._fleet.runs():
            charged_s = self.ledger.estimate_in_flight(run.charge)
            assert charged_s == run.device_s(run.estimate_s), "not every executor held is charged"
        self.recent._check()
        self._costs._check()
        self._paths._check()
