"""Callback inputs: producers first, on another executor; a loss unblocks at once."""

from __future__ import annotations

from functools import partial

import pytest

from scheduler_plugin import events as ev
from scheduler_plugin.instructions import Producer, Unblock
from scheduler_plugin.outline import Outline, Step
from scheduler_plugin.policy import FairPolicy
from scheduler_plugin.requests import State

from .virtual_cluster import Truth, VirtualCluster

TEXT, CONTROL, BASE, VAE = range(4)
CONTROLNET = Outline(
    "controlnet",
    (
        Step("Text", "t5", "77"),
        Step("Control", "canny", "1024x1024", (TEXT,)),
        Step("Denoise", "flux", "1024x1024", (TEXT,), callback_deps=(CONTROL,)),
        Step("Decode", "vae", "1024x1024", (CONTROL, BASE)),
    ),
)
USED = ev.Measured(0.0, 1.0, 0.0)


def ready(policy, now, position):
    policy.handle(ev.InvocationReady(now, f"k{position}", "r", position))


@pytest.fixture
def policy():
    """The text encoder is done; base is reported ready before its callback producer."""
    policy = FairPolicy()
    policy.handle(ev.ExecutorJoined(0.0, "w1"))
    policy.handle(ev.ExecutorJoined(0.0, "w2"))
    policy.handle(ev.RequestSubmitted(0.0, "r", "t", CONTROLNET))
    policy.handle(ev.Skipped(0.0, "r", (TEXT,)))
    ready(policy, 0.0, BASE)
    yield policy
    policy._check()


def test_the_consumer_waits_until_its_producer_is_dispatched(policy):
    assert policy.state("k2") is State.GATED
    assert policy.next_decision(0.0) is None
    ready(policy, 1.0, CONTROL)
    assert policy.state("k2") is State.GATED
    assert policy.next_decision(1.0).key == "k1"
    assert policy.state("k2") is State.READY


def test_they_sit_on_different_executors_and_the_consumer_learns_where(policy):
    ready(policy, 0.0, CONTROL)
    producer = policy.next_decision(0.0)
    consumer = policy.next_decision(0.0)
    assert consumer.key == "k2"
    assert consumer.executor != producer.executor
    assert consumer.producers == (Producer(CONTROL, "k1", producer.executor),)


def test_a_producer_goes_where_its_consumers_model_is_not():
    policy = FairPolicy()
    policy.handle(ev.ExecutorJoined(0.0, "w1", 100, {"flux": 0.0}))
    policy.handle(ev.ExecutorJoined(0.0, "w2", 1, {}))
    policy.handle(ev.RequestSubmitted(0.0, "r", "t", CONTROLNET))
    policy.handle(ev.Skipped(0.0, "r", (TEXT,)))
    for position in (BASE, CONTROL):
        ready(policy, 0.0, position)
    assert [policy.next_decision(0.0).executor for _ in "ab"] == ["w2", "w1"]
    policy._check()


def test_with_one_executor_the_consumer_runs_after_the_producer(policy):
    policy.handle(ev.ExecutorLeft(0.0, "w2"))
    ready(policy, 0.0, CONTROL)
    assert policy.next_decision(0.0).key == "k1"
    assert policy.next_decision(0.0) is None
    policy.handle(ev.Completed(1.0, "k1", USED))
    decision = policy.next_decision(1.0)
    assert (decision.key, decision.executor, decision.producers) == ("k2", "w1", ())


@pytest.mark.parametrize("loss", ["left", "lost", "failed", "cancelled"])
def test_a_loss_unblocks_a_running_consumer_at_once(policy, loss):
    ready(policy, 0.0, CONTROL)
    producer, consumer = policy.next_decision(0.0), policy.next_decision(0.0)
    event = {
        "left": ev.ExecutorLeft(0.5, producer.executor, stimulus_id="s"),
        "lost": ev.Lost(0.5, "k1", stimulus_id="s"),
        "failed": ev.Failed(0.5, "k1", stimulus_id="s"),
        "cancelled": ev.Cancelled(0.5, "k1", stimulus_id="s"),
    }[loss]
    assert policy.handle(event) == [Unblock("k2", consumer.executor, "k1", stimulus_id="s")]


