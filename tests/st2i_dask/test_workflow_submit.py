"""Requests of a workflow: everything is checked before anything is composed or sent; one or many."""

from __future__ import annotations

import itertools
import threading
from typing import Annotated, Any, Literal

import numpy as np
import pytest

import st2i_dask as st2i
from st2i_dask import submission

from .portraits import Step, about

pytestmark = pytest.mark.usefixtures("fresh_registry")


@pytest.fixture
def portrait():
    @st2i.workflow
    def portrait(
        prompt: Annotated[str, st2i.Prompt(max_chars=100)],
        seed: int = 0,
        num_steps: Annotated[int, st2i.Range(1, 50)] = 2,
        height: Annotated[int, st2i.Multiple(16, 64, 1024)] = 64,
        guidance_scale: Annotated[float, st2i.Range(0, 100)] = 3.5,
        output_type: Literal["pil", "pt"] = "pil",
        image: Any = None,
    ):
        return Step()(prompt, [seed, guidance_scale, image])

    return portrait


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "parameter 'prompt' is missing"),
        ({"promt": "a"}, "has no parameter 'promt'; did you mean 'prompt'?"),
        ({"steps": 4}, "has no parameter 'steps'; did you mean 'num_steps'?"),
        ({"prompt": ""}, "prompt='' is empty; say what the picture shows"),
        ({"prompt": "  \n"}, "is empty"),
        ({"prompt": "x" * 101}, "prompt is too long: 101 characters, limit 100; shorten it"),
        ({"prompt": None}, "prompt=None has type NoneType, wanted str"),
        ({"prompt": ["a"]}, "prompt=['a'] has type list, wanted str"),
        ({"prompt": b"a"}, "has type bytes, wanted str"),
        ({"seed": 0.0}, "seed=0.0 has type float, wanted int"),
        ({"seed": True}, "seed=True has type bool, wanted int"),
        ({"seed": "7"}, "seed='7' has type str, wanted int"),
        ({"seed": None}, "seed=None has type NoneType, wanted int"),
        (
            {"seed": 2**64},
            "seed=18446744073709551616 is out of range; allowed: -9223372036854775808",
        ),
        ({"seed": -(2**63) - 1}, "is out of range"),
        ({"num_steps": 0}, "num_steps=0 is out of range; allowed: 1 to 50"),
        ({"num_steps": 2.0}, "num_steps=2.0 has type float, wanted int"),
        ({"height": 100}, "height=100 is not an allowed size; allowed: multiples of 16 from 64 to"),
        ({"height": 2048}, "height=2048 is not an allowed size"),
        ({"guidance_scale": float("nan")}, "guidance_scale=nan is out of range; allowed: 0 to 100"),
        ({"guidance_scale": "high"}, "has type str, wanted float"),
        ({"output_type": "png"}, "output_type='png' has type str, wanted 'pil' | 'pt'"),
        ({"image": threading.Lock()}, "cannot be sent to workers"),
        ({"tenant": ""}, "tenant '' is not a tenant name"),
        ({"tenant": "a b"}, "tenant 'a b' is not a tenant name; allowed: 1 to 64 characters"),
        ({"tenant": None}, "tenant None is not a tenant name"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_composed(portrait, values, message):
    given = {"prompt": "a", **values} if values and "promt" not in values else values
    with pytest.raises(st2i.ParameterError) as caught:
        portrait.request(**given)
    assert message in str(caught.value)
    if "tenant" not in values:
        assert str(caught.value).startswith("workflow 'portrait'")
    assert not portrait._composed


@pytest.fixture
def sent(monkeypatch):
    """The requests that would be submitted."""
    requests = []

    def submit_requests(client, batch, also=()):
        requests.extend(batch)
        return list(batch)

    monkeypatch.setattr(submission, "submit_requests", submit_requests)
    return requests


def test_submit_sends_one_request(portrait, sent):
    portrait.submit(None, prompt="a", tenant="alice")
    (request,) = sent
    assert request.tenant == "alice"
    with pytest.raises(st2i.ParameterError):
        portrait.submit(None, prompt="")
    assert len(sent) == 1


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [
        (5, [5, 5, 5]),
        ([1, 2, 3], [1, 2, 3]),
        (range(3), [0, 1, 2]),
        (np.arange(3), [0, 1, 2]),
        ((i for i in (7, 8, 9)), [7, 8, 9]),
    ],
    ids=["one", "list", "range", "array", "generator"],
)
def test_map_takes_one_seed_or_one_per_prompt(portrait, sent, seed, seeds):
    portrait.map(None, (p for p in "abc"), seed=seed, tenant="bob", num_steps=3)
    assert [about(request)["prompt"] for request in sent] == ["a", "b", "c"]
    assert [about(request)["seed"] for request in sent] == seeds
    assert {about(request)["steps"] for request in sent} == {3}
    assert {request.tenant for request in sent} == {"bob"}


