"""The files in deploy/ and the commands in docs/deploy.md, checked against the package."""

from __future__ import annotations

import importlib
import re
import shlex
import tomllib
from pathlib import Path

import click
import dask.config
import pytest
import yaml
from distributed.cli import dask_scheduler, dask_worker

from scheduler_plugin import preload as scheduler_preload
from st2i_dask import config
from st2i_dask.cli import _COMMANDS, main
from worker_plugin import preload as worker_preload

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/deploy.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ROLES = {"scheduler": (dask_scheduler, scheduler_preload), "worker": (dask_worker, worker_preload)}


def parse(command):
    """Let Dask's own command read the arguments of `dask scheduler ...` or `dask worker ...`."""
    program, role, *arguments = command
    assert program == "dask"
    node, preload = ROLES[role]
    context = node.main.make_context(role, list(arguments))
    assert context.params["preload"] == (preload.__name__,)
    return context.params


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def environment(container):
    return {entry["name"]: entry["value"] for entry in container["env"]}


def set_by(name, value):
    """The configuration after this variable of the environment alone."""

    found = dask.config.collect_env({name: value})
    return dask.config.merge({"st2i": config.DEFAULTS}, found)


@pytest.mark.parametrize("role", ROLES)
def test_the_manifest(role):
    cluster = yaml.safe_load((ROOT / "deploy/dask-cluster.yaml").read_text())
    assert (cluster["apiVersion"], cluster["kind"]) == ("kubernetes.dask.org/v1", "DaskCluster")
    [container] = cluster["spec"][role]["spec"]["containers"]
    assert container["name"] == role
    found = parse(container["args"])
    if role == "worker":
        # The address comes by environment: an option of the preload would be taken for it.
        assert found["scheduler"] is None
        assert found["nthreads"] == 1
        volumes = {volume["name"] for volume in cluster["spec"]["worker"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    ours = {n: v for n, v in environment(container).items() if n.startswith("DASK_ST2I")}
    assert ours

    for name, value in ours.items():
        with dask.config.set(set_by(name, value)):
            config.worker_options()
            config.scheduler_settings()
    ports = {port["name"] for port in container["ports"]}
    if role == "scheduler":
        service = cluster["spec"]["scheduler"]["service"]
        assert {port["targetPort"] for port in service["ports"]} == ports
        assert service["selector"]["dask.org/cluster-name"] == cluster["metadata"]["name"]


def test_the_dockerfile():
    text = (ROOT / "deploy/Dockerfile").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and line[0] != "#"]
    assert {line.split()[0] for line in lines} <= {
        *("FROM", "RUN", "ARG", "COPY", "ENV", "USER", "WORKDIR", "EXPOSE", "CMD"),
    }
    copied = set()
    for line in lines:
        if line.startswith("COPY ") and "--from" not in line:
            *sources, _ = line.split()[1:]
            assert all((ROOT / source).exists() for source in sources), line
            copied |= set(sources)
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    assert {*build["wheel"]["packages"], PROJECT["readme"], PROJECT["license"]["file"]} <= copied
    extras = re.findall(r"EXTRAS=(\S+)", text)
    assert extras
    assert all(set(given.split(",")) <= set(PROJECT["optional-dependencies"]) for given in extras)
    [command] = [line for line in lines if line.startswith("CMD ")]
    parse(yaml.safe_load(command.removeprefix("CMD ")))


def test_commands_of_the_page():
    commands = re.findall(r"^\$ (.*)$", "".join(blocks("console")), re.MULTILINE)
    assert commands

    nodes = [shlex.split(line) for line in commands if line.startswith("dask ")]
    assert [command[1] for command in nodes] == ["scheduler", "worker"]
    for command in nodes:
        parse(command)
    for line in commands:
        program, name, *arguments = shlex.split(line)
        if program == "st2i":
            assert name in _COMMANDS
            command = main.get_command(click.Context(main), name)
            command.make_context(name, list(arguments))


def test_every_key_and_option_is_on_the_page():
    for section, keys in config.DEFAULTS.items():
        for key in keys:
            variable = f"DASK_ST2I__{section}__{key}".upper().replace("-", "_")
            assert f"| `st2i.{section}.{key}` | `{variable}` |" in PAGE
    for _, preload in ROLES.values():
        for parameter in preload.dask_setup.params:
            assert f"`{'/'.join(parameter.opts + parameter.secondary_opts)}`" in PAGE
    rows = re.findall(r"^\| `st2i\.(\w+)\.([\w-]+)`", PAGE, re.MULTILINE)
    assert all(key in config.DEFAULTS[section] for section, key in rows)


def test_blocks_of_the_page_can_be_read():
    ours, tls, scraped = (yaml.safe_load(block) for block in blocks("yaml"))
    assert len(scraped["scrape_configs"][0]["static_configs"][0]["targets"]) == 3

    with dask.config.set(ours):
        assert config.worker_options()["memory_bytes"] == 40 << 30
        assert config.scheduler_settings()["weights"] == {"studio": 3.0}
    known = dask.config.get("distributed.comm.tls")
    for role in ("scheduler", "worker", "client"):
        assert set(tls["distributed"]["comm"]["tls"][role]) <= set(known[role])
    for block in blocks("python"):
        compile(block, "deploy.md", "exec")
    [(extra, preload)] = re.findall(
        r'worker_extra_args=\["--preload", "([\w.]+)", "(--[\w-]+)"', PAGE
    )
    assert importlib.import_module(extra) is worker_preload
    assert preload in {o for parameter in worker_preload.dask_setup.params for o in parameter.opts}
    for path in re.findall(r"\]\(\.\./([\w/.-]+)\)", PAGE):
        assert (ROOT / path).exists()
