"""Prompts measured before anything is submitted."""

from __future__ import annotations

from typing import Any

from ..errors import LoadError
from .folder import DiffusersFolder


class TokenCounter:
    """Length of a text as a tokenizer of a pipeline counts it, special tokens included.

    part: the tokenizer's name in the folder; it is read on first use.
    """

    def __init__(self, folder: DiffusersFolder, part: str):
        self.folder = folder
        self.part = part
        self._tokenizer: Any = None

    def __call__(self, text: str) -> int:
        return len(self.tokenizer(text, verbose=False).input_ids)

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            if not (self.folder.index.get(self.part) or [None])[0]:
                raise LoadError(
                    f"{self.folder.source!r} has no {self.part}; copy the whole folder again"
                )
            self._tokenizer = self.folder.tokenizer(self.part)
        return self._tokenizer
