"""The folder that images go to: whole files only, and a manifest that matches them.

Rules:

* An image is written under a temporary name in the same folder and renamed: a file with its final
  name is whole. A killed run leaves temporary files at most; the next run removes them.
* `manifest.jsonl` has one line per image. A line is added after its image is in place, so a crash
  loses lines, never adds false ones; lost lines are read back from the PNG's own text chunks.
* One run at a time writes to a folder (an advisory lock on the folder itself, no lock file).
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import OutputError, ParameterError
from ..image import GeneratedImage, read_metadata
from ..quoting import quoted

MANIFEST = "manifest.jsonl"

_PNG_HEAD = b"\x89PNG\r\n\x1a\n"
_PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
# Metadata that stays text even where it looks like JSON (a prompt may be "7").
_TEXTS = frozenset({"workflow", "version", "prompt", "size", "tenant", "software"})


class OutputFolder:
    """An open output folder. Use as a context manager; `save` may be called from any thread.

    Opening costs one short read per PNG in the folder. ParameterError when the folder cannot be
    made or written, or when another run is writing to it.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._entries: dict[str, dict[str, Any]] = {}
        self._whole: set[str] = set()
        self._superseded = False  # an image was made again: two lines, the last one counts
        self._mutex = threading.Lock()
        self._lock: int | None = None
        self._manifest: io.FileIO | None = None

    def __enter__(self) -> OutputFolder:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            self._remove_leftovers()
            self._whole = {
                entry.name
                for entry in os.scandir(self.path)
                if entry.name.endswith(".png") and is_whole(entry.path)
            }
            self._read_manifest()
            self._manifest = io.FileIO(self.path / MANIFEST, "ab")
        except OSError as error:
            self.close()
            raise ParameterError(
                f"cannot write to {quoted(str(self.path))}: {error.strerror or error}; "
                "choose a folder that you may write to, on a disk with free space"
            ) from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the manifest and give the lock back. Idempotent."""
        if self._manifest is not None:
            self._manifest.close()
            self._manifest = None
            if self._superseded:
                with contextlib.suppress(OSError):  # the next run tidies up
                    self._read_manifest()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __contains__(self, file: str) -> bool:
        """Whether a whole image of this name is there."""
        return file in self._whole

    def entry(self, file: str) -> dict[str, Any] | None:
        """What the manifest says about an image."""
        return self._entries.get(file)

    def save(self, file: str, image: GeneratedImage, **more: Any) -> dict[str, Any]:
        """Write an image and its manifest line; returns the line's fields. OSError on a full disk.

        more: further fields of the line.
        """
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        replace_with(self.path / file, buffer.getbuffer())
        entry = {"file": file, **image.metadata, **more}
        with self._mutex:
            self._whole.add(file)
            self._add(entry)
        return entry

    def note(self, file: str, fields: Mapping[str, Any]) -> None:
        """Add a manifest line for an image that is there but has none."""
        with self._mutex:
            if file in self._whole and file not in self._entries:
                self._add({"file": file, **fields})

    def _add(self, entry: dict[str, Any]) -> None:
        assert self._manifest is not None, "the folder is not open"
        # One unbuffered write: a crash leaves at most this line half written.
        line = _line(entry)
        written = self._manifest.write(line)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes of a manifest line were written")
        self._superseded |= entry["file"] in self._entries
        self._entries[entry["file"]] = entry

    def _take_lock(self) -> None:
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ParameterError(
                f"another run is writing to {str(self.path)!r}; wait for it, or choose another "
                "folder"
            ) from None
        except OSError:
            pass  # a file system without locks

    def _remove_leftovers(self) -> None:
        for entry in os.scandir(self.path):
            if entry.name.startswith(".") and entry.name.endswith((".png.tmp", f"{MANIFEST}.tmp")):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.path)

    def _read_manifest(self) -> None:
        """Keep the lines whose image is there, recover those that are missing, save if changed."""
        path = self.path / MANIFEST
        before = path.read_bytes() if path.exists() else b""
        lines: dict[Any, bytes] = {}
        for number, raw in enumerate(before.split(b"\n")):
            entry = _parse(raw)
            if entry is None:
                continue  # blank, or half a line from a crash
            file = entry.get("file")
            if not isinstance(file, str):
                lines[number] = raw + b"\n"  # not ours
            elif file in self._whole:
                lines[file] = raw + b"\n"
                self._entries[file] = entry
        for file in sorted(self._whole - self._entries.keys()):
            recovered = _recover(self.path / file)
            if recovered is not None:
                self._entries[file] = {"file": file, **recovered}
                lines[file] = _line(self._entries[file])
        after = b"".join(lines.values())
        if after != before:
            replace_with(path, after)


def replace_with(path: Path, data: bytes | memoryview) -> None:
    """Give the file these bytes at once: whole or not at all. OSError leaves nothing behind."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def is_whole(path: str | Path) -> bool:
    """Whether a PNG file begins and ends as one. Costs two short reads, no decoding."""
    try:
        with open(path, "rb", buffering=0) as file:
            if file.read(len(_PNG_HEAD)) != _PNG_HEAD:
                return False
            file.seek(-len(_PNG_END), os.SEEK_END)
            return file.read(len(_PNG_END)) == _PNG_END
    except OSError:
        return False


def checked_image(value: Any) -> GeneratedImage:
    """A workflow's result as the image it must be, or OutputError."""
    if not isinstance(value, GeneratedImage):
        raise OutputError(
            f"the workflow returned {type(value).__name__}, not an image; end it with "
            "st2i.to_image, or set its output type to 'pil'"
        )
    return value


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, ensure_ascii=False, default=str).encode() + b"\n"


def _parse(raw: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(raw)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _recover(path: Path) -> dict[str, Any] | None:
    """An image's manifest fields from its text chunks; None if it was not made by a workflow."""
    try:
        texts = read_metadata(path)
    except Exception:  # Pillow raises many kinds for damaged files
        return None
    if "st2i_dask" not in texts.get("software", ""):
        return None
    fields: dict[str, Any] = {}
    for name, text in texts.items():
        fields[name] = text
        if name not in _TEXTS:
            with contextlib.suppress(ValueError):
                fields[name] = json.loads(text)
    return fields
