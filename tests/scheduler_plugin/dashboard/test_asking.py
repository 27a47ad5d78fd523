"""Executors are asked what they hold while somebody looks; one that is silent delays nobody."""

import asyncio
import time

from distributed.core import Server

from scheduler_plugin import events as ev
from scheduler_plugin.dashboard import asking as asking_module
from scheduler_plugin.dashboard.asking import Asking
from scheduler_plugin.policy import FairPolicy
from scheduler_plugin.watch import Watch


async def never(**kwargs):
    await asyncio.sleep(3600)


def fails():
    raise RuntimeError("no disk")


async def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


async def listening(handler):
    server = Server({"st2i_holdings": handler} if handler else {})
    await server.listen("tcp://127.0.0.1:0")
    return server


class Viewer:
    def __init__(self):
        self.looks = True


def asked(handlers, use, monkeypatch, *, dead=False):
    monkeypatch.setattr(asking_module, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(asking_module, "ROUND_SECONDS", 0.05)
    monkeypatch.setattr(asking_module, "AGAIN_SECONDS", 0.1)

    async def go():
        servers = [await listening(handler) for handler in handlers]
        addresses = [server.listeners[0].contact_address for server in servers]
        if dead:
            await servers[-1].close()
        scheduler, policy, viewer = Server({}), FairPolicy(), Viewer()
        await scheduler.rpc.start()
        for address in addresses:
            policy.handle(ev.ExecutorJoined(0.0, address))
        watch = Watch(policy)
        asking = Asking(scheduler, watch, time.monotonic, lambda: viewer.looks)
        asking.start()
        try:
            await use(watch, addresses, viewer, asking)
        finally:
            asking.stop()
            await scheduler.rpc.close()
            for server in (scheduler, *servers):
                await server.close()
                await server.rpc.close()

    asyncio.run(go())


def test_answers_and_silence(monkeypatch):
    async def use(watch, addresses, viewer, asking):
        facts = watch.facts
        await until(lambda: len(facts.silent) == 4 and len(facts.answers) == 1)
        good, slow, none, old, broken = addresses
        assert facts.answers == {good: {"models": ()}}
        assert facts.silent[slow] == "no answer within 0.3 s"
        assert facts.silent[none] == "it does not serve now"
        assert facts.silent[old] == "it does not serve now"  # it has no plugin
        assert facts.silent[broken] == "RuntimeError: no disk"
        first = facts.answered[good]
        await until(lambda: facts.answered[good] > first)  # again, though another is silent

    asked([lambda: {"models": []}, never, lambda: None, None, fails], use, monkeypatch)


def test_one_that_cannot_be_reached_is_silent(monkeypatch):
    async def use(watch, addresses, viewer, asking):
        await until(lambda: addresses[1] in watch.facts.silent)
        assert addresses[0] in watch.facts.answers

    asked([lambda: {"models": []}] * 2, use, monkeypatch, dead=True)


def test_nobody_is_asked_while_nobody_looks(monkeypatch):
    questions = []

    def count():
        questions.append(time.monotonic())
        return {"models": []}

    async def use(watch, addresses, viewer, asking):
        await until(lambda: questions)
        viewer.looks = False
        await until(lambda: asking._task.done())
        had = len(questions)
        await asyncio.sleep(0.3)
        assert len(questions) == had
        viewer.looks = True
        asking.start()
        await until(lambda: len(questions) > had)

    asked([count], use, monkeypatch)


def test_those_come_first_that_were_not_asked_for_longest(monkeypatch):
    now = 100.0
    policy = FairPolicy()
    names = [f"tcp://{n:02d}" for n in range(25)]
    for name in names:
        policy.handle(ev.ExecutorJoined(0.0, name))
    asking = Asking(None, Watch(policy), lambda: now, lambda: True)
    asked_in_turn = []
    for _ in range(5):
        due = asking._due(names)
        assert len(due) <= asking_module.PER_ROUND
        asked_in_turn += due
        asking._asked.update(dict.fromkeys(due, now))
        now += 1.0
    assert asked_in_turn[:25] == names
    assert asked_in_turn[25:30] == names[:5]


def test_who_has_left_is_asked_and_known_no_more(monkeypatch):
    async def use(watch, addresses, viewer, asking):
        await until(lambda: len(watch.facts.answers) == 2)
        watch.policy.handle(ev.ExecutorLeft(1.0, addresses[0]))
        await until(lambda: list(watch.facts.answers) == [addresses[1]])
        assert addresses[0] not in asking._asked

    asked([lambda: {"models": []}] * 2, use, monkeypatch)
