"""Files of adapters are read while a text encoder runs, in the background, and once."""

from __future__ import annotations

import shutil
import threading
import time

import pytest
import torch
from distributed import Client, LocalCluster

import st2i_dask as st2i
from st2i_dask.catalogue import lora_files, part, tiny, tiny_lora
from st2i_dask.catalogue.flux.parts import ClipText, FluxTransformer, T5Text, VaeDecoder
from st2i_dask.catalogue.folder import read_folder
from st2i_dask.catalogue.lora import Loras, adapted
from st2i_dask.errors import LoadError

from .running import run_here

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return read_folder(str(tiny.save_flux(tmp_path_factory.mktemp("ahead") / "dev")))


@pytest.fixture
def file(tmp_path):
    return tiny_lora.save_lora(tmp_path / "film.safetensors", tiny.flux())


@pytest.fixture
def reads(monkeypatch):
    """Times at which reads begin and end; `reads.seconds` makes them slow."""

    class Reads(list):
        seconds = 0.0

    reads, read = Reads(), lora_files._read

    def slow(path, key):
        reads.append((path.name, threading.current_thread().name, time.perf_counter()))
        time.sleep(reads.seconds)
        return read(path, key)

    monkeypatch.setattr(lora_files, "_read", slow)
    return reads


def quiet():
    """Until nothing is read ahead any more."""
    deadline = time.monotonic() + 10
    while lora_files._reader is not None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def forget():
    """As in another process than the one that has submitted."""
    lora_files._known.clear()


def models(folder, *loras):
    checked = Loras(folder).carry("loras", list(loras))
    parts = {"text_encoder": ClipText, "text_encoder_2": T5Text, "transformer": FluxTransformer}
    return {
        part: cls(folder.source, **adapted({"dtype": "float32"}, checked, part))
        for part, cls in parts.items()
    }


def encode(model):
    components = model.load_model(model.model_path)
    return lambda: model.execute(components, prompt="a cat", max_sequence_length=8, num_images=1)


def test_only_text_encoders_read_ahead_and_only_what_others_need(folder, tmp_path):
    base = tiny.flux()
    both = tiny_lora.save_lora(
        tmp_path / "b.safetensors", base, parts=["transformer", "text_encoder"]
    )
    clip = tiny_lora.save_lora(tmp_path / "c.safetensors", base, parts=["text_encoder"], seed=1)
    made = models(folder, (both, 1.0), (clip, 1.0))
    ahead = {part: model.options.get("ahead") for part, model in made.items()}
    assert ahead == {
        "text_encoder": [str(both)],
        "text_encoder_2": [str(both), str(clip)],
        "transformer": None,
    }
    assert "ahead" not in models(folder)["text_encoder_2"].options


def test_a_text_encoder_does_not_wait_for_the_file_and_the_load_finds_it(folder, file, reads):
    made = models(folder, (file, 1.0))
    run = encode(made["text_encoder_2"])
    forget()
    reads.clear()
    reads.seconds = 0.5
    start = time.perf_counter()
    run()
    assert time.perf_counter() - start < 0.4, "the encoder waited for the file"
    made["transformer"].load_model(folder.source)
    assert [(name, thread) for name, thread, _ in reads] == [("film.safetensors", "st2i-adapters")]
    assert time.perf_counter() - start > 0.5, "the load must have the whole file"
    quiet()


def measure(folder, file, reads, is_ahead, encoder_s=0.3):
    """Seconds from the encoder's start to the loaded transformer, whose file takes as long to read as
    the encoder to run."""
    made = models(folder, (file, 1.0))
    encoder = made["text_encoder_2"]
    if not is_ahead:
        encoder = T5Text(folder.source, dtype="float32")
    run = encode(encoder)
    forget()
    reads.seconds = 0.3
    start = time.perf_counter()
    run()
    time.sleep(max(0.0, encoder_s - (time.perf_counter() - start)))
    made["transformer"].load_model(folder.source)
    took = time.perf_counter() - start
    quiet()
    return took


def test_reading_ahead_hides_the_file_behind_the_text_encoder(folder, file, reads):
    measure(folder, file, reads, True)  # imports
    late = min(measure(folder, file, reads, False) for _ in range(2))
    early = min(measure(folder, file, reads, True) for _ in range(2))
    assert late - early > 0.15, (late, early)  # of 0.3 s


