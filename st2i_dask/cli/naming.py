"""File names of images: stable, readable, and different for different images.

A name depends on the workflow's name and the image's parameters, and on nothing else: not on the
order of prompts, nor on the other prompts, nor on who asks.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Mapping
from typing import Any

#: Characters of a prompt that a file name shows.
SLUG_LENGTH = 48


def image_name(workflow: str, parameters: Mapping[str, Any]) -> str:
    """`SLUG-SEED-HASH.png`; without the seed where there is none.

    parameters: all of them by name, defaults included.

    >>> image_name("shapes", {"prompt": "A large, red ring!", "seed": 7})
    'a-large-red-ring-7-b85feba2.png'
    """
    parts = [slug(str(parameters.get("prompt") or workflow)) or "image"]
    if parameters.get("seed") is not None:
        parts.append(str(parameters["seed"]))
    text = json.dumps([workflow, dict(parameters)], sort_keys=True, default=_stand_in)
    parts.append(hashlib.sha256(text.encode()).hexdigest()[:8])
    return "-".join(parts) + ".png"


def described(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with a digest of their pixels in place of pictures."""
    return {name: _described(value) for name, value in parameters.items()}


def _described(value: Any) -> Any:
    if isinstance(value, list):
        return [_described(each) for each in value]
    if not (hasattr(value, "tobytes") and hasattr(value, "dtype")):
        return value
    digest = hashlib.sha256(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    return f"sha256:{digest.hexdigest()[:16]}"


def slug(text: str) -> str:
    """Letters and digits of any script in lower case, joined by '-'; cut between words.

    >>> slug("  Über den Wolken / dawn, 35mm  ")
    'über-den-wolken-dawn-35mm'
    """
    text = unicodedata.normalize("NFKC", text).lower()
    words = "".join(c if c.isalnum() else " " for c in text).split()
    whole = "-".join(words)
    if len(whole) <= SLUG_LENGTH:
        return whole
    cut = whole[: SLUG_LENGTH + 1]
    return cut.rpartition("-")[0] or cut[:SLUG_LENGTH]


def _stand_in(value: Any) -> str:
    # A default that is no plain value belongs to the workflow; its repr may hold an address.
    return f"{type(value).__module__}.{type(value).__qualname__}"
