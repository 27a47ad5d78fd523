"""Pages about workflows inside Dask's own dashboard: who gets what, and what runs where.

They exist where Dask's dashboard does: on a scheduler that has one, with bokeh installed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..policy import FairPolicy

if TYPE_CHECKING:
    from .board import Board

logger = logging.getLogger(__name__)


def open_board(scheduler: Any, policy: FairPolicy, clock: Callable[[], float]) -> Board | None:
    """Add the pages to the scheduler's dashboard, in place of earlier ones. None: it has no dashboard.

    Event loop only. clock: the policy's, seconds.
    """
    try:
        from .board import Board
    except ImportError as error:
        logger.info("no dashboard pages: %s; pip install 'st2i_dask[dashboard]' adds them", error)
        return None
    server = Board.server_of(scheduler)
    if server is None:
        logger.info("no dashboard pages: this scheduler runs without a dashboard")
        return None
    try:
        return Board(scheduler, server, policy, clock)
    except Exception as error:  # they use more of Dask's dashboard than it promises
        logger.warning("no dashboard pages: %s: %s", type(error).__name__, error, exc_info=True)
        return None
