"""Tenant names: the one rule, used by client, scheduler and command line."""

from __future__ import annotations

import re

from .errors import ParameterError
from .quoting import quoted

DEFAULT_TENANT = "default"

_ALLOWED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


def check_tenant(name: object) -> str:
    """The name itself, or ParameterError. Names travel in keys, metrics and file names."""
    if not isinstance(name, str) or not _ALLOWED.fullmatch(name):
        raise ParameterError(
            f"tenant {quoted(name)} is not a tenant name; allowed: 1 to 64 characters of letters, "
            "digits, '.', '_', '@', '-', the first one a letter or digit"
        )
    return name
