"""Transformers of HiDream's kind with random weights: of several experts a token passes through a few.

A layer is loaded whole and computes with a part of its weights, so that on a CPU too loading takes
several times as long as computing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ._transformers import HEAD, TEXT, source

_CHANNELS = 4


@dataclass(frozen=True)
class Experts:
    """Double and single blocks, heads, and experts of each block, one of which a token passes through;
    the default has 796 MB in float32. The image has one token."""

    layers: tuple[int, int] = (1, 5)
    heads: int = 32
    experts: int = 12

    def make(self) -> Any:
        from diffusers import HiDreamImageTransformer2DModel

        return HiDreamImageTransformer2DModel(
            patch_size=2,
            in_channels=_CHANNELS,
            num_layers=self.layers[0],
            num_single_layers=self.layers[1],
            attention_head_dim=HEAD,
            num_attention_heads=self.heads,
            caption_channels=[TEXT, TEXT],
            text_emb_dim=TEXT,
            num_routed_experts=self.experts,
            num_activated_experts=1,
            axes_dims_rope=(4, 6, 6),
            max_resolution=(2, 2),
            llama_layers=[0] * sum(self.layers),
        )

    def inputs(self, seed: int) -> dict[str, Any]:
        """What one denoising step gets."""
        noise = source(seed)
        return {
            "hidden_states": noise(1, _CHANNELS, 2, 2),
            "timesteps": noise(1).fill_(500.0),
            "encoder_hidden_states_t5": noise(1, 1, TEXT),
            "encoder_hidden_states_llama3": [noise(1, 1, TEXT)],
            "pooled_embeds": noise(1, TEXT),
        }
