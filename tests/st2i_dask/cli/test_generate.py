"""`st2i generate` on a live cluster: resuming, failures, options, and what the folder holds."""

from __future__ import annotations

import json
import os
import time

import pytest
from distributed import LocalCluster
from PIL import Image

from st2i_dask import submission
from st2i_dask.cli import clusters, runner
from st2i_dask.cli.folder import MANIFEST, OutputFolder
from st2i_dask.errors import LimitError
from st2i_dask.image import read_metadata

from .conftest import PAINT

THREE = "a cat\na dog\na bird\n"


def pngs(path):
    return sorted(name for name in os.listdir(path) if name.endswith(".png"))


def manifest(path):
    return {e["file"]: e for e in map(json.loads, (path / MANIFEST).read_text().splitlines())}


def contents(path):
    return {name: (path / name).read_bytes() for name in pngs(path)}


def check_folder(path):
    """Every file is an image or the manifest; both agree; nothing half written."""
    names = pngs(path)
    assert sorted(os.listdir(path)) == sorted([*names, MANIFEST])
    assert sorted(manifest(path)) == names
    for name in names:
        Image.open(path / name).load()


@pytest.fixture
def no_cluster(monkeypatch):
    """The test fails if a command connects to a cluster or starts one."""

    def refuse(*args, **kwargs):
        raise AssertionError("a cluster was asked for")

    monkeypatch.setattr("st2i_dask.cli.generate.running_cluster", refuse)
    monkeypatch.setattr("st2i_dask.cli.generate.own_cluster", refuse)


def test_images_and_manifest(generate, tmp_path):
    result = generate(THREE, "--seed", 5, "--images", 2, "--tenant", "bob", "--size", "32x16")
    assert result.exit_code == 0, result.output
    assert "6 images made" in result.output
    check_folder(tmp_path / "out")
    entries = manifest(tmp_path / "out").values()
    assert sorted((e["prompt"], e["seed"]) for e in entries) == [
        (prompt, seed) for prompt in ("a bird", "a cat", "a dog") for seed in (5, 6)
    ]
    for entry in entries:
        assert entry["file"].startswith(f"{entry['prompt'].replace(' ', '-')}-{entry['seed']}-")
        assert (entry["size"], entry["tenant"], entry["steps"]) == ("32x16", "bob", 2)
        assert entry["workflow"] == "paint"
        assert entry["version"]
        assert entry["parameters"]["strength"] == 0.5
        assert 0 < entry["seconds"] < 60
        path = tmp_path / "out" / entry["file"]
        assert Image.open(path).size == (32, 16)
        assert read_metadata(path)["prompt"] == entry["prompt"]


def test_again_makes_only_what_is_missing(generate, tmp_path):
    assert generate(THREE).exit_code == 0
    out = tmp_path / "out"
    before = contents(out)
    lost = pngs(out)[1]
    times = {name: os.stat(out / name).st_mtime_ns for name in before if name != lost}
    (out / lost).unlink()
    result = generate(THREE)
    assert result.exit_code == 0, result.output
    assert "1 image made, 2 kept" in result.output
    assert contents(out) == before
    assert times == {name: os.stat(out / name).st_mtime_ns for name in times}
    check_folder(out)


def test_nothing_to_do_needs_no_cluster(generate, tmp_path, request):
    assert generate(THREE).exit_code == 0
    request.getfixturevalue("no_cluster")
    result = generate(THREE)
    assert result.exit_code == 0, result.output
    assert "nothing to do: 3 images already in" in result.output


def test_names_do_not_depend_on_order_or_other_prompts(generate, tmp_path):
    assert generate(THREE).exit_code == 0
    assert generate("a bird\na bee\na cat\n", out=tmp_path / "other").exit_code == 0
    first, second = contents(tmp_path / "out"), contents(tmp_path / "other")
    assert len(first.keys() & second.keys()) == 2
    for name in first.keys() & second.keys():
        assert first[name] == second[name]


