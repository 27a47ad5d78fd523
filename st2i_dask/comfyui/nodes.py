"""What each supported node means, and with it what the output of a workflow is made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import LoadError
from .graph import Graph, Link, Node


@dataclass(frozen=True)
class Lora:
    file: str
    scale: float


@dataclass(frozen=True)
class Model:
    """A checkpoint, or its text encoder or VAE, with the LoRAs it has passed through."""

    checkpoint: str
    loras: tuple[Lora, ...] = ()


@dataclass(frozen=True)
class Control:
    """A ControlNet at work. image: a file; start, end: parts of all steps."""

    file: str
    image: str
    strength: float
    start: float = 0.0
    end: float = 1.0


@dataclass(frozen=True)
class Conditioning:
    text: str
    controls: tuple[Control, ...] = ()
    guidance: float | None = None


@dataclass(frozen=True)
class Latent:
    """Where denoising starts: empty of a size, or a picture's file."""

    width: int | None = None
    height: int | None = None
    images: int = 1
    picture: str | None = None


@dataclass(frozen=True)
class Sampling:
    """A KSampler with everything it is given; `picture` says what came out of it."""

    model: Model
    positive: Conditioning
    negative: Conditioning
    latent: Latent
    seed: int
    steps: int
    cfg: float
    sampler: str
    schedule: str
    denoise: float


@dataclass(frozen=True)
class Picture:
    """An image: of a sampler, or of a file."""

    sampling: Sampling | None = None
    file: str | None = None


@dataclass(frozen=True)
class File:
    name: str


#: Takes a node's input by name and type; gives the node's outputs.
Take = Callable[..., Any]


def _checkpoint(take: Take) -> tuple[Any, ...]:
    model = Model(take("ckpt_name", str))
    return model, model, model


def _lora(take: Take) -> tuple[Any, ...]:
    model, clip = take("model", Model), take("clip", Model)
    scale, of_text = take("strength_model", float), take("strength_clip", float)
    if scale != of_text:
        raise ValueError(
            f"strength_model={scale:g} and strength_clip={of_text:g} differ; an adapter has one "
            "scale here, give both the same"
        )
    lora = Lora(take("lora_name", str), scale)
    return tuple(replace(each, loras=(*each.loras, lora)) for each in (model, clip))


# What ComfyUI's encoder does not take as it is written.
_SPECIAL = re.compile(r"\(.*:\s*[\d.]+\s*\)|\bembedding:\S+", re.DOTALL)


def _text(take: Take) -> tuple[Any, ...]:
    take("clip", Model)
    text = take("text", str)
    if special := _SPECIAL.search(text):
        raise ValueError(
            f"text has {special[0]!r}: weights and embeddings have no counterpart here; write plain words"
        )
    return (Conditioning(text),)


def _guidance(take: Take) -> tuple[Any, ...]:
    return (replace(take("conditioning", Conditioning), guidance=take("guidance", float)),)


def _control(take: Take) -> tuple[Any, ...]:
    given = take("conditioning", Conditioning)
    control = Control(take("control_net", File).name, _file(take), take("strength", float))
    return (replace(given, controls=(*given.controls, control)),)


def _advanced_control(take: Take) -> tuple[Any, ...]:
    control = Control(
        take("control_net", File).name,
        _file(take),
        take("strength", float),
        take("start_percent", float),
        take("end_percent", float),
    )
    both = take("positive", Conditioning), take("negative", Conditioning)
    return tuple(replace(each, controls=(*each.controls, control)) for each in both)


def _file(take: Take) -> str:
    picture = take("image", Picture)
    if picture.file is None:
        raise ValueError("its image is another sampler's; only files from LoadImage are supported")
    name: str = picture.file
    return name


def _empty(take: Take) -> tuple[Any, ...]:
    return (Latent(take("width", int), take("height", int), take("batch_size", int)),)


def _encode(take: Take) -> tuple[Any, ...]:
    take("vae", Model)
    picture = take("pixels", Picture)
    if picture.file is None:
        raise ValueError(
            "its pixels are another sampler's; only files from LoadImage are supported"
        )
    return (Latent(picture=picture.file),)


def _sampler(take: Take) -> tuple[Any, ...]:
    return (
        Sampling(
            take("model", Model),
            take("positive", Conditioning),
            take("negative", Conditioning),
            take("latent_image", Latent),
            take("seed", int),
            take("steps", int),
            take("cfg", float),
            take("sampler_name", str),
            take("scheduler", str),
            take("denoise", float),
        ),
    )


def _decode(take: Take) -> tuple[Any, ...]:
    take("vae", Model)
    return (Picture(sampling=take("samples", Sampling)),)


def _save(take: Take) -> tuple[Any, ...]:
    return (take("images", Picture),)


#: By class_type.
MEANING: Mapping[str, Callable[[Take], tuple[Any, ...]]] = {
    "CheckpointLoaderSimple": _checkpoint,
    "LoraLoader": _lora,
    "CLIPTextEncode": _text,
    "FluxGuidance": _guidance,
    "ControlNetLoader": lambda take: (File(take("control_net_name", str)),),
    "ControlNetApply": _control,
    "ControlNetApplyAdvanced": _advanced_control,
    "LoadImage": lambda take: (Picture(file=take("image", str)),),
    "EmptyLatentImage": _empty,
    "EmptySD3LatentImage": _empty,
    "VAEEncode": _encode,
    "KSampler": _sampler,
    "VAEDecode": _decode,
    "SaveImage": _save,
    "PreviewImage": _save,
}


def evaluate(graph: Graph) -> Sampling:
    """What the output of a graph is made of. LoadError naming all nodes without a counterpart."""
    unknown = sorted(str(node) for node in graph.nodes.values() if node.kind not in MEANING)
    if unknown:
        raise LoadError(
            f"no counterpart here for: {', '.join(unknown)}; supported nodes: "
            f"{', '.join(sorted(MEANING))}"
        )
    made: dict[str, tuple[Any, ...]] = {}
    for node in graph.nodes.values():  # what a node needs comes before it
        try:
            made[node.id] = MEANING[node.kind](_taking(node, made))
        except LoadError:
            raise
        except ValueError as error:
            raise LoadError(f"{node}: {error}") from None
    picture = made[graph.output.id][0]
    if picture.sampling is None:
        raise LoadError(f"{graph.output} shows a file; there is nothing to draw")
    sampling: Sampling = picture.sampling
    return sampling


def _taking(node: Node, made: Mapping[str, tuple[Any, ...]]) -> Take:
    def take(name: str, kind: type) -> Any:
        if name not in node.inputs:
            raise LoadError(f"{node} has no input {name!r}; export the workflow again")
        value = node.inputs[name]
        if isinstance(value, Link):
            outputs = made[value.node]
            value = outputs[value.output] if 0 <= value.output < len(outputs) else None
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise LoadError(
                f"{node}: {name} is a {type(value).__name__}, wanted {kind.__name__}; connect it "
                "as its name says"
            )
        return value

    return take