def test_map_refuses_another_number_of_seeds(portrait, sent):
    with pytest.raises(
        st2i.ParameterError, match="2 values of 'seed' for 3 prompts; give one for all, or one"
    ):
        portrait.map(None, ["a", "b", "c"], seed=[1, 2])
    assert not sent


def test_map_takes_one_value_per_prompt_of_any_parameter(portrait, sent):
    portrait.map(None, ["a", "b"], each={"num_steps": iter([3, 5]), "seed": [7, 8]})
    assert [about(request)["steps"] for request in sent] == [3, 5]
    assert [about(request)["seed"] for request in sent] == [7, 8]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"each": {"num_steps": [3]}}, "1 values of 'num_steps' for 2 prompts"),
        ({"each": {"num_steps": 3}}, r"each\['num_steps'\] is one int; give a list"),
        ({"each": {"prompt": "ab"}}, "'prompt' is given in each and outside"),
        (
            {"each": {"num_steps": [3, 5]}, "num_steps": 4},
            "'num_steps' is given in each and outside",
        ),
        ({"each": {"seed": [3, 5]}, "seed": 4}, "'seed' is given in each and outside"),
        ({"each": {"size": [3, 5]}}, "size"),
        ({"each": {"num_steps": [3, 5, 4]}}, "more than 2 values of 'num_steps' for 2 prompts"),
        ({"each": {"num_steps": itertools.repeat(3)}}, "more than 2 values of 'num_steps'"),
        ({"seed": itertools.count(5)}, "more than 2 values of 'seed' for 2 prompts"),
        ({"prompt": "b"}, "'prompt' is given beside the prompts"),
        ({"each": [1, 2]}, "each is one list; give a dict"),
        ({"each": {"tenant": ["ann", "bob"]}}, "'tenant' is given once per map"),
    ],
)
def test_map_refuses_what_is_not_one_value_per_prompt(portrait, sent, given, what):
    with pytest.raises(st2i.ParameterError, match=what):
        portrait.map(None, ["a", "b"], **given)
    assert not sent


def test_previews_are_of_single_requests(portrait, sent):
    for given in ({"previews": 2}, {"each": {"previews": [1, 2]}}):
        with pytest.raises(st2i.ParameterError, match=r"submit\(client, \.\.\., previews=2\)"):
            portrait.map(None, ["a", "b"], **given)
    with pytest.raises(st2i.ParameterError, match="single requests"):
        portrait.request(prompt="a", previews=2)
    assert not sent


def test_map_refuses_one_text_as_its_prompts(portrait, sent):
    with pytest.raises(st2i.ParameterError, match="prompts is one text, 'a cat'; give a list"):
        portrait.map(None, "a cat")
    assert not sent


def test_map_sends_nothing_when_one_prompt_is_wrong(portrait, sent):
    with pytest.raises(st2i.ParameterError, match="prompt='' is empty"):
        portrait.map(None, ["a", "", "c"])
    assert not sent


def test_map_without_a_seed_parameter(sent):
    @st2i.workflow
    def portrait(prompt: str):
        return Step()(prompt)

    portrait.map(None, ["a", "b"])
    assert len(sent) == 2