@pytest.mark.parametrize("keep", [0, -30])
def test_a_manifest_lost_or_cut_off_by_a_crash_is_recovered(generate, tmp_path, keep):
    assert generate(THREE).exit_code == 0
    out = tmp_path / "out"
    before = manifest(out)
    data = (out / MANIFEST).read_bytes()
    (out / MANIFEST).write_bytes(data[:keep])
    result = generate(THREE)
    assert result.exit_code == 0, result.output
    assert "nothing to do" in result.output
    after = manifest(out)
    for entry in (*before.values(), *after.values()):
        entry.pop("seconds", None)
    assert after == before


def test_failures_are_reported_and_the_rest_is_kept(generate, tmp_path):
    result = generate("a cat\na broken cup\n\na dog\n", "--images", 2)
    assert result.exit_code == 1, result.output
    assert "1 prompt failed:" in result.stderr
    assert (
        "line 2: 'a broken cup' (2 images): RuntimeError: the brush broke at 'a broken cup'"
        in result.stderr
    )
    assert "4 images made" in result.stdout
    assert "Traceback" not in result.output
    check_folder(tmp_path / "out")


def test_bad_lines_count_as_failed_prompts(generate, tmp_path):
    long = "x" * 61
    result = generate(
        f'a cat\n{{"prompt": ""}}\n{long}\n{{"prompt": "b", "sed": 1}}\n{{"prompt": \n'
        '{"prompt": "a dog", "steps": 51}\n{"prompt": "a dog", "tenant": "no/slash"}\n'
    )
    assert result.exit_code == 1
    assert "1 image made" in result.stdout
    assert "6 prompts failed" in result.stderr
    for text in (
        "line 2: '': prompt='' is empty",
        "prompt is too long: 61 characters, limit 60",
        "line 4: '{\"prompt\": \"b\", \"sed\": 1}': workflow 'paint' has no parameter 'sed'",
        "line 5: '{\"prompt\":': is not a JSON object",
        "line 6: 'a dog': num_steps=51 is out of range",
        "line 7: 'a dog': tenant 'no/slash' is not a tenant name",
    ):
        assert text in result.stderr
    check_folder(tmp_path / "out")


def test_only_bad_prompts_need_no_cluster(generate, no_cluster):
    result = generate('{"prompt": ""}\n')
    assert result.exit_code == 1
    assert "line 1: '': prompt='' is empty" in result.stderr


def test_json_lines(generate, tmp_path):
    lines = [
        {"prompt": "a", "seed": 9, "steps": 3, "size": "8x24", "images": 2, "tenant": "eve"},
        {"prompt": "b", "num_steps": 4, "strength": 1, "medium": "chalk"},
    ]
    result = generate("".join(json.dumps(line) + "\n" for line in lines), "--seed", 1)
    assert result.exit_code == 0, result.output
    entries = sorted(
        manifest(tmp_path / "out").values(), key=lambda entry: (entry["prompt"], entry["seed"])
    )
    told = [(e["prompt"], e["seed"], e["steps"], e["size"], e["tenant"]) for e in entries]
    assert told == [
        ("a", 9, 3, "8x24", "eve"),
        ("a", 10, 3, "8x24", "eve"),
        ("b", 1, 4, "16x16", "default"),
    ]
    assert entries[2]["parameters"]["strength"] == 1.0
    assert entries[2]["parameters"]["medium"] == "chalk"


def test_duplicates_are_made_once(generate, tmp_path):
    result = generate('a cat\na dog\n a cat \n{"prompt": "a cat", "seed": 0, "images": 2}\n')
    assert result.exit_code == 0
    assert "2 duplicates left out" in result.stderr
    assert len(pngs(tmp_path / "out")) == 3


