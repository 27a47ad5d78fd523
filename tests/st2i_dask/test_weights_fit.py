"""Models whose weights are not those of their files are refused; what the libraries load is not."""

from __future__ import annotations

import json
import re
import shutil

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import st2i_dask as st2i
from st2i_dask.catalogue import tiny, tiny_qwen_image, tiny_z_image
from st2i_dask.catalogue.component_check import check_component, without_memory
from st2i_dask.catalogue.weights_fit import check_weights_fit, read_shapes

MODEL, DENOISER = "model.safetensors", "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    return tiny.save_flux(tmp_path_factory.mktemp("whole") / "flux", seed=0)


@pytest.fixture(scope="module")
def z_image(tmp_path_factory):
    return tiny_z_image.save_z_image(tmp_path_factory.mktemp("whole") / "z")


@pytest.fixture(scope="module")
def qwen_image(tmp_path_factory):
    return tiny_qwen_image.save_qwen_image(tmp_path_factory.mktemp("whole") / "qwen")


@pytest.fixture
def copied(tmp_path):
    def copy(folder, part=""):
        return shutil.copytree(folder / part, tmp_path / (part or "copy"))

    return copy


def change(file, **values):
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, **values}))


def rewrite(file, changed):
    """With other tensors, which `changed` makes of them by name."""
    save_file(changed(load_file(file)), file, {"format": "pt"})


def renamed(pattern, new):
    return lambda tensors: {re.sub(pattern, new, name): each for name, each in tensors.items()}


def check(cls, folder):
    check_component(cls, json.loads((folder / "config.json").read_text()), folder, "it")


def refused(cls, folder):
    with pytest.raises(st2i.LoadError) as caught:
        check(cls, folder)
    message = str(caught.value)
    assert message.startswith(f"'it': {folder / 'config.json'} ")
    assert re.search(r"copy the (file|folder) again$", message)
    return message


def passes(cls, folder):
    """Here, compared by name, and in the library, which finds all it needs."""
    assert read_shapes(cls, folder)
    check(cls, folder)
    _, found = cls.from_pretrained(str(folder), output_loading_info=True)
    assert not found["missing_keys"]


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("key", "value", "name", "shapes"),
    [
        ("in_channels", 15, "x_embedder.weight", ([32, 15], [32, 16])),
        ("in_channels", 17, "x_embedder.weight", ([32, 17], [32, 16])),
        ("joint_attention_dim", 33, "context_embedder.weight", ([32, 33], [32, 32])),
        (
            "pooled_projection_dim",
            16,
            "time_text_embed.text_embedder.linear_1.weight",
            ([32, 16], [32, 32]),
        ),
    ],
)
def test_another_shape_is_refused_with_parameter_and_both_shapes(
    flux, copied, key, value, name, shapes
):
    folder = copied(flux, "transformer")
    change(folder / "config.json", **{key: value})
    message = refused(diffusers.FluxTransformer2DModel, folder)
    assert f"{name!r} has the shape {shapes[0]}" in message
    assert f"that of the transformer has {shapes[1]}" in message
    with pytest.raises(ValueError, match="expected shape"):
        diffusers.FluxTransformer2DModel.from_pretrained(folder)


def test_it_is_refused_before_anything_is_submitted(flux, copied):
    folder = copied(flux)
    change(folder / "transformer" / "config.json", in_channels=15)
    with pytest.raises(st2i.LoadError, match=r"'x_embedder.weight' has the shape \[32, 15\]"):
        st2i.load(folder, name="damaged")


def test_another_shape_of_a_text_encoder_is_refused(flux, copied):
    folder = copied(flux, "text_encoder")
    change(folder / "config.json", max_position_embeddings=76)
    message = refused(transformers.CLIPTextModel, folder)
    assert "'embeddings.position_embedding.weight' has the shape [76, 32]" in message


@pytest.mark.parametrize("missing", [1, 2, 5])
def test_weights_that_the_files_lack_are_refused(flux, copied, missing):
    folder = copied(flux, "transformer")
    biases = [name for name in load_file(folder / DENOISER) if name.endswith("bias")][:missing]
    rewrite(
        folder / DENOISER, lambda tensors: {k: v for k, v in tensors.items() if k not in biases}
    )
    message = refused(diffusers.FluxTransformer2DModel, folder)
    assert "the files of the transformer beside it do not have it" in message
    assert any(f"{name!r} has the shape [" in message for name in biases)
    assert (" and 2 more" in message) == (missing == 5)
    assert ("so it is with" in message) == (missing > 1)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "num_layers",
            1,
            "with 1 of 'transformer_blocks', but the files of the transformer beside",
        ),
        ("num_layers", 0, "hold 'transformer_blocks.0'"),
        ("num_layers", -1, "num_layers=-1, wanted a whole number above 0, or 0"),
        ("num_single_layers", 1, "hold 'single_transformer_blocks.1'"),
    ],
)
def test_layers_of_the_files_that_the_model_would_not_have_are_refused(
    flux, copied, key, value, said
):
    folder = copied(flux)
    change(folder / "transformer" / "config.json", **{key: value})
    with pytest.raises(st2i.LoadError, match=re.escape(said)):
        st2i.load(folder, name="damaged")


