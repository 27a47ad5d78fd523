"""What from_pipeline takes, what it refuses, and that an orchestrator has no weights."""

from __future__ import annotations

import itertools
import json
import shutil

import cloudpickle
import pytest
import torch

import st2i_dask as st2i
from st2i_dask.errors import LoadError, OutputError, ParameterError
from st2i_dask.pipelines import pipeline_workflow
from st2i_dask.pipelines.component_call import asked
from st2i_dask.pipelines.hollow import calling, for_request
from st2i_dask.pipelines.travel import put_together, take_apart

from .here import SHELLS, Here, run_pipeline_here
from .odd_pipelines import save
from .test_from_pipeline import CASES, classic


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    return save("FluxPipeline", tmp_path_factory.mktemp("flux") / "pipeline")


@pytest.fixture(scope="module")
def xl(tmp_path_factory):
    return save("StableDiffusionXLPipeline", tmp_path_factory.mktemp("xl") / "pipeline")


def loaded(folder, dtype="float32"):
    import diffusers

    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=getattr(torch, dtype))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


# ---------------------------------------------------------------- hollow components


def test_an_orchestrator_has_no_weights_but_buffers_that_lie_in_files(tmp_path_factory):
    folder = save("Flux2KleinPipeline", tmp_path_factory.mktemp("klein") / "pipeline")
    source = st2i.from_pipeline(folder, dtype="bfloat16").source
    shell = SHELLS.get(source)
    assert set(shell.models) == {"text_encoder", "transformer", "vae"}
    for model in shell.models.values():
        assert all(parameter.is_meta for parameter in model.parameters())
    real = loaded(folder, "bfloat16")
    for name, model in shell.models.items():
        theirs = getattr(real, name)
        assert [p.dtype for p in model.parameters()] == [p.dtype for p in theirs.parameters()]
        assert isinstance(model, type(theirs))
    statistics = shell.models["vae"].bn.running_mean
    assert torch.equal(statistics, real.vae.bn.running_mean)
    assert statistics.dtype == real.vae.bn.running_mean.dtype


def test_a_module_inside_a_component_can_be_called(flux):
    """As clip_skip does, and a component's own conversion is seen by its calls alone."""
    source = st2i.from_pipeline(flux, dtype="float32").source
    shell = SHELLS.get(source)
    text, real = for_request(shell.models["text_encoder"]), loaded(flux).text_encoder
    states = torch.randn(1, 3, 32)
    with calling(Here(shell, source)), torch.no_grad():
        assert torch.equal(text.final_layer_norm(states), real.final_layer_norm(states))


def test_weights_used_outside_of_a_component_are_an_error(flux):
    source = st2i.from_pipeline(flux, dtype="float32").source
    shell = SHELLS.get(source)
    weight = next(shell.models["transformer"].parameters())
    with pytest.raises(OutputError, match="a weight is used outside of its component"):
        asked(shell, source, "transformer", "", "forward", (), (weight,), {})


def test_a_vae_that_is_converted_midway_gives_the_same_image(xl):
    """SDXL in half precision decodes in float32."""
    arguments = CASES["StableDiffusionXLPipeline"]
    ours, _ = run_pipeline_here(
        st2i.from_pipeline(xl, dtype="float16"), seed=1, output_type="pt", **arguments
    )
    assert torch.equal(ours, classic(xl, "float16", 1, **arguments))
    assert ours.std() > 0.01


def test_draws_from_the_global_generator_are_the_seeds(tmp_path_factory):
    name = "StableDiffusion3ControlNetPipeline"
    folder = save(name, tmp_path_factory.mktemp("sd3") / "pipeline")
    workflow = st2i.from_pipeline(folder, dtype="float32")
    one, _ = run_pipeline_here(workflow, seed=1, output_type="pt", **CASES[name])
    assert torch.equal(one, classic(folder, "float32", 1, **CASES[name]))


def test_what_travels_keeps_its_form_and_which_tensors_are_one():
    tensor = torch.arange(6).view(2, 3)
    value = {"a": (tensor, [tensor, None]), "b": torch.float16, "c": tensor[0]}
    form, tensors = take_apart(value, "it")
    assert len(tensors) == 2
    assert tensors[0] is tensor  # known again in the next call
    back = put_together(form, [t.clone() for t in tensors])
    assert back["a"][0] is back["a"][1][0]
    assert back["b"] is torch.float16
    with pytest.raises(OutputError, match="it cannot be sent"):
        take_apart([iter([1])], "it") if False else take_apart((n for n in [1]), "it")


# ---------------------------------------------------------------- sources


