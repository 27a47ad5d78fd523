"""Fetching from the hub: once per node, going on where a fetch broke off, checked before it is used.

The hub's client keeps a cache that the processes of a node share. It fetches a file again from its
first byte when the process that fetched it ended, and several processes that want the same model ask
for it file by file. So here one process fetches a repository's weights and the others wait for it,
and large files that come over plain HTTP are written to a file that stays until it is whole. Those
that the hub keeps in its chunk store (hf_xet installed) are left to the client, which is faster there
but begins each file anew; HF_HUB_DISABLE_XET=1 makes it plain HTTP.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import LoadError
from .checkpoint import Fault, find_fault
from .turns import turn

logger = logging.getLogger(__name__)

#: How long a process waits for another one of the node that fetches the same repository, seconds.
WAIT_SECONDS = 1800.0
#: Smaller files are fetched again from their first byte, bytes. The client writes 10 MiB at a time.
LARGE = 16 << 20
#: What a large file's name ends in until it is whole.
PARTIAL = ".st2i.incomplete"
#: Large files fetched at once.
CONNECTIONS = 8

_FULL = (errno.ENOSPC, errno.EDQUOT)


def fetch(
    repository: str, patterns: Sequence[str], weights: bool = False, wait: float = WAIT_SECONDS
) -> Path:
    """The snapshot folder on this machine, with the files that match `patterns` in it.

    weights: there may be much to fetch: take turns with other processes, and check what came.
    wait: bounds that turn, seconds.

    LoadError: no room, waited too long, broke off, or what comes is damaged. When the hub's client
    knows no such repository or cannot reach it, one of `client_errors`.
    Blocks; any thread.
    """
    from huggingface_hub import constants, snapshot_download

    cache = Path(constants.HF_HUB_CACHE).absolute()
    fetching = _Fetch(repository, list(patterns), cache)
    with _told_when_full(fetching):
        if constants.HF_HUB_OFFLINE or not weights:
            return Path(snapshot_download(repository, allow_patterns=list(patterns)))
        fetching.plan()
        # Nobody waits for what is there: neither on a cache that cannot be written.
        if fetching.missing or fetching.fault():
            with fetching.turn(wait):
                fetching.plan()
                fetching.fetch_missing()
                fetching.mend()
        return fetching.snapshot()


def stored_dtype(repository: str, folder: str) -> str | None:
    """How safetensors calls the dtype of a component's weights, from their header: they need not be
    fetched for that. None: it has no safetensors files. One of `client_errors` when it cannot be
    known."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import SafetensorsParsingError

    hub = HfApi()
    files = sorted(entry.path for entry in hub.list_repo_tree(repository, folder))
    files = [file for file in files if file.endswith(".safetensors")]
    if not files:
        return None
    try:
        tensors = hub.parse_safetensors_file_metadata(repository, files[0]).tensors
    except SafetensorsParsingError as error:
        raise ValueError(str(error)) from error
    return str(tensors[min(tensors)].dtype) if tensors else None


