"""The lease of a task's calls: kept from one call to the next, where both run one model that is all there.

Beginning and ending a lease takes as long as ten small operators. While layers come and go it is done all
the same: where the next call begins, others may have been given the room.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from st2i_dask.model_fn import ModelFn

from .lease import Lease
from .weights import WeightStore


class RunLease:
    """Used by one thread. `close` when the calls are over; a call that fails has closed it."""

    def __init__(self, models: WeightStore):
        self._models = models
        self._context: AbstractContextManager[Lease] | None = None
        self._lease: Lease | None = None
        self._names: dict[str, str] = {}

    @contextmanager
    def of(self, model_fn: ModelFn, **names: str) -> Iterator[Lease]:
        """The model for one call. names, errors: see `WeightStore.lease`."""
        lease = self._kept({"model": model_fn.model_key, **names})
        if lease is None:
            self.close()
            context = self._models.lease(model_fn, **names)
            lease = context.__enter__()
            self._context, self._lease = context, lease
            self._names = {"model": model_fn.model_key, **names}
        else:
            self._models.again(lease)
        try:
            yield lease
        except BaseException:
            # The lease takes it as its own: nothing that it has measured counts.
            context, self._context, self._lease = self._context, None, None
            assert context is not None
            context.__exit__(*sys.exc_info())
            raise

    def _kept(self, names: dict[str, str]) -> Lease | None:
        lease = self._lease
        return lease if lease is not None and lease.held and names == self._names else None

    def close(self) -> None:
        """OutputError if weights were written to: no result since the lease began is to be trusted."""
        context, self._context, self._lease = self._context, None, None
        if context is not None:
            context.__exit__(None, None, None)
