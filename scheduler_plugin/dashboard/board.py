"""Puts the pages into Dask's dashboard and takes them out again; samples the policy once a second.

Pages are a Bokeh application beside Dask's own on the same HTTP server. A page refers to the board, the
board's watch to the policy: once the board is closed, an open page says so and refers to no policy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from bokeh.server.tornado import BokehTornado
from distributed.dashboard.core import BokehApplication
from distributed.dashboard.scheduler import template_variables
from tornado.ioloop import IOLoop, PeriodicCallback

from ..policy import FairPolicy
from ..watch import Watch
from .asking import Asking
from .executors import ExecutorsPage
from .index import IndexPage
from .models import ModelsPage
from .page import Page
from .requests import RequestsPage
from .tenants import TenantsPage

logger = logging.getLogger(__name__)

#: In the order of their links. The first is the entry in Dask's navigation.
PAGES: tuple[type[Page], ...] = (IndexPage, TenantsPage, ExecutorsPage, RequestsPage, ModelsPage)

SAMPLE_SECONDS = 1.0

#: Of the scheduler's time, for all open pages, and how much dearer an update is with its messages.
PAGES_SHARE = 0.006
SENDING = 2.0

#: Name of the attribute by which an application of ours is known.
_OURS = "st2i_board"


class Board:
    """See the head of this file. Event loop only."""

    def __init__(
        self,
        scheduler: Any,
        server: BokehTornado,
        policy: FairPolicy,
        clock: Callable[[], float],
    ) -> None:
        self.watch = Watch(policy)
        self.clock = clock
        self._scheduler = scheduler
        self._open: set[Page] = set()
        self.asking = Asking(scheduler, self.watch, clock, self._wanted)
        for app in list(scheduler.http_application.applications):
            earlier = getattr(app, _OURS, None)
            if earlier is not None:
                earlier.close()
        navigation = template_variables(scheduler)
        self._navigation: list[str] = navigation["pages"]
        self._navigation.append(IndexPage.path.strip("/"))
        self._app = BokehApplication(
            {page.path: page.maker(self) for page in PAGES},
            scheduler,
            prefix=server.prefix,
            template_variables=navigation,
        )
        setattr(self._app, _OURS, self)
        scheduler.http_application.add_application(self._app)
        self._app.initialize(IOLoop.current())
        self._app.start()
        self.sampler = PeriodicCallback(self.sample, 1e3 * SAMPLE_SECONDS)
        self.sampler.start()
        self.sample()
        self.closed = False

    @staticmethod
    def server_of(scheduler: Any) -> BokehTornado | None:
        """Dask's own Bokeh application on this scheduler, if it has one."""
        for app in scheduler.http_application.applications:
            if isinstance(app, BokehTornado) and not hasattr(app, _OURS):
                return app
        return None

    def close(self) -> None:
        """Take the pages out. Those that are open say that it is over."""
        if self.closed:
            return
        self.closed = True
        self.sampler.stop()
        self.asking.stop()
        self.watch.close()
        for page in list(self._open):
            page.end()
        self._open.clear()
        self._navigation.remove(IndexPage.path.strip("/"))
        self._scheduler.http_application.applications.remove(self._app)
        self._app.stop()

    # -- what is recorded --------------------------------------------------------------------------

    def sample(self) -> None:
        self.watch.sample(self.clock())

    # -- what pages ask ----------------------------------------------------------------------------

    def opened(self, page: Page) -> None:
        self._open.add(page)
        if page.asks:
            self.asking.start()

    def left(self, page: Page) -> None:
        self._open.discard(page)

    def pause_s(self, cost_s: float) -> float:
        """How long a page whose update took so many CPU seconds waits, so that all that are open together
        take no more than `PAGES_SHARE` of the scheduler's time."""
        return cost_s * SENDING * max(1, len(self._open)) / PAGES_SHARE

    def _wanted(self) -> bool:
        """Whether a page is open that shows what executors say."""
        return any(page.asks for page in self._open)

    def wall_ms(self, at: float) -> float:
        """A time of the policy's clock as milliseconds since the epoch."""
        return 1e3 * (time.time() - self.clock() + at)

    def label(self, executor: str) -> str:
        """How people know an executor: its Dask name, or where it is."""
        worker = self._scheduler.workers.get(executor)
        name = worker.name if worker is not None else executor
        if isinstance(name, int):
            return f"worker {name}"
        return str(name).partition("://")[2] or str(name)