def test_a_loaded_pipeline_brings_its_scheduler_and_what_it_goes_without(tmp_path_factory):
    from diffusers import EulerDiscreteScheduler

    name = "StableDiffusionPipeline"
    folder = save(name, tmp_path_factory.mktemp("sd") / "pipeline")
    pipeline = loaded(folder)
    pipeline.scheduler = EulerDiscreteScheduler.from_config(pipeline.scheduler.config)
    pipeline.safety_checker = None
    workflow = st2i.from_pipeline(pipeline)
    assert workflow.source.dtype == "float32"
    ours, calls = run_pipeline_here(workflow, seed=2, output_type="pt", **CASES[name])
    generator = torch.Generator("cpu").manual_seed(2)
    theirs = pipeline(**CASES[name], output_type="pt", generator=generator)[0]
    assert torch.equal(ours, theirs)
    assert "safety_checker" not in calls
    plain, _ = run_pipeline_here(
        st2i.from_pipeline(folder), seed=2, output_type="pt", **CASES[name]
    )
    assert not torch.equal(ours, plain)


def test_another_pipeline_class_of_the_same_folder(flux):
    from diffusers import FluxImg2ImgPipeline
    from PIL import Image

    pipeline = FluxImg2ImgPipeline.from_pretrained(flux, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    workflow = st2i.from_pipeline(pipeline)
    picture = Image.effect_noise((32, 32), 80).convert("RGB")
    arguments = dict(CASES["FluxPipeline"], image=picture, strength=0.7, output_type="pt")
    ours, calls = run_pipeline_here(workflow, seed=2, **arguments)
    generator = torch.Generator("cpu").manual_seed(2)
    assert torch.equal(ours, pipeline(**arguments, generator=generator)[0])
    assert "vae.encode" in calls


def _tiled(pipeline):
    pipeline.vae.enable_tiling()


def _elsewhere(pipeline):
    pipeline.transformer.register_to_config(_name_or_path="/somewhere/else")


def _unsaved(pipeline):
    pipeline.register_to_config(_name_or_path=None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_tiled, r"vae was changed after loading \(tiling\)"),
        (_elsewhere, "transformer comes from '/somewhere/else'.*save_pretrained"),
        (_unsaved, "was not loaded from anywhere.*save_pretrained"),
    ],
)
def test_a_pipeline_that_its_folder_does_not_give_is_refused(flux, change, message):
    pipeline = loaded(flux)
    change(pipeline)
    with pytest.raises(LoadError, match=message):
        st2i.from_pipeline(pipeline)


def edited(folder, path, **index):
    shutil.copytree(folder, path)
    file = path / "model_index.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **index}))
    return path


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (dict(transformer=["diffusers", "OnnxRuntimeModel"]), "'transformer' is a Onnx|not to be"),
        (dict(transformer=["diffusers", "NoSuchModel"]), "NoSuchModel of diffusers"),
        (dict(_class_name="NoSuchPipeline"), "is a NoSuchPipeline, which diffusers"),
    ],
)
def test_folders_that_cannot_serve_are_refused(flux, tmp_path, index, message):
    with pytest.raises(LoadError, match=message):
        st2i.from_pipeline(edited(flux, tmp_path / "odd", **index))


def test_other_things_are_no_pipelines(flux):
    with pytest.raises(LoadError, match="int is no Diffusers pipeline"):
        st2i.from_pipeline(3)
    with pytest.raises(LoadError, match="dtype='int8' is not supported"):
        st2i.from_pipeline(flux, dtype="int8")


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(num_steps=3), "no parameter 'num_steps'; did you mean 'num_images_per_prompt'|takes"),
        (dict(previews=2), "shows no previews; leave previews out"),
        (dict(num_inference_step=3), "did you mean 'num_inference_steps'"),
        (dict(generator=torch.Generator()), "give seed"),
        (dict(seed=1.5), "seed=1.5 has type float"),
        (dict(seed=2**64), "out of range"),
        (dict(callback_on_step_end=print), "function of this process"),
        (dict(joint_attention_kwargs={"f": print}), "which is code"),
        (dict(latents=torch.empty(2, device="meta")), r"on meta; pass it on the CPU"),
        (dict(output_type="jpg"), "output_type='jpg' is not one of pil, pt"),
        (dict(return_dict=False), "no parameter 'return_dict'"),
        (dict(tenant="not a name"), "is not a tenant name"),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_sent(flux, arguments, message):
    workflow = st2i.from_pipeline(flux)
    with pytest.raises(ParameterError, match=message):
        workflow.request(**{"prompt": "a cat", **arguments})


def test_seeds_and_prompts_of_a_map_must_agree(flux):
    workflow = st2i.from_pipeline(flux)
    for seeds in ([1, 2], itertools.count()):
        with pytest.raises(ParameterError, match="more than 1 values of 'seed' for 1 prompts"):
            workflow.map(None, ["a cat"], seed=seeds)


def test_a_map_takes_one_value_per_prompt_of_any_argument(flux, monkeypatch):
    workflow = st2i.from_pipeline(flux)
    monkeypatch.setattr(pipeline_workflow, "_submit", lambda client, name, requests: requests)
    made = workflow.map(None, ["a", "b"], each={"num_inference_steps": [2, 3]}, tenant="bob")
    sent = [cloudpickle.loads(request.data) for request in made]
    assert [(r.arguments["prompt"], r.arguments["num_inference_steps"], r.seed) for r in sent] == [
        ("a", 2, 0),
        ("b", 3, 0),
    ]
