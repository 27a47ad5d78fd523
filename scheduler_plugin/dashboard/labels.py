"""Short names for ticks and legends. Things with different names never share one: plots place by it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

#: How a worker names a model: ModelFn('path', adapter, adapter).
_MODEL = re.compile(
    r"""(?P<fn>[^(]+)\((?:None|(?P<quote>['"])(?P<path>.*?)(?P=quote))(?:, (?P<more>.*))?\)"""
)
#: Most folders of a path that are named to tell models apart.
_FOLDERS = 3


def distinct(texts: Iterable[str], most: int) -> list[str]:
    """One label each: what is longer than `most` loses its middle, and those equal then are numbered.

    >>> distinct(["a-tenant-with-a-long-name", "bob", "bob"], 12)
    ['a-t...g-name', 'bob', 'bob (2)']
    """
    found: dict[str, None] = {}
    equal: Counter[str] = Counter()
    for text in texts:
        whole = label = _without_middle(text, most)
        while label in found:
            equal[whole] += 1
            number = f" ({equal[whole] + 1})"
            label = _without_middle(text, most - len(number)) + number
        found[label] = None
    return list(found)


def of_models(models: Mapping[str, str], most: int = 30) -> dict[str, str]:
    """A label for each model: its ModelFn, folder and adapters, with as many folders as tell it apart.

    models: what workers call them, by a key that is the model's own. most: characters.

    >>> list(of_models({"k1": "Vae('/a/sd3')", "k2": "Vae('/b/sd3')", "k3": "Unet('/a/xl', oil.bin)"}).values())
    ['Unet@xl+oil', 'Vae@a/sd3', 'Vae@b/sd3']
    """
    keys = sorted(models, key=lambda key: (models[key], key))
    texts = {key: _model(models[key], 1) for key in keys}
    for folders in range(2, _FOLDERS + 1):
        count = Counter(texts.values())
        for key in keys:
            if count[texts[key]] > 1:
                texts[key] = _model(models[key], folders)
    return dict(zip(keys, distinct(texts.values(), most), strict=True))


def _model(name: str, folders: int) -> str:
    match = _MODEL.fullmatch(name)
    if match is None:
        return name
    path = [part for part in (match["path"] or "").split("/") if part]
    adapters = [adapter.rpartition(".")[0] or adapter for adapter in _list(match["more"])]
    where = "/".join(path[-folders:])
    return "+".join([f"{match['fn']}@{where}" if where else match["fn"], *adapters])


def _list(text: str | None) -> list[str]:
    return text.split(", ") if text else []


def _without_middle(text: str, most: int) -> str:
    """Names differ at their ends more often than where they begin."""
    if len(text) <= most:
        return text
    head = (most - 3) // 3
    return f"{text[:head]}...{text[head + 3 - most :]}"
