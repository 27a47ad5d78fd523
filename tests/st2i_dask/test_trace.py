"""Recording: inputs by position and name, and every wrong call with workflow, node and cure."""

from __future__ import annotations

from collections import namedtuple

import cloudpickle
import pytest

import st2i_dask as st2i
from st2i_dask.symbol import LaterRef, ParamRef, Ref
from st2i_dask.trace import Trace, current_trace, tracing


class Denoiser(st2i.ModelFn):
    def setup_io(self):
        self.add_input("latents")
        self.add_input("embeds")
        self.add_input("control", callback=True, optional=True)
        self.add_output("noise")


class Encoder(st2i.ModelFn):
    def setup_io(self):
        self.add_input("prompt")
        self.add_output("embeds")
        self.add_output("pooled")


class Nothing(st2i.ModelFn):
    def setup_io(self):
        self.add_output("y")


Pair = namedtuple("Pair", "a b")


@st2i.glue
def glued(value):
    return value


@pytest.fixture
def trace():
    with tracing(Trace("portrait")) as trace:
        yield trace


def refused(call):
    with pytest.raises(st2i.ComposeError) as caught:
        call()
    return str(caught.value)


# ---------------------------------------------------------------- inputs


def test_inputs_are_taken_by_position_and_by_name(trace):
    prompt = trace.parameter("prompt")
    embeds, _pooled = Encoder()(prompt)
    noise = Denoiser()(prompt, control=1, embeds=embeds)
    assert repr(noise) == "<symbolic Denoiser#1.noise>"
    encoder, denoiser = trace.nodes
    assert encoder.inputs == {"prompt": ParamRef("prompt")}
    assert denoiser.inputs == {
        "latents": ParamRef("prompt"),
        "embeds": Ref(0, "embeds"),
        "control": 1,
    }


def test_symbols_are_found_inside_plain_containers(trace):
    prompt = trace.parameter("prompt")
    glued({"a": [prompt, (prompt, 1)], "b": {"c": prompt}})
    leaf = ParamRef("prompt")
    assert trace.nodes[0].args == ({"a": [leaf, (leaf, 1)], "b": {"c": leaf}},)


def test_a_container_changed_after_the_call_changes_nothing(trace):
    values = [1]
    glued(values)
    values.append(2)
    assert trace.nodes[0].args == ([1],)


def test_a_missing_input_is_refused(trace):
    message = refused(lambda: Denoiser()(1))
    assert message == (
        "workflow 'portrait': Denoiser#1 misses input 'embeds'; pass it, or declare it optional; "
        "it declares: latents, embeds, control"
    )


def test_an_unknown_input_is_refused(trace):
    message = refused(lambda: Denoiser()(1, 2, contrl=3))
    assert message.startswith("workflow 'portrait': Denoiser#1 has no input 'contrl'")
    assert "it declares: latents, embeds, control" in message
    assert "it declares: no inputs" in refused(lambda: Nothing()(x=1))


def test_an_input_given_twice_is_refused(trace):
    message = refused(lambda: Denoiser()(1, 2, latents=3))
    assert "workflow 'portrait': Denoiser#1 got input 'latents' twice; pass it once" in message


def test_too_many_positional_inputs_are_refused(trace):
    assert "Denoiser#1 got 4 positional inputs" in refused(lambda: Denoiser()(1, 2, 3, 4))


def test_a_refused_call_records_nothing(trace):
    refused(lambda: Denoiser()(1))
    assert not trace.nodes


def test_all_outputs_at_once_are_refused_with_their_names(trace):
    message = refused(lambda: Denoiser()(Encoder()(1), 2))
    assert (
        "Encoder#1 has several outputs; pass one of them to Denoiser#1: embeds, pooled" in message
    )
    assert "glued#1" in refused(lambda: glued([Encoder()(1)]))


# ---------------------------------------------------------------- another composition


def test_a_value_of_another_composition_is_refused(trace):
    with tracing(Trace("landscape")) as other:
        foreign = other.parameter("seed")
    message = refused(lambda: Encoder()(foreign))
    assert "workflow 'portrait': Encoder#1 uses parameter 'seed' of workflow 'landscape'" in message
    assert "pass it through parameters or call the other workflow inside this one" in message
    for call in (
        lambda: glued(foreign),
        lambda: glued(value=[{"a": foreign}]),
        lambda: st2i.later().bind(foreign),
    ):
        assert "landscape" in refused(call)


def test_a_value_of_an_earlier_composition_of_the_same_workflow_is_refused(trace):
    with tracing(Trace("portrait")) as earlier:
        stale = earlier.parameter("seed")
    assert "outside the composition that made it" in refused(lambda: Encoder()(stale))


def test_a_composition_inside_another_does_not_disturb_it(trace):
    with tracing(Trace("inner")) as inner:
        assert current_trace() is inner
        Encoder()(1)
    assert current_trace() is trace
    assert not trace.nodes


def test_the_composition_ends_also_after_an_error():
    with pytest.raises(ZeroDivisionError), tracing(Trace("portrait")):
        _ = 1 / 0
    assert current_trace() is None


# ---------------------------------------------------------------- later


def test_later_outside_a_workflow_is_refused():
    assert "st2i.later() was called outside a workflow" in refused(st2i.later)


def test_a_later_value_is_bound_once(trace):
    later = st2i.later("latents")
    assert repr(later) == "<symbolic later 'latents'>"
    glued(later)
    later.bind(1)
    assert trace.nodes[0].args == (LaterRef(0),)
    assert trace.later_values == [1]
    assert "workflow 'portrait': a later() value is bound twice" in refused(lambda: later.bind(2))


# ---------------------------------------------------------------- what is not looked into


def test_symbols_in_other_containers_cannot_leave(trace):
    """Named tuples, sets and keys are constants: their symbols are refused when pickled."""
    prompt = trace.parameter("prompt")
    for value in (Pair(prompt, 1), {prompt}, {prompt: 1}):
        glued(value)
        assert "outside its workflow" in refused(lambda: cloudpickle.dumps(trace.nodes[-1].args))
