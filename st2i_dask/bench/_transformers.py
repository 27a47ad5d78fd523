"""Transformers with random weights, for benchmarks of loading: large weights, hardly any compute.

One image token and one text token: on a CPU a layer is then computed about as fast as its weights can
be read, and copying them, which also writes them, is what takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from st2i_dask.model_fn import ModelFn

#: Width of an attention head, and of what texts give.
HEAD = 16
TEXT = 32
_CHANNELS = 16


class Model(Protocol):
    """The form of a transformer, of whose forward nothing but the seed of its inputs is left open."""

    def make(self) -> Any:
        """Such a transformer with random weights (float32)."""

    def inputs(self, seed: int) -> dict[str, Any]:
        """What one denoising step gets."""


@dataclass(frozen=True)
class Shape:
    """FLUX: double and single blocks, and heads; the default has 232 MB in float32."""

    layers: tuple[int, int] = (1, 12)
    heads: int = 32
    tokens: int = 1

    def make(self) -> Any:
        from diffusers import FluxTransformer2DModel

        return FluxTransformer2DModel(
            patch_size=1,
            in_channels=_CHANNELS,
            num_layers=self.layers[0],
            num_single_layers=self.layers[1],
            attention_head_dim=HEAD,
            num_attention_heads=self.heads,
            joint_attention_dim=TEXT,
            pooled_projection_dim=TEXT,
            axes_dims_rope=(4, 4, 8),
        )

    def inputs(self, seed: int) -> dict[str, Any]:
        noise = source(seed)
        return {
            "hidden_states": noise(1, self.tokens, _CHANNELS),
            "encoder_hidden_states": noise(1, 1, TEXT),
            "pooled_projections": noise(1, TEXT),
            "timestep": noise(1).fill_(0.5),
            "img_ids": noise(self.tokens, 3).zero_(),
            "txt_ids": noise(1, 3).zero_(),
        }


def source(seed: int) -> Callable[..., Any]:
    """Makes random tensors of a shape."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def noise(*dimensions: int) -> Any:
        return torch.randn(*dimensions, generator=generator)

    return noise


def save(path: Path, seed: int, shape: Model) -> None:
    """Make the model and save it as a Diffusers folder of one component (float32)."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = shape.make()
    model.save_pretrained(path, safe_serialization=True)


def read(path: str | Path) -> Any:
    """The model in host memory: its parameters lie in the mapped file."""
    import torch
    from diffusers import AutoModel

    return AutoModel.from_pretrained(str(path), torch_dtype=torch.float32).eval()


def nbytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def step(model: Any, given: Mapping[str, Any]) -> Any:
    """What it predicts for the image."""
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
