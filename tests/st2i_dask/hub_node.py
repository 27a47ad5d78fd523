"""A node that fetches from a hub of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time

from .fake_hub import COMMIT, REPOSITORY

LARGE_FILE = "transformer/diffusion_pytorch_model.safetensors"
SMALL_FILE = "vae/diffusion_pytorch_model.safetensors"
MIB = 1 << 20

FETCH = """
    import json, logging, sys
    from st2i_dask.catalogue import hub, turns
    from st2i_dask.errors import LoadError
    turns.LOG_SECONDS = 0.2
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    patterns, options = json.loads(sys.argv[1])
    try:
        print(hub.fetch("some-one/some-model", patterns, **options))
    except LoadError as error:
        print("LoadError:", error)
"""


class Node:
    """A machine: processes that share a cache."""

    def __init__(self, hub, folder):
        self.hub, self.home = hub, folder / "hf"
        self.cache = self.home / "hub"
        self.repository = self.cache / f"models--{REPOSITORY.replace('/', '--')}"
        self.snapshot = self.repository / "snapshots" / COMMIT

    def start(self, patterns=("*",), code=FETCH, prefix=(), **options):
        options = {"weights": True, **options}
        arguments = [*prefix, sys.executable, "-c", textwrap.dedent(code)]
        return subprocess.Popen(
            [*arguments, json.dumps([list(patterns), options])],
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
                "HF_ENDPOINT": self.hub.address,
                "HF_HOME": str(self.home),
                "HF_HUB_OFFLINE": "0",
                "HF_HUB_DISABLE_XET": "1",
                "HF_TOKEN": "hf_secret",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def fetch(self, *arguments, **options):
        """What it printed and logged."""
        return ended(self.start(*arguments, **options))

    def check_whole(self):
        """Every file is there with its bytes, and nothing else."""
        for name, data in self.hub.files.items():
            assert (self.snapshot / name).read_bytes() == data, name
        assert self.unfinished() == []
        assert len(list((self.repository / "blobs").iterdir())) == len(set(self.hub.files.values()))

    def unfinished(self):
        return sorted((self.repository / "blobs").glob("*incomplete*"))


def ended(process, seconds=60):
    try:
        printed, log = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, log
    return printed.strip(), log


def wait_for(what, process, seconds=20):
    deadline = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
