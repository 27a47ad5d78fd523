"""The discrete-event simulator: requests arrive, the real policy decides, devices take their time.

Everything that happens is an entry of one heap: an arrival, or the end of a task. After all entries of
one moment there is one round of decisions, as in the scheduler's plugin.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import count
from time import process_time

from scheduler_plugin import events as ev
from scheduler_plugin.instructions import Dispatch
from scheduler_plugin.policy import FairPolicy

from .arena import Arena
from .device import Device, Took
from .report import Finished, Ran, Report
from .systems import System
from .tasks import Arrival, Request, Task
from .workflows import Position
from .workload import Workload


class Cluster:
    """Executors in virtual time under one system. Runs once."""

    def __init__(
        self,
        system: System,
        workload: Workload,
        executors: int,
        *,
        seed: int = 0,
        noise: float = 0.0,
        decision_s: float = 0.0,
        keep_runs: bool = False,
        check_every: int = 0,
        arena_bytes: int = 0,
        shared: bool = True,
    ) -> None:
        """noise: of compute, a factor of up to 1 + noise up or down. decision_s: seconds of the
        scheduler for one dispatch; it makes them one after the other. arena_bytes: of each executor's
        memory; tensors are then placed there by the real allocator, and weights too if it is `shared`;
        0: tensors are not simulated one by one."""
        self.system, self.workload = system, workload
        self.now = 0.0
        self._random = random.Random(seed)
        self._noise, self._decision_s, self._scheduler_free = noise, decision_s, 0.0
        self._check_every = check_every
        profile = self._profile = workload.profile
        settings = system.settings.with_changes(bandwidth=profile.link_bandwidth)
        self._workflows = {t: system.tasks_of(w) for t, w in workload.workflows.items()}
        self._compute_s = system.compute_s(workload)
        self._catalogue = system.catalogue(workload)
        self.policy = FairPolicy(settings, chooser=system.chooser)
        self._know_costs()
        capacity = {"framework": system.weight_bytes(workload), "arena": 0}
        if arena_bytes:
            capacity["framework"] = profile.weight_bytes - arena_bytes
            capacity["arena"] = arena_bytes if shared else 0
        self.devices: dict[str, Device] = {}
        for number in range(executors):
            arena = Arena(arena_bytes) if arena_bytes else None
            device = Device(f"w{number:03}", self._catalogue, capacity, arena)
            self.devices[device.name] = device
            joined = ev.ExecutorJoined(0.0, device.name, device.free_bytes, device.missing)
            self.policy.handle(joined)
        self._forgets = system.mode == "nocache"
        self._heap: list[tuple[float, int, Arrival | Task]] = []
        self._serial = count()
        self._requests: dict[str, Request] = {}
        self._running: dict[str, Task] = {}  # by executor
        self._arenas = arena_bytes > 0
        self.report = Report(system.name, executors, profile.memory_bytes)
        self._runs: list[Ran] | None = self.report.runs if keep_runs else None

    def _know_costs(self) -> None:
        """The policy starts with true costs, as after a day of serving."""
        costs = self.policy.costs
        for workflow in self._workflows.values():
            for key in dict.fromkeys(workflow.outline.cost_keys):
                load_s = self._catalogue.load_s(key.model)
                compute_s = self._compute_s[workflow.name, key.model]
                used = ev.Measured(load_s, compute_s, 0.0)
                costs.observe(key, used, loaded_share=1.0, pulled=False)
            for position in workflow.positions:
                alone_s = self._compute_s[workflow.name, position.model]
                for n in range(2, position.step.gang + 1):
                    used = ev.Measured(0.0, self._together_s(position, alone_s, n), 0.0)
                    key = position.step.cost_key
                    costs.observe(key, used, group=n, loaded_share=0.0, pulled=False)

    def _together_s(self, position: Position, alone_s: float, n: int) -> float:
        """Compute of each of n executors for what one alone takes `alone_s` for."""
        assert position.split is not None
        return position.split.seconds(alone_s, n, self._profile)

    # The loop

    def run(self, arrivals: Iterable[Arrival], until: float = float("inf")) -> Report:
        """Until every request is finished, or nothing more happens before `until`."""
        heap, policy = self._heap, self.policy
        heap += [(a.at, next(self._serial), a) for a in arrivals]
        heapify(heap)
        began = process_time()
        batches = 0
        while heap and heap[0][0] <= until:
            now = self.now = heap[0][0]
            while heap and heap[0][0] == now:
                what = heappop(heap)[2]
                if type(what) is Arrival:
                    self._arrive(what)
                elif not what.over:  # type: ignore[union-attr]
                    self._end(what)  # type: ignore[arg-type]
            self._round(now)
            batches += 1
            if self._check_every and batches % self._check_every == 0:
                policy._check()
                for device in self.devices.values():
                    device.cache._check()
        report = self.report
        report.cpu_s += process_time() - began
        report.seconds = self.now
        report.unfinished = len(self._requests)
        report.service = {t: row.service_s for t, row in policy.ledger.totals().items()}
        for device in self.devices.values():
            self._account(device)
            report.loaded_bytes += device.loaded_bytes
        return report

    def _round(self, now: float) -> None:
        policy = self.policy
        while True:
            decision = policy.next_decision(now)
            if decision is None:
                break
            self._start(decision)
        for wanted in policy.yields(now):
            self._hand_back(self._running[wanted.executor])

    # Requests

    def _arrive(self, arrival: Arrival) -> None:
        report = self.report
        name = f"r{report.arrived}"
        report.arrived += 1
        workflow = self._workflows[arrival.tenant]
        request = Request(name, arrival.tenant, workflow, self.now)
        self._requests[name] = request
        self.policy.handle(ev.RequestSubmitted(self.now, name, arrival.tenant, workflow.outline))
        report.events += 1
        for position, waits in enumerate(request.waits):
            if not waits:
                self._ready(request, position)

    def _ready(self, request: Request, position: int) -> None:
        name, workflow = request.name, request.workflow
        positions = workflow.positions
        nbytes = 0
        at: dict[str, int] = {}
        for dep in positions[position].deps:
            size = positions[dep].out_bytes
            nbytes += size
            for executor in request.given[dep]:
                at[executor] = at.get(executor, 0) + size
        key, steps = f"{name}/{position}", workflow.chains[position]
        self.report.events += 1
        self.policy.handle(ev.InvocationReady(self.now, key, name, position, nbytes, at, steps))

    # Tasks

    def _start(self, decision: Dispatch) -> None:
        now, executor, position = self.now, decision.executor, decision.position
        request = self._requests[decision.request]
        workflow = request.workflow
        what = workflow.positions[position]
        if self._decision_s:
            self._scheduler_free = max(now, self._scheduler_free) + self._decision_s
            begins = self._scheduler_free + self._profile.hop_s
        else:
            begins = now + self._profile.hop_s
        compute_s = self._compute_s[workflow.name, what.model]
        if self._noise:
            compute_s *= (1 + self._noise * self._random.random()) ** self._random.choice((-1, 1))
        transfer_s = self._pull(request, what, executor)
        for member in decision.members:
            transfer_s = max(transfer_s, self._pull(request, what, member))
        if decision.members:
            compute_s = self._together_s(what, compute_s, 1 + len(decision.members))
        took = self._run(executor, what, compute_s, begins + transfer_s)
        for member in decision.members:  # they wait for each other in every block
            took = max(took, self._run(member, what, compute_s, begins + transfer_s))
        first_s, next_s, stalled_s, whole = took
        first_s += transfer_s
        steps = decision.steps
        task = Task(decision, request, begins, steps, transfer_s, stalled_s, first_s, next_s)
        for producer in decision.producers:
            beside = self._running.get(producer.executor)
            if beside is not None and beside.decision.key == producer.key:
                # It waits for the last block.
                late_s = beside.ends + self._profile.link_latency_s - task.ends
                task.first_s += max(0.0, late_s)
        self._running[executor] = task
        heappush(self._heap, (task.ends, next(self._serial), task))
        report = self.report
        report.dispatches += 1
        report.invocations += steps
        if whole:
            report.runs_whole += 1
        else:
            report.runs_hidden += stalled_s <= 0.1 * compute_s
        report.stalled_s += stalled_s
        report.transfer_s += transfer_s
        report.control_s += begins - now

    def _run(self, executor: str, what: Position, compute_s: float, begins: float) -> Took:
        device = self.devices[executor]
        self._account(device)
        return device.run(what.model, compute_s, begins)

    def _pull(self, request: Request, what: Position, executor: str) -> float:
        """Seconds to bring its inputs there; they stay."""
        pulls = nbytes = 0
        given = request.given
        for dep in what.deps:
            holders = given[dep]
            if executor not in holders:
                pulls += 1
                nbytes += request.workflow.positions[dep].out_bytes
                holders.append(executor)
                if self._arenas:
                    self._keep(request, dep, executor)
        return self._profile.transfer_s(nbytes, pulls) if pulls else 0.0

    def _hand_back(self, task: Task) -> None:
        """It ends after the step it is in."""
        steps = task.steps_at(self.now)
        if steps == task.steps:
            return
        self.report.invocations -= task.steps - steps
        task.over = True
        sooner = replace(task, steps=steps, over=False)
        self._running[task.decision.executor] = sooner
        heappush(self._heap, (max(self.now, sooner.ends), next(self._serial), sooner))

    def _end(self, task: Task) -> None:
        now, decision, request = self.now, task.decision, task.request
        task.over = True
        executor, position = decision.executor, decision.position
        del self._running[executor]
        device = self.devices[executor]
        self._account(device)
        if self._forgets:
            device.clear(now)
        used = ev.Measured(task.stalled_s, task.compute_s, task.transfer_s)
        used_s = used.total_s * (1 + len(decision.members))
        request.device_s += used_s
        report = self.report
        report.device_s += used_s
        report.events += 1
        handle = self.policy.handle
        for member in decision.members:
            beside = self.devices[member]
            self._account(beside)
            report.events += 1
            handle(ev.ResidencyReported(now, member, beside.missing, beside.free_bytes))
        handle(
            ev.Completed(
                now, decision.key, used, device.missing, device.free_bytes, steps=task.steps
            )
        )
        if self._runs is not None:
            self._runs.append(
                Ran(request.tenant, request.name, position, executor, task.started, now, used_s)
            )
        steps = task.steps
        done = range(position, position + steps)
        if steps > 1:
            report.events += 1
            handle(ev.Skipped(now, request.name, tuple(done[1:])))
        if self._arenas:
            for done_at in done:
                self._keep(request, done_at, executor)
                self._release(request, done_at)
        request.open -= steps
        given, waits, successors = request.given, request.waits, request.workflow.outline.successors
        for done_at in done:
            given[done_at].append(executor)
            for after in successors[done_at]:
                waits[after] -= 1
                if not waits[after] and after >= done.stop:
                    self._ready(request, after)
        if not request.open:
            report.events += 1
            handle(ev.RequestClosed(now, request.name))
            del self._requests[request.name]
            report.finished.append(
                Finished(request.name, request.tenant, request.arrived, now, request.device_s)
            )

    # Tensors

    def _keep(self, request: Request, position: int, executor: str) -> None:
        """A result, or a copy of it, lies on that executor from now on."""
        nbytes = request.workflow.positions[position].out_bytes
        offset = self.devices[executor].place_tensor(nbytes, self.now) if nbytes else None
        if offset is not None:
            request.blocks.setdefault(position, []).append((executor, offset, nbytes))

    def _release(self, request: Request, position: int) -> None:
        """That position is done: results which nobody needs any more go."""
        workflow = request.workflow
        what = workflow.positions[position]
        if request.users is None:
            outline = workflow.outline
            request.users = [
                len(outline.successors[p]) + len(outline.consumers[p])
                for p in range(len(workflow.positions))
            ]
        over = [position] if not request.users[position] else []
        for dep in (*what.deps, *what.callback_deps):
            request.users[dep] -= 1
            if not request.users[dep]:
                over.append(dep)
        for gone in over:
            for executor, offset, nbytes in request.blocks.pop(gone, ()):
                self.devices[executor].drop_tensor(offset, nbytes, self.now)

    def _account(self, device: Device) -> None:
        """Byte seconds of weights until now."""
        self.report.weight_byte_s += (self.now - device.accounted) * device.weight_bytes
        device.accounted = self.now
