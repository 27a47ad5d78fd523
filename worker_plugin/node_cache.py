"""Where a node keeps what its workers have learned of models, over restarts."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any


def node_cache() -> Path | None:
    """The folder that ST2I_CACHE names, else ~/.cache/st2i_dask; None: no home."""
    cache = os.environ.get("ST2I_CACHE")
    if cache:
        return Path(cache)
    try:
        return Path.home() / ".cache" / "st2i_dask"
    except RuntimeError:
        return None


def replace_json(path: Path, content: Any) -> None:
    """Write a file whole, or leave it as it is: OSError then. Its folder is made, for its owner alone."""
    temporary = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, temporary = tempfile.mkstemp(".tmp", f".{path.stem}-", path.parent)
        with os.fdopen(number, "w") as file:
            json.dump(content, file, separators=(",", ":"), allow_nan=False)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with suppress(OSError):  # a folder that went away took it along
                os.unlink(temporary)
        raise
