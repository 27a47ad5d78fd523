"""What the tiny pipelines of several families are built of: a VAE, and weights of which none is zero."""

from __future__ import annotations

from typing import Any

#: How the VAEs of flow models differ.
FLOW = dict(
    scaling_factor=1.5,
    shift_factor=0.1,
    use_quant_conv=False,
    use_post_quant_conv=False,
    force_upcast=False,
)


def autoencoder(*, blocks: int = 2, **config: Any) -> Any:
    """An AutoencoderKL, factor 2 ** (blocks - 1), 4 channels unless config says otherwise."""
    from diffusers import AutoencoderKL

    shape = dict(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(8,) * blocks,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
    )
    return AutoencoderKL(**{**shape, **config}).eval()


def without_zeros(model: Any) -> Any:
    """The model, its weights that are made as zeros drawn: a ControlNet's residuals would not matter."""
    import torch

    for weight in model.parameters():
        if not weight.any():
            torch.nn.init.normal_(weight, std=0.05)
    return model.eval()
