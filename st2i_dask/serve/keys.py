"""API keys: which tenant a client is. Only their digests are kept, here and in the file.

A key file has one JSON object a key, as lines, or as one JSON list:

    {"sha256": "<hex>", "tenant": "studio", "weight": 2, "cap": 100, "admin": false}

A plain digest is enough because keys are 256 random bits (`st2i serve --new-key`): there is nothing to
guess, so nothing that a slow hash would make slower.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import LoadError
from ..tenants import DEFAULT_TENANT, check_tenant

#: Variable that holds the list, where no file is given.
VARIABLE = "ST2I_API_KEYS"

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FIELDS = frozenset({"sha256", "tenant", "weight", "cap", "admin"})


@dataclass(frozen=True)
class Holder:
    """Who a key belongs to. admin: may register workflows."""

    tenant: str
    admin: bool = False


@dataclass(frozen=True)
class Entry:
    """One key: its digest (hex), tenant, and what the scheduler is told of the tenant."""

    digest: str
    holder: Holder
    weight: float | None = None
    cap: int | None = None


class KeyRing:
    """The known keys."""

    def __init__(self, entries: Sequence[Entry]):
        self._entries = tuple(entries)
        self.tenants = frozenset(entry.holder.tenant for entry in entries)
        self.weights = {e.holder.tenant: e.weight for e in entries if e.weight is not None}
        self.caps = {e.holder.tenant: e.cap for e in entries if e.cap is not None}

    def holder(self, key: str) -> Holder | None:
        """Whose key it is; None: nobody's. Takes the same time for every key."""
        digest, found = digest_of(key), None
        for entry in self._entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry.holder
        return found


class OpenDoor(KeyRing):
    """No keys: everybody is the default tenant. admin: and may register workflows."""

    def __init__(self, *, admin: bool) -> None:
        super().__init__(())
        self._holder = Holder(DEFAULT_TENANT, admin)
        self.tenants = frozenset({DEFAULT_TENANT})

    def holder(self, key: str) -> Holder | None:
        return self._holder


def digest_of(key: str) -> str:
    """What is kept of a key, hex."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key(tenant: str, **more: Any) -> tuple[str, dict[str, Any]]:
    """A new key, and the object that the key file gets for it."""
    check_tenant(tenant)
    key = f"st2i-{secrets.token_urlsafe(32)}"
    return key, {"sha256": digest_of(key), "tenant": tenant, **more}


def read_keys(text: str, where: str) -> KeyRing:
    """The keys of a key file's text. LoadError says what is wrong in which entry of `where`."""
    listed = _listed(text, where)
    if not listed:
        raise LoadError(f"{where} has no key; st2i serve --new-key TENANT prints a line for it")
    entries = [_entry(value, f"{where}, key {n}") for n, value in enumerate(listed, 1)]
    for field in ("weight", "cap"):
        said: dict[str, Any] = {}
        for entry in entries:
            value, tenant = getattr(entry, field), entry.holder.tenant
            if value is not None and said.setdefault(tenant, value) != value:
                raise LoadError(
                    f"{where}: tenant {tenant!r} has two values of {field}, {said[tenant]} and "
                    f"{value}; give one"
                )
    if len({entry.digest for entry in entries}) < len(entries):
        raise LoadError(f"{where} holds a key twice; a key belongs to one tenant")
    return KeyRing(entries)


def read_key_file(path: str | Path) -> KeyRing:
    """The keys of a file."""
    try:
        return read_keys(Path(path).read_text(), f"key file {str(path)!r}")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"key file {str(path)!r} cannot be read: {error}") from error


def _listed(text: str, where: str) -> list[Any]:
    """What a list holds, or the lines."""
    try:
        whole = json.loads(text)
    except ValueError:
        pass
    else:
        return whole if isinstance(whole, list) else [whole]
    listed = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                listed.append(json.loads(line))
            except ValueError as error:
                raise LoadError(
                    f"{where}, line {number} is no JSON ({error}); write one object a line, or one list "
                    "of objects"
                ) from error
    return listed


def _entry(value: Any, where: str) -> Entry:
    if not isinstance(value, Mapping):
        raise LoadError(f"{where} is a {type(value).__name__}; write an object")
    unknown = set(value) - _FIELDS
    if unknown:
        raise LoadError(
            f"{where} has {', '.join(map(repr, sorted(unknown)))}; known are "
            f"{', '.join(sorted(_FIELDS))}"
        )
    digest = value.get("sha256")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise LoadError(
            f"{where}: sha256 is no digest of 64 hex digits; keys are not kept themselves: "
            "st2i serve --new-key TENANT makes one"
        )
    weight, cap, admin = value.get("weight"), value.get("cap"), value.get("admin", False)
    if weight is not None and (type(weight) not in (int, float) or not 0 < weight < float("inf")):
        raise LoadError(f"{where}: weight is {weight!r}; give a number above 0")
    if cap is not None and (type(cap) is not int or cap < 1):
        raise LoadError(f"{where}: cap is {cap!r}; give a whole number of at least 1")
    if type(admin) is not bool:
        raise LoadError(f"{where}: admin is {admin!r}; give true or false")
    try:
        tenant = check_tenant(value.get("tenant"))
    except ValueError as error:
        raise LoadError(f"{where}: {error}") from None
    return Entry(digest, Holder(tenant, admin), None if weight is None else float(weight), cap)
