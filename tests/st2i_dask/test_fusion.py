"""Fusion: any DAG, run task by task with everything pickled between tasks, gives its own value."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from st2i_dask.symbol import Ref
from st2i_dask.trace import GlueNode

from .programs import (
    check_structure,
    compose,
    glue,
    model,
    run_both,
)

# ---------------------------------------------------------------- any DAG


@st.composite
def workflows(draw):
    """Steps of a random workflow: models and glue with one or several outputs, any wiring."""
    steps = []
    sources = [["prompt"], ["seed"]]
    for number in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["model", "glue", "glue"]))
        outputs = draw(st.sampled_from([None, None, 1, 2, 3]))
        flat = [name for names in sources for name in names]
        recent = st.sampled_from(flat[-4:])
        inputs = draw(st.lists(recent | st.sampled_from(flat) | st.integers(0, 3), max_size=4))
        shape = draw(st.sampled_from(["list", "dict", "nested"]))
        midway = draw(st.none() | recent)
        steps.append((kind, number, outputs, inputs, shape, midway))
        sources.append([f"{number}.{i}" for i in range(outputs or 1)])
    wanted = draw(st.lists(st.sampled_from([n for s in sources for n in s]), max_size=4))
    return steps, wanted, draw(st.booleans())


def written(steps, wanted, glue_last):
    def workflow(prompt, seed):
        made = {"prompt": prompt, "seed": seed}
        for kind, number, outputs, inputs, shape, midway in steps:
            values = [made.get(name, name) for name in inputs]
            tree = {"list": values, "dict": {"k": values}, "nested": ([values], 1)}[shape]
            if kind == "model":
                symbols = model(number, outputs or 1)(tree, made.get(midway))
                symbols = [symbols] if (outputs or 1) == 1 else list(symbols)
            else:
                symbols = glue(number, outputs)(tree, named=tree)
                symbols = [symbols] if outputs is None else list(symbols)
            made |= {f"{number}.{i}": symbol for i, symbol in enumerate(symbols)}
        tail = [made[name] for name in wanted]
        # The last model makes sure that there is one.
        last = model("last")([tail[:2], prompt] if glue_last else tail)
        return glue("result")(last, tail) if glue_last else last

    return workflow


@settings(max_examples=100, deadline=None)
@example(
    described=(
        [
            ("glue", 0, None, [], "list", None),
            ("model", 1, None, [], "list", None),
            ("model", 2, None, [], "list", None),
            ("model", 3, 2, [], "list", None),
            ("model", 4, 3, [], "list", None),
            ("model", 5, 3, ["0.0"], "list", None),
            ("model", 6, None, ["0.0"], "list", None),
            ("model", 7, None, [], "list", None),
            ("model", 8, None, [], "list", "5.1"),
            ("model", 9, None, [], "list", None),
            ("model", 10, None, [], "list", None),
            ("model", 11, None, [], "list", None),
            ("model", 12, None, ["8.0"], "list", None),
        ],
        ["0.0", "12.0", "6.0"],
        True,
    )
)
@given(described=workflows())
def test_any_workflow_gives_the_value_of_its_dag(described):
    run_both(written(*described))


# ---------------------------------------------------------------- shapes that matter


def denoising(steps):
    """The shape of FLUX: two encoders, a prepared scheduler, glue around every step."""

    def workflow(prompt, seed):
        pooled, embeds = model("clip")(prompt), model("t5")(prompt)
        latents, ids, scheduler = glue("prepare", 3)(embeds, seed, steps)
        text_ids = glue("text_ids")(embeds, pooled)
        transformer = model("transformer")
        for step in range(steps):
            timestep = glue("timestep")(scheduler, step, latents)
            noise = transformer([latents, timestep, pooled, embeds, text_ids, ids])
            latents, scheduler = glue("scheduler_step", 2)(scheduler, step, noise, latents)
        return glue("finish")(model("vae")(latents), "pil")

    return workflow


def test_a_denoising_loop_evaluates_every_steps_glue_once():
    _dag, program, counts = run_both(denoising(28))
    assert len(program.tasks) == 31
    once = dict.fromkeys(("mclip", "mt5", "mvae", "gprepare", "gtext_ids", "gfinish"), 1)
    assert counts == once | dict.fromkeys(("mtransformer", "gtimestep", "gscheduler_step"), 28)


def test_a_denoising_step_hands_on_little():
    dag, program, _ = run_both(denoising(4))
    by_label = {dag.nodes[task.node].label: task for task in program.tasks}
    second = by_label["mtransformer#2"]
    # Latents, scheduler and the next timestep; the raw noise stays where it was made.
    exported = {(dag.nodes[ref.node].label, ref.output) for ref in second.exports}
    assert exported == {
        ("gscheduler_step#2", 0),
        ("gscheduler_step#2", 1),
        ("gtimestep#3", None),
    }
    assert not any(ref.output == "a" for ref in second.exports)
    # The last step's scheduler is wanted by nobody.
    assert len(by_label["mtransformer#4"].exports) == 1


def test_glue_after_a_model_replaces_its_raw_output():
    def workflow(prompt, seed):
        return model(2)(glue(1)(model(1)(prompt)))

    dag, program, counts = run_both(workflow)
    (export,) = program.tasks[0].exports
    assert dag.nodes[export.node].label == "g1#1"
    assert counts["g1"] == 1


def test_guided_steps_join_in_both_branches_of_the_next_step_at_most():
    """Two parallel models per step: what mixes them may run twice, never more."""
    steps = 6

    def workflow(prompt, seed):
        latents = glue("prepare")(seed)
        for step in range(steps):
            mixed = glue("mix")(model("cond")(latents), model("uncond")(latents))
            latents = glue("step")(step, mixed, latents)
        return model("vae")(latents)

    dag, _program, counts = run_both(workflow)
    assert counts["mcond"] == counts["muncond"] == steps
    for name in ("gprepare", "gmix", "gstep"):
        nodes = sum(node.label.startswith(f"{name}#") for node in dag.nodes)
        assert nodes <= counts[name] <= 2 * nodes


def test_a_join_for_the_result_alone_runs_in_the_last_model():
    def workflow(prompt, seed):
        return glue("join")([model(i)(prompt) for i in range(4)])

    dag, program, counts = run_both(workflow)
    assert counts["gjoin"] == 1
    assert program.tasks[-1].dependencies == (0, 1, 2)
    assert [len(task.dependencies) for task in program.tasks[:-1]] == [0, 0, 0]
    assert dag.nodes[program.tasks[-1].nodes[-1]].label == "gjoin#1"


def test_a_result_that_an_early_model_gives_waits_for_nothing_else():
    def workflow(prompt, seed):
        first = model(1)(prompt)
        model(2)(first)
        return glue("after")(first)

    _dag, program, _ = run_both(workflow)
    assert len(program.tasks) == 1


def test_one_output_of_several_is_handed_on_alone():
    def workflow(prompt, seed):
        a, _b, _c = model(1, 3)(prompt)
        _first, second = glue(1, 2)(seed)
        return model(2)([a, second])

    dag, program, _ = run_both(workflow)
    assert program.tasks[0].exports == (Ref(program.tasks[0].node, "a"),)
    assert len(program.tasks[1].nodes) == 2
    assert len(dag.nodes) == 3


def test_glue_on_parameters_runs_where_it_is_used():
    def workflow(prompt, seed):
        noise = glue("noise")(seed)
        return model(2)([model(1)(prompt), noise])

    dag, program, counts = run_both(workflow)
    assert counts["gnoise"] == 1
    assert program.tasks[0].parameters == ("prompt",)
    assert program.tasks[1].parameters == ("seed",)
    assert len(program.tasks[0].exports) == 1
    assert isinstance(dag.nodes[program.tasks[1].nodes[0]], GlueNode)


def test_a_later_task_does_not_repeat_what_is_on_its_path():
    def workflow(prompt, seed):
        shared = glue("shared")(model(1)(prompt), model(2)(prompt))
        value = model(3)(shared)
        for _ in range(5):
            value = model(4)([value, shared])
        return value

    _dag, _program, counts = run_both(workflow)
    assert counts["gshared"] == 1


def test_a_consumer_starts_with_the_producer_of_its_callback_input():
    def workflow(prompt, seed):
        control = model("control")(prompt)
        noise = model("denoiser")(seed, midway=control)
        return model("vae")(noise)

    _dag, program, _ = run_both(workflow)
    control, denoiser, vae = program.tasks
    assert denoiser.dependencies == ()
    assert denoiser.callbacks == (control.position,)
    assert set(vae.dependencies) == {control.position, denoiser.position}


def test_shared_glue_is_not_imported_from_the_producer_of_a_callback_input():
    """All that the producer hands on would travel with it."""

    def workflow(prompt, seed):
        shared, value = glue("shared")(prompt), seed
        for _ in range(2):
            control = model("control")([shared, value])
            value = model("denoiser")([shared, value], midway=control)
        return model("vae")(value)

    _dag, program, _ = run_both(workflow)
    producers = {p for task in program.tasks for p in task.callbacks}
    denoisers = [task for task in program.tasks if task.callbacks]
    assert not set(denoisers[1].dependencies) & producers


@pytest.mark.parametrize("length", [2, 3, 5])
def test_callback_inputs_in_a_row(length):
    """A consumer that is only read through a callback itself has nobody to keep its producer."""

    def workflow(prompt, seed):
        value = model(0)(prompt)
        for number in range(1, length):
            value = model(number)(prompt, midway=value)
        return model("last")([value, prompt])

    _dag, program, _ = run_both(workflow)
    assert any(task.callbacks for task in program.tasks)


def test_very_long_chains_of_glue_are_no_trouble():
    """Glue in a row before, between and after models, and a sum over all steps."""
    length = 1500

    def workflow(prompt, seed):
        value = prompt
        for _ in range(length):
            value = glue("before")(value)
        total = value
        for _ in range(300):
            value = glue("between")(model("m")(0))
            total = glue("sum")(total, value)
        for _ in range(length):
            total = glue("after")(total)
        return glue("result")([0, total])

    start = time.perf_counter()
    dag, program = compose(workflow)
    assert time.perf_counter() - start < 10
    check_structure(dag, program)
    assert len(program.tasks) == 300


def test_fusing_does_not_depend_on_chance():
    programs = [compose(denoising(5))[1] for _ in range(3)]
    assert programs[0] == programs[1] == programs[2]
