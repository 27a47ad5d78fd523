"""Requests on a live cluster, timed: one alone, or those of a trace, each when the trace says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import AttachError, OutputError, St2iError

if TYPE_CHECKING:
    from distributed import Future

#: How long no request may end while some are open, seconds.
IDLE_SECONDS = 600.0
#: How long a request alone may take, seconds: the first one loads.
ALONE_SECONDS = 600.0


@dataclass(frozen=True)
class Played:
    """latency_s: of each request, None where it failed. seconds: from the first submit to the last end.
    late_s: how much later than the trace says the latest request was submitted."""

    latency_s: tuple[float | None, ...]
    seconds: float
    late_s: float
    futures: tuple[Future, ...]


def alone_s(submit: Callable[[], Future], name: str) -> float:
    """Seconds of one request of that workflow, waited for. AttachError: it took longer than `ALONE_SECONDS`;
    OutputError: it failed with what is no error of this package."""
    began = time.monotonic()
    try:
        submit().result(timeout=ALONE_SECONDS)
    except St2iError:
        raise
    except TimeoutError:
        raise AttachError(
            f"workflow {name!r}: one request took longer than {ALONE_SECONDS:g} s; see whether the cluster "
            "has workers: st2i doctor --scheduler ADDR"
        ) from None
    except Exception as error:
        raise OutputError(
            f"workflow {name!r} failed, {type(error).__name__}: {error}; correct it or its parameters first"
        ) from error
    return time.monotonic() - began


def attainment(latency_s: Sequence[float | None], deadline_s: Sequence[float]) -> float:
    """Share of the requests that ended within their deadline; a failed one has missed it."""
    good = sum(
        one is not None and one <= limit for one, limit in zip(latency_s, deadline_s, strict=True)
    )
    return good / len(latency_s)


def play(
    times: Sequence[float],
    submit: Callable[[int], Future],
    idle_s: float = IDLE_SECONDS,
) -> Played:
    """Submits request number n at times[n] seconds from now, ascending, and waits for all.

    Blocks; the cluster may run anywhere. What `submit` raises goes to the caller. AttachError: requests
    are open and none has ended for `idle_s` seconds.
    """
    ended: dict[int, float | None] = {}
    news = threading.Condition()
    futures: list[Future] = []
    late_s = 0.0
    begin = time.monotonic()
    for number, at in enumerate(times):
        time.sleep(max(0.0, begin + at - time.monotonic()))
        submitted = time.monotonic()
        late_s = max(late_s, submitted - begin - at)
        future = submit(number)

        def over(future: Future, number: int = number, submitted: float = submitted) -> None:
            seconds = time.monotonic() - submitted
            with news:
                ended[number] = seconds if future.status == "finished" else None
                news.notify_all()

        future.add_done_callback(over)
        futures.append(future)
    with news:
        while len(ended) < len(futures):
            before = len(ended)
            if not news.wait_for(lambda before=before: len(ended) > before, idle_s):
                raise AttachError(
                    f"{len(futures) - before} of {len(futures)} requests are open and none has ended for "
                    f"{idle_s:g} s; look at the cluster with `st2i doctor --scheduler ADDR`"
                )
    latency = tuple(ended[number] for number in range(len(futures)))
    return Played(latency, time.monotonic() - begin, late_s, tuple(futures))
