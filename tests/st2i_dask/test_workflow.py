"""Workflows: composed once per static combination; what cannot be composed is refused."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest

import st2i_dask as st2i
from st2i_dask.parameters import Maybe
from st2i_dask.plan import unpack
from st2i_dask.symbol import ParamRef, Symbol

from .portraits import Step

pytestmark = pytest.mark.usefixtures("fresh_registry")


@st2i.glue
def join(*values):
    return values


def test_the_function_runs_once_per_combination_of_static_parameters():
    runs: Counter[Any] = Counter()

    @st2i.workflow
    def portrait(prompt: str, seed: int = 0, scale: float = 1.0, num_steps: int = 2):
        runs[num_steps] += 1
        for _ in range(num_steps):
            prompt = Step()(prompt, [seed, scale])
        return prompt

    for seed in range(3):
        for num_steps in (2, 3, np.int64(3)):
            request = portrait.request(prompt=f"{seed}", seed=seed, num_steps=num_steps, scale=seed)
            assert len(request.tasks) == num_steps
    portrait.request(prompt="default")
    assert runs == {2: 1, 3: 1}


def test_whether_a_value_is_there_may_decide_what_is_composed():
    runs: Counter[Any] = Counter()

    @st2i.workflow
    def portrait(prompt: str, negative: Maybe[str | None] = None):
        runs[negative is None] += 1
        wanted = Step()(prompt)
        return wanted if negative is None else join(wanted, Step()(negative))

    assert len(portrait.request(prompt="a cat").tasks) == 1
    for negative in ("rain", "", "snow"):
        assert len(portrait.request(prompt="a cat", negative=negative).tasks) == 2
    assert len(portrait.request(prompt="a dog", negative=None).tasks) == 1
    assert runs == {True: 1, False: 1}


def test_static_values_of_different_types_are_different_combinations():
    seen = []

    @st2i.workflow
    def portrait(kind: st2i.Static[Any]):
        seen.append(kind)
        return Step()(0)

    for kind in (1, 1.0, True, "1", 1):
        portrait.request(kind=kind)
    assert list(map(repr, seen)) == ["1", "1.0", "True", "'1'"]


def test_data_parameters_stay_symbolic_and_arrive_in_the_tasks():
    seen = {}

    @st2i.workflow
    def portrait(prompt: str, seed: int, image: Any, num_steps: int):
        seen.update(prompt=prompt, seed=seed, image=image, num_steps=num_steps)
        return Step()(prompt, {"seed": seed, "image": [image]})

    request = portrait.request(prompt="a", seed=5, image=b"pixels", num_steps=1)
    assert isinstance(seen["prompt"], Symbol)
    assert isinstance(seen["seed"], Symbol)
    assert isinstance(seen["image"], Symbol)
    assert seen["num_steps"] == 1
    (task,) = request.tasks.values()
    assert task.args[1] == {"prompt": "a", "seed": 5, "image": b"pixels"}
    (node,) = unpack(task.args[0])[1].nodes
    assert node.inputs == {
        "x": ParamRef("prompt"),
        "extra": {"seed": ParamRef("seed"), "image": [ParamRef("image")]},
    }


def test_no_more_than_a_bounded_number_of_combinations_is_kept():
    @st2i.workflow
    def portrait(n: int):
        return Step()(n)

    for n in range(100):
        portrait.request(n=n)
    assert len(portrait._composed) == 64


def test_threads_may_compose_at_once():
    @st2i.workflow
    def portrait(prompt: str, num_steps: int = 2):
        for _ in range(num_steps):
            prompt = Step()(prompt)
        return prompt

    lengths = []
    threads = [
        threading.Thread(
            target=lambda n=n: lengths.append(
                (n, len(portrait.request(prompt="a", num_steps=n).tasks))
            )
        )
        for n in (1, 2, 3, 4) * 3
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(lengths) == 12
    assert all(n == length for n, length in lengths)


def test_a_workflow_inside_another_is_composed_in_place():
    @st2i.workflow
    def encode(prompt: str, times: int = 2):
        for _ in range(times):
            prompt = Step(name="encoder")(prompt)
        return prompt

    @st2i.workflow
    def portrait(prompt: str, times: int = 3):
        return Step(name="vae")(encode(prompt, times), encode(prompt))

    request = portrait.request(prompt="a")
    assert Counter(a["fn"] for a in request.annotations.values()) == {"encoder": 5, "vae": 1}
    assert {a["workflow"] for a in request.annotations.values()} == {"portrait"}


def test_an_error_in_the_function_stays_what_it_is_and_nothing_is_kept():
    @st2i.workflow
    def portrait(n: int):
        if n:
            raise ZeroDivisionError("mine")
        return Step()(n)

    with pytest.raises(ZeroDivisionError, match="mine"):
        portrait.request(n=1)
    assert not portrait._composed
    portrait.request(n=0)


def test_control_flow_on_data_is_refused_when_composed():
    @st2i.workflow
    def portrait(prompt: str, scale: float = 1.0):
        return Step()(prompt) if scale > 1 else Step()(prompt, 1)

    with pytest.raises(st2i.ComposeError) as caught:
        portrait.request(prompt="a")
    assert "workflow 'portrait'" in str(caught.value)
    assert "parameter 'scale'" in str(caught.value)
    assert "st2i.Static" in str(caught.value)


def test_a_value_kept_from_an_earlier_composition_is_refused():
    kept = []

    @st2i.workflow
    def portrait(prompt: str, n: int):
        kept.append(Step()(prompt))
        return kept[0]

    portrait.request(prompt="a", n=1)
    with pytest.raises(st2i.ComposeError) as caught:
        portrait.request(prompt="a", n=2)
    assert "'portrait': the returned value uses Step#1.y of workflow 'portrait'" in str(
        caught.value
    )
    assert "outside the composition that made it" in str(caught.value)


def test_a_value_of_another_workflow_is_refused():
    kept = []

    @st2i.workflow
    def landscape(prompt: str):
        kept.append(Step(name="sky")(prompt))
        return kept[-1]

    @st2i.workflow
    def portrait(prompt: str):
        return Step()(kept[-1])

    landscape.request(prompt="a")
    with pytest.raises(
        st2i.ComposeError, match=r"'portrait': Step#1 uses sky#1\.y of workflow 'la"
    ):
        portrait.request(prompt="a")


def test_a_call_outside_a_workflow_is_refused():
    @st2i.workflow
    def portrait(prompt: str):
        return Step()(prompt)

    with pytest.raises(st2i.ComposeError, match=r"run it with portrait\.submit\(client, \.\.\.\)"):
        portrait("a")


def test_static_values_that_print_alike_are_not_taken_for_the_same():
    seen = []

    @st2i.workflow(name="long-arrays", replace=True)
    def long_arrays(prompt: str, weights: st2i.Static[np.ndarray]):
        seen.append(int(weights.sum()))
        return Upper()(prompt)

    class Upper(st2i.ModelFn):
        def setup_io(self):
            self.add_input("text")
            self.add_output("upper")

    one, other = np.zeros(10_000, int), np.zeros(10_000, int)
    other[5_000] = 1
    assert repr(one) == repr(other)
    for weights in (one, other, one):
        long_arrays.request(prompt="a", weights=weights)
    assert seen == [0, 1]


def test_costs_are_learned_alike_whatever_the_scales_are(fresh_registry):
    @st2i.workflow
    def scaled(
        prompt: str,
        guidance: st2i.Static[float] = 5.0,
        num_steps: int = 4,
        num_images: int = 1,
        spread: bool = False,
    ):
        return Step()(prompt, 1.0)

    def bucket(**static):
        composed, _, _ = scaled.bind(prompt="a", **static)
        return composed.bucket

    assert bucket() == bucket(guidance=7.5) == bucket(num_steps=9) == bucket(spread=True)
    assert len({bucket(), bucket(guidance=1.0), bucket(guidance=0.0), bucket(num_images=2)}) == 4
