"""Reading annotations: whatever a client writes by hand, its tasks run and the scheduler lives."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace

import dask
import pytest
from dask._task_spec import Task, TaskRef

from scheduler_plugin.intake import Intake

from .live import TIMEOUT, chain, decisions_of, serving


def annotation(position=0, **changes):
    made = {
        "tenant": "ann",
        "request": "r1",
        "workflow": "w",
        "position": position,
        "fn": "F",
        "model": "m",
        "bucket": "",
        "callbacks": (),
        **changes,
    }
    return {name: value for name, value in made.items() if value is not ...}


class FakeScheduler:
    """Tasks in a chain, with these annotations."""

    def __init__(self, *annotations, **more):
        self.tasks = {}
        before = []
        for number, note in enumerate(annotations):
            ts = SimpleNamespace(
                key=f"k{number}",
                annotations={"st2i": note},
                dependencies=set(),
                worker_restrictions=None,
                host_restrictions=None,
                resource_restrictions=None,
                actor=False,
                state="released",
            )
            vars(ts).update(more)
            ts.dependencies = tuple(before[-1:])
            before.append(ts)
            self.tasks[ts.key] = ts

    def take(self):
        intake = Intake(self)
        requests = intake.take(list(self.tasks))
        intake._check()
        return intake, requests


def test_requests_of_one_workflow_share_one_outline():
    one, (first,) = FakeScheduler(*map(annotation, range(3))).take()
    two, (second,) = FakeScheduler(*(annotation(n, tenant="bob") for n in range(3))).take()
    assert first.outline is second.outline
    assert [e.steps for e in one.entries.values()] == [e.steps for e in two.entries.values()]
    _, (other,) = FakeScheduler(*(annotation(n, bucket="b") for n in range(3))).take()
    assert other.outline != first.outline


def test_sound_annotations_make_a_request():
    intake, (request,) = FakeScheduler(*map(annotation, range(4))).take()
    assert (request.name, request.tenant) == ("r1", "ann")
    assert [step.deps for step in request.outline.steps] == [(), (0,), (1,), (2,)]
    assert {key: entry.steps for key, entry in intake.entries.items()} == {
        "k0": 4,
        "k1": 3,
        "k2": 2,
        "k3": 1,
    }
    assert [intake.forget(key) for key in ("k2", "k0", "k1")] == [None] * 3
    intake._check()
    assert intake.forget("k3") == "r1"
    intake._check()
    assert not intake.entries


def test_gangs_are_read_and_one_executor_is_the_default():
    _, (request,) = FakeScheduler(annotation(0, gang=4), annotation(1)).take()
    assert [step.gang for step in request.outline.steps] == [4, 1]


def test_positions_may_come_in_any_order():
    scheduler = FakeScheduler(*map(annotation, range(3)))
    intake = Intake(scheduler)
    (request,) = intake.take(["k2", "k0", "k1"])
    assert [step.deps for step in request.outline.steps] == [(), (0,), (1,)]


NONSENSE = {
    "not a dict": (3, "is a int, not a dict"),
    "a list": ([], "is a list, not a dict"),
    "no request": (annotation(request=...), "'request' is None, not text"),
    "a request of bytes": (annotation(request=b"r1"), "'request' is b'r1', not text"),
    "a model that is a number": (annotation(model=1.5), "'model' is 1.5, not text"),
    "no position": (annotation(position=...), "'position' is None"),
    "a true position": (annotation(position=True), "'position' is True"),
    "a negative position": (annotation(position=-1), "'position' is -1"),
    "a position that is text": (annotation(position="0"), "'position' is '0'"),
    "no tenant": (annotation(tenant=...), "'tenant' is None"),
    "a tenant with a space": (annotation(tenant="a b"), "'tenant' is 'a b'"),
    "an unhashable tenant": (annotation(tenant=["ann"]), "'tenant' is ['ann']"),
    "a gap": (annotation(position=1), "positions [1] are not 0 to 0"),
    "a huge position": (annotation(position=10**30), "are not 0 to 0"),
    "an empty workflow": (annotation(workflow=""), "is not a non-empty string"),
    "a callback from later": (annotation(callbacks=(5,)), "takes a callback from 5"),
    "callbacks that are a number": (annotation(callbacks=3), "'callbacks'"),
    "a gang of none": (annotation(gang=0), "gang of position 0 is 0"),
    "a gang that is text": (annotation(gang="4"), "gang of position 0 is '4'"),
    "a gang that is a list": (annotation(gang=[4]), "unhashable"),
    "very long nonsense": (annotation(fn=["x" * 10**6]), "..., not text"),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_is_a_plain_task_with_a_reason(kind, caplog):
    note, why = NONSENSE[kind]
    with caplog.at_level(logging.WARNING):
        intake, requests = FakeScheduler(note).take()
    assert not requests
    assert not intake.entries
    (record,) = caplog.records
    assert why in record.getMessage()
    assert "runs as a plain Dask task" in record.getMessage()
    assert len(record.getMessage()) < 500


def test_two_tasks_at_one_position_make_no_request():
    intake, requests = FakeScheduler(annotation(0), annotation(1), annotation(1)).take()
    assert not requests
    assert not intake.entries


@pytest.mark.parametrize("field", ["tenant", "workflow"])
def test_one_request_has_one_tenant_and_one_workflow(field):
    intake, requests = FakeScheduler(annotation(0), annotation(1, **{field: "other"})).take()
    assert not requests
    assert not intake.entries


def test_the_name_of_an_open_request_is_taken(caplog):
    scheduler = FakeScheduler(annotation(0))
    intake = Intake(scheduler)
    assert intake.take(["k0"])
    foreign = FakeScheduler(annotation(0), annotation(0))
    scheduler.tasks["k1"] = foreign.tasks["k1"]
    with caplog.at_level(logging.WARNING):
        assert not intake.take(["k1"])
    assert "exists already" in caplog.text
    assert set(intake.entries) == {"k0"}
    intake._check()


def test_one_line_per_reason_and_not_too_many(caplog):
    with caplog.at_level(logging.WARNING):
        intake = Intake(FakeScheduler(*[annotation(position=-1)] * 20))
        intake.take([f"k{n}" for n in range(20)])
        assert len(caplog.records) == 1
        scheduler = FakeScheduler(*[annotation(fn=number) for number in range(1_500)])
        intake = Intake(scheduler)
        intake.take(list(scheduler.tasks))
        assert len(caplog.records) == 1_001
        assert len(intake._warned) == 1_000


@pytest.mark.parametrize(
    "tie", ["worker_restrictions", "host_restrictions", "resource_restrictions", "actor"]
)
def test_tied_tasks_are_plain(tie):
    intake, requests = FakeScheduler(annotation(0), **{tie: {"here"}}).take()
    assert not requests
    assert not intake.entries


@pytest.mark.parametrize("state", ["waiting", "queued", "processing", "memory", "erred"])
def test_what_dask_already_deals_with_stays_plain(state):
    """A second submission may complete what was unsound before."""
    intake, requests = FakeScheduler(annotation(0), state=state).take()
    assert not requests
    assert not intake.entries


def test_keys_that_are_no_text_are_plain():
    scheduler = FakeScheduler(annotation(0))
    (ts,) = scheduler.tasks.values()
    ts.key = ("k", 0)
    scheduler.tasks = {ts.key: ts}
    intake, requests = scheduler.take()
    assert not requests
    assert not intake.entries


# Live


def increment(value):
    return value + 1


def test_a_live_scheduler_survives_every_kind_of_nonsense(caplog):
    with serving(2) as client:
        made = decisions_of(client)
        ours = [chain.submit(client, value=float(i), steps=4, seconds=0.005) for i in range(5)]
        with caplog.at_level(logging.WARNING, "scheduler_plugin.intake"):
            futures = []
            for number, (note, _) in enumerate(NONSENSE.values()):
                for _ in range(2):
                    with dask.annotate(st2i=note):
                        futures.append(client.submit(increment, number, pure=False))
            assert client.gather(futures) == [n + 1 for n in range(len(NONSENSE)) for _ in "ab"]
        assert client.gather(ours) == [4.0 + i for i in range(5)]
        assert {d.tenant for d in made} == {"default"}
        lines = [r.getMessage() for r in caplog.records if r.name == "scheduler_plugin.intake"]
        reasons = [line.partition("plain Dask task: ")[2] for line in lines]
        assert len(reasons) == len(set(reasons)) <= len(NONSENSE)
        del futures, ours


def test_a_sound_annotation_on_somebody_elses_function_is_served(caplog):
    """Nothing forbids it: it is dispatched, charged by Dask's clock, and can be cancelled."""
    notes = {f"by-hand-{n}": annotation(n, request="by-hand") for n in range(3)}
    with serving(1) as client:
        made = decisions_of(client)
        tasks = {
            "by-hand-0": Task("by-hand-0", increment, 1),
            "by-hand-1": Task("by-hand-1", increment, TaskRef("by-hand-0")),
            "by-hand-2": Task("by-hand-2", increment, TaskRef("by-hand-1")),
        }
        with dask.annotate(st2i=notes.get):
            (future,) = client.get(tasks, ["by-hand-2"], sync=False)
        assert future.result(timeout=TIMEOUT) == 4
        assert [d.key for d in made] == ["by-hand-0", "by-hand-1", "by-hand-2"]
        del future
        note = annotation(0, request="slow")
        with dask.annotate(st2i=note):
            slow = client.submit(time.sleep, 0.4, key="slow")
        time.sleep(0.1)
        slow.cancel()
        assert chain.submit(client, value=0.0).result(timeout=TIMEOUT) == 3.0
        del slow


def test_a_request_submitted_in_two_halves_stays_plain():
    """The first half is unsound alone; the second would make it whole while it is queued."""
    notes = {f"half-{n}": annotation(n, request="halves") for n in range(2)}
    with serving(1) as client:
        made = decisions_of(client)
        blocker = client.submit(time.sleep, 0.3)
        with dask.annotate(st2i=notes.get):
            first = client.get({"half-1": Task("half-1", increment, 1)}, ["half-1"], sync=False)
            both = client.get(
                {
                    "half-0": Task("half-0", increment, 2),
                    "half-1": Task("half-1", increment, 1),
                },
                ["half-0", "half-1"],
                sync=False,
            )
        assert client.gather([*first, *both]) == [2, 3, 2]
        assert {d.key for d in made} <= {"half-0"}
        del first, both, blocker
