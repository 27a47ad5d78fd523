"""The fake against the real packages: names, order and defaults of every parameter that is used.

Reads the sources that nvshmem4py ships, and asks CuPy and cuda.core, where they are installed (or
unpacked on PYTHONPATH); skipped otherwise. What runs without a device is run on the real library.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .nvshmem_fake import Bindings, Core, Device, InitStatus
from .nvshmem_fake_cuda import FakeCuda, Runtime


def folder(package):
    """Where an installed package's sources are; skips the test when it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed: pip install nvshmem4py-cu13 cupy-cuda13x")
    return Path(next(iter(spec.submodule_search_locations)))


def parameters(function):
    """[(name, default)] without self."""
    found = inspect.signature(function).parameters.values()
    empty = inspect.Parameter.empty
    return [(p.name, "required" if p.default is empty else p.default) for p in found][1:]


# ---------------------------------------------------------------- nvshmem4py


@pytest.mark.parametrize("name", ["get_unique_id", "init", "finalize"])
def test_nvshmem_core(name):
    tree = ast.parse((folder("nvshmem") / "core" / "init_fini.py").read_text())
    (real,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    assert not real.args.kwonlyargs
    defaults = [ast.literal_eval(default) for default in real.args.defaults]
    required = ["required"] * (len(real.args.args) - len(defaults))
    names = [argument.arg for argument in real.args.args]
    expected = list(zip(names, required + defaults, strict=True))
    assert parameters(getattr(Core, name)) == expected


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("init_status", []),
        ("ptr", ["intptr_t", "int"]),
        ("getmem_on_stream", ["intptr_t", "intptr_t", "size_t", "int", "intptr_t"]),
    ],
)
def test_nvshmem_bindings(name, types):
    text = (folder("nvshmem") / "bindings" / "nvshmem.pyx").read_text()
    (real,) = re.findall(rf"^cpdef \w+ {name}\((.*?)\) except", text, re.M)
    pairs = [pair.rsplit(" ", 1) for pair in real.split(", ")] if real else []
    assert [kind for kind, _ in pairs] == types
    assert parameters(getattr(Bindings, name)) == [(argument, "required") for _, argument in pairs]


def test_the_unique_id_is_128_bytes_behind__data():
    text = (folder("nvshmem") / "bindings" / "nvshmem.pyx").read_text()
    assert '("version", _numpy.int32, ),\n    ("internal", _numpy.int8, (124,)),' in text
    assert "readonly object _data" in text


def test_states_of_init_have_the_values_of_the_real_ones():
    folder("nvshmem")
    bindings = pytest.importorskip("nvshmem.bindings", exc_type=ImportError)
    for status in InitStatus:
        assert int(bindings.Init_status[status.name]) == int(status)


# ---------------------------------------------------------------- CuPy and cuda.core


def test_cupy_runtime():
    runtime = pytest.importorskip("cupy").cuda.runtime
    assert int(runtime.memcpyDefault) == Runtime.memcpyDefault
    for name in ("eventRecord", "streamWaitEvent", "memcpyAsync"):
        found = re.match(rf"{name}\((.*)\)", getattr(runtime, name).__doc__)
        real = [p.rsplit(" ", 1)[-1].partition("=")[0] for p in found[1].split(", ")]
        assert [parameter for parameter, _ in parameters(getattr(Runtime, name))] == real


def test_cupy_objects():
    cuda = pytest.importorskip("cupy").cuda
    for real, fake in ((cuda.Stream, FakeCuda.Stream), (cuda.Event, FakeCuda.Event)):
        assert {name for name, _ in parameters(fake)} <= set(inspect.signature(real).parameters)
    assert re.match(r"alloc_pinned_memory\(size_t size\)", cuda.alloc_pinned_memory.__doc__)
    assert "ptr (int)" in cuda.PinnedMemoryPointer.__doc__
    assert isinstance(inspect.getattr_static(cuda.Event, "done"), property)
    assert hasattr(cuda.Device, "__enter__")


def test_cuda_core_device():
    folder("nvshmem")
    device = pytest.importorskip("cuda.core").Device
    assert "device_id" in dict(parameters(device.__new__))
    assert hasattr(device, Device.set_current.__name__)
    pathfinder = importlib.import_module("cuda.pathfinder")
    assert list(inspect.signature(pathfinder.load_nvidia_dynamic_lib).parameters) == ["libname"]


