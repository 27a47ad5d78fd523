"""The Dask task: one invocation with its glue, evaluated on a worker.

The worker's executor decides how models are held and where tensors live; this file only walks the
program. It is imported by the scheduler too, so it must stay cheap to import.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from .callback import CallbackFuture, Items
from .dag import substitute
from .errors import AttachError, OutputError
from .outputs import TaskOutputs, check_values
from .plan import PackedTask, unpack
from .stream import OutputStream, Sink, check_streams, streaming
from .symbol import ParamRef, Ref
from .trace import GlueNode

#: Name of the WorkerPlugin that holds the executor.
WORKER_PLUGIN = "st2i-worker"


@dataclass(frozen=True)
class Call:
    """One invocation as it stands in a graph: what to run, with which parameters, after which keys.

    about: the result's metadata; None unless this is the final task.
    """

    packed: PackedTask
    parameters: dict[str, Any]
    about: dict[str, Any] | None
    callbacks: tuple[str, ...]  # keys of the producers, in the order of TaskProgram.callbacks
    dependencies: tuple[str, ...]  # keys, in the order of TaskProgram.dependencies
    key: str


class Runner(Protocol):
    """What runs calls on a worker."""

    def run(self, calls: Sequence[Call], values: dict[str, Any]) -> Any:
        """The result of the first call; the following ones are its next steps, run ahead.

        values: the results of all keys that the calls depend on and that none of them makes.
        """
        ...


class Producer(Protocol):
    """The task that makes callback inputs, as its consumer sees it. Waits are bounded.

    Raises ProducerLostError when it is gone. Any thread.
    """

    def outputs(self) -> TaskOutputs:
        """All its exports, once it is done."""
        ...

    def items(self, export: int) -> Items | None:
        """One export, item by item; None: it comes in one piece."""
        ...


class BoundTask:
    """A task with its inputs: everything an executor needs to run it.

    open_stream: where the items of an export go that is handed over while the model runs; the
        arguments are the export and the number of items. None: they are only collected.
    """

    def __init__(
        self,
        packed: PackedTask,
        parameters: dict[str, Any],
        about: dict[str, Any] | None,
        dependencies: Sequence[TaskOutputs],
        producers: Sequence[Producer] = (),
        open_stream: Callable[[int, int], Sink] | None = None,
    ):
        self.digest = packed.plan.digest
        self.model_fn, self.plan = unpack(packed)
        #: What runs the model: `execute`, or something that has others run it too.
        self.execute: Callable[..., Any] = self.model_fn.execute
        self.about = about  # the result's metadata; None unless this is the final task
        self._parameters = parameters
        self._open_stream = open_stream
        #: Which weights earlier tasks of the request have used, by model key.
        self.versions: dict[str, str] = {}
        for outputs in dependencies:
            self.versions |= outputs.versions
        #: The task of the request that gave the first NaN, if one of its inputs has passed that on.
        self.spoilt = next((outputs.spoilt for outputs in dependencies if outputs.spoilt), None)
        #: Whether items were handed over while it ran: it cannot be evaluated again.
        self.has_streamed = False
        self.imports: dict[Ref, Any] = {
            ref: dependencies[source].values[export] for source, export, ref in self.plan.imports
        }
        self.callbacks: dict[Ref, CallbackFuture] = {
            ref: CallbackFuture(
                lambda p=producers[source], e=export: p.outputs().values[e],  # type: ignore[misc]
                producers[source].items(export),
            )
            for source, export, ref in self.plan.callbacks
        }

    def evaluate(self, components: Mapping[str, Any]) -> Any:
        """Run glue and model in order. Returns the final value or the tuple of exports."""
        made: dict[int, Any] = {}

        def value(leaf: Any) -> Any:
            if isinstance(leaf, ParamRef):
                return self._parameters[leaf.name]
            if leaf in self.imports:
                return self.imports[leaf]
            if leaf in self.callbacks:
                return self.callbacks[leaf]
            whole = made[leaf.node]
            return whole if leaf.output is None else whole[leaf.output]

        for node in self.plan.nodes:
            if isinstance(node, GlueNode):
                result = node.function(
                    *(substitute(tree, value) for tree in node.args),
                    **{name: substitute(tree, value) for name, tree in node.kwargs.items()},
                )
                if node.outputs is not None:
                    result = self._unpacked(node, result)
            else:
                inputs = dict.fromkeys(self.model_fn.inputs)
                inputs.update((n, substitute(tree, value)) for n, tree in node.inputs.items())
                self._wrap_callbacks(inputs)
                with streaming(partial(self._sink, node.index)) as streams:
                    result = self.execute(components, **inputs)
                self._check_outputs(result)
                self._check_streams(streams, result)
            made[node.index] = result
        if self.plan.result is not None:
            handed_on = value(self.plan.result)
        else:
            handed_on = tuple(value(ref) for ref in self.plan.program.exports)
        check_values(handed_on, f"workflow {self.plan.workflow!r}: {self.plan.label}")
        return handed_on

    def _sink(self, node: int, output: str, length: int) -> Sink | None:
        if output not in self.model_fn.outputs:
            raise OutputError(
                f"workflow {self.plan.workflow!r}: {self.plan.label} streams {output!r} but "
                f"declares {sorted(self.model_fn.outputs)}; name a declared output"
            )
        ref, exports = Ref(node, output), self.plan.program.exports
        if self._open_stream is None or ref not in exports:
            return None
        self.has_streamed = True
        return self._open_stream(exports.index(ref), length)

    def _wrap_callbacks(self, inputs: dict[str, Any]) -> None:
        """A callback input is a CallbackFuture also where it happened to be an ordinary one."""
        for name, declared in self.model_fn.inputs.items():
            value = inputs[name]
            if declared.callback and not (value is None or isinstance(value, CallbackFuture)):
                inputs[name] = CallbackFuture.of(value)

    def _check_outputs(self, result: Any) -> None:
        declared = set(self.model_fn.outputs)
        given = set(result) if isinstance(result, Mapping) else None
        if given != declared:
            what = sorted(map(str, given)) if given is not None else type(result).__name__
            raise OutputError(
                f"workflow {self.plan.workflow!r}: {self.plan.label} returned {what} but declares "
                f"{sorted(declared)}; return a dict with exactly the declared outputs"
            )

    def _check_streams(self, streams: Mapping[str, OutputStream], result: Any) -> None:
        try:
            check_streams(streams, result)
        except OutputError as error:
            raise OutputError(
                f"workflow {self.plan.workflow!r}: {self.plan.label}: {error}"
            ) from None

    def _unpacked(self, node: GlueNode, result: Any) -> tuple[Any, ...]:
        values = tuple(result) if isinstance(result, (tuple, list)) else None
        if values is None or len(values) != node.outputs:
            raise OutputError(
                f"workflow {self.plan.workflow!r}: glue {node.label} returned "
                f"{type(result).__name__} but is declared with outputs={node.outputs}; "
                "return a tuple of that length"
            )
        return values


#: How long a task waits for a plugin that is being replaced, and for one that is starting, seconds.
ABSENT_SECONDS, START_SECONDS = 2.0, 120.0
#: Arguments of `run_invocation` before the dependencies.
LEADING = 4


def run_invocation(
    packed: PackedTask,
    parameters: dict[str, Any],
    about: dict[str, Any] | None,
    callbacks: tuple[str, ...],
    *dependencies: TaskOutputs,
) -> Any:
    """Entry point of a task. Runs in a worker's executor thread."""
    names = tuple(map(str, range(len(dependencies))))
    call = Call(packed, parameters, about, callbacks, names, "")
    return _runner().run([call], dict(zip(names, dependencies, strict=True)))


def run_steps(calls: tuple[Call, ...], names: tuple[str, ...], *dependencies: TaskOutputs) -> Any:
    """Entry point of a task that runs several steps: the first call's, and what follows it."""
    return _runner().run(calls, dict(zip(names, dependencies, strict=True)))


def _runner() -> Runner:
    from distributed import get_worker

    worker = get_worker()
    plugin = worker.plugins.get(WORKER_PLUGIN)
    # Attaching anew replaces the plugin while tasks are there: for moments none is ready.
    begin = time.monotonic()
    while plugin is None or (plugin.runner is None and plugin.starting):
        if time.monotonic() - begin > (ABSENT_SECONDS if plugin is None else START_SECONDS):
            break
        time.sleep(0.005)
        plugin = worker.plugins.get(WORKER_PLUGIN)
    if plugin is None or plugin.runner is None:
        raise AttachError(
            f"worker {worker.address} does not serve: its {WORKER_PLUGIN} plugin "
            f"{'is missing' if plugin is None else 'did not start'}; see the worker's log, then "
            "call st2i.attach(client, device='cpu') or with the device it has"
        )
    runner: Runner = plugin.runner
    return runner
