"""Waiting for images with a progress bar, in a terminal, a notebook or a log."""

from __future__ import annotations

import difflib
import inspect
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .errors import ParameterError
from .updates import Update, Watch, checked

if TYPE_CHECKING:
    from distributed import Future

logger = logging.getLogger(__name__)

# Seconds between two states of the bar: where it moves, and in a log, where each is a line.
_MOVING_S, _LINES_S = 0.1, 10.0


def progress(
    futures: Iterable[Future] | Future,
    *,
    on_progress: Callable[[Update], object] | None = None,
    **bar_options: Any,
) -> list[Future]:
    """Wait for all futures, showing a progress bar; returns them in the given order.

    The bar counts images, of a single one its steps, and says what those that run have done, or while
    none runs the place in the queue and the expected wait. Where standard error is no terminal and no
    notebook, it is a line every 10 s.

    on_progress: called in this thread with every `Update`; see there. What it raises is logged, once,
        and changes nothing.
    bar_options: of tqdm; `disable=True` shows no bar. ParameterError for others, before it waits.

    Does not raise for failed requests: ask each future's `status` or `result()`. Ctrl-C ends the wait
    and cancels nothing by itself: requests are cancelled with their futures, with `client.cancel`, or
    when the client closes, which ends the wait. ParameterError for anything but futures of one client, and with an
    asynchronous client: it has `st2i.updates`.
    """
    _check_options(bar_options)
    listed = checked(futures)
    if not listed:
        return listed
    watch = Watch(listed)
    if watch.client.asynchronous:
        raise ParameterError(
            "progress would stop the event loop of an asynchronous client; write "
            "`async for update in st2i.updates(futures)`"
        )
    tell = _Teller(on_progress)
    try:
        with _Bar(len(listed), bar_options) as bar:
            while changes := watch.from_thread():
                bar.take(changes)
                for update in changes:
                    tell(update)
    finally:
        watch.end()
    return listed


def _check_options(options: Iterable[str]) -> None:
    from tqdm.std import tqdm

    own = {"self", "iterable", "gui", "kwargs"}
    known = [name for name in inspect.signature(tqdm.__init__).parameters if name not in own]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ParameterError(
                f"progress has no option {name!r}; {hint}it takes on_progress and, of tqdm: "
                f"{', '.join(known)}"
            )


class _Teller:
    """Calls what the user gave; an exception there is logged the first time."""

    def __init__(self, function: Callable[[Update], object] | None) -> None:
        self._function = function
        self._failed = False

    def __call__(self, update: Update) -> None:
        if self._function is None:
            return
        try:
            self._function(update)
        except Exception:
            if not self._failed:
                logger.exception("on_progress failed for %r; the wait goes on", update)
            self._failed = True


class _Bar:
    """A tqdm bar of so many requests. A single one is counted in steps."""

    def __init__(self, requests: int, options: dict[str, Any]) -> None:
        self._single = requests == 1
        self._last: dict[int, Update] = {}
        file = options.get("file") or sys.stderr
        moving = _in_notebook() or file.isatty()
        self._every_s = _MOVING_S if moving else _LINES_S
        # The first state is drawn at once: nothing may change after it for long.
        self._drawn = -math.inf
        counted = {"total": None, "unit": "step"} if self._single else {"total": requests}
        options = {
            "desc": "image" if self._single else "images",
            "unit": "image",
            **counted,
            **options,
        }
        options["file"] = file if moving else _Lines(file)
        with warnings.catch_warnings():
            # A notebook without ipywidgets gets the bar of a terminal, and needs no warning.
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm
        self._bar = tqdm(**options)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()

    def take(self, changes: list[Update]) -> None:
        self._last.update((update.number, update) for update in changes)
        bar, last = self._bar, list(self._last.values())
        if self._single:
            (only,) = last
            if bar.total != only.total and not bar.disable:
                bar.reset(total=only.total)
            bar.n = only.done
        else:
            bar.n = sum(update.over for update in last)
        bar.set_postfix_str(_said(last, self._single), refresh=False)
        now = time.monotonic()
        if now - self._drawn >= self._every_s:
            self._drawn = now
            bar.refresh()


def _said(last: list[Update], single: bool) -> str:
    """What stands after the bar."""
    parts = []
    running = [update for update in last if update.state == "running"]
    places = [update for update in last if update.place is not None]
    failed = sum(update.over and update.state != "finished" for update in last)
    if running and not single:
        done = sum(update.done for update in running)
        total = sum(update.total or update.done for update in running)
        parts.append(f"{len(running)} running: {done}/{total} steps")
    elif places and not running:
        first = min(places, key=lambda update: update.place or 0)
        wait = f", about {_time(first.wait_s)} to go" if first.wait_s is not None else ""
        parts.append(f"place {first.place} in the queue{wait}")
    if failed:
        parts.append(f"failed={failed}")
    return ", ".join(parts)


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _in_notebook() -> bool:
    """As tqdm finds out: what is written here is shown, and moves."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


class _Lines:
    """A file for logs: every state of the bar a line of its own, and none twice."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._written = ""

    def write(self, text: str) -> None:
        line = text.strip()
        if line and line != self._written:
            self._written = line
            self._file.write(f"{line}\n")

    def flush(self) -> None:
        self._file.flush()