def test_other_parameters(generate, tmp_path):
    assert generate("a", "--param", "strength=0.25", "--param", "medium=chalk").exit_code == 0
    (entry,) = manifest(tmp_path / "out").values()
    assert (entry["parameters"]["strength"], entry["parameters"]["medium"]) == (0.25, "chalk")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--param", "brush=big"], "has no parameter 'brush'; it takes: prompt, seed, num_steps"),
        (["--param", "strength=lots"], "strength='lots' cannot be read; wanted: float"),
        (["--param", "strength=2"], "strength=2.0 is out of range; allowed: 0 to 1"),
        (["--param", "seed=1", "--seed", "2"], "seed is given twice"),
        (["--param", "prompt=b"], "use these"),
        (["--steps", "0"], "num_steps=0 is out of range"),
        (["--size", "17x16"], "width=17 is not an allowed size"),
        (["--size", "big"], "--size='big' is not a size; write WIDTHxHEIGHT"),
        (["--tenant", "a b"], "tenant 'a b' is not a tenant name"),
    ],
)
def test_options_that_are_refused(generate, no_cluster, tmp_path, options, message):
    result = generate("a", *options)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", [("--steps", 3), ("--size", "8x8"), ("--seed", 3)])
def test_options_that_the_workflow_does_not_take(generate, no_cluster, option):
    result = generate("a", *option, workflow="plain")
    assert result.exit_code == 2
    assert "it takes: prompt\n" in result.stderr


def test_several_images_need_a_seed(generate, no_cluster):
    result = generate("a", "--images", 2, workflow="plain")
    assert result.exit_code == 1
    assert "2 images of one prompt differ in their seed" in result.stderr


def test_a_file_holds_one_image(generate, no_cluster):
    result = generate("a", "--param", "num_images=2", workflow="batch")
    assert result.exit_code == 1
    assert "num_images=2 gives several images at once, and a file holds one" in result.stderr


def test_a_result_that_is_no_image_fails_its_prompt(generate):
    result = generate("a", workflow="numbers")
    assert result.exit_code == 1
    assert "the workflow returned ndarray, not an image" in result.stderr


def test_prompts_come_from_one_place(st2i, tmp_path):
    base = ("generate", "--workflow", f"{PAINT}:paint", "--out", tmp_path)
    for options in ((), ("--prompt", "a", "--prompts", "-")):
        result = st2i(*base, *options)
        assert result.exit_code == 2
        assert "either by --prompt or by --prompts FILE" in result.stderr


def test_prompts_of_the_command_line(st2i, scheduler, tmp_path):
    options = ("--scheduler", scheduler, "--out", tmp_path / "out", "--workflow", f"{PAINT}:paint")
    result = st2i("generate", *options, "--prompt", "a cat", "--prompt", "# a dog")
    assert result.exit_code == 0, result.output
    prompts = {entry["prompt"] for entry in manifest(tmp_path / "out").values()}
    assert prompts == {"a cat", "# a dog"}


def test_an_empty_file(generate, no_cluster):
    result = generate("# nothing\n\n")
    assert result.exit_code == 2
    assert "holds no prompt" in result.stderr


def test_nobody_at_the_address(st2i, tmp_path, monkeypatch):
    monkeypatch.setattr(clusters, "CONNECT_SECONDS", 1.0)
    base = ("generate", "--workflow", f"{PAINT}:paint", "--out", tmp_path / "out", "--prompt", "a")
    for address, reason in (
        ("tcp://127.0.0.1:9", "Connection refused"),
        ("localhost", "no port"),
        ("x://y", "no address"),
    ):
        result = st2i(*base, "--scheduler", address)
        assert result.exit_code == 2, result.output
        assert f"'{address}'" in result.stderr
        assert reason in result.stderr
        assert "Traceback" not in result.output


def test_an_image_of_other_parameters_under_the_same_name_is_not_taken(generate, tmp_path):
    assert generate("a cat").exit_code == 0
    path = tmp_path / "out" / MANIFEST
    path.write_text(path.read_text().replace('"strength": 0.5', '"strength": 0.7'))
    result = generate("a cat")
    assert result.exit_code == 1
    assert "is there with other parameters" in result.stderr


