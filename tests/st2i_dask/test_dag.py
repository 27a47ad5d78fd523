"""The DAG: order from inputs and outputs alone, and what cannot be one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import st2i_dask as st2i
from st2i_dask.dag import build, leaves, substitute
from st2i_dask.symbol import ParamRef, Ref
from st2i_dask.trace import Trace, tracing


class Step(st2i.ModelFn):
    def setup_io(self):
        self.add_input("x")
        self.add_input("y", optional=True)
        self.add_output("z")


@st2i.glue
def join(*values):
    return values


def composed(function):
    with tracing(Trace("portrait")) as trace:
        result = function(trace.parameter("prompt"))
    return build(trace, result)


def refused(function):
    with pytest.raises(st2i.ComposeError) as caught:
        composed(function)
    assert "workflow 'portrait'" in str(caught.value)
    return str(caught.value)


def labels(dag):
    return [node.label for node in dag.nodes]


# ---------------------------------------------------------------- order


def test_a_consumer_may_be_written_before_its_producer():
    def backwards(prompt):
        middle = st2i.later()
        last = join(Step(name="last")(middle), prompt)
        middle.bind(Step(name="first")(prompt))
        return last

    dag = composed(backwards)
    assert labels(dag) == ["first#1", "last#1", "join#1"]
    assert dag.nodes[1].inputs == {"x": Ref(0, "z")}
    assert dag.result == Ref(2)


def test_what_the_result_does_not_need_is_left_out():
    def wasteful(prompt):
        Step(name="unused")(join(prompt))
        return Step(name="used")(prompt)

    assert labels(composed(wasteful)) == ["used#1"]


def test_a_later_value_may_be_a_constant_or_a_tree_or_another_later():
    def chained(prompt):
        first, second = st2i.later("first"), st2i.later("second")
        result = Step()(first, {"both": [second, first]})
        first.bind(second)
        second.bind((1, prompt))
        return result

    value = (1, ParamRef("prompt"))
    assert composed(chained).nodes[0].inputs == {"x": value, "y": {"both": [value, value]}}


@given(seed=st.integers(0, 10_000), size=st.integers(1, 12))
def test_any_order_of_writing_gives_a_topological_order_of_the_same_graph(seed, size):
    rng = random.Random(seed)
    wanted = {i: sorted(rng.sample(range(i), min(i, rng.randrange(3)))) for i in range(size)}
    wanted[size] = list(range(size))
    writing = rng.sample(sorted(wanted), len(wanted))

    def shuffled(prompt):
        made = {i: st2i.later(str(i)) for i in wanted}
        for i in writing:
            symbol = Step(name=f"n{i}")(prompt, [made[d] for d in wanted[i]])
            made[i].bind(symbol)
        return made[size]

    dag = composed(shuffled)
    dag._check()
    assert sorted(labels(dag)) == sorted(f"n{i}#1" for i in wanted)
    for node in dag.nodes:
        number = int(node.label[1:-2])
        inputs = [dag.nodes[leaf.node].label for leaf in leaves(node.inputs["y"])]
        assert inputs == [f"n{d}#1" for d in wanted[number]]


# ---------------------------------------------------------------- refusals


def test_a_cycle_is_refused_with_its_nodes():
    def cyclic(prompt):
        latents = st2i.later()
        noise = Step(name="denoise")(latents)
        latents.bind(join(noise, prompt))
        return noise

    message = refused(cyclic)
    assert "its inputs form a cycle" in message
    assert "denoise#1 -> join#1 -> denoise#1" in message or (
        "join#1 -> denoise#1 -> join#1" in message
    )
    assert "unroll the loop over steps" in message


def test_a_node_that_feeds_itself_is_refused():
    def selfish(prompt):
        value = st2i.later()
        value.bind(Step(name="loop")(value))
        return value

    assert "loop#1 -> loop#1" in refused(selfish)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_later_values_bound_in_a_circle_are_refused(length):
    def circle(prompt):
        values = [st2i.later(str(i)) for i in range(length)]
        for value, following in zip(values, values[1:] + values[:1], strict=True):
            value.bind([following])
        return Step()(values[0])

    assert "later() values are bound to each other in a cycle; bind each to" in refused(circle)


def test_an_unbound_later_value_is_refused():
    message = refused(lambda prompt: Step()(prompt, st2i.later("mask")))
    assert "a later() value is used but never bound; call .bind(value)" in message


@pytest.mark.parametrize(
    "value", [None, 1, "text", [], (), {}], ids=["None", "int", "str", "list", "tuple", "dict"]
)
def test_a_result_that_is_no_symbol_is_refused(value):
    message = refused(lambda prompt: value)
    assert f"returns {type(value).__name__}; return one symbolic value" in message
    assert "join several with a @st2i.glue function" in message


def test_several_values_as_result_are_refused():
    class Two(st2i.ModelFn):
        def setup_io(self):
            self.add_output("a")
            self.add_output("b")

    assert "returns Outputs; return one symbolic value" in refused(lambda prompt: Two()())
    assert "returns tuple" in refused(lambda prompt: (Step()(prompt), Step()(prompt)))


def test_a_parameter_or_constant_as_result_is_refused():
    def constant(prompt):
        value = st2i.later()
        value.bind(1)
        return value

    for function in (lambda prompt: prompt, constant):
        assert "returns its own parameter or a constant; return what a ModelFn" in refused(function)


def test_a_result_that_needs_no_model_is_refused():
    def unused(prompt):
        Step()(prompt)
        return join(prompt)

    message = refused(unused)
    assert "needs no ModelFn, so there is nothing to schedule; call at least one" in message


# ---------------------------------------------------------------- trees


TREES = st.recursive(
    st.integers() | st.text(max_size=3) | st.builds(ParamRef, st.sampled_from("ab")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
)


@given(tree=TREES)
def test_substituting_keeps_everything_but_the_leaves(tree):
    assert substitute(tree, lambda leaf: leaf) == tree
    gone = substitute(tree, lambda leaf: 0)
    assert not list(leaves(gone))
    seen = []
    substitute(tree, seen.append)
    assert seen == list(leaves(tree))
