"""A thread that follows a pipeline's own code, with hollow components.

It holds the process's glue lock whenever it runs and gives it back while a component call is under way.
With the lock come torch's global generators, as this request's draws have left them: a pipeline that
draws from them gives what it gives after `torch.manual_seed(seed)`, whatever runs beside it.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

from st2i_dask.errors import NotFiniteError, OutputError
from st2i_dask.image import check_pixels, finish
from st2i_dask.outputs import TaskOutputs, is_tensor, map_values

from .component_calls import CallChannel, Sent
from .executor import Executor, changed_files

# Models are read under the same lock, one at a time: torch's default dtype changes meanwhile.
from .shelf import building as glue_lock

# Pause between an error and the collection of what its frames refer to, seconds.
_COLLECT_S = 0.5


class OrchestrationStopped(BaseException):
    """Nobody wants the request any more, or not here. No Exception: pipelines must not catch it."""


class OrchestrationThread:
    """result: of the request, on the event loop; OrchestrationStopped after `stop`."""

    def __init__(
        self,
        key: str,
        request: Any,
        shells: Any,
        channel: CallChannel,
        executor: Executor,
        loop: asyncio.AbstractEventLoop,
    ):
        self._request = request
        self._shells = shells
        self._channel = channel
        self._executor = executor
        self._loop = loop
        self.result: asyncio.Future[Any] = loop.create_future()
        self._thread = threading.Thread(target=self._main, name=f"st2i-orchestrator-{key}")
        self._thread.daemon = True
        self._is_stopped = False
        self._pending: Future[Any] | None = None
        self._lock = threading.Lock()
        self._index = 0
        self._versions: dict[str, str] = {}
        self._sent: dict[int, tuple[weakref.ref[Any], int, Sent]] = {}
        self._outer: Any = None
        self._last: tuple[str, list[Any]] = "", []

    # -- event loop --------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Its next component call, or the one it waits for, ends it. Idempotent."""
        with self._lock:
            self._is_stopped = True
            pending = self._pending
        if pending is not None:
            pending.cancel()

    # -- its own thread ----------------------------------------------------------------------------

    def _main(self) -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = self._run()
        except OrchestrationStopped:
            error = OrchestrationStopped()  # without frames, which refer to tensors
        except (SystemExit, KeyboardInterrupt) as caught:
            error = OutputError(f"the pipeline's code raised {type(caught).__name__}")
        except BaseException as caught:  # all of it is the request's, and ends with it
            error = caught
        finally:
            self._sent.clear()
            self._last = "", []
            with suppress(RuntimeError):  # the loop is closed: the worker has ended
                self._loop.call_soon_threadsafe(self._over, value, error)

    def _over(self, value: Any, error: BaseException | None) -> None:
        if self.result.done():
            return
        if error is not None:
            self.result.set_exception(error)
            # Frames and their tensors, in cycles through Dask's own frames.
            self._loop.call_later(_COLLECT_S, gc.collect)
        else:
            self.result.set_result(value)

    def _run(self) -> Any:
        import torch

        from st2i_dask.pipelines.hollow import calling

        request = self._request
        self.device = torch.device(self._executor.device)
        with self._glue():
            self._shell = self._shells.get(request.source)
            pipeline = self._shell.for_request()
            arguments = dict(request.arguments)
            if takes_generator(type(pipeline)):
                arguments["generator"] = torch.Generator("cpu").manual_seed(request.seed)
            with calling(self):
                output = pipeline(**arguments)
            return self._finished(output[0])

    def call(
        self,
        component: str,
        path: str,
        method: str,
        casts: tuple[str, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Carry out a component call somewhere; its result, as if it had been made here."""
        from st2i_dask.pipelines.component_call import asked
        from st2i_dask.pipelines.travel import put_together

        source = self._request.source
        call = asked(self._shell, source, component, path, method, casts, args, kwargs)
        with self._elsewhere():
            outputs = self._carried_out(call)
            form, made = outputs.values
            made = [self._own(tensor) for tensor in made]
        self._note_versions(outputs, call.model_fn)
        self._last = call.label, made
        return put_together(form, made)

    def _carried_out(self, call: Any) -> TaskOutputs:
        index, self._index = self._index, self._index + 1
        outputs = self._wait(self._channel.recorded(index, call))
        while outputs is None:
            outputs = self._wait(self._channel.submit(index, call, self._send(call)))
            if outputs is None:  # any argument may be lost
                for _, _, old in self._sent.values():
                    self._channel.drop(old)
                self._sent.clear()
        return outputs

    def _send(self, call: Any) -> list[Sent]:
        """Large tensors of the arguments as keys of this worker: new ones, and those sent before."""
        sent = []
        for tensor in call.large():
            known = self._sent.get(id(tensor))
            if known is not None and known[0]() is tensor and known[1] == tensor._version:
                sent.append(known[2])
                continue
            outputs = TaskOutputs((self._executor.store.keep(tensor),), versions=self._versions)
            fresh = self._channel.new(outputs)
            self._sent[id(tensor)] = weakref.ref(tensor), tensor._version, fresh
            sent.append(fresh)
        for number, (tensor, version, old) in list(self._sent.items()):
            alive = tensor()
            if old not in sent and (alive is None or alive._version != version):
                self._channel.drop(old)
                del self._sent[number]
        self._executor.store.arena.heap.settle()
        return sent

    def _own(self, tensor: Any) -> Any:
        """The glue may write into it; what was recorded stays as it is."""
        return tensor.to(self.device, copy=True)

    def _note_versions(self, outputs: TaskOutputs, model_fn: Any) -> None:
        for key, version in outputs.versions.items():
            if self._versions.get(key, version) != version:
                raise changed_files(model_fn)
        self._versions = {**self._versions, **outputs.versions}

    def _wait(self, coroutine: Any) -> Any:
        with self._lock:
            if self._is_stopped:
                coroutine.close()
                raise OrchestrationStopped
            self._pending = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return self._pending.result()
        except BaseException:
            if self._is_stopped:
                raise OrchestrationStopped from None
            raise
        finally:
            self._pending = None

    # -- the lock, and the generators with it ------------------------------------------------------

    @contextmanager
    def _glue(self) -> Iterator[None]:
        with glue_lock:
            self._outer = self._generators()
            self._seed()
            try:
                yield
            finally:
                self._set_generators(self._outer)

    @contextmanager
    def _elsewhere(self) -> Iterator[None]:
        """Inside of `_glue`: somebody else's turn."""
        mine = self._generators()
        self._set_generators(self._outer)
        glue_lock.release()
        try:
            yield
        finally:
            glue_lock.acquire()
            self._outer = self._generators()
            self._set_generators(mine)

    def _generators(self) -> list[Any]:
        import torch

        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        return states

    def _set_generators(self, states: list[Any]) -> None:
        import torch

        torch.set_rng_state(states[0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self.device)

    def _seed(self) -> None:
        import torch

        torch.default_generator.manual_seed(self._request.seed)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(self._request.seed)

    # -- the result --------------------------------------------------------------------------------

    def _finished(self, images: Any) -> Any:
        """What the client gets. Errors for what is no picture."""
        label, last = self._last
        for tensor in last:
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise NotFiniteError(
                    f"{label} gave numbers that are NaN or infinite; another dtype (bfloat16 or "
                    "float32 instead of float16) usually cures it"
                )
        output_type = self._request.arguments.get("output_type", "pil")
        where = f"workflow {self._request.workflow!r}"
        if output_type in ("pt", "np"):
            for image in images:
                check_pixels(image, lowest=0.0, where=where)
        elif output_type == "pil":
            for image in images:
                _check_picture(image, where)
        images = map_values(images, is_tensor, _to_client)
        if hasattr(images, "__len__") and len(images) == 1:
            images = images[0]
        return finish(images, self._request.about)


def takes_generator(pipeline_class: type) -> bool:
    return "generator" in inspect.signature(pipeline_class.__call__).parameters


def _check_picture(image: Any, where: str) -> None:
    bands = image.getextrema() if hasattr(image, "getextrema") else ()
    highest = [band[1] if isinstance(band, tuple) else band for band in bands[:3]]
    if highest and not any(highest):
        raise OutputError(
            f"{where} produced an all-black image: the model's numbers overflowed, its weights are "
            "wrong, or its safety checker took the image away"
        )


def _to_client(tensor: Any) -> Any:
    """Dask carries tensors as NumPy arrays, which know no bfloat16: float32 holds it exactly."""
    tensor = tensor.detach().to("cpu")
    return tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor.clone()
