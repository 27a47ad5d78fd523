"""Images that are fetched by URL: at paths nobody can guess, for a limited time, within a limit of bytes."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Kept:
    """An image file. owner: the request it belongs to."""

    data: bytes
    media_type: str
    until: float


class Shelf:
    """Files by name. The oldest go first when there are too many bytes."""

    def __init__(self, max_bytes: int, keep_s: float, clock: Callable[[], float]):
        self._max_bytes, self._keep_s, self._clock = max_bytes, keep_s, clock
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self.nbytes = 0

    def put(self, data: bytes, output_format: str, media_type: str) -> str:
        """Keep a file; its name."""
        name = f"{secrets.token_urlsafe(24)}.{output_format}"
        self._kept[name] = Kept(data, media_type, self._clock() + self._keep_s)
        self.nbytes += len(data)
        self.tidy()
        return name

    def get(self, name: str) -> Kept | None:
        self.tidy()
        return self._kept.get(name)

    def drop(self, name: str) -> None:
        found = self._kept.pop(name, None)
        if found is not None:
            self.nbytes -= len(found.data)

    def tidy(self) -> None:
        """Let go what is out of time, and the oldest while there are too many bytes."""
        now = self._clock()
        while self._kept:
            name, oldest = next(iter(self._kept.items()))
            if oldest.until > now and self.nbytes <= self._max_bytes:
                return
            self.drop(name)

    def _check(self) -> None:
        assert self.nbytes == sum(len(kept.data) for kept in self._kept.values())
        untils = [kept.until for kept in self._kept.values()]
        assert untils == sorted(untils)
