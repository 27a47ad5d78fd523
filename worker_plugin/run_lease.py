"""The lease of a task's calls: kept from one call to the next, where both run one model that is all there.

Beginning and ending a lease takes as long as ten small operators. One that does not hold all layers ends
with its call: before the next begins, others may be given the room.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

from st2i_dask.model_fn import ModelFn

from .lease import Lease
from .weights import WeightStore, written_to

logger = logging.getLogger(__name__)


class RunLease:
    """Used by one thread. `close` when the calls are over, or `drop` after an error."""

    def __init__(self, models: WeightStore):
        self._models = models
        self._context: AbstractContextManager[Lease] | None = None
        self._lease: Lease | None = None
        self._of: dict[str, str] = {}  # what the lease is of
        self._calls = 0  # that have used the lease and ended well
        # A lease that a call has failed with, after others had used weights that were written to.
        self._spoilt: Lease | None = None

    @contextmanager
    def of(self, model_fn: ModelFn, **names: str) -> Iterator[Lease]:
        """The model for one call. names, errors: see `WeightStore.lease`."""
        of = {"model": model_fn.model_key, **names}
        lease = self._lease
        if lease is None or of != self._of:
            self.close()
            context = self._models.lease(model_fn, **names)
            lease = context.__enter__()
            self._context, self._lease, self._of, self._calls = context, lease, of, 0
        else:
            self._models.again(lease)
        try:
            yield lease
        except BaseException:
            # The lease takes it as its own: nothing that it has measured counts.
            try:
                self._end(*sys.exc_info())
            finally:
                if lease.is_spoilt and self._calls:
                    self._spoilt = lease
            raise
        if not lease.held or self._models.mode == "pipelined":
            self._end()  # an error of its end is this call's
        self._calls += 1

    def _end(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        context, self._context, self._lease = self._context, None, None
        if context is not None:
            context.__exit__(kind, error, traceback)

    def close(self) -> None:
        """OutputError if weights were written to, by a call or beside it: no result since the lease began is
        to be trusted."""
        self._end()
        spoilt, self._spoilt = self._spoilt, None
        if spoilt is not None:
            raise written_to(spoilt)

    def drop(self) -> None:
        """Close it after an error, which is what counts."""
        try:
            self.close()
        except Exception as error:
            logger.info("a lease ended with an error after another one: %s", error)
