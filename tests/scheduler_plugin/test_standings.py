"""Rows for requests whose steps only a worker knows, and for orchestrators, whose calls are requests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from scheduler_plugin import events as ev
from scheduler_plugin.outline import chain
from scheduler_plugin.policy import FairPolicy
from scheduler_plugin.settings import Settings
from scheduler_plugin.standings import Standings

MANY = chain("many", [("Fn", "m", "1")] * 8)
ONE = chain("one", [("Fn", "m", "1")])


class Calls:
    """Of one orchestrator, "pipeline@p-abc": how many of its calls are done, and which are not."""

    def __init__(self):
        self.done, self.under_way = 0, []

    def owners(self, requests):
        return {"abc": "pipeline@p-abc"} if "abc" in requests else {}

    def count(self, owner):
        assert owner == "pipeline@p-abc"
        return self.done, self.under_way


class Workers:
    """The scheduler's connections to workers: what each answers, or raises."""

    def __init__(self):
        self.answers = {}
        self.asked = []

    def rpc(self, address):
        async def st2i_steps():
            self.asked.append(address)
            answer = self.answers[address]
            return answer() if callable(answer) else answer

        return SimpleNamespace(st2i_steps=st2i_steps)


@pytest.fixture
def policy():
    policy = FairPolicy(Settings(steps_per_task=8))
    policy.handle(ev.ExecutorJoined(0.0, "w1"))
    yield policy
    policy._check()


@pytest.fixture
def workers():
    return Workers()


@pytest.fixture
def calls():
    return Calls()


@pytest.fixture
def rows(policy, workers, calls):
    standings = Standings(workers, policy, calls)
    return lambda *names, now=0.0: asyncio.run(standings.of(names, now))


def submit(policy, name, tenant, outline, steps=1):
    policy.handle(ev.RequestSubmitted(0.0, name, tenant, outline))
    policy.handle(ev.InvocationReady(0.0, f"{name}/0", name, 0, steps=steps))


def test_the_worker_of_a_task_of_several_steps_is_asked(policy, workers, rows):
    submit(policy, "r", "a", MANY, steps=8)
    assert policy.next_decision(0.0).steps == 8
    workers.answers["w1"] = {"r/0": 5, "another": 3}
    assert rows("r")["r"]["done"] == 5
    assert workers.asked == ["w1"]


def test_the_wait_falls_with_the_steps_of_a_task_that_runs(policy, workers, rows):
    submit(policy, "r", "a", MANY, steps=8)
    policy.next_decision(0.0)
    workers.answers["w1"] = {"r/0": 0}
    whole = rows("r")["r"]["wait_s"]
    assert whole > 0
    workers.answers["w1"] = {"r/0": 6}
    assert rows("r")["r"]["wait_s"] == pytest.approx(whole * 2 / 8)
    workers.answers["w1"] = {"r/0": 8}
    assert rows("r")["r"]["wait_s"] == 0


def test_nobody_is_asked_about_others_or_single_steps(policy, workers, rows):
    submit(policy, "r", "a", MANY, steps=1)
    policy.next_decision(0.0)
    assert rows("r", "unknown").keys() == {"r"}
    assert workers.asked == []


def test_a_worker_that_fails_costs_only_its_steps(policy, workers, rows):
    submit(policy, "r", "a", MANY, steps=8)
    policy.next_decision(0.0)

    def gone():
        raise OSError("gone")

    workers.answers["w1"] = gone
    assert rows("r")["r"]["done"] == 0


def test_a_task_that_ends_while_its_worker_is_asked_is_not_counted_twice(policy, workers, rows):
    submit(policy, "r", "a", MANY, steps=8)
    policy.next_decision(0.0)

    def late():
        policy.handle(ev.Completed(1.0, "r/0", ev.Measured(0.0, 1.0, 0.0), steps=1))
        return {"r/0": 7}

    workers.answers["w1"] = late
    assert rows("r")["r"]["done"] == 1


def test_an_orchestrator_waits_as_its_first_call_does(policy, calls, rows):
    submit(policy, "before", "a", ONE)
    policy.next_decision(0.0)
    submit(policy, "also", "a", ONE)
    submit(policy, "call", "a", ONE)
    calls.under_way = ["call"]
    assert rows("abc") == {"abc": {"done": 0, "total": None, "place": 2, "wait_s": None}}
    calls.done = 3  # it has begun: between its calls it waits no more
    assert rows("abc")["abc"] == {"done": 3, "total": None, "place": None, "wait_s": None}


def test_an_orchestrator_before_its_first_call(rows):
    assert rows("abc")["abc"]["done"] == 0
    assert rows("xyz") == {}
