"""`st2i serve` as people start it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from st2i_dask.cli import main
from st2i_dask.serve.keys import VARIABLE, digest_of, read_keys

from .conftest import SKETCH
from .test_generations import picture


def run(*arguments, env=None):
    return CliRunner().invoke(main, ["serve", *arguments], env={VARIABLE: "", **(env or {})})


def test_a_new_key_fits_the_key_file():
    printed = run("--new-key", "studio").output
    key = re.search(r"key, shown once: (\S+)", printed)[1]
    line = re.search(r"a line for the key file: (.*)", printed)[1]
    assert json.loads(line) == {"sha256": digest_of(key), "tenant": "studio"}
    assert read_keys(line, "x").holder(key).tenant == "studio"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "0.0.0.0"], "there are no API keys"),
        (["--new-key", "no blanks"], "not a tenant name"),
        (["--model", "a b=shapes"], "the name is 1 to 100 letters"),
        (["--model", "none"], "neither a packaged model"),
        (["--ssl-cert", str(SKETCH)], "--ssl-key"),
        (["--keys", str(SKETCH)], "no JSON"),
        (["--scheduler", "tcp://127.0.0.1:9"], "cannot connect to the scheduler"),
    ],
)
def test_what_is_refused(arguments, says, monkeypatch, fresh_registry):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = run(*arguments)
    assert done.exit_code == 2
    assert says in done.output
    assert "Traceback" not in done.output


@pytest.mark.slow
def test_it_serves_and_ends_with_ctrl_c(tmp_path):
    import httpx

    command = [sys.executable, "-m", "st2i_dask.cli", "serve", "--port", "0", "--workers", "1"]
    server = subprocess.Popen(
        [*command, "--model", f"gpt-image-1={SKETCH}:sketch"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
    )
    try:
        assert server.stdout is not None
        printed = []
        for line in server.stdout:
            printed.append(line)
            if line.startswith("serving "):
                break
        url = re.search(r"serving (\S+)", printed[-1])[1]
        with httpx.Client(
            base_url=url, timeout=60, transport=httpx.HTTPTransport(retries=5)
        ) as client:
            assert client.get("/models").json()["data"][0]["id"] == "gpt-image-1"
            answer = client.post(
                "/images/generations", json={"prompt": "x", "model": "gpt-image-1"}
            )
            assert picture(answer).size == (16, 16)
        server.send_signal(signal.SIGINT)
        rest = server.communicate(timeout=30)[0]
        assert "Traceback" not in rest
        assert server.returncode in (0, 130)
    finally:
        server.kill()
        server.wait()
