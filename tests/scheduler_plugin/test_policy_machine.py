"""Any legal sequence of events: the policy stays consistent after each, and ends empty."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_plugin import events as ev
from scheduler_plugin.cost_model import CostModel
from scheduler_plugin.outline import Outline, Step
from scheduler_plugin.policy import FairPolicy
from scheduler_plugin.requests import State
from scheduler_plugin.rivals import CHOOSERS
from scheduler_plugin.settings import Settings

OUTLINES = (
    Outline("single", (Step("A", "a", "1"),)),
    Outline("chain", (Step("A", "a", "1"), Step("B", "b", "1", (0,)), Step("A", "a", "2", (1,)))),
    Outline(
        "callback",
        (
            Step("T", "t", "1"),
            Step("C", "c", "1", (0,)),
            Step("B", "b", "1", (0,), (1,)),
            Step("V", "v", "1", (1, 2)),
        ),
    ),
    Outline("fan", (Step("A", "a", "1"), Step("B", "b", "1"), Step("V", "v", "1", (0, 1)))),
    Outline("gang", (Step("A", "a", "1", gang=3), Step("B", "b", "1", (0,), gang=2))),
    Outline(
        "led",
        (Step("C", "c", "1", gang=4), Step("B", "b", "1", (), (0,)), Step("V", "v", "1", (1,))),
    ),
)
EXECUTORS = [f"w{number}" for number in range(4)]
TENANTS = ["a", "b", "c"]
USED = st.builds(
    ev.Measured, st.sampled_from([0.0, 3.0]), st.sampled_from([0.1, 1.0, 20.0]), st.just(0.0)
)


class PolicyMachine(RuleBasedStateMachine):
    chooser = "fair"

    def __init__(self):
        super().__init__()
        self.now, self.serial = 0.0, 0

    @initialize(slack=st.sampled_from([0.0, 1.0, 10.0]))
    def start(self, slack):
        self.policy = FairPolicy(
            Settings(slack_s=slack, default_cap=6), chooser=CHOOSERS[self.chooser]
        )

    def tell(self, event):
        for instruction in self.policy.handle(event):
            # A consumer may be cancelled by the same event that tells it not to wait any more.
            runs = {run.dispatch.executor: run for run in self.policy._fleet.runs()}
            assert runs[instruction.executor].dispatch.key == instruction.key

    def keys(self, *states):
        invocations = self.policy._book.invocations
        return sorted(key for key in invocations if self.policy.state(key) in states)

    def requests(self):
        return sorted(self.policy._book.requests)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(executor=st.sampled_from(EXECUTORS), resident=st.sets(st.sampled_from("abct")))
    def join_or_report(self, executor, resident):
        missing = dict.fromkeys(resident, 0.0)
        if executor in self.policy._placement:
            self.tell(ev.ResidencyReported(self.now, executor, missing, 100))
        else:
            self.tell(ev.ExecutorJoined(self.now, executor, 100, missing))

    @rule(executor=st.sampled_from(EXECUTORS))
    def leave(self, executor):
        if executor in self.policy._placement:
            self.tell(ev.ExecutorLeft(self.now, executor))

    @rule(executor=st.sampled_from(EXECUTORS), busy=st.booleans())
    def plain_tasks(self, executor, busy):
        if executor in self.policy._placement:
            event = ev.ExecutorBusy if busy else ev.ExecutorIdle
            self.tell(event(self.now, executor))

    @rule(tenant=st.sampled_from(TENANTS), outline=st.sampled_from(OUTLINES))
    def submit(self, tenant, outline):
        self.serial += 1
        name = f"r{self.serial}"
        if self.policy.refusal(tenant) is None:
            self.tell(ev.RequestSubmitted(self.now, name, tenant, outline))

    @precondition(lambda self: self.requests())
    @rule(data=st.data(), steps=st.sampled_from([1, 1, 5]))
    def ready(self, data, steps):
        request = self.policy._book.requests[data.draw(st.sampled_from(self.requests()))]
        possible = [
            position
            for position, step in enumerate(request.outline.steps)
            if request.states[position] not in (State.GATED, State.READY, State.RUNNING)
            and all(request.states[d] is State.DONE for d in step.deps)
        ]
        if possible:
            position = data.draw(st.sampled_from(possible))
            self.tell(
                ev.InvocationReady(
                    self.now, f"{request.name}/{position}", request.name, position, 10, steps=steps
                )
            )

    @rule(at_most=st.integers(1, 6))
    def decide(self, at_most):
        for _ in range(at_most):
            idle = set(self.policy.idle_names())
            queued = self.policy.queued
            decision = self.policy.next_decision(self.now)
            held = self.policy.waits_until
            assert (decision is not None or held is not None) == (len(idle) > 0 and queued > 0)
            if decision is None:
                assert held is None or held > self.now
                break
            assert held is None
            group = {decision.executor, *decision.members}
            assert len(group) == 1 + len(decision.members)
            assert group <= idle
            if decision.members:
                assert self.policy.idle_executors >= self.policy.queued, "somebody waits for a gang"
            for producer in decision.producers:
                assert producer.executor != decision.executor
        for instruction in self.policy.yields(self.now):
            assert self.policy.yield_wanted(instruction.executor)
        assert self.policy.yields(self.now) == []

    @precondition(lambda self: self.keys(State.RUNNING))
    @rule(
        data=st.data(),
        used=USED,
        end=st.sampled_from(["done", "done", "yield", "fail", "lost"]),
        members=st.sampled_from([None, None, 0, 1]),
    )
    def end(self, data, used, end, members):
        key = data.draw(st.sampled_from(self.keys(State.RUNNING)))
        run = self.policy._book.invocations[key].run
        self.tell(
            {
                "done": ev.Completed(
                    self.now, key, used, steps=run.dispatch.steps, members=members
                ),
                "yield": ev.Completed(self.now, key, used, finished=False),
                "fail": ev.Failed(self.now, key, used),
                "lost": ev.Lost(self.now, key),
            }[end]
        )

    @precondition(lambda self: self.keys(State.READY, State.GATED))
    @rule(data=st.data())
    def unready(self, data):
        key = data.draw(st.sampled_from(self.keys(State.READY, State.GATED)))
        self.tell(ev.InvocationUnready(self.now, key))

    @precondition(lambda self: self.keys(*State))
    @rule(data=st.data(), stopped=st.booleans())
    def cancel(self, data, stopped):
        self.tell(
            ev.Cancelled(self.now, data.draw(st.sampled_from(self.keys(*State))), stopped=stopped)
        )

    @precondition(lambda self: self.requests())
    @rule(data=st.data())
    def close(self, data):
        self.tell(ev.RequestClosed(self.now, data.draw(st.sampled_from(self.requests()))))

    @precondition(lambda self: self.requests())
    @rule(data=st.data())
    def skip(self, data):
        name = data.draw(st.sampled_from(self.requests()))
        request = self.policy._book.requests[name]
        positions = [p for p, s in enumerate(request.states) if s is not State.RUNNING]
        self.tell(ev.Skipped(self.now, name, tuple(positions[:2])))

    @precondition(lambda self: self.keys(State.DONE))
    @rule(data=st.data())
    def result_lost(self, data):
        key = data.draw(st.sampled_from(self.keys(State.DONE)))
        invocation = self.policy._book.invocations[key]
        name = invocation.request.name
        self.tell(ev.ResultLost(self.now, key, name, invocation.position))

    @precondition(lambda self: self.policy._fleet.draining)
    @rule(data=st.data(), used=st.none() | USED)
    def drained(self, data, used):
        executor = data.draw(st.sampled_from(sorted(self.policy._fleet.draining)))
        self.tell(ev.Drained(self.now, executor, used))

    @rule(slack=st.sampled_from([0.0, 2.0]), weight=st.sampled_from([0.5, 1.0, 4.0]))
    def settings(self, slack, weight):
        changed = self.policy.settings.with_changes(slack_s=slack, weights={"a": weight})
        self.tell(ev.SettingsChanged(self.now, changed))

    @rule(seconds=st.sampled_from([0.5, 3.0]), known=st.booleans())
    def costs(self, seconds, known):
        learned = CostModel()
        for request in self.policy._book.requests.values() if known else ():
            used = ev.Measured(seconds, seconds, 0.0)
            for key in request.outline.cost_keys:
                learned.observe(key, used, loaded_share=1.0, pulled=False)
        self.tell(ev.CostsReplaced(self.now, learned))

    @invariant()
    def consistent(self):
        if hasattr(self, "policy"):
            self.policy._check()

    def teardown(self):
        """Close everything: nothing may be left but the totals."""
        if not hasattr(self, "policy"):
            return
        policy = self.policy
        for name in self.requests():
            self.tell(ev.RequestClosed(self.now, name))
        for executor in sorted(policy._fleet.draining):
            self.tell(ev.Drained(self.now, executor))
        policy._check()
        assert_empty(policy)


def assert_empty(policy):
    """Nothing is left of any request but tenants' totals and learned costs."""
    assert policy.queued == 0
    assert len(policy._chooser) == 0
    book = policy._book
    assert not book.requests
    assert not book.invocations
    assert not book.standings
    assert not policy._fleet.running
    assert not policy._fleet.draining
    assert not policy._fleet.members
    assert not policy._fleet.multi_step
    assert not policy.ledger._charges
    assert policy.ledger.active() == []
    assert len(policy._paths) == 0
    assert not policy._paths._users
    assert not policy._paths._paths
    lanes = getattr(policy._chooser, "_lanes", None)
    if lanes is not None:
        assert (len(lanes), lanes.queued) == (0, 0)
        assert not lanes._by_tenant
        assert not lanes._kinds
        assert not lanes._costs


class FifoMachine(PolicyMachine):
    chooser = "fifo"


class ShortestMachine(PolicyMachine):
    chooser = "sjf"


class CounterMachine(PolicyMachine):
    chooser = "vtc"


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
for machine in (FifoMachine, ShortestMachine, CounterMachine):
    machine.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestFifoMachine = FifoMachine.TestCase
TestShortestMachine = ShortestMachine.TestCase
TestCounterMachine = CounterMachine.TestCase
