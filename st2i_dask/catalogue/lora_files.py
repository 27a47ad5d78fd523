"""Files of LoRA adapters: where they are, which content they have, and reading them ahead of need."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

from ..errors import LoadError
from . import hub
from .folder import LORAS

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
#: How long a thread waits for another one that reads the same file, seconds.
WAIT_SECONDS = 600.0
#: Files that wait to be read ahead; more than these are read when they are needed.
_AHEAD = 16
# Digests kept: a few bytes each.
_KNOWN = 4096

_ON_HUB = re.compile(
    r"(?P<repository>[\w.-]+/[\w.-]+)(/(?P<file>.+\.safetensors)|(?<!\.safetensors))"
)
_Key = tuple[int, int, int, int]

_lock = threading.Lock()
_known: OrderedDict[_Key, Future[str]] = OrderedDict()
_queue: deque[str] = deque()
_reader: threading.Thread | None = None


def locate(source: str) -> tuple[str, Path]:
    """What workers get (an absolute path, or a name as it is) and where the file is here.

    source: a packaged adapter's name ("shapes-night"), a safetensors file, a folder with exactly one,
    "owner/repository/file.safetensors" on the hub, or "owner/repository" of one that has exactly one.
    LoadError when there is no such file.
    """
    if source in LORAS:
        return source, LORAS[source]
    path = Path(source)
    if not path.exists() and not path.is_absolute() and (named := _ON_HUB.fullmatch(source)):
        return source, _from_hub(source, named["repository"], named["file"])
    path = path.absolute()
    if path.is_dir():
        path = _only(source, sorted(path.glob(f"*{SUFFIX}")))
    if not path.is_file():
        raise LoadError(
            f"adapter {source!r} is not there ({path}); give the path of a {SUFFIX} file that every "
            "worker sees, or owner/repository/file.safetensors on the hub"
        )
    if path.suffix != SUFFIX:
        raise LoadError(f"adapter {source!r} is no {SUFFIX} file; convert it to one")
    return str(path), path


def _only(source: str, files: list[Path]) -> Path:
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise LoadError(
            f"{source!r} is a folder with {len(files)} {SUFFIX} files ({names}); an adapter is one "
            "file: name it"
        )
    return files[0]


def _from_hub(source: str, repository: str, file: str | None) -> Path:
    try:
        folder = hub.fetch(repository, [file or f"*{SUFFIX}"], weights=True)
    except hub.client_errors() as error:
        raise LoadError(
            f"adapter {source!r} is neither a file here nor one on the hub that can be reached "
            f"({type(error).__name__}); give the path of a {SUFFIX} file"
        ) from error
    path = folder / file if file else _only(source, sorted(folder.rglob(f"*{SUFFIX}")))
    if not path.is_file():
        raise LoadError(
            f"hub repository {repository!r} has no file {file!r}; see its list of files"
        )
    return path


def identity_of(path: Path) -> str:
    """Digest (32 hex digits) of a file's content; read once while size and time stay the same.

    It waits for a thread that is reading it already. LoadError when it cannot be read or changes.
    """
    try:
        key = _key(os.stat(path))
        with _lock:
            future = _known.get(key)
            mine = future is None
            if future is None:
                future = _known[key] = Future()
                while len(_known) > _KNOWN:
                    _known.popitem(last=False)
            else:
                _known.move_to_end(key)
        if mine:
            try:
                future.set_result(_read(path, key))
            except BaseException as error:
                with _lock:
                    _known.pop(key, None)
                future.set_exception(error)
        return future.result(WAIT_SECONDS)
    except TimeoutError:
        raise LoadError(f"{path} was still being read after {WAIT_SECONDS:g} s") from None
    except OSError as error:
        raise LoadError(f"adapter {path} cannot be read ({error.strerror})") from error


def _read(path: Path, key: _Key) -> str:
    with open(path, "rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256")
        if _key(os.fstat(file.fileno())) != key:
            raise LoadError(
                f"adapter {path} changes while it is read; submit again when it is whole"
            )
    return digest.hexdigest()[:32]


def _key(state: os.stat_result) -> _Key:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def read_ahead(sources: Iterable[str]) -> None:
    """Begin to read these files in a thread, so that whoever loads them finds them in memory.

    Whatever goes wrong shows when they are loaded. Returns at once.
    """
    global _reader
    with _lock:
        for source in sources:
            if source not in _queue and len(_queue) < _AHEAD:
                _queue.append(source)
        if _queue and _reader is None:
            _reader = threading.Thread(target=_read_queue, name="st2i-adapters", daemon=True)
            _reader.start()


def _read_queue() -> None:
    """Until nothing is left: a worker that has no requests with adapters has no thread for them."""
    global _reader
    while True:
        with _lock:
            if not _queue:
                _reader = None
                return
            source = _queue.popleft()
        try:
            path = locate(source)[1]
            identity_of(path)
            # Of a file that was read before, the kernel may have dropped the pages.
            with open(path, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        except Exception as error:
            logger.info("adapter %s was not read ahead: %s", source, error)
