"""Memory that a model frees stays with the process, so that the tensors of its next layer find it.

Dask starts workers with MALLOC_TRIM_THRESHOLD_=65536. glibc then gives back at once what is freed, and no
longer learns which sizes come again: on a CPU every activation is faulted in anew, page by page, and a
step takes half as long again. So the two limits are put where glibc would have moved them by itself.
"""

from __future__ import annotations

import ctypes
import os

_VARIABLE, _DASKS = "MALLOC_TRIM_THRESHOLD_", "65536"
#: Parameters of mallopt(3), and the largest that glibc sets without being told, bytes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_BYTES = 32 << 20
_TRIM_BYTES = 2 * _MMAP_BYTES


def keep_freed_memory() -> bool:
    """For the rest of the process; blocks of 32 MiB and more still go back when they are freed. False: the
    environment does not have Dask's value, but none or the user's; or this C library knows no such limits."""
    if os.environ.get(_VARIABLE) != _DASKS:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    limits = {_M_MMAP_THRESHOLD: _MMAP_BYTES, _M_TRIM_THRESHOLD: _TRIM_BYTES}
    return all(mallopt(name, nbytes) for name, nbytes in limits.items())
