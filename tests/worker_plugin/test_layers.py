"""Real model classes divide as their forward passes run; every parameter is in exactly one layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from st2i_dask.catalogue import tiny
from worker_plugin.layers import divide


def unet():
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
    )


@pytest.fixture(scope="module")
def models():
    pipeline = tiny.flux_controlnet()
    names = ("transformer", "controlnet", "text_encoder", "text_encoder_2", "vae")
    return {**{name: getattr(pipeline, name) for name in names}, "unet": unet()}


def names(module):
    return [layer.name for layer in divide(module)]


def check_complete(module):
    """What holds for the layers of any module."""
    layers = divide(module)
    parameters = [parameter for layer in layers for _, parameter in layer.parameters]
    assert len({id(p) for p in parameters}) == len(parameters), "a parameter is in two layers"
    assert {id(p) for p in parameters} == {id(p) for p in module.parameters()}
    assert len({layer.name for layer in layers}) == len(layers)
    for layer in layers:
        assert layer.parameters
        for name, parameter in layer.parameters:
            assert module.get_parameter(name) is parameter
        if layer.name:
            assert module.get_submodule(layer.name) is layer.modules[0]
            held = {id(p) for part in layer.modules for p in part.parameters()}
            assert held == {id(p) for _, p in layer.parameters}
        else:
            assert not layer.modules
    return layers


@pytest.mark.parametrize(
    "name", ["transformer", "controlnet", "text_encoder", "text_encoder_2", "vae", "unet"]
)
def test_every_parameter_of_real_models_is_in_one_layer(models, name):
    layers = check_complete(models[name])
    order = {n: i for i, (n, _) in enumerate(models[name].named_parameters())}
    first = [order[layer.parameters[0][0]] for layer in layers]
    assert first == sorted(first), "not in order of definition"


def test_a_flux_transformer_divides_into_blocks_and_what_surrounds_them(models):
    assert names(models["transformer"]) == [
        *("time_text_embed", "context_embedder", "x_embedder"),
        *("transformer_blocks.0", "transformer_blocks.1"),
        *("single_transformer_blocks.0", "single_transformer_blocks.1"),
        *("norm_out", "proj_out"),
    ]
    block = divide(models["transformer"])[3]
    assert len(block.parameters) == 32
    assert block.modules == (models["transformer"].transformer_blocks[0],)


def test_encoders_and_vae_divide_below_their_wrappers(models):
    assert names(models["text_encoder"])[-3:] == [
        *("encoder.layers.0", "encoder.layers.1", "final_layer_norm"),
    ]
    vae = names(models["vae"])
    assert "encoder.down_blocks.0" in vae
    assert "encoder.mid_block.resnets.1" in vae
    assert vae[-1] == "decoder.conv_out"


def test_a_unet_divides_into_its_blocks(models):
    found = names(models["unet"])
    assert found[:4] == ["conv_in", "time_embedding", "down_blocks.0", "down_blocks.1"]
    assert {"up_blocks.0", "up_blocks.1", "mid_block.attentions.0", "conv_out"} <= set(found)


def test_a_controlnets_projections_are_layers_of_their_own(models):
    found = names(models["controlnet"])
    assert {"transformer_blocks.1", "controlnet_blocks.1", "controlnet_single_blocks.0"} <= {*found}


def test_the_tied_embedding_of_t5_is_one_layer_that_either_module_needs(models):
    t5 = models["text_encoder_2"]
    layers = divide(t5)
    assert [layer.name for layer in layers] == [
        *("shared", "encoder.block.0", "encoder.block.1", "encoder.final_layer_norm"),
    ]
    tied = layers[0]
    assert {id(t5.shared), id(t5.encoder.embed_tokens)} == {id(module) for module in tied.modules}
    assert [name for name, _ in tied.parameters] == ["shared.weight"]


def test_the_hooked_modules_are_those_that_run(models):
    """Layers by the order in which their modules are entered in a forward pass."""
    model, entered = models["transformer"], []
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=layer.name: entered.append(name))
        for layer in divide(model)
        for module in layer.modules
    ]
    with torch.no_grad():
        model(
            hidden_states=torch.randn(1, 4, 16),
            encoder_hidden_states=torch.randn(1, 3, 32),
            pooled_projections=torch.randn(1, 32),
            timestep=torch.tensor([0.5]),
            guidance=torch.tensor([1.0]),
            img_ids=torch.zeros(4, 3),
            txt_ids=torch.zeros(3, 3),
        )
    for hook in hooks:
        hook.remove()
    assert sorted(entered) == sorted(names(model))
    assert entered[3:] == names(model)[3:]


# ---------------------------------------------------------------- shapes of modules


def linears(count):
    return nn.ModuleList(nn.Linear(3, 3) for _ in range(count))


class Holder(nn.Module):
    """A module with these children and parameters, and a forward pass."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self):
        raise AssertionError


