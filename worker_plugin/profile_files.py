"""Profiles on disk: one JSON file per weights, shared by the workers of a node.

A file is replaced whole, so a reader finds one writer's file, never parts of two; of two writers the
last one wins. Nothing is synced: what a power cut leaves is read as a broken file and measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .node_cache import replace_json

logger = logging.getLogger(__name__)

#: Of the layout of a file. Files of other versions are measured anew and replaced.
VERSION = 1

Decoded = TypeVar("Decoded")


class ProfileFiles:
    """Reads and writes never fail: what goes wrong is one warning in the log per file that cannot be
    read, and one per folder that cannot be written. Not thread-safe for writes."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._warned: set[str] = set()
        self._write_warned = False

    def path(self, weights: str) -> Path:
        """Named by a digest: weights ids may hold any character."""
        return self.folder / f"{hashlib.sha256(weights.encode()).hexdigest()[:32]}.json"

    def read(self, weights: str, decode: Callable[[Any], Decoded]) -> Decoded | None:
        """`decode(content)`, or None: no file, or none that is of use.

        decode: raises ValueError, KeyError, TypeError or AttributeError for what it cannot use.
        """
        path = self.path(weights)
        try:
            whole = json.loads(path.read_bytes())
            if whole["version"] != VERSION:
                raise ValueError(f"version {whole['version']!r} is not {VERSION}")
            if whole["weights"] != weights:
                raise ValueError(f"it is of the weights {whole['weights']!r}")
            return decode(whole["content"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if weights not in self._warned:
                self._warned.add(weights)
                logger.warning(
                    "profile %s of weights %r is not used (%s: %s); its layers are measured again "
                    "and the file is replaced",
                    path,
                    weights,
                    type(error).__name__,
                    error,
                )
            return None

    def write(self, weights: str, content: Any) -> bool:
        """Replace the file. False when it could not be: then the old one is still there."""
        whole = {"version": VERSION, "weights": weights, "content": content}
        try:
            replace_json(self.path(weights), whole)
            return True
        except OSError as error:
            if not self._write_warned:
                self._write_warned = True
                logger.warning(
                    "profiles cannot be written to %s (%s); they are kept in memory until this "
                    "worker ends; set ST2I_CACHE to a folder with room that can be written",
                    self.folder,
                    error,
                )
            return False
