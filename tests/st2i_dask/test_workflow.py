"""Workflows: composed once per static combination, one name each, everything checked at submit."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from typing import Annotated, Any, Literal

import numpy as np
import pytest

import st2i_dask as st2i
from st2i_dask import submission
from st2i_dask.parameters import Maybe
from st2i_dask.plan import unpack
from st2i_dask.symbol import ParamRef, Symbol

pytestmark = pytest.mark.usefixtures("fresh_registry")


class Step(st2i.ModelFn):
    def setup_io(self):
        self.add_input("x")
        self.add_input("extra", optional=True)
        self.add_output("y")


@st2i.glue
def join(*values):
    return values


def made(**names):
    """Definition of the workflow `portrait` as text, in a namespace of its own."""

    def define(source):
        exec(source, {"st2i": st2i, "Step": Step, "join": join, "__name__": "__main__", **names})

    return define


# ---------------------------------------------------------------- composing


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


# ---------------------------------------------------------------- version


VERSIONED = """
@st2i.glue
def half(value): return value / 2

@st2i.workflow(name="portrait", replace=True)
def portrait(prompt: str, num_steps: int = 2):
    for step in range(num_steps): prompt = half(Step("folder", dtype="f")(prompt, step))
    return prompt
"""


def version(source=VERSIONED, **static):
    made()(source)
    return st2i.workflows.get("portrait").request(prompt="a", **static)


def about(request):
    return request.tasks[request.key].args[2]


def test_the_version_is_a_digest_of_what_is_composed():
    first = about(version())["version"]
    assert len(first) == 16
    assert about(version("\n\n" + VERSIONED))["version"] == first
    for edited in (
        VERSIONED.replace("/ 2", "/ 3"),
        VERSIONED.replace("/ 2", "* 2"),
        VERSIONED.replace('"folder"', '"other"'),
        VERSIONED.replace('"f"', '"g"'),
        VERSIONED.replace("(prompt, step)", "(prompt)"),
        VERSIONED.replace("(prompt, step)", "(prompt, 0)"),
    ):
        assert about(version(edited))["version"] != first, edited


def test_a_given_version_is_kept():
    @st2i.workflow(version="2.1")
    def portrait(prompt: str):
        return Step()(prompt)

    assert about(portrait.request(prompt="a"))["version"] == "2.1"


def test_metadata_says_how_the_image_was_made():
    request = version(num_steps=3)
    found = about(request)
    assert found["workflow"] == "portrait"
    assert found["prompt"] == "a"
    assert found["steps"] == 3
    assert found["tenant"] == "default"
    assert found["parameters"] == {"prompt": "a", "num_steps": 3}
    assert found["software"].startswith("st2i_dask ")
    assert "seed" not in found
    others = [task for key, task in request.tasks.items() if key != request.key]
    assert all(task.args[2] is None for task in others)


# ---------------------------------------------------------------- registering


PORTRAIT = "@st2i.workflow\ndef portrait(prompt: str): return Step()(prompt)\n"


def test_the_name_description_and_registration(fresh_registry):
    @st2i.workflow
    def portrait(prompt: str, n: int = 1):
        """A face.

        More about it.
        """
        return Step()(prompt)

    assert fresh_registry.get("portrait") is portrait
    assert portrait in list(fresh_registry)
    assert portrait.description == "A face."
    assert portrait.__name__ == "portrait"
    assert repr(portrait) == "<workflow portrait(prompt, n=1)>"
    assert fresh_registry.get("nobody") is None


def test_the_same_lines_may_be_evaluated_again(fresh_registry):
    made()(PORTRAIT)
    first = fresh_registry.get("portrait")
    made()(PORTRAIT)
    assert fresh_registry.get("portrait") is not first


def test_another_workflow_of_the_same_name_is_refused(fresh_registry):
    made()(PORTRAIT)
    first = fresh_registry.get("portrait")
    with pytest.raises(st2i.RegistrationError) as caught:
        made()(PORTRAIT.replace("Step()(prompt)", "Step()(prompt, 1)"))
    assert "a workflow named 'portrait' is already registered (defined in <string>" in str(
        caught.value
    )
    assert "@st2i.workflow(name=...), or replace it with replace=True" in str(caught.value)
    assert fresh_registry.get("portrait") is first


def test_another_workflow_may_replace_it_or_take_another_name(fresh_registry):
    made()(PORTRAIT)
    other = PORTRAIT.replace("Step()(prompt)", "Step()(prompt, 1)")
    made()(other.replace("workflow", "workflow(name='other')"))
    first = fresh_registry.get("portrait")
    made()(other.replace("workflow", "workflow(replace=True)"))
    assert fresh_registry.get("portrait") is not first
    assert [w.name for w in fresh_registry if w.name in ("portrait", "other")] == [
        "other",
        "portrait",
    ]


def test_two_workflows_from_one_factory_are_two():
    def define(model):
        @st2i.workflow(name="portrait")
        def portrait(prompt: str):
            return model(prompt)

    define(Step("a"))
    with pytest.raises(st2i.RegistrationError, match="'portrait' is already registered"):
        define(Step("b"))


# ---------------------------------------------------------------- submitting


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

    def submit_requests(client, batch):
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


def test_map_refuses_one_text_as_its_prompts(portrait, sent):
    with pytest.raises(st2i.ParameterError, match="prompts is one text, 'a cat'; give a list"):
        portrait.map(None, "a cat")
    assert not sent


def test_static_values_that_print_alike_are_not_taken_for_the_same():
    import numpy as np

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


def test_another_default_is_another_definition(fresh_registry):
    def define(default):
        @st2i.workflow(name="defaults")
        def chosen(prompt: str, steps: int = default):
            return prompt

    define(1)
    define(1)
    with pytest.raises(st2i.RegistrationError, match="'defaults' is already registered"):
        define(2)


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
