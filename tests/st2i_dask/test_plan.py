"""Plans: pieces that workers open once, and a refusal for what cannot be pickled."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import st2i_dask as st2i
from st2i_dask.dag import build
from st2i_dask.fusion import fuse
from st2i_dask.plan import Packed, _Opened, pack, unpack
from st2i_dask.trace import Trace, tracing


class Step(st2i.ModelFn):
    def setup_io(self):
        self.add_input("x")
        self.add_input("y", optional=True)
        self.add_output("z")

    def execute(self, model_components, x, y):
        return {"z": x}


@st2i.glue
def plus(value, other=1):
    return value


def packed(function):
    with tracing(Trace("portrait")) as trace:
        result = function(trace.parameter("prompt"))
    dag = build(trace, result)
    return pack(dag, fuse(dag))


def refused(function):
    with pytest.raises(st2i.ComposeError) as caught:
        packed(function)
    message = str(caught.value)
    assert message.startswith("workflow 'portrait': ")
    assert "cannot be sent to workers" in message
    assert "pass plain values (numbers, strings, arrays)" in message
    return message


# ---------------------------------------------------------------- refusals


def test_a_constant_that_does_not_pickle_is_refused_with_its_model():
    message = refused(lambda prompt: Step()(Step()(prompt), threading.Lock()))
    assert "workflow 'portrait': Step#2 cannot be sent" in message


def test_a_constant_of_glue_that_does_not_pickle_is_refused_with_the_glue():
    message = refused(lambda prompt: plus(Step()(plus(prompt)), other=(i for i in ())))
    assert "workflow 'portrait': plus#2 cannot be sent" in message


def test_glue_that_closes_over_something_live_is_refused():
    lock = threading.Lock()

    @st2i.glue
    def guarded(value):
        with lock:
            return value

    assert "guarded#1" in refused(lambda prompt: Step()(guarded(prompt)))


def test_a_model_that_holds_something_live_is_refused():
    class Live(Step):
        def setup_io(self):
            super().setup_io()
            self.lock = threading.Lock()

    message = refused(lambda prompt: Live()(prompt))
    assert "Live cannot be sent" in message
    assert "in load_model" in message


def test_a_symbol_that_hides_in_a_set_is_refused():
    message = refused(lambda prompt: Step()(prompt, {prompt}))
    assert "outside its workflow" in message


# ---------------------------------------------------------------- pieces


def test_tasks_of_one_model_share_its_bytes():
    step = Step("folder")

    def chain(prompt):
        for _ in range(3):
            prompt = step(prompt)
        return prompt

    first, second, third = packed(chain)
    assert first.model_fn is second.model_fn is third.model_fn
    assert len({task.plan.digest for task in (first, second, third)}) == 3


def test_a_piece_holds_only_the_constants_of_its_task():
    large = np.zeros(100_000)
    first, second = packed(lambda prompt: Step()(Step()(prompt), large))
    assert len(first.plan.data) < 10_000
    assert len(second.plan.data) > 800_000


def test_only_the_last_task_gives_the_result():
    plans = [unpack(task)[1] for task in packed(lambda prompt: plus(Step()(Step()(prompt))))]
    assert [plan.result is not None for plan in plans] == [False, True]
    assert [plan.label for plan in plans] == ["Step#1", "Step#2"]


def test_a_piece_is_opened_once():
    (task,) = packed(lambda prompt: Step()(prompt))
    task = pickle.loads(pickle.dumps(task))
    model_fn, plan = unpack(task)
    again = unpack(pickle.loads(pickle.dumps(task)))
    assert again[0] is model_fn
    assert again[1] is plan


def test_threads_that_open_at_once_get_the_same():
    packed = Packed("0123456789abcdef", pickle.dumps({"a": list(range(10_000))}))
    for _ in range(20):
        opened = _Opened(5)
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda _: id(opened.get(packed)), range(8)))  # noqa: B023
        assert len(set(got)) == 1


def test_the_least_recently_opened_is_forgotten_first():
    opened = _Opened(2)
    pieces = [Packed(str(i), pickle.dumps([i])) for i in range(3)]
    first, second = opened.get(pieces[0]), opened.get(pieces[1])
    assert opened.get(pieces[0]) is first
    opened.get(pieces[2])
    assert opened.get(pieces[0]) is first
    assert opened.get(pieces[1]) is not second


def test_a_worker_without_the_module_says_what_to_do():
    data = b"cst2i_no_such_module\nModel\n."
    with pytest.raises(st2i.LoadError) as caught:
        _Opened(2).get(Packed("0", data))
    assert "this worker cannot make what the workflow is made of: No module" in str(caught.value)
    assert "st2i_no_such_module" in str(caught.value)
    assert "client.upload_file(...)" in str(caught.value)
