"""Workflows out of models and glue that say what they were given; run fused and by node."""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from types import SimpleNamespace

import cloudpickle

import st2i_dask as st2i
from st2i_dask.dag import arguments, build, leaves, substitute
from st2i_dask.fusion import fuse
from st2i_dask.invocation import BoundTask
from st2i_dask.outputs import TaskOutputs
from st2i_dask.plan import pack
from st2i_dask.symbol import ParamRef, Ref
from st2i_dask.trace import InvocationNode, Trace, tracing

PARAMETERS = {"prompt": "a cat", "seed": 7}

# Calls of models and glue by name.
calls: Counter[str] = Counter()


def called(name, *inputs):
    """Count a call; the value that it gives, equal only if every wire came from the same place."""
    calls[name] += 1
    return f"{name}:{hashlib.sha1(repr(inputs).encode()).hexdigest()[:10]}"


class Model(st2i.ModelFn):
    def setup_io(self):
        self.add_input("tree", optional=True)
        self.add_input("midway", callback=True, optional=True)
        for name in self.options.get("outputs", ["y"]):
            self.add_output(name)

    def execute(self, model_components, tree, midway):
        value = called(self.name, tree, getattr(midway, "result", lambda: midway)())
        return {name: f"{value}.{name}" for name in self.outputs}


def model(number, outputs=1):
    return Model(name=f"m{number}", outputs=list("abc"[:outputs]))


def glue(number, outputs=None):
    name = f"g{number}"

    def function(*args, **kwargs):
        value = called(name, args, kwargs)
        return value if outputs is None else tuple(f"{value}[{i}]" for i in range(outputs))

    function.__name__ = name
    return st2i.glue(outputs=outputs)(function)


def compose(function):
    """(dag, program) of a workflow with the parameters `prompt` and `seed`."""
    with tracing(Trace("w")) as trace:
        result = function(*(trace.parameter(name) for name in PARAMETERS))
    dag = build(trace, result)
    return dag, fuse(dag)


def direct(dag):
    """The result by evaluating every node once, in order, in this process."""
    made = {}

    def value(leaf):
        if isinstance(leaf, ParamRef):
            return PARAMETERS[leaf.name]
        whole = made[leaf.node]
        return whole if leaf.output is None else whole[leaf.output]

    for node in dag.nodes:
        if isinstance(node, InvocationNode):
            inputs = dict.fromkeys(node.model_fn.inputs)
            inputs |= {name: substitute(tree, value) for name, tree in node.inputs.items()}
            made[node.index] = node.model_fn.execute({}, **inputs)
        else:
            args = [substitute(tree, value) for tree in node.args]
            kwargs = {name: substitute(tree, value) for name, tree in node.kwargs.items()}
            made[node.index] = node.function(*args, **kwargs)
    return value(dag.result)


def as_on_a_cluster(dag, program):
    """The result by running the tasks one after the other, everything pickled in between."""
    packed = cloudpickle.dumps(pack(dag, program))
    results = {}
    for task in program.tasks:
        dependencies = tuple(pickle.loads(results[d]) for d in task.dependencies)
        producers = [
            SimpleNamespace(outputs=lambda p=p: pickle.loads(results[p]), items=lambda export: None)
            for p in task.callbacks
        ]
        parameters = {name: PARAMETERS[name] for name in task.parameters}
        piece = pickle.loads(packed)[task.position]
        bound = BoundTask(piece, parameters, None, dependencies, producers)
        value = bound.evaluate({})
        if task.position == program.result_position:
            return value
        assert len(value) == len(task.exports)
        results[task.position] = pickle.dumps(TaskOutputs(value), protocol=5)
    raise AssertionError("no task gave the result")


def run_both(function):
    """Compose, run both ways, compare; returns (dag, program, calls of the tasks)."""
    dag, program = compose(function)
    expected = direct(dag)
    calls.clear()
    assert as_on_a_cluster(dag, program) == expected
    check_structure(dag, program)
    return dag, program, Counter(calls)


def check_structure(dag, program):
    program._check()
    models = [node.index for node in dag.nodes if isinstance(node, InvocationNode)]
    # One task per invocation, in topological order; glue is never a task of its own.
    assert [task.node for task in program.tasks] == models
    assert program.result_position == len(models) - 1
    read = {(program.result_position, None)}
    for task in program.tasks:
        assert all(dependency < task.position for dependency in task.dependencies)
        assert [n for n in task.nodes if isinstance(dag.nodes[n], InvocationNode)] == [task.node]
        assert list(task.nodes) == sorted(set(task.nodes))
        # Everything that is evaluated finds its inputs: evaluated before, or imported.
        imported = {ref for _, ref in task.imports + task.callback_imports}
        assert len(imported) == len(task.imports) + len(task.callback_imports)
        assert len(set(task.dependencies)) == len(task.dependencies)
        assert {source for source, _ in task.callback_imports} == set(range(len(task.callbacks)))
        # Nobody waits for the producer of a callback input, but somebody keeps it wanted.
        assert all(producer < task.position for producer in task.callbacks)
        keepers = [t for t in program.tasks if task.position in t.dependencies]
        for producer in task.callbacks:
            assert not reachable(program, task.position) & {producer}
            assert any(producer in keeper.dependencies for keeper in keepers)
        unread = set(range(len(task.dependencies))) - {source for source, _ in task.imports}
        consumers = {c for t in program.tasks if t.callbacks for c in [t.position]}
        for source in unread:
            producer = task.dependencies[source]
            assert any(
                producer in program.tasks[c].callbacks for c in consumers & {*task.dependencies}
            )
        parameters = set()
        for node in task.nodes:
            for leaf in leaves(arguments(dag.nodes[node])):
                if isinstance(leaf, ParamRef):
                    parameters.add(leaf.name)
                else:
                    assert leaf in imported or (leaf.node in task.nodes and leaf.node < node)
        assert parameters == set(task.parameters)
        read |= {(task.dependencies[source], ref) for source, ref in task.imports}
        read |= {(task.callbacks[source], ref) for source, ref in task.callback_imports}
        # It waits for no model that it does not need (the last one may: it gives the result).
        if task.position != program.result_position:
            needed = {program.tasks[d].node for d in task.dependencies}
            assert needed <= ancestors(dag, task.node)
    # Exports are what others read, no more, and nothing twice.
    for task in program.tasks:
        assert len(set(task.exports)) == len(task.exports)
        for ref in task.exports:
            assert (task.position, ref) in read
    assert program.tasks[program.result_position].exports == ()


def reachable(program, position):
    """The tasks that a task waits for, directly or not."""
    found, stack = set(), [position]
    while stack:
        more = set(program.tasks[stack.pop()].dependencies) - found
        found |= more
        stack.extend(more)
    return found


def ancestors(dag, node):
    found, stack = set(), [node]
    while stack:
        for leaf in leaves(arguments(dag.nodes[stack.pop()])):
            if isinstance(leaf, Ref) and leaf.node not in found:
                found.add(leaf.node)
                stack.append(leaf.node)
    return found
