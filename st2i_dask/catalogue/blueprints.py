"""Denoisers as they were read, that no run uses: copies of them take adapters beside models that run.

While the libraries read a model they change torch for the whole process (its default dtype, how parameters
are made), so nothing may run meanwhile. Copying one that was read changes nothing, and takes less time.
"""

from __future__ import annotations

import copy
import os
import threading
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from .folder import read_folder, stored_dtype

_ATTRIBUTE = "_st2i_blueprint"
#: Name, device, inode, bytes, and nanoseconds of the last change, of each of a component's files.
_Files = tuple[tuple[str, int, int, int, int], ...]

_lock = threading.Lock()
_kept: WeakValueDictionary[tuple[str, str, str | None], Blueprint] = WeakValueDictionary()


class Blueprint:
    """A pipeline whose component lies in its files' own memory. It is kept as long as a pipeline that was
    made with it. Thread-safe."""

    def __init__(self, pipeline: Any, part: str, path: Path, files: _Files):
        self._pipeline = pipeline
        self._part = part
        self._path = path
        self._files = files

    def pipeline(self) -> Any:
        """A new one with a copy of the component: the same weights, parameters of its own."""
        made = _with_copy(self._pipeline, self._part)
        setattr(made, _ATTRIBUTE, self)
        return made

    def is_current(self) -> bool:
        """Whether the files are the ones that were read."""
        try:
            return _files_in(self._path) == self._files
        except OSError:
            return False


def find(source: str, part: str, dtype: str | None) -> Blueprint | None:
    """What `keep` has kept, if its files are still the same."""
    with _lock:
        found = _kept.get((source, part, dtype))
    return found if found is not None and found.is_current() else None


def keep(pipeline: Any, source: str, part: str, dtype: str | None, since_ns: int) -> None:
    """Keep a component that was just read, as long as this pipeline. since_ns: when that began.

    One that was converted to another dtype is not kept, since it takes memory of its own; nor one whose
    files have changed meanwhile.
    """
    if dtype is not None and dtype != stored_dtype(read_folder(source)):
        return
    path = Path(getattr(pipeline, part).config._name_or_path)
    files = _files_in(path)
    if any(changed_ns >= since_ns for *_, changed_ns in files):
        return
    made = Blueprint(_with_copy(pipeline, part), part, path, files)
    setattr(pipeline, _ATTRIBUTE, made)
    with _lock:
        _kept[source, part, dtype] = made


def _files_in(path: Path) -> _Files:
    states = [(name, os.stat(path / name)) for name in sorted(os.listdir(path))]
    return tuple((name, s.st_dev, s.st_ino, s.st_size, s.st_ctime_ns) for name, s in states)


def _with_copy(pipeline: Any, part: str) -> Any:
    from torch.nn import Parameter

    module = getattr(pipeline, part)
    memo = {id(p): Parameter(p.data, requires_grad=p.requires_grad) for p in module.parameters()}
    made = copy.copy(pipeline)
    setattr(made, part, copy.deepcopy(module, memo))
    return made