def test_layers_of_a_language_model_are_not_left_out_either(z_image, copied):
    folder = copied(z_image, "text_encoder")
    change(folder / "config.json", num_hidden_layers=1, layer_types=["full_attention"])
    assert "with 1 of 'layers'" in refused(transformers.Qwen3Model, folder)


@pytest.mark.parametrize(
    ("part", "key", "cls"),
    [
        ("transformer", "num_layers", diffusers.FluxTransformer2DModel),
        ("transformer", "num_single_layers", diffusers.FluxTransformer2DModel),
        ("text_encoder", "num_hidden_layers", transformers.CLIPTextModel),
        ("text_encoder_2", "num_layers", transformers.T5EncoderModel),
        ("vae", "layers_per_block", diffusers.AutoencoderKL),
    ],
)
@pytest.mark.parametrize("value", [9_000, 10**9])
def test_any_number_of_layers_is_refused_soon(flux, copied, part, key, cls, value):
    folder = copied(flux, part)
    message, made = refused_after(cls, folder, key, value)
    assert made <= 3_000
    assert ("10000 are allowed" in message) == (value == 10**9)
    assert ("but the files beside it hold" in message) == (value != 10**9)


@pytest.mark.parametrize("value", [9_000, 10**9])
def test_so_it_is_without_files(flux, copied, value):
    folder = copied(flux, "transformer")
    (folder / DENOISER).unlink()
    cls = diffusers.FluxTransformer2DModel
    message, made = refused_after(cls, folder, "num_layers", value)
    assert made <= 10_000
    assert "the files beside it" not in message


def refused_after(cls, folder, key, value):
    """The error, and how many parameters were made before it."""
    made = []
    count = torch.nn.modules.module.register_module_parameter_registration_hook(
        lambda *_: made.append(None)
    )
    try:
        change(folder / "config.json", **{key: value})
        return refused(cls, folder), len(made)
    finally:
        count.remove()


@pytest.mark.parametrize("axes", [[1, 2], [4, 4, 6], [3, 5, 8], [16, 56, 56]])
def test_axes_of_rotary_embeddings_fill_a_head(flux, copied, axes):
    folder = copied(flux, "transformer")
    change(folder / "config.json", axes_dims_rope=axes)
    message = refused(diffusers.FluxTransformer2DModel, folder)
    assert (
        f"axes_dims_rope={axes}, wanted even numbers whose sum is attention_head_dim=16" in message
    )


# ---------------------------------------------------------------- what libraries load


def test_names_that_old_versions_have_written(flux, copied):
    vae = copied(flux, "vae")
    old = {"to_q": "query", "to_k": "key", "to_v": "value", r"to_out\.0": "proj_attn"}
    for new, name in old.items():
        rewrite(vae / DENOISER, renamed(rf"(attentions\.0)\.{new}\.", rf"\1.{name}."))
    assert any("proj_attn" in name for name in read_shapes(diffusers.AutoencoderKL, vae))
    passes(diffusers.AutoencoderKL, vae)
    clip = copied(flux, "text_encoder")
    rewrite(clip / MODEL, renamed("^", "text_model."))
    position_ids = {"text_model.embeddings.position_ids": torch.arange(77)[None]}
    rewrite(clip / MODEL, lambda tensors: {**tensors, **position_ids})
    passes(transformers.CLIPTextModel, clip)


@pytest.mark.parametrize("name", ["shared.weight", "encoder.embed_tokens.weight", "both"])
def test_tied_weights_under_any_of_their_names(flux, copied, name):
    folder = copied(flux, "text_encoder_2")

    def named(tensors):
        both = ("shared.weight", "encoder.embed_tokens.weight")
        words = next(tensors.pop(each) for each in both if each in tensors)
        return tensors | {each: words.clone() for each in both if name in (each, "both")}

    rewrite(folder / MODEL, named)
    assert ("shared.weight" in read_shapes(transformers.T5EncoderModel, folder)) == (
        name != "encoder.embed_tokens.weight"
    )
    passes(transformers.T5EncoderModel, folder)
    rewrite(
        folder / MODEL,
        lambda tensors: {k: v for k, v in tensors.items() if k not in ("shared.weight", name)},
    )
    if name == "both":
        passes(transformers.T5EncoderModel, folder)
    else:
        assert "do not have it" in refused(transformers.T5EncoderModel, folder)


def test_a_model_beside_the_files_of_one_around_it(flux, z_image, copied):
    """The decoder of a T5; the head of a language model."""
    t5 = copied(flux, "text_encoder_2")
    decoder = {"decoder.block.0.layer.0.SelfAttention.q.weight": torch.zeros(3, 3)}
    rewrite(t5 / MODEL, lambda tensors: {**tensors, **decoder})
    passes(transformers.T5EncoderModel, t5)
    language = copied(z_image, "text_encoder")
    rewrite(language / MODEL, renamed(r"^(model\.)?", "model."))
    rewrite(language / MODEL, lambda tensors: {**tensors, "lm_head.weight": torch.zeros(7, 3)})
    passes(transformers.Qwen3Model, language)