def test_a_plain_layer_is_its_root():
    linear = nn.Linear(2, 3)
    (layer,) = check_complete(linear)
    assert (layer.name, layer.modules) == ("", ())
    assert [name for name, _ in layer.parameters] == ["weight", "bias"]


def test_a_module_without_parameters_has_no_layers():
    assert divide(Holder(a=nn.ReLU(), b=nn.ModuleList([nn.ReLU()]))) == []


def test_own_parameters_of_what_is_descended_into_are_the_root():
    inner = Holder(blocks=linears(2), scale=nn.Parameter(torch.ones(3)))
    model = Holder(first=nn.Linear(3, 3), inner=inner, token=nn.Parameter(torch.ones(2)))
    layers = check_complete(model)
    assert [layer.name for layer in layers] == ["", "first", "inner.blocks.0", "inner.blocks.1"]
    assert [name for name, _ in layers[0].parameters] == ["token", "inner.scale"]


def test_lists_within_an_item_of_a_list_do_not_divide_it():
    model = Holder(blocks=nn.ModuleList([Holder(parts=linears(3)), nn.Linear(3, 3)]))
    check_complete(model)
    assert names(model) == ["blocks.0", "blocks.1"]


def test_lists_of_lists_divide_down_to_what_can_be_called():
    model = Holder(blocks=nn.ModuleList([linears(2), linears(1)]))
    check_complete(model)
    assert names(model) == ["blocks.0.0", "blocks.0.1", "blocks.1.0"]


def test_dictionaries_divide_and_bare_holders_of_parameters_belong_to_the_root():
    model = Holder(
        parts=nn.ModuleDict({"a": nn.Linear(3, 3)}),
        bare=nn.ParameterList([nn.Parameter(torch.ones(2))]),
    )
    check_complete(model)
    assert names(model) == ["", "parts.a"]


def test_a_child_that_is_there_twice_is_one_layer_with_one_hook():
    shared = nn.Linear(3, 3)
    model = Holder(one=shared, two=shared, other=nn.Linear(3, 3))
    layers = check_complete(model)
    assert [layer.name for layer in layers] == ["one", "other"]
    assert layers[0].modules == (shared,)


def test_blocks_that_share_a_child_are_one_layer():
    shared = nn.Linear(3, 3)
    blocks = nn.ModuleList(Holder(own=nn.Linear(3, 3), shared=shared) for _ in range(3))
    model = Holder(before=nn.Linear(3, 3), blocks=blocks)
    before, merged = check_complete(model)
    assert (before.name, merged.name) == ("before", "blocks.0")
    assert merged.modules == tuple(blocks)
    assert len(merged.parameters) == 2 * 3 + 2


def test_layers_that_a_later_one_ties_together_become_one():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    model = Holder(first=first, second=second, both=Holder(a=first, b=second))
    (merged,) = check_complete(model)
    assert {*merged.modules} == {first, second, model.both}


def test_memory_decides_and_not_the_parameter_object():
    head, embedding = nn.Linear(3, 5, bias=False), nn.Embedding(5, 3)
    head.weight = nn.Parameter(embedding.weight.detach())
    assert head.weight is not embedding.weight
    layers = divide(Holder(embedding=embedding, head=head))
    assert len(layers) == 1
    assert layers[0].modules == (embedding, head)
    assert [name for name, _ in layers[0].parameters] == ["embedding.weight", "head.weight"]


def test_what_the_root_shares_with_a_module_is_in_the_root():
    linear = nn.Linear(3, 3)
    layers = divide(Holder(linear=linear, tied=linear.weight))
    assert [(layer.name, layer.modules) for layer in layers] == [("", ())]
    assert len(layers[0].parameters) == 2


def test_parameters_without_memory_are_not_taken_for_tied():
    with torch.device("meta"):
        model = Holder(blocks=linears(2))
    assert names(model) == ["blocks.0", "blocks.1"]
    empty = Holder(a=Holder(p=nn.Parameter(torch.ones(0))), b=Holder(p=nn.Parameter(torch.ones(0))))
    assert names(empty) == ["a", "b"]
