"""The small files that a model is made with beside its weights: who changes one makes another model.

They are those of the folders that a model's components were read from, as Diffusers and Transformers tell.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from st2i_dask.errors import LoadError

from .components import parts
from .file_identity import FileIdentity

#: Of pipelines, models and tokenizers. Whatever else lies there changes no picture.
NAMES = (
    "model_index.json",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True)
class Configurations:
    """files: as they were when the model was read. digest: of their content, alike on every worker; ""
    without any. is_settled: none of them was written to meanwhile, so the model was made of just these."""

    files: tuple[FileIdentity, ...] = ()
    digest: str = ""
    is_settled: bool = True

    def check(self) -> None:
        """LoadError unless all are still the ones that were read. A look at each, nothing is read."""
        if not self.is_settled:
            raise _changed(self.files[0].path)
        for file in self.files:
            try:
                is_same = FileIdentity.of(file.path) == file
            except OSError:
                is_same = False
            if not is_same:
                raise _changed(file.path)


def configurations(components: Mapping[str, Any], since_ns: int) -> Configurations:
    """Those of models, tokenizers and pipelines that load_model has returned. since_ns: of
    time.time_ns, when it began.

    A file that cannot be read is left out: the library that read it found it elsewhere.
    """
    looked_at = [*components.values(), *parts(components)]
    folders = {folder for part in looked_at if (folder := read_from(part)) is not None}
    files, digest, is_settled = [], hashlib.sha256(), True
    for folder in sorted(folders):
        for name in NAMES:
            path = str((folder / name).absolute())
            try:
                with open(path, "rb") as opened:
                    file = FileIdentity.of_open(path, opened.fileno())
                    content = hashlib.sha256(opened.read()).hexdigest()
            except OSError:
                continue
            files.append(file)
            # Not the path: other workers may have it elsewhere.
            digest.update(f"{name} {content}\n".encode())
            is_settled &= file.mtime_ns < since_ns
    if not files:
        return Configurations()
    known_by = digest.hexdigest()[:32] if is_settled else f"written at {since_ns}"
    return Configurations(tuple(files), known_by, is_settled)


def read_from(part: Any) -> Path | None:
    """The folder that a component was read from, if its library tells."""
    config = getattr(part, "config", None)
    where = getattr(config, "_name_or_path", None) or getattr(part, "name_or_path", None)
    return Path(where) if isinstance(where, str) and os.path.isdir(where) else None


def _changed(path: str) -> LoadError:
    return LoadError(
        f"{path} was changed since a model was made with it; submit again, and the model is read anew. "
        "Give a new version a new folder"
    )
