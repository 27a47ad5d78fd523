"""Layers of real models, for simulations: the elements of each of their tensors, from the architectures."""

from __future__ import annotations

ALIGN = 64
ELEMENT = 2  # bytes: bfloat16

Shapes = list[int]  # elements of each tensor of a layer


def linear(inputs: int, outputs: int, bias: bool = True) -> Shapes:
    return [inputs * outputs, outputs] if bias else [inputs * outputs]


def conv(inputs: int, outputs: int, side: int = 3) -> Shapes:
    return [inputs * outputs * side * side, outputs]


def attention(d: int, heads: int, streams: int = 1) -> Shapes:
    """Queries, keys, values, output, and norms of queries and keys."""
    return streams * (4 * linear(d, d) + 2 * [d // heads])


def feed_forward(d: int) -> Shapes:
    return linear(d, 4 * d) + linear(4 * d, d)


def double_block(d: int, heads: int) -> Shapes:
    """Of FLUX and SD3: image and text side by side."""
    return 2 * linear(d, 6 * d) + attention(d, heads, 2) + 2 * feed_forward(d)


def flux(double: int = 19, single: int = 38) -> list[Shapes]:
    d, heads = 3072, 24
    one = (
        linear(d, 3 * d) + linear(d, 4 * d) + linear(5 * d, d) + 3 * linear(d, d) + 2 * [d // heads]
    )
    times = 2 * (linear(256, d) + linear(d, d)) + linear(768, d) + linear(d, d)
    ends = [linear(64, d), times, linear(4096, d)]
    last = [linear(d, 2 * d), linear(d, 64)]
    return [*ends, *double * [double_block(d, heads)], *single * [one], *last]


def stable_diffusion_3(d: int, blocks: int, dual: int = 0) -> list[Shapes]:
    heads = d // 64
    two = double_block(d, heads)
    first = two + linear(d, 3 * d) + attention(d, heads)
    times = linear(256, d) + linear(d, d) + linear(2048, d) + linear(d, d)
    ends = [conv(16, d, 2), times, linear(4096, d)]
    return [*ends, *dual * [first], *(blocks - dual) * [two], linear(d, 2 * d) + linear(d, 64)]


def z_image() -> list[Shapes]:
    d, hidden = 3840, 10240
    block = 4 * linear(d, d, False) + 3 * linear(d, hidden, False) + 4 * [d] + 2 * [128]
    modulated = block + linear(256, 4 * d)
    ends = [linear(64, d), linear(256, 1024) + linear(1024, 256), [2560, *linear(2560, d)]]
    return [*ends, *2 * [modulated], *2 * [block], *30 * [modulated], linear(d, 64)]


def language_model(
    layers: int, d: int, hidden: int, words: int, keys: int, queries: int = 0, gated: bool = True
) -> list[Shapes]:
    """T5, CLIP and Qwen: an embedding and equal layers. keys, queries: their width."""
    queries = queries or d
    block = 2 * linear(d, queries, False) + 2 * linear(d, keys, False) + 2 * [d]
    block += (3 if gated else 2) * linear(d, hidden, False)
    return [[words * d], *layers * [block], [d]]


def vae() -> list[Shapes]:
    """Its decoder."""

    def resnet(inputs: int, outputs: int) -> Shapes:
        skip = conv(inputs, outputs, 1) if inputs != outputs else []
        return 2 * [inputs] + conv(inputs, outputs) + 2 * [outputs] + conv(outputs, outputs) + skip

    blocks = [conv(16, 512), 2 * resnet(512, 512) + attention(512, 1)]
    for inputs, outputs in ((512, 512), (512, 512), (512, 256), (256, 128)):
        up = conv(outputs, outputs) if outputs > 128 else []
        blocks.append(resnet(inputs, outputs) + 2 * resnet(outputs, outputs) + up)
    return [*blocks, 2 * [128] + conv(128, 3)]


def models() -> dict[str, list[Shapes]]:
    """Most popular first."""
    t5 = language_model(24, 4096, 10240, 32128, 4096)
    clip_l = language_model(12, 768, 3072, 49408, 768, gated=False)
    clip_g = language_model(32, 1280, 5120, 49408, 1280, gated=False)
    qwen = language_model(36, 2560, 9728, 151936, 1024, queries=4096)
    large, medium = stable_diffusion_3(2432, 38), stable_diffusion_3(1536, 24, dual=13)
    return {
        "t5-xxl": t5,
        "clip-l": clip_l,
        "vae": vae(),
        "flux-0": flux(),
        "sd3.5-large-0": large,
        "z-image-0": z_image(),
        "qwen3-4b": qwen,
        "clip-g": clip_g,
        "flux-1": flux(),
        "flux-controlnet-0": flux(5, 10),
        "sd3.5-medium-0": medium,
        "z-image-1": z_image(),
        "flux-2": flux(),
        "sd3.5-large-1": large,
        "flux-3": flux(),
        "z-image-2": z_image(),
        "flux-controlnet-1": flux(5, 10),
        "sd3.5-medium-1": medium,
        "sd3.5-large-2": large,
        "flux-4": flux(),
    }


def packed(shapes: Shapes) -> int:
    """Bytes of a layer in one block."""
    return sum(-(-elements * ELEMENT // ALIGN) * ALIGN for elements in shapes)
