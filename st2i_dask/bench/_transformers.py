"""FLUX transformers with random weights, for benchmarks of loading: large weights, hardly any compute.

One image token and one text token: on a CPU a layer is then computed about as fast as its weights can
be read, and copying them, which also writes them, is what takes longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from st2i_dask.model_fn import ModelFn

_HEAD = 16
_TEXT = 32
_CHANNELS = 16


@dataclass(frozen=True)
class Shape:
    """Double and single blocks, and heads of width 16; the default has 232 MB in float32."""

    layers: tuple[int, int] = (1, 12)
    heads: int = 32
    tokens: int = 1


def save(path: Path, seed: int, shape: Shape) -> None:
    """Make the model and save it as a Diffusers folder of one component (float32)."""
    import torch
    from diffusers import FluxTransformer2DModel

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = FluxTransformer2DModel(
            patch_size=1,
            in_channels=_CHANNELS,
            num_layers=shape.layers[0],
            num_single_layers=shape.layers[1],
            attention_head_dim=_HEAD,
            num_attention_heads=shape.heads,
            joint_attention_dim=_TEXT,
            pooled_projection_dim=_TEXT,
            axes_dims_rope=(4, 4, 8),
        )
    model.save_pretrained(path, safe_serialization=True)


def read(path: str | Path) -> Any:
    """The model in host memory: its parameters lie in the mapped file."""
    import torch
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel.from_pretrained(str(path), torch_dtype=torch.float32).eval()


def nbytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def inputs(seed: int, shape: Shape) -> dict[str, Any]:
    """What one denoising step gets."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def noise(*dimensions: int) -> Any:
        return torch.randn(*dimensions, generator=generator)

    return {
        "hidden_states": noise(1, shape.tokens, _CHANNELS),
        "encoder_hidden_states": noise(1, 1, _TEXT),
        "pooled_projections": noise(1, _TEXT),
        "timestep": torch.full((1,), 0.5),
        "img_ids": torch.zeros(shape.tokens, 3),
        "txt_ids": torch.zeros(1, 3),
    }


def step(model: Any, given: Mapping[str, Any]) -> Any:
    """The predicted velocity, (1, tokens, channels)."""
    import torch

    with torch.no_grad():
        return model(**given, return_dict=False)[0]


class Transformer(ModelFn):
    """One denoising step of the transformer alone."""

    def setup_io(self) -> None:
        self.add_input("given")
        self.add_output("velocity")

    def load_model(self, model_path: str | None) -> dict[str, Any]:
        return {"transformer": read(str(model_path))}

    def execute(self, model_components: Any, given: Any) -> dict[str, Any]:
        return {"velocity": step(model_components["transformer"], given)}


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one core in the body: the others are for what loads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