# ---------------------------------------------------------------- the real library, no device


def real(code, timeout=60):
    """What the code prints in a new process, or how that ends; skips where there is a device."""
    folder("nvshmem")
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a device: see tests/gpu")
    head = (
        "import sys, threading, time\n"
        "from types import SimpleNamespace\n"
        "from worker_plugin.nvshmem_library import Library, NvshmemError, Packages\n"
        "try:\n"
        "    packages = Packages.real()\n"
        "except NvshmemError as error:\n"
        "    print('skip', error); sys.exit()\n"
        "class NoDevice:\n"
        "    def __init__(self, number): pass\n"
        "    def set_current(self): pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + code], capture_output=True, text=True, timeout=timeout
    )
    if done.stdout.startswith("skip"):
        pytest.skip(done.stdout[5:].strip())
    return done.returncode, done.stdout, done.stderr


def test_the_real_library_mints_and_refuses_without_a_driver():
    rc, said, errors = real(
        "library = Library(packages)\n"
        "uid = library.mint()\n"
        "print(len(uid), any(uid))\n"
        "try: library.attach(uid, 0, 1, 0, 1 << 20)\n"
        "except NvshmemError as error: print(error)\n"
    )
    assert rc == 0, errors
    assert said.startswith("128 True\nNVSHMEM did not start on CUDA device 0")


def test_the_real_library_never_allocates_after_only_the_bootstrap():
    """Without a device some versions refuse in init; others do the bootstrap, return, and crash in
    the next call."""
    rc, said, errors = real(
        "packages = Packages(packages.core, packages.bindings, packages.host, NoDevice)\n"
        "library = Library(packages)\n"
        "uid = library.mint()\n"
        "try: library.attach(uid, 0, 1, 0, 1 << 20)\n"
        "except NvshmemError as error: print(error)\n"
    )
    assert rc == 0, errors
    assert re.match(r"NVSHMEM (started without|did not start on) CUDA device 0", said)


def test_the_real_init_hangs_for_a_missing_pe_and_leaves_the_process_running():
    rc, said, errors = real(
        "import os\n"
        "packages = Packages(packages.core, packages.bindings, packages.host, NoDevice)\n"
        "library = Library(packages)\n"
        "uid = library.mint()\n"
        "def attach():\n"
        "    try: library.attach(uid, 0, 2, 0, 1 << 20)\n"
        "    except NvshmemError as error: print('ended', error, flush=True)\n"
        "thread = threading.Thread(target=attach, daemon=True); thread.start()\n"
        "start = time.monotonic(); turns = 0\n"
        "while time.monotonic() < start + 2: time.sleep(0.01); turns += 1\n"
        "print(thread.is_alive(), turns > 100, flush=True)\n"
        "os._exit(0)\n"
    )
    assert rc == 0, errors
    assert said == "True True\n"


def test_two_real_processes_find_each_other_by_the_unique_id():
    """As far as one comes without a device: both have done the bootstrap."""
    rc, said, errors = real(
        "import os, subprocess\n"
        "packages = Packages(packages.core, packages.bindings, packages.host, NoDevice)\n"
        "library = Library(packages)\n"
        "uid = library.mint() if len(sys.argv) < 2 else bytes.fromhex(sys.argv[1])\n"
        "pe = len(sys.argv) - 1\n"
        "if pe == 0:\n"
        "    code = sys.orig_argv[2]\n"
        "    other = subprocess.Popen([sys.executable, '-c', code, uid.hex()])\n"
        "try: library.attach(uid, pe, 2, 0, 1 << 20)\n"
        "except NvshmemError as error: os.write(1, f'{pe} {error}\\n'.encode())\n"
        "if pe == 0: os.write(1, f'0{other.wait(30)}\\n'.encode())\n"
    )
    assert rc == 0, errors
    lines = sorted(said.splitlines())
    assert len(lines) == 3
    assert re.match(r"0 NVSHMEM (started without|did not start on) CUDA device 0", lines[0])
    assert lines[1] == "00"
    assert re.match(r"1 NVSHMEM (started without|did not start on) CUDA device 0", lines[2])
