"""FLUX.1: every image equals, bit for bit, what the unmodified FluxPipeline makes."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from distributed import Client, wait

import st2i_dask as st2i
from st2i_dask.catalogue import tiny

from .originals import expected as of_pipeline

# Workers run one torch thread each; the reference must sum in the same order.
torch.set_num_threads(1)

TIMEOUT = 120


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("flux")
    return {
        "dev": tiny.save_flux(root / "tiny-dev", guidance=True),
        "schnell": tiny.save_flux(root / "tiny-schnell", guidance=False),
    }


@functools.cache
def reference(folder, dtype):
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(folder, dtype=getattr(torch, dtype))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def expected(folder, dtype, **parameters):
    return of_pipeline(reference(folder, dtype), **parameters)


CASES = [
    # form, dtype, parameters
    ("dev", "float32", dict(prompt="a cat", seed=0, num_steps=3, height=32, width=32)),
    ("dev", "float32", dict(prompt="a wet dog", seed=7, num_steps=5, height=48, width=20)),
    ("dev", "bfloat16", dict(prompt="a cat", seed=0, num_steps=3, height=32, width=32)),
    ("dev", "bfloat16", dict(prompt="tea", seed=2**63, num_steps=4, height=20, width=64)),
    # Enough steps that rounding a timestep at another place gives another number in some of them.
    ("dev", "bfloat16", dict(prompt="a cat", seed=0, num_steps=28, height=32, width=32)),
    ("schnell", "bfloat16", dict(prompt="a cat", seed=1, num_steps=12, height=32, width=32)),
    ("schnell", "float32", dict(prompt="a cat", seed=1, num_steps=1, height=32, width=32)),
    ("schnell", "float32", dict(prompt="snow", seed=5, num_steps=4, height=64, width=32)),
    ("schnell", "bfloat16", dict(prompt="a cat", seed=1, num_steps=4, height=32, width=32)),
    ("schnell", "bfloat16", dict(prompt="sand", seed=-3, num_steps=2, height=36, width=52)),
]


@pytest.mark.parametrize(("form", "dtype", "parameters"), CASES)
def test_tensor_equals_the_pipelines(client, folders, form, dtype, parameters):
    workflow = st2i.load(folders[form], dtype=dtype)
    future = workflow.submit(client, output_type="pt", **parameters)
    ours = future.result(timeout=TIMEOUT)
    theirs = expected(folders[form], dtype, **parameters)
    assert str(theirs.dtype) == f"torch.{dtype}"
    assert ours.dtype == torch.float32  # bfloat16 results arrive as float32, exactly
    assert ours.shape == (3, parameters["height"], parameters["width"])
    assert torch.equal(ours, theirs.float())
    assert ours.std() > 0.01  # not a constant picture, which would prove nothing


def test_guidance_and_sequence_length_reach_the_model(client, folders):
    workflow = st2i.load(folders["dev"], dtype="float32")
    common = dict(prompt="a cat", seed=0, num_steps=2, height=32, width=32)
    images = []
    for guidance, length in ((1.0, 64), (7.5, 64), (7.5, 16)):
        extra = dict(guidance_scale=guidance, max_sequence_length=length)
        ours = workflow.submit(client, output_type="pt", **common, **extra).result(timeout=TIMEOUT)
        assert torch.equal(ours, expected(folders["dev"], "float32", **common, **extra))
        images.append(ours)
    assert not torch.equal(images[0], images[1])
    assert not torch.equal(images[1], images[2])


def test_png_pixels_equal_the_pipelines(client, folders, tmp_path):
    from PIL import Image

    parameters = dict(prompt="a cat", seed=11, num_steps=2, height=32, width=48)
    image = (
        st2i.load(folders["dev"], dtype="float32")
        .submit(client, tenant="alice", **parameters)
        .result(timeout=TIMEOUT)
    )
    image.save(tmp_path / "cat.png")
    theirs = expected(folders["dev"], "float32", output_type="pil", **parameters)
    with Image.open(tmp_path / "cat.png") as ours:
        assert np.array_equal(np.asarray(ours), np.asarray(theirs))
        assert ours.text["prompt"] == "a cat"
        assert ours.text["seed"] == "11"
        assert ours.text["steps"] == "2"
        assert ours.text["size"] == "48x32"
        assert ours.text["tenant"] == "alice"
        assert ours.text["workflow"] == "tiny-dev:float32"
        assert ours.text["version"]


def test_interleaved_requests_equal_those_made_alone(client, folders):
    """Two requests at once on two workers, steps of both taking turns on each."""
    dev = st2i.load(folders["dev"], dtype="float32")
    schnell = st2i.load(folders["schnell"], dtype="bfloat16")
    first = dict(prompt="a cat", seed=1, num_steps=20, height=32, width=32)
    second = dict(prompt="a dog", seed=2, num_steps=24, height=32, width=32)
    futures = [
        dev.submit(client, output_type="pt", tenant="alice", **first),
        schnell.submit(client, output_type="pt", tenant="bob", **second),
        dev.submit(client, output_type="pt", tenant="bob", **second),
    ]
    wait(futures, timeout=TIMEOUT)
    assert torch.equal(futures[0].result(), expected(folders["dev"], "float32", **first))
    assert torch.equal(
        futures[1].result(), expected(folders["schnell"], "bfloat16", **second).float()
    )
    assert torch.equal(futures[2].result(), expected(folders["dev"], "float32", **second))

    # Every worker ran something: the requests really shared the cluster.
    story = client.run(lambda dask_worker: dask_worker.state.executed_count)
    assert all(count > 0 for count in story.values())


def test_steps_that_move_between_workers_stay_equal(folders):
    """Each step on another worker than the one before: values cross processes every time."""
    parameters = dict(prompt="a cat", seed=3, num_steps=6, height=32, width=32)
    workflow = st2i.load(folders["dev"], dtype="bfloat16")
    request = workflow.request(output_type="pt", **parameters)
    with (
        st2i.local_cluster(2, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        st2i.attach(client)
        import dask

        workers = sorted(client.scheduler_info()["workers"])
        places = {key: [workers[i % 2]] for i, key in enumerate(sorted(request.tasks))}
        with dask.annotate(workers=places.get, allow_other_workers=False):
            future = client.get(request.tasks, request.key, sync=False)
        ours = future.result(timeout=TIMEOUT)
    assert torch.equal(ours, expected(folders["dev"], "bfloat16", **parameters).float())


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (dict(prompt=""), "empty"),
        (dict(prompt="   "), "empty"),
        (dict(prompt="x" * 600), r"602 tokens, limit 512"),
        (dict(prompt="a long cat", max_sequence_length=5), r"tokens, limit 5;"),
        (dict(prompt="a cat", seed=1.5), "seed=1.5 has type float, wanted int"),
        (dict(prompt="a cat", height=33), "multiples of 4.*nearest: 32"),
        (dict(prompt="a cat", num_steps=0), "1 to 1000"),
        (dict(prompt="a cat", guidance_scale=float("nan")), "0 to 100"),
        (dict(prompt="a cat", stepps=3), "no parameter 'stepps'"),
        (dict(prompt=["a cat"]), "wanted str"),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_sent(folders, parameters, message):
    with pytest.raises(st2i.ParameterError, match=message):
        st2i.load(folders["dev"]).request(**parameters)


def test_schnell_has_no_guidance_scale(folders):
    with pytest.raises(st2i.ParameterError, match="no parameter 'guidance_scale'"):
        st2i.load(folders["schnell"]).request(prompt="a cat", guidance_scale=3.5)


def test_one_task_per_invocation(folders):
    request = st2i.load(folders["dev"]).request(prompt="a cat", num_steps=28)
    assert len(request.tasks) == 31  # CLIP, T5, 28 steps, VAE: glue has no task of its own
    from dask.utils import key_split

    groups = [key_split(key) for key in request.tasks]
    assert sorted(set(groups)) == [
        "ClipText@tiny_dev",
        "FluxTransformer@tiny_dev",
        "T5Text@tiny_dev",
        "VaeDecoder@tiny_dev",
    ]


def test_missing_weights_name_the_folder(client, folders, tmp_path):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(folders["dev"], broken)
    for file in (broken / "vae").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    future = st2i.load(broken).submit(client, prompt="a cat", num_steps=1, height=32, width=32)
    with pytest.raises(st2i.LoadError, match=r"broken.*vae"):
        future.result(timeout=TIMEOUT)
    # The worker lives on and serves others.
    good = st2i.load(folders["dev"]).submit(
        client, prompt="a cat", num_steps=1, height=32, width=32
    )
    assert good.result(timeout=TIMEOUT).size == (32, 32)


def test_nan_is_an_error_never_a_picture(client, folders, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    poisoned = tmp_path / "poisoned"
    shutil.copytree(folders["schnell"], poisoned)
    file = next((poisoned / "vae").glob("*.safetensors"))
    weights = load_file(file)
    weights["decoder.conv_out.bias"][0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    future = st2i.load(poisoned).submit(client, prompt="a cat", num_steps=1, height=32, width=32)
    with pytest.raises(st2i.OutputError, match=r"VAE.*NaN"):
        future.result(timeout=TIMEOUT)


# ---------------------------------------------------------------- other defaults


@pytest.mark.parametrize("task", ["text-to-image", "image-to-image", "inpainting"])
def test_any_parameter_may_have_another_default(folders, task):
    loaded = st2i.load(folders["dev"], task=task, seed=5, num_images=2, num_steps=3)
    defaults = {parameter.name: parameter.default for parameter in loaded.parameters}
    assert (defaults["seed"], defaults["num_images"], defaults["num_steps"]) == (5, 2, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(steps=3), "no parameter 'steps' to give a default to; its workflow takes: prompt"),
        (dict(task="inpainting", steps=3), "no parameter 'steps'"),
        (dict(scheduler="EulerDiscreteScheduler"), "no dictionary of changes; .*_class_name"),
        (dict(controlnet=3), "controlnet=3 is no folder or hub id"),
    ],
)
def test_options_that_are_none_are_refused(folders, options, message):
    with pytest.raises(st2i.LoadError, match=message):
        st2i.load(folders["dev"], **options)