def test_images_of_another_version_are_kept_with_a_note(generate, tmp_path):
    assert generate("a cat").exit_code == 0
    path = tmp_path / "out" / MANIFEST
    entry = json.loads(path.read_text())
    path.write_text(json.dumps({**entry, "version": "older"}) + "\n")
    result = generate("a cat")
    assert result.exit_code == 0
    assert "another version of the workflow" in result.stderr


def test_a_full_disk_stops_the_run_and_keeps_what_is_done(generate, tmp_path, monkeypatch):
    save = OutputFolder.save
    saved = []

    def limited(self, file, image, **more):
        if len(saved) >= 5:
            raise OSError(28, "No space left on device", f"out/{file}")
        saved.append(file)
        return save(self, file, image, **more)

    monkeypatch.setattr(OutputFolder, "save", limited)
    prompts = "".join(f"picture {i}\n" for i in range(200))
    result = generate(prompts)
    assert result.exit_code == 1
    assert "No space left on device; " in result.stderr
    assert "run the same command again" in result.stderr
    assert len(saved) <= 5
    check_folder(tmp_path / "out")
    monkeypatch.undo()


def test_requests_in_flight_are_bounded(generate, monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "WINDOW_LEAST", 3)
    monkeypatch.setattr(runner, "WINDOW_PER_EXECUTOR", 1)
    submitted, flying = [], []
    real = submission.submit_requests

    def counted(client, requests):
        submitted.extend(requests)
        flying.append(len(submitted) - len(pngs(tmp_path / "out")))
        return real(client, requests)

    monkeypatch.setattr(submission, "submit_requests", counted)
    result = generate("".join(f"picture {i}\n" for i in range(20)))
    assert result.exit_code == 0, result.output
    assert len(submitted) == 20
    assert max(flying) == 3


def test_futures_are_released(generate, scheduler):
    from distributed import Client

    assert generate(THREE).exit_code == 0
    with Client(scheduler, set_as_default=False) as client:
        deadline = time.monotonic() + 10
        while client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_the_scheduler_goes_away(st2i, tmp_path):
    cluster = LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0"
    )
    original = runner._Run._end
    closing = []

    def close_after_first(self, job, problem, flight=None):
        original(self, job, problem, flight)
        if not closing:
            closing.append(True)
            cluster.close()

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner._Run, "_end", close_after_first)
            patch.setattr(clusters, "CONNECT_SECONDS", 2.0)
            result = st2i(
                *("generate", "--workflow", f"{PAINT}:paint", "--prompts", "-"),
                *("--scheduler", cluster.scheduler_address, "--out", tmp_path / "out"),
                stdin="".join(f"slow {i}\n" for i in range(30)),
            )
    finally:
        cluster.close()
    assert result.exit_code == 1, result.output
    assert "connection to the scheduler was lost" in result.stderr
    assert "run the same command again" in result.stderr
    check_folder(tmp_path / "out")


def test_a_tenant_at_its_cap_waits_and_goes_on(generate, monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "_CAP_SECONDS", 0.05)
    real = submission.submit_requests
    submitted, refused = [], []

    def capped(client, requests):
        flying = len(submitted) - len(pngs(tmp_path / "out"))
        if flying + len(requests) > 3:
            refused.append(len(requests))
            raise LimitError("tenant 'default' has its cap of 3 queued requests")
        submitted.extend(requests)
        return real(client, requests)

    monkeypatch.setattr(submission, "submit_requests", capped)
    result = generate("".join(f"picture {i}\n" for i in range(12)))
    assert result.exit_code == 0, result.output
    assert refused
    assert len(submitted) == 12
    assert result.stderr.count("waiting: tenant 'default' has its cap") == 1
    check_folder(tmp_path / "out")
