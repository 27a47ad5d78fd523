"""Runs the calls of a task: one invocation, or several denoising steps while nobody else waits.

Between two steps it looks whether the scheduler wants the executor back. The results of the steps after
the first are put under their own keys in this worker's memory, so that Dask's view stays true; the
completion message names them.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from distributed import Reschedule, Status
from distributed.comm import CommClosedError
from distributed.worker import thread_state
from distributed.worker_state_machine import FreeKeysEvent, UpdateDataEvent

from st2i_dask.errors import OutputError, ProducerLostError
from st2i_dask.invocation import BoundTask, Call
from st2i_dask.logs import about
from st2i_dask.messages import quicken, restore
from st2i_dask.request import ANNOTATION

from .callback_pulls import CallbackPulls
from .executor import Executor, Seconds, UnwantedError
from .gang_leader import Leader
from .gangs import Gangs
from .messages import RidingSend
from .run_lease import RunLease
from .streams import OutputBoard
from .task_log import TaskLog

logger = logging.getLogger(__name__)

# States of a task in Dask's worker while its thread runs and its result is wanted, and before.
_RUNNING = ("executing", "long-running")
_PENDING = ("waiting", "ready", "constrained")
# How often to look whether the thread of a task that was taken back has ended, seconds. Only needed
# where it ends without passing `run`.
_LOOK_S = 0.2
# Pause between an error and the collection of what its frames refer to, seconds.
_COLLECT_S = 0.5
# Runs whose later results can still be told apart, for a task that is taken back as it ends.
_AHEAD_KEPT = 16


class StepRunner:
    """One per worker. `run` is called from task threads, the other methods from the event loop."""

    def __init__(self, worker: Any, executor: Executor, pulls: CallbackPulls, gangs: Gangs):
        self._worker = worker
        self._executor = executor
        self._pulls = pulls
        self._gangs = gangs
        self.log = TaskLog(worker)
        self._yielding: set[str] = set()
        self._watched: set[str] = set()  # taken back; the scheduler waits to hear of their end
        self._ahead: OrderedDict[str, list[str]] = OrderedDict()  # kept by the last few runs
        self._steps: dict[str, int] = {}  # done by what runs now, for those who ask
        self._reported = -1  # version of what is resident, as last told
        self._collecting = False
        self._lock = threading.Lock()

    def run(self, calls: Sequence[Call], values: dict[str, Any]) -> Any:
        """The first call's result. Later calls run ahead until a yield or an error."""
        with self._executor.in_use() as may_run:
            if not may_run:
                raise Reschedule  # the worker was attached anew: to its new executor
            with about(self.log.fields(thread_state.key)):
                return self._run(calls, values)

    def _run(self, calls: Sequence[Call], values: dict[str, Any]) -> Any:
        key = thread_state.key
        total = Seconds()
        begin: float | None = None  # of the call that is under way
        done: list[Any] = []
        request, bucket, members = self._belongs(key)
        gang = ExitStack()
        leader: Leader | None = None
        kept = RunLease(self._executor.models)
        try:
            for call in calls:
                if done and (key in self._yielding or self._unwanted(key)):
                    break
                boards: list[OutputBoard] = []
                begin = time.perf_counter()
                try:
                    task = BoundTask(
                        call.packed,
                        call.parameters,
                        call.about,
                        [values[name] for name in call.dependencies],
                        [self._pulls.producer(key, producer) for producer in call.callbacks],
                        partial(self._pulls.boards.open, call.key or key, boards),
                    )
                    if members and leader is None:
                        names = {"workflow": task.plan.workflow, "request": request}
                        # It computes less than the same shapes alone.
                        names["bucket"] = bucket = f"{bucket}/{1 + len(members)}"
                        leader = gang.enter_context(self._gangs.lead(members, task.model_fn, names))
                    together = leader.execute if leader is not None else None
                    wanted = partial(self._is_wanted, key)
                    result, seconds = self._executor.run(
                        task, request, bucket, together, wanted, kept
                    )
                    if boards:
                        result.held = boards
                except ProducerLostError as error:
                    logger.info("%s runs again: %s", key, error)
                    self._worker.loop.add_callback(self._collect_soon)
                    raise Reschedule from error
                except UnwantedError as error:
                    self._worker.loop.add_callback(self._collect_soon)
                    raise Reschedule from error  # for when it is wanted again meanwhile
                except (SystemExit, KeyboardInterrupt) as error:
                    # They would end the worker, and with it everybody's work.
                    raise OutputError(
                        f"the model code of {key!r} raised {type(error).__name__}; a ModelFn "
                        "must not end its process: raise an ordinary error"
                    ) from error
                except Exception:
                    self._worker.loop.add_callback(self._collect_soon)
                    if done:
                        break  # it runs again, and fails, under its own key
                    raise
                total, begin = total.plus(seconds), None
                values[call.key] = result
                done.append(result)
                self._steps[key] = len(done)
            kept.close()
        except BaseException:
            done.clear()  # no message of completion will name what was run ahead
            raise
        finally:
            kept.drop()
            gang.close()
            if begin is not None:  # a call that gave nothing took its time all the same
                total = total.plus(Seconds(compute=time.perf_counter() - begin))
            self._steps.pop(key, None)
            self._yielding.discard(key)
            ahead = {c.key: r for c, r in zip(calls[1:], done[1:], strict=False)}
            self._worker.loop.add_callback(self._over, key, total, ahead)
        served = len(leader.served) if leader is not None else None
        self._report(key, total, ahead, served)
        return done[0]

    def _belongs(self, key: str) -> tuple[str, str, list[str]]:
        """Request, shape bucket and the members of its gang of a running task; empty where nobody
        said."""
        task = self._worker.state.tasks.get(key)
        annotation = ((task.annotations if task is not None else None) or {}).get(ANNOTATION)
        if not isinstance(annotation, dict):
            return "", "", []
        members = dict.fromkeys(map(str, annotation.get("members") or ()))
        members.pop(self._worker.address, None)
        return str(annotation.get("request", "")), str(annotation.get("bucket", "")), list(members)

    def _collect_soon(self) -> None:
        """Free what the frames of an error refer to: tensors, in cycles through Dask's own frames.
        One collection for all errors of a moment, as it stops the process for a while."""
        if not self._collecting:
            self._collecting = True
            self._worker.loop.call_later(_COLLECT_S, self._collect)

    def _collect(self) -> None:
        self._collecting = False
        gc.collect()

    def _is_wanted(self, key: str) -> bool:
        return not self._unwanted(key)

    def _unwanted(self, key: str) -> bool:
        task = self._worker.state.tasks.get(key)
        return task is None or task.state not in _RUNNING

    def start(self) -> None:
        """Listen to the scheduler."""
        self._worker.stream_handlers["st2i_yield"] = self.yield_wanted
        steps = self._steps

        def answer() -> dict[str, int]:
            """RPC `st2i_steps`: by key, the steps done by tasks that run."""
            return dict(steps)

        # Dask keeps handlers in a cache of the process: this one must not keep the arena with it.
        self._worker.handlers["st2i_steps"] = answer
        quicken(self._worker.batched_stream, RidingSend)

    def announce(self) -> None:
        """Tell the scheduler what is resident here: at first nothing, whatever was there before."""
        message = {"op": "st2i_residency", **self._residency()}
        with suppress(CommClosedError):
            self._worker.batched_stream.send(message)

    def stop(self) -> None:
        self._worker.stream_handlers.pop("st2i_yield", None)
        self._worker.handlers.pop("st2i_steps", None)
        restore(self._worker.batched_stream)

    def yield_wanted(self, key: str, taken_back: bool = False, **message: Any) -> None:
        """Stream message `st2i_yield`: hand back after the current step.

        taken_back: the scheduler wants the result no more and waits for the executor; tell it when
            the thread has ended, at once if none was started.
        """
        if taken_back:
            self._yielding.discard(key)
            # Dask drops the result of a task that was taken back just before it was done, and with
            # it the news of the later ones.
            self._free(self._ahead.pop(key, []))
            self._watched.add(key)
            self._look(key, Seconds())
            return
        for old in [k for k in list(self._yielding) if self._state(k) not in _RUNNING + _PENDING]:
            self._yielding.discard(old)
        if self._state(key) in _RUNNING + _PENDING:
            self._yielding.add(key)

    def _state(self, key: str) -> str | None:
        task = self._worker.state.tasks.get(key)
        return task.state if task is not None else None

    def _look(self, key: str, seconds: Seconds | None) -> None:
        """Tell the scheduler if no thread runs the key; else look again. seconds: what it used."""
        if key not in self._watched or self._worker.status is Status.closed:
            return
        task = self._worker.state.tasks.get(key)
        if task is not None and (task.state in _RUNNING or task.previous in _RUNNING):
            self._worker.loop.call_later(_LOOK_S, self._look, key, None)
        else:
            self._tell_ended(key, seconds)

    def _tell_ended(self, key: str, seconds: Seconds | None) -> None:
        self._watched.discard(key)
        used = {} if seconds is None else {"seconds": list(seconds)}
        with suppress(CommClosedError):
            self._worker.batched_stream.send({"op": "st2i_ended", "key": key, **used})

    def _over(self, key: str, seconds: Seconds, ahead: dict[str, Any]) -> None:
        """In the event loop, before Dask hears that the thread is done."""
        self._yielding.discard(key)
        self._pulls.over(key)
        if self._unwanted(key):
            # Cancelled meanwhile: Dask tells the scheduler nothing, which waits for the executor.
            self._tell_ended(key, seconds)
        elif ahead:
            self._worker.handle_stimulus(
                UpdateDataEvent(data=ahead, stimulus_id=f"st2i-ahead-{key}")
            )
            self._ahead[key] = list(ahead)
            while len(self._ahead) > _AHEAD_KEPT:
                self._ahead.popitem(last=False)

    def _free(self, keys: list[str]) -> None:
        if keys:
            stimulus_id = f"st2i-free-{keys[0]}"
            self._worker.handle_stimulus(FreeKeysEvent(keys=keys, stimulus_id=stimulus_id))

    def _residency(self) -> dict[str, Any]:
        models = self._executor.models
        return {"missing": models.missing(), "free_bytes": models.free_bytes()}

    def _report(
        self, key: str, seconds: Seconds, ahead: dict[str, Any], members: int | None
    ) -> None:
        """Put what was measured on the completion message of the running task. members: of its gang
        that served; None: it had none."""
        task = self._worker.state.tasks.get(key)
        if task is None:
            return
        report: dict[str, Any] = seconds._asdict()
        if members is not None:
            report["members"] = members
        if ahead:
            report["ahead"] = {name: value.__sizeof__() for name, value in ahead.items()}
        with self._lock:
            version = self._executor.models.residency.version
            # Once it closes its models are going; what its successor has is told by that one.
            if version != self._reported and not self._executor.closing:
                self._reported = version
                report |= self._residency()
        task.metadata = {**(task.metadata or {}), "st2i": report}
