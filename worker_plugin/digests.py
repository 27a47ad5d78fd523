"""Digests of whole weights on disk, shared by the workers of a node: a cache, never needed."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from threading import Lock

from .node_cache import replace_json

logger = logging.getLogger(__name__)

#: Of the layout of the file.
VERSION = 1
#: More are dropped, oldest first. About 150 bytes each.
LIMIT = 1024
_DIGEST = re.compile(r"[0-9a-f]{64}")


class DigestStore:
    """SHA-256 digests by a key that changes when the content may have. Thread-safe.

    Reads and writes never fail: what goes wrong is one warning in the log. The file is replaced
    whole; of two processes that write at once one may lose its entry, which is computed again.
    """

    def __init__(self, folder: Path):
        self.path = folder / "digests.json"
        self._lock = Lock()
        self._digests: dict[str, str] = {}
        self._warned: set[str] = set()

    def get(self, key: str) -> str | None:
        with self._lock:
            if key not in self._digests:
                self._digests = {**self._read(), **self._digests}
            return self._digests.get(key)

    def put(self, key: str, digest: str) -> None:
        with self._lock:
            # What others wrote in the meantime stays.
            digests = {**self._read(), **self._digests, key: digest}
            self._digests = dict(list(digests.items())[-LIMIT:])
            self._write()

    def _read(self) -> dict[str, str]:
        try:
            whole = json.loads(self.path.read_bytes())
            if whole["version"] != VERSION:
                raise ValueError(f"version {whole['version']!r} is not {VERSION}")
            digests = dict(whole["digests"])
            for digest in digests.values():
                if not _DIGEST.fullmatch(digest):
                    raise ValueError(f"{digest!r} is no digest")
            return digests
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._warn(
                "read",
                "%s is not used (%s: %s); weights are read again where needed and it is replaced",
                self.path,
                type(error).__name__,
                error,
            )
            return {}

    def _write(self) -> None:
        try:
            replace_json(self.path, {"version": VERSION, "digests": self._digests})
        except OSError as error:
            self._warn(
                "write",
                "%s cannot be written (%s); copies of weights are compared again after a restart; "
                "set ST2I_CACHE to a folder with room that can be written",
                self.path,
                error,
            )

    def _warn(self, what: str, text: str, *values: object) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning(text, *values)

    def _check(self) -> None:
        with self._lock:
            assert len(self._digests) <= LIMIT
            assert all(_DIGEST.fullmatch(digest) for digest in self._digests.values())