def test_the_loss_of_a_finished_producers_result_unblocks_a_running_consumer(policy):
    ready(policy, 0.0, CONTROL)
    policy.next_decision(0.0)
    consumer = policy.next_decision(0.0)
    policy.handle(ev.Completed(0.5, "k1", USED))
    lost = policy.handle(ev.ResultLost(0.6, "k1", "r", CONTROL, stimulus_id="s"))
    assert lost == [Unblock("k2", consumer.executor, "k1", stimulus_id="s")]


def test_a_consumer_does_not_run_before_a_lost_result_is_made_again(policy):
    """Not even where it scores higher: it would take the producer's executor, for ever."""
    policy.handle(ev.ExecutorLeft(0.0, "w2"))
    ready(policy, 0.0, CONTROL)
    policy.next_decision(0.0)
    policy.handle(ev.Completed(0.5, "k1", USED))
    assert policy.state("k2") is State.READY
    policy.handle(ev.ResultLost(0.5, "k1", "r", CONTROL))
    assert policy.state("k2") is State.GATED
    assert policy.next_decision(0.5) is None
    ready(policy, 1.0, CONTROL)
    assert policy.next_decision(1.0).key == "k1"


def test_after_a_loss_both_run_again(policy):
    ready(policy, 0.0, CONTROL)
    producer = policy.next_decision(0.0)
    policy.next_decision(0.0)
    policy.handle(ev.ExecutorLeft(0.5, producer.executor))
    policy.handle(ev.Lost(0.5, "k2"))  # its worker raised the typed error
    ready(policy, 0.5, BASE)
    assert policy.state("k2") is State.GATED
    ready(policy, 0.5, CONTROL)
    assert policy.next_decision(0.5).key == "k1"
    policy.handle(ev.ExecutorJoined(0.6, "w3"))
    assert policy.next_decision(0.6).key == "k2"


def test_a_queued_consumer_is_gated_again_when_its_producer_is_lost(policy):
    policy.handle(ev.ExecutorBusy(0.0, "w2"))
    ready(policy, 0.0, CONTROL)
    policy.next_decision(0.0)
    assert policy.state("k2") is State.READY
    assert policy.handle(ev.Lost(0.5, "k1")) == []
    assert policy.state("k2") is State.GATED
    policy._check()
    policy.handle(ev.ExecutorIdle(0.5, "w2"))
    assert policy.next_decision(0.5) is None


def test_a_done_producer_whose_output_was_lost_shuts_the_gate(policy):
    policy.handle(ev.ExecutorBusy(0.0, "w2"))
    ready(policy, 0.0, CONTROL)
    policy.next_decision(0.0)
    policy.handle(ev.ExecutorBusy(0.5, "w1"))
    policy.handle(ev.Completed(0.5, "k1", USED))
    assert policy.state("k2") is State.READY
    ready(policy, 1.0, CONTROL)
    assert policy.state("k2") is State.GATED


def test_a_failed_producer_takes_queued_consumers_with_it(policy):
    policy.handle(ev.ExecutorBusy(0.0, "w2"))
    ready(policy, 0.0, CONTROL)
    policy.next_decision(0.0)
    policy.handle(ev.Failed(0.5, "k1"))
    assert policy.state("k2") is State.DEAD
    assert not policy.ledger.is_active("t")


@pytest.mark.parametrize("executors", [1, 2, 5])
@pytest.mark.parametrize("losses", [0, 8])
def test_many_requests_with_and_without_losses(executors, losses):
    """Virtual time asserts at every dispatch that a running producer sits elsewhere. Producers are
    killed while their consumers run."""
    truth = Truth(
        compute={"t5": 0.2, "canny": 1.0, "flux": 0.7, "vae": 0.3}, load={"flux": 1.0}, noise=0.5
    )
    policy = FairPolicy()
    cluster = VirtualCluster(policy, executors, truth, seed=executors, check_every=5)
    for number in range(40):
        cluster.submit(number * 0.4, f"t{number % 3}", CONTROLNET)
    killed = 0

    def kill_a_producer(cluster):
        nonlocal killed
        for invocation in list(policy._fleet.running.values()):
            if killed < losses and invocation.run.dispatch.producers:
                killed += 1
                victim = invocation.run.dispatch.producers[0].executor
                cluster.kill(cluster.now, victim)
                cluster.at(cluster.now, partial(cluster.join, victim))
                return

    cluster.after_batch = kill_a_producer
    cluster.run()
    assert all(job.finished is not None for job in cluster.jobs.values())
    assert len(cluster.jobs) == 40
    if executors > 1:
        assert len(cluster.unblocks) == killed == losses
    policy._check()
    assert policy.ledger.active() == []
