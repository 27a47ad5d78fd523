"""Whether the files of a folder are still the ones that were read."""

from __future__ import annotations

import os
from pathlib import Path

#: Name, device, inode, bytes, and nanoseconds of the last change, of each file of a pipeline's folder.
FilesState = tuple[tuple[str, int, int, int, int], ...]


def files_state(path: Path) -> FilesState:
    """Of the files in a folder and in the folders in it. () when it is no folder."""
    found = []
    folders = [path]
    for folder in folders:
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_file():
                        s = entry.stat()
                        state = (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns)
                        found.append((os.path.relpath(entry.path, path), *state))
                    elif folder is path and entry.is_dir():
                        folders.append(Path(entry.path))
        except (OSError, ValueError):  # gone since it was listed, or no path at all
            continue
    return tuple(sorted(found))