def test_a_head_that_no_pipeline_reads_may_be_missing(z_image, copied):
    folder = copied(z_image, "text_encoder")
    change(folder / "config.json", tie_word_embeddings=False)
    check(transformers.Qwen3ForCausalLM, folder)
    _, found = transformers.Qwen3ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert set(found["missing_keys"]) == {"lm_head.weight"}
    # With it in the same matrix as the words, which then must be there.
    change(folder / "config.json", tie_word_embeddings=True)
    passes(transformers.Qwen3ForCausalLM, folder)
    config = json.loads((folder / "config.json").read_text())
    model = without_memory(transformers.Qwen3ForCausalLM, config)
    stored = read_shapes(transformers.Qwen3ForCausalLM, folder)
    stored.pop("embed_tokens.weight")
    with pytest.raises(st2i.LoadError, match=r"embed_tokens\.weight' has the shape .* not have it"):
        check_weights_fit(model, stored, folder / "config.json", "it")


def test_a_vision_language_model_under_its_old_and_new_names(qwen_image, copied):
    folder = copied(qwen_image, "text_encoder")
    cls = transformers.Qwen2_5_VLForConditionalGeneration
    passes(cls, folder)
    rewrite(folder / MODEL, renamed(r"^model\.(visual)\.", r"\1."))
    rewrite(folder / MODEL, renamed(r"^model\.language_model\.", "model."))
    stored = set(read_shapes(cls, folder))
    assert any(name.startswith("visual.") for name in stored)
    assert any(name.startswith("model.layers.") for name in stored)
    passes(cls, folder)


def test_shards_with_their_index(flux, z_image, tmp_path):
    for cls, whole in (
        (diffusers.FluxTransformer2DModel, flux / "transformer"),
        (transformers.Qwen3Model, z_image / "text_encoder"),
    ):
        folder = tmp_path / cls.__name__
        cls.from_pretrained(whole).save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
        passes(cls, folder)
        shard = sorted(folder.glob("*.safetensors"))[1]
        rewrite(shard, lambda tensors: {k: v.new_zeros(3, 5, 7) for k, v in tensors.items()})
        assert "[3, 5, 7]" in refused(cls, folder)
        shard.unlink()
        check(cls, folder)  # who loads it says what is missing


def test_variants_and_other_files_beside_it_are_not_what_is_compared(flux, copied):
    folder = copied(flux, "transformer")
    other = {"x_embedder.weight": torch.zeros(2, 2, dtype=torch.float16)}
    save_file(other, folder / "diffusion_pytorch_model.fp16.safetensors")
    save_file(other, folder / "flux_other_layout.safetensors")
    passes(diffusers.FluxTransformer2DModel, folder)
    # With variants alone, sizes are compared: what they hold is not what would be read.
    (folder / DENOISER).unlink()
    assert read_shapes(diffusers.FluxTransformer2DModel, folder) is None
    assert "weights, but the files beside it" in refused(diffusers.FluxTransformer2DModel, folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float64])
def test_dtypes_are_not_compared(flux, copied, dtype):
    folder = copied(flux, "transformer")
    rewrite(folder / DENOISER, lambda tensors: {k: v.to(dtype) for k, v in tensors.items()})
    check(diffusers.FluxTransformer2DModel, folder)


def test_quantized_and_unused_weights_are_left_to_the_libraries(flux, copied):
    folder = copied(flux, "transformer")
    unused = {"time_text_embed.guidance_embedder.more.weight": torch.zeros(3)}
    rewrite(folder / DENOISER, lambda tensors: {**tensors, **unused})
    passes(diffusers.FluxTransformer2DModel, folder)
    rewrite(folder / DENOISER, lambda tensors: {k: v.reshape(-1)[:1] for k, v in tensors.items()})
    change(folder / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    check(diffusers.FluxTransformer2DModel, folder)


def test_clip_with_fewer_layers_than_its_files(flux, copied):
    """As checkpoints say which layer they were trained with."""
    folder = copied(flux, "text_encoder")
    change(folder / "config.json", num_hidden_layers=1)
    assert any(".layers.1." in name for name in read_shapes(transformers.CLIPTextModel, folder))
    passes(transformers.CLIPTextModel, folder)


def test_a_class_that_loads_in_its_own_way_is_compared_by_size(flux, copied):
    class Own(diffusers.FluxTransformer2DModel):
        @classmethod
        def from_pretrained(cls, *args, **kwargs):
            raise NotImplementedError

    folder = copied(flux, "transformer")
    change(folder / "config.json", in_channels=15)
    assert read_shapes(Own, folder) is None
    check(Own, folder)
    change(folder / "config.json", num_layers=9)
    assert "says a Own of" in refused(Own, folder)
