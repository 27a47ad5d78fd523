"""Waiting for images with a progress bar, in a terminal or a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Future


def completed(futures: Iterable[Future], **bar_options: Any) -> Iterator[Future]:
    """The futures as they finish (also failed and cancelled ones), advancing a progress bar.

    bar_options go to tqdm; the bar shows rate, remaining time and how many failed.
    """
    from distributed import as_completed
    from tqdm.auto import tqdm

    futures = list(futures)
    failed = 0
    options = {"total": len(futures), "unit": "image", "desc": "images", **bar_options}
    with tqdm(**options) as bar:
        for future in as_completed(futures):
            if future.status != "finished":
                failed += 1
                bar.set_postfix(failed=failed, refresh=False)
            yield future
            bar.update()


def progress(futures: Sequence[Future] | Future, **bar_options: Any) -> list[Future]:
    """Wait for all futures, showing a progress bar; returns them in the given order.

    Does not raise for failed requests: ask each future's `status` or `result()`.
    """
    listed = list(futures) if isinstance(futures, Sequence) else [futures]
    for _ in completed(listed, **bar_options):
        pass
    return listed
