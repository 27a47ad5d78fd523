"""Models of plain torch whose weights lie in a safetensors file: cheap enough for workers in this process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from distributed import get_worker
from safetensors.torch import load_file, save_file

import st2i_dask as st2i

from .aligned import align

WIDTH = 256
BLOCK = WIDTH * WIDTH * 4  # bytes

#: Worker's address and file name of every `load_model` in this process.
loads: list[tuple[str, str]] = []


class Blocks(torch.nn.Module):
    def __init__(self, depth: int, width: int):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Linear(width, width, bias=False) for _ in range(depth)
        )

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def save(path: Path, depth: int, seed: int = 0, *, width: int = WIDTH) -> Path:
    """A file with the weights of `depth` blocks, by default of BLOCK bytes each."""
    generator = torch.Generator().manual_seed(seed)
    blocks = {
        f"blocks.{i}.weight": torch.randn(width, width, generator=generator) / width**0.5
        for i in range(depth)
    }
    save_file(blocks, path)
    align(path)
    return path


def read(path: str | Path) -> Blocks:
    state = load_file(path)
    with torch.device("meta"):
        blocks = Blocks(len(state), state["blocks.0.weight"].shape[0])
    blocks.load_state_dict(state, assign=True)
    return blocks


def expected(path: Path, x: float) -> float:
    """What the workflow of that file gives."""
    with torch.no_grad():
        return float(read(path)(torch.full((1, WIDTH), x)).sum())


class Stack(st2i.ModelFn):
    """The sum of what the blocks make of x, after `seconds`."""

    def setup_io(self) -> None:
        self.add_input("x")
        self.add_input("seconds")
        self.add_output("y")

    def load_model(self, model_path: str | None) -> dict[str, Any]:
        assert model_path is not None
        loads.append((get_worker().address, Path(model_path).name))
        return {"blocks": read(model_path)}

    def execute(self, model_components: Any, x: float, seconds: float) -> dict[str, Any]:
        time.sleep(seconds)
        return {"y": float(model_components["blocks"](torch.full((1, WIDTH), x)).sum())}


def workflow(path: Path) -> Any:
    @st2i.workflow(name=f"stack-{path.stem}", replace=True)
    def stack(x: float, seconds: float = 0.0) -> Any:
        return Stack(str(path), name=f"Stack-{path.stem}")(x, seconds)

    return stack
