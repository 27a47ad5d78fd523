"""Files of the host tier, as its tests make and look at them."""

from __future__ import annotations

import contextlib
import os

import numpy as np

from worker_plugin.file_identity import FileIdentity
from worker_plugin.host_tier import Part
from worker_plugin.mappings import FileRange

MIB = 1 << 20


class File:
    """A file of random bytes, and what it was."""

    def __init__(self, path, nbytes, seed=0):
        self.path = str(path)
        self.content = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
        self.content.tofile(self.path)
        self.identity = FileIdentity.of(self.path)

    def part(self, start, nbytes, offset=0):
        return Part(FileRange(self.identity, start, nbytes), offset)


def copied(tier, parts, nbytes):
    into = np.full(nbytes, 0xAB, np.uint8)
    tier.copy(parts, into.ctypes.data)
    return into


def mappings_of(path):
    with open("/proc/self/maps") as maps:
        return sum(str(path) in line for line in maps)


def open_files(path):
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{number}").startswith(str(path))
    return found
