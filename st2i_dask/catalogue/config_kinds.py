"""What kinds of values configurations must have, where workflows compute with them.

A damaged or mistyped value is named with its file, before anything is made of it. Of values that only the
libraries read, the kinds are those of their classes' own parameters.
"""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import LoadError


class Kind(NamedTuple):
    """holds: whether a value is of the kind. said: for messages."""

    holds: Callable[[Any], bool]
    said: str


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _is_list_of(holds: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(map(holds, value))


_COUNT = Kind(_is_count, "a whole number above 0")
_COUNTS = Kind(lambda value: _is_list_of(_is_count, value), "a list of whole numbers above 0")
_PLACES = Kind(
    lambda value: _is_list_of(lambda each: type(each) is int and each >= 0, value),
    "a list of whole numbers",
)
_FINITE = Kind(
    lambda value: type(value) in (int, float) and math.isfinite(value), "a finite number"
)
_FLAG = Kind(lambda value: type(value) is bool, "true or false")
_FLAGS = Kind(lambda value: _is_list_of(_FLAG.holds, value), "a list of true and false")
_SEVERAL = Kind(
    lambda value: _COUNT.holds(value) or _COUNTS.holds(value), f"{_COUNT.said}, or a list"
)
_NAME = Kind(lambda value: isinstance(value, str) and bool(value), "a name")


def _or_none(kind: Kind) -> Kind:
    return Kind(lambda value: value is None or kind.holds(value), f"{kind.said}, or null")


def _or_zero(kind: Kind) -> Kind:
    return Kind(
        lambda value: value is None or value == 0 or kind.holds(value), f"{kind.said}, or 0"
    )


_WIDTHS = {
    "num_attention_heads": _or_none(_SEVERAL),
    "attention_head_dim": _SEVERAL,
    "joint_attention_dim": _or_none(_COUNT),
    "pooled_projection_dim": _or_none(_COUNT),
}
_UNET = {
    "block_out_channels": _COUNTS,
    "layers_per_block": _SEVERAL,
    "cross_attention_dim": _SEVERAL,
    "addition_embed_type": _or_none(_NAME),
    "addition_time_embed_dim": _or_none(_COUNT),
    "projection_class_embeddings_input_dim": _or_none(_COUNT),
}
# By component, its number left out.
_KINDS: dict[str, Mapping[str, Kind]] = {
    "transformer": {
        **_WIDTHS,
        "in_channels": _COUNT,
        "patch_size": _COUNT,
        "sample_size": _COUNT,
        "n_layers": _COUNT,
        "pos_embed_max_size": _or_none(_COUNT),
        "axes_lens": Kind(
            lambda value: _COUNTS.holds(value) and len(value) == 3,
            "a list of 3 whole numbers above 0",
        ),
        "guidance_embeds": _FLAG,
        "num_layers": _or_zero(_COUNT),
        "num_single_layers": _or_zero(_COUNT),
    },
    "unet": {
        **_UNET,
        "in_channels": _COUNT,
        "sample_size": _COUNT,
        "time_cond_proj_dim": _or_none(_COUNT),
    },
    "vae": {
        "block_out_channels": _COUNTS,
        "latent_channels": _COUNT,
        "force_upcast": _FLAG,
        "temperal_downsample": _FLAGS,
    },
    "shifted vae": {"shift_factor": _FINITE},
    "text_encoder": {
        "hidden_size": _COUNT,
        "num_hidden_layers": _COUNT,
        "projection_dim": _COUNT,
        "max_position_embeddings": _COUNT,
    },
    "controlnet": {
        **_WIDTHS,
        **_UNET,
        "in_channels": _COUNT,
        "pos_embed_max_size": _or_none(_COUNT),
        "num_layers": _or_zero(_COUNT),
        "num_single_layers": _or_zero(_COUNT),
        "num_mode": _or_zero(_COUNT),
        "guidance_embeds": _FLAG,
        "use_pos_embed": _FLAG,
        "force_zeros_for_pooled_projection": _FLAG,
        "extra_conditioning_channels": _or_zero(_COUNT),
        "extra_condition_channels": _or_zero(_COUNT),
        "conditioning_embedding_channels": _or_none(_SEVERAL),
        "conditioning_embedding_out_channels": _or_none(_COUNTS),
        "control_in_dim": _or_none(_COUNT),
        "control_layers_places": _PLACES,
        "global_pool_conditions": _FLAG,
    },
    "model_index.json": {
        "_class_name": _NAME,
        "is_distilled": _or_none(_FLAG),
        "requires_aesthetics_score": _or_none(_FLAG),
        "force_zeros_for_empty_prompt": _or_none(_FLAG),
    },
}
_NUMBER = re.compile(r"_\d+$")
# Far more than any model has. Some configurations hold a list with an entry for each.
_MOST_LAYERS = 10_000
# Those whose attention turns each head's numbers by places, in as many pairs as the axes have together.
_ROTARY = re.compile(r"(Flux2?|QwenImage)(Transformer2D|ControlNet)Model")


def check_kinds(part: str, values: Mapping[str, Any], path: Path, source: str) -> None:
    """LoadError with file, key and value for one of another kind.

    part: the component, or "model_index.json". source: what the error calls the folder.
    """
    for key, kind in _KINDS.get(_NUMBER.sub("", part), {}).items():
        if key in values and not kind.holds(values[key]):
            raise LoadError(
                f"{source!r}: {path} has {key}={values[key]!r}, wanted {kind.said}; copy the file again"
            )


def check_layers(values: Mapping[str, Any], path: Path, source: str) -> None:
    """LoadError for a number of layers that no model has, also of a model in it: a list as long would not
    fit into memory."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            check_layers(value, path, source)
        elif "layer" in key and type(value) is int and value > _MOST_LAYERS:
            raise LoadError(
                f"{source!r}: {path} has {key}={value}, at most {_MOST_LAYERS} are allowed; copy the "
                "file again"
            )


def check_rotary(class_name: str, values: Mapping[str, Any], path: Path, source: str) -> None:
    """LoadError for axes of rotary embeddings that do not fill a head: their models are built, and fail
    at their first step."""
    axes, width = values.get("axes_dims_rope"), values.get("attention_head_dim")
    if not _ROTARY.fullmatch(class_name) or not _COUNTS.holds(axes) or type(width) is not int:
        return
    if any(axis % 2 for axis in axes) or sum(axes) != width:
        raise LoadError(
            f"{source!r}: {path} has axes_dims_rope={list(axes)}, wanted even numbers whose sum is "
            f"attention_head_dim={width}; copy the file again"
        )


def check_signature(cls: Any, values: Mapping[str, Any], path: Path, source: str) -> None:
    """LoadError for a value of another kind than the class's parameter of that name is annotated with or,
    without an annotation, has by default. What the table above knows, it alone judges."""
    known = {key for part, kinds in _KINDS.items() if part != "shifted vae" for key in kinds}
    try:
        annotations = typing.get_type_hints(cls.__init__)
    except Exception:  # names that only exist for type checkers
        annotations = {}
    for key, parameter in inspect.signature(cls.__init__).parameters.items():
        if key not in values or key in known:
            continue
        value, default = values[key], parameter.default
        wanted = annotations.get(key, _kind_of(default))
        if value is None and not isinstance(default, float):
            continue  # what cannot be without it says so when it is built
        if not _is_a(wanted, value):
            raise LoadError(
                f"{source!r}: {path} has {key}={value!r}, wanted {_said(wanted)}; copy the file again"
            )


def _kind_of(default: Any) -> Any:
    if isinstance(default, (list, tuple)) and default:
        return list[type(default[0])]  # type: ignore[misc]
    return type(default) if isinstance(default, (bool, int, float, str)) else Any


def _is_a(wanted: Any, value: Any) -> bool:
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        # False stood for None in configurations of early versions.
        return (value is False and type(None) in inner) or any(_is_a(each, value) for each in inner)
    if wanted in (list, tuple) or origin in (list, tuple):
        kinds = [each for each in inner if each is not ...]
        return isinstance(value, (list, tuple)) and (
            not kinds or all(any(_is_a(kind, each) for kind in kinds) for each in value)
        )
    if wanted in (int, float):
        return _FINITE.holds(value)
    if wanted in (bool, str):
        return type(value) is wanted
    if wanted is type(None):
        return value is None
    return True


_SAID = {
    int: "a number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    tuple: "a list",
    type(None): "null",
}


def _said(wanted: Any) -> str:
    origin = typing.get_origin(wanted)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_said, typing.get_args(wanted))))
    inner = typing.get_args(wanted)
    of = f": each {_said(inner[0])}" if origin in (list, tuple) and inner else ""
    return _SAID.get(origin or wanted, str(wanted)) + of