@pytest.mark.parametrize("what", ["absent", "damaged", "no permission"])
def test_errors_show_when_the_file_is_needed_and_not_before(folder, file, what, monkeypatch):
    made = models(folder, (file, 1.0))
    run = encode(made["text_encoder_2"])
    forget()
    if what == "absent":
        file.unlink()
    elif what == "damaged":
        file.write_bytes(file.read_bytes()[:-9])
    else:
        monkeypatch.setattr(
            lora_files, "_read", lambda *_: (_ for _ in ()).throw(PermissionError(13, "denied"))
        )
    assert torch.isfinite(run()["prompt_embeds"]).all()
    quiet()
    with pytest.raises(LoadError, match=r"film.safetensors.*(not there|another file|denied)"):
        made["transformer"].load_model(folder.source)


def test_what_waits_is_bounded_and_the_thread_ends(tmp_path, reads):
    files = []
    for number in range(3 * lora_files._AHEAD):
        files.append(tmp_path / f"{number}.safetensors")
        files[-1].write_bytes(b"x" * number)
    reads.seconds = 0.02
    lora_files.read_ahead(map(str, files))
    lora_files.read_ahead(map(str, files))
    quiet()
    assert len(reads) <= lora_files._AHEAD + 2
    assert not [t for t in threading.enumerate() if t.name == "st2i-adapters"]


def test_threads_that_want_one_file_read_it_once(file, reads):
    reads.seconds = 0.1
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(lora_files.identity_of(file)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 4
    assert len(set(found)) == len(reads) == 1


def test_a_failed_read_is_tried_again(file, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(lora_files, "_read", lambda *_: (_ for _ in ()).throw(OSError(5, "broken")))
        with pytest.raises(LoadError, match=r"film.safetensors cannot be read \(broken\)"):
            lora_files.identity_of(file)
    assert len(lora_files.identity_of(file)) == 32


def test_content_names_a_file_and_time_makes_it_be_read_anew(file, tmp_path, reads):
    shutil.copy(file, tmp_path / "copy.safetensors")
    assert lora_files.identity_of(file) == lora_files.identity_of(tmp_path / "copy.safetensors")
    before = lora_files.identity_of(file)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    time.sleep(0.01)
    file.write_bytes(data)
    assert lora_files.identity_of(file) != before
    assert [name for name, _, _ in reads] == [file.name, "copy.safetensors", file.name]


def test_decoders_do_not_read_ahead(folder):
    assert VaeDecoder(folder.source).options == {}


def test_a_worker_puts_adapters_in_while_its_text_encoder_runs(folder, tmp_path, monkeypatch):
    files = [
        tiny_lora.save_lora(tmp_path / f"{seed}.safetensors", tiny.flux(), seed=seed)
        for seed in range(2)
    ]
    workflow = st2i.load(folder.source, dtype="float32", name="ahead")
    parameters = dict(prompt="a cat", seed=3, num_steps=2, height=32, width=32, output_type="pt")
    told, injected = [], threading.Event()

    def record(owner, name, what, then=lambda: None):
        function = getattr(owner, name)

        def recorded(*args, **kwargs):
            start = time.perf_counter()
            made = function(*args, **kwargs)
            if owner is part:
                told.append((what, threading.current_thread().name, start, time.perf_counter()))
                then()
            else:  # the wait is part of the run
                then()
                told.append((what, threading.current_thread().name, start, time.perf_counter()))
            return made

        monkeypatch.setattr(owner, name, recorded)

    # An encoder that takes longer than putting adapters in.
    record(T5Text, "run", "encoder", lambda: injected.wait(30))
    record(FluxTransformer, "run", "step")
    record(part, "load_adapters", "adapters", injected.set)
    options = dict(processes=False, threads_per_worker=1, dashboard_address=None)
    with LocalCluster(1, **options) as cluster, Client(cluster) as client:
        st2i.attach(client)
        injected.set()
        workflow.submit(client, **parameters).result(60)  # the base is there
        made = []
        for file in files:
            injected.clear()
            told.clear()
            made.append(workflow.submit(client, loras=[(file, 0.7)], **parameters).result(60))
            [(_, thread, begun, ended)] = [each for each in told if each[0] == "adapters"]
            [encoder] = [each for each in told if each[0] == "encoder"]
            first = min(start for what, _, start, _ in told if what == "step")
            assert thread == "st2i-preparer"
            assert begun < ended < encoder[3] < first
    for file, ours in zip(files, made, strict=True):
        theirs = run_here(workflow, loras=[(file, 0.7)], **parameters)
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
