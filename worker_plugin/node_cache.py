"""Where a node keeps what its workers have learned of models, over restarts."""

from __future__ import annotations

import os
from pathlib import Path


def node_cache() -> Path | None:
    """The folder that ST2I_CACHE names, else ~/.cache/st2i_dask; None: no home."""
    cache = os.environ.get("ST2I_CACHE")
    if cache:
        return Path(cache)
    try:
        return Path.home() / ".cache" / "st2i_dask"
    except RuntimeError:
        return None
