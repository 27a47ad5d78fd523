"""Regions, bytes and layers that the policy of weights refuses: PolicyError, before anything changes. Pure."""

from __future__ import annotations

from st2i_dask.errors import PolicyError

from .weight_books import REGIONS


def refuse_region(region: object) -> None:
    if region not in REGIONS:
        raise PolicyError(f"region {region!r} is none of {', '.join(REGIONS)}")


def refuse_bytes(what: str, nbytes: object, least: int) -> None:
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < least:
        raise PolicyError(f"{what} is {nbytes!r} bytes; give an int of at least {least}")


def refuse_layer(weights: str, layer: object, layers: int) -> None:
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < layers:
        raise PolicyError(f"layer {layer!r} of weights {weights!r} is not one of their {layers}")