def client_errors() -> tuple[type[Exception], ...]:
    """What the hub's client raises when something is wrong with repository, network or disk."""
    from huggingface_hub.errors import HfHubHTTPError

    # Of the HTTP library; which one it is depends on the client's version.
    http = [base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"]
    return (OSError, ValueError, *http)


class _Fetch:
    """What one call fetches: not thread-safe, apart from `progress`."""

    def __init__(self, repository: str, patterns: list[str], cache: Path):
        self.repository = repository
        self.cache = cache
        self._patterns = patterns
        self._folder = f"models--{repository.replace('/', '--')}"
        self._files: list[Any] = []  # the client's DryRunFileInfo
        self._present = 0  # bytes among the blobs when it was planned
        self._begun = 0  # of them, in files that are not whole yet

    def turn(self, wait: float) -> AbstractContextManager[None]:
        """Only one process of those that share the cache is in it, per repository."""
        return turn(
            self.cache / ".locks" / self._folder,
            f"fetch {self.repository!r}",
            wait,
            f"try again later, or fetch it beforehand with `hf download {self.repository}`",
            lambda: f"{_amount(self.progress())} of it so far",
        )

    @property
    def missing(self) -> list[Any]:
        return [file for file in self._files if file.will_download]

    @property
    def needed(self) -> int:
        """Bytes still to come, as far as sizes are known."""
        total = sum(file.file_size or 0 for file in self.missing)
        return max(total - self._begun - self.progress(), 0)

    def plan(self) -> None:
        """Ask the hub which files there are. Knows of none when the hub cannot be reached."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import DryRunError

        try:
            self._files = snapshot_download(
                self.repository, allow_patterns=self._patterns, dry_run=True
            )
        except DryRunError:
            self._files = []  # `snapshot` gives what is there, or raises what is wrong
        self._present = self._stored()
        self._begun = self._stored(PARTIAL)

    def snapshot(self) -> Path:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(self.repository, allow_patterns=self._patterns))

    def fetch_missing(self) -> None:
        missing = self.missing
        if not missing:
            return
        self._check_room()
        logger.info("fetching %s: %s", self.repository, _amount(self.needed))
        large = [file for file in missing if (file.file_size or 0) >= LARGE]
        try:
            with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="st2i-fetch") as threads:
                list(threads.map(self._fetch_large, large))
            self.snapshot()
            # Of earlier versions of the repository: nobody will go on with them.
            for partial in self._blobs.glob(f"*{PARTIAL}"):
                partial.unlink()
        except LoadError:
            raise
        except client_errors() as error:
            if _is_full(error):
                raise
            raise LoadError(
                f"{self.repository!r}: the fetch broke off ({type(error).__name__}: {error}); try "
                "again: it goes on from what is there"
            ) from error

    def _check_room(self) -> None:
        # Filling a disk to the last byte hurts whoever else writes to it.
        free = _free(self.cache)
        if free is not None and free < self.needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.cache))

    def _fetch_large(self, file: Any) -> None:
        """Put a file among the client's blobs, where `snapshot` finds it."""
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(self.repository, file.filename, revision=file.commit_hash)
        about = get_hf_file_metadata(url)
        chunks = not constants.HF_HUB_DISABLE_XET and find_spec("hf_xet") is not None
        etag, in_chunks = about.etag, chunks and about.xet_file_data is not None
        if etag is None or about.size is None or in_chunks or not re.fullmatch(r"[\w.-]+", etag):
            return  # left to the client
        blob = self._blobs / etag
        for attempt in (1, 2):
            partial = self._receive(about, url, blob)
            # An etag of this length is the file's SHA-256.
            if len(etag) != 64 or _sha256(partial) == etag:
                os.replace(partial, blob)
                return
            partial.unlink()
            logger.warning("%s of %s came damaged (%d)", file.filename, self.repository, attempt)
        raise LoadError(
            f"{self.repository!r}: {file.filename} came twice with another SHA-256 than the hub "
            f"says, {etag}; try again later, or look for a proxy that changes what it passes on"
        )

    def _receive(self, about: Any, url: str, blob: Path) -> Path:
        """Append what is missing to the partial file."""
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        headers = build_hf_headers()
        if urlsplit(about.location).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)  # the token is for the hub, not for who stores files
        blob.parent.mkdir(parents=True, exist_ok=True)
        partial = blob.with_name(blob.name + PARTIAL)
        if partial.exists() and partial.stat().st_size > about.size:
            partial.unlink()
        try:
            with open(partial, "ab") as stream:
                http_get(
                    about.location,
                    stream,
                    resume_size=stream.tell(),
                    headers=headers,
                    expected_size=about.size,
                    displayed_filename=blob.name,
                )
        except OSError as error:
            if _is_full(error):
                partial.unlink(missing_ok=True)  # others need the room
            raise
        return partial

    def fault(self) -> Fault | None:
        """The first fault of the planned weights that are there."""
        suffix = re.compile(r"\.safetensors(\.index\b.*)?$")
        weights = [Path(file.local_path) for file in self._files if suffix.search(file.filename)]
        faults = (find_fault(folder) for folder in dict.fromkeys(file.parent for file in weights))
        return next((fault for fault in faults if fault), None)

    def mend(self) -> None:
        """Fetch damaged files once more. LoadError when one is damaged again."""
        again: set[Path] = set()
        while (fault := self.fault()) is not None:
            if not fault.damaged:
                raise LoadError(f"{self.repository!r}: {fault}")
            _remove(fault.file)
            if fault.file in again:
                raise LoadError(
                    f"{self.repository!r}: {fault.file} {fault.what}, also after it was fetched "
                    "once more; it was removed; ask those who keep the repository, or try later"
                )
            again.add(fault.file)
            logger.warning("%s: %s %s; fetching it again", self.repository, fault.file, fault.what)
            self.plan()
            self.fetch_missing()

    @property
    def _blobs(self) -> Path:
        return self.cache / self._folder / "blobs"

    def progress(self) -> int:
        """Bytes that came since `plan`, whoever writes them. Any thread."""
        return max(self._stored() - self._present, 0)

    def _stored(self, suffix: str = "") -> int:
        total = 0
        with suppress(OSError), os.scandir(self._blobs) as entries:
            for entry in entries:
                if not entry.name.endswith(suffix):
                    continue
                with suppress(OSError):  # renamed since it was listed
                    total += entry.stat().st_size
        return total


@contextmanager
def _told_when_full(fetching: _Fetch) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not _is_full(error):
            raise
        needed, free = fetching.needed, _free(fetching.cache)
        raise LoadError(
            f"{fetching.repository!r}: no room in {fetching.cache} ({os.strerror(error.errno or 0)})"
            + (f", {_amount(needed)} more needed" if needed else "")
            + (f", {_amount(free)} free" if free is not None else "")
            + "; make room there, or set HF_HOME to a folder with more of it"
        ) from error


def _is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _FULL


def _free(cache: Path) -> int | None:
    """Bytes that may be written to the folder's file system; None: not known."""
    for folder in (cache, *cache.parents):
        with suppress(OSError):
            return shutil.disk_usage(folder).free
    return None


def _amount(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 10**9 else f"{nbytes / 1e6:.1f} MB"


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _remove(file: Path) -> None:
    """A file of a snapshot, with every link that leads to it and what they lead to."""
    links = [file]
    while links[-1].is_symlink():
        links.append(links[-1].parent / os.readlink(links[-1]))
    for link in reversed(links):
        link.unlink(missing_ok=True)
