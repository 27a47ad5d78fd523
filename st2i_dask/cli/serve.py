"""`st2i serve`: the OpenAI images API over HTTP, for a cluster that runs already or one of its own."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import logs
from ..errors import AttachError, ParameterError
from ..quoting import quoted
from .clusters import (
    CONNECT_SECONDS,
    cluster_options,
    dashboard,
    own_cluster,
    quiet_logs,
    running_cluster,
)
from .loading import load_options

if TYPE_CHECKING:
    from ..serve.keys import KeyRing

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}")


@click.command()
@click.option(
    "--model",
    "sources",
    multiple=True,
    metavar="[NAME=]SOURCE",
    help="A model to serve: a packaged model, a Diffusers folder, a hub id, or FILE.py:WORKFLOW. "
    "Repeatable; the first is the default. NAME is what clients call it.  [default: shapes]",
)
@load_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535))
@click.option(
    "--keys",
    "key_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File of API keys; else the variable ST2I_API_KEYS.",
)
@click.option("--no-keys", is_flag=True, help="Serve everybody who can reach the address.")
@click.option(
    "--new-key", metavar="TENANT", help="Make a key for this tenant, and do nothing else."
)
@cluster_options
@click.option(
    "--workflow-root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder below which admin keys may register workflows. Its Python files are run.",
)
@click.option(
    "--lora",
    "loras",
    multiple=True,
    metavar="NAME=SOURCE",
    help="An adapter that clients may name: a safetensors file, or OWNER/REPOSITORY/FILE on the "
    "hub. Repeatable.",
)
@click.option("--public-url", metavar="URL", help="What URLs of images begin with.")
@click.option(
    "--max-open",
    type=click.IntRange(1),
    default=1000,
    show_default=True,
    help="Images that wait or run at most; more are answered 503.",
)
@click.option(
    "--max-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=3600.0,
    show_default=True,
    help="Longest time from a request to its result.",
)
@click.option(
    "--ssl-cert", type=click.Path(exists=True, dir_okay=False), help="PEM file, for HTTPS."
)
@click.option(
    "--ssl-key", type=click.Path(exists=True, dir_okay=False), help="PEM file, for HTTPS."
)
@click.option("--verbose", is_flag=True, help="Log every request.")
def serve(
    sources: Sequence[str],
    host: str,
    port: int,
    key_file: Path | None,
    no_keys: bool,
    new_key: str | None,
    scheduler: str | None,
    workers: int,
    workflow_root: Path | None,
    loras: Sequence[str],
    public_url: str | None,
    max_open: int,
    max_seconds: float,
    ssl_cert: str | None,
    ssl_key: str | None,
    verbose: bool,
    loaded: dict[str, Any],
) -> None:
    """Serve the OpenAI images API.

    POST /v1/images/generations and /v1/images/edits, GET /v1/models, GET and DELETE
    /v1/requests/ID; /openapi.json describes all. Point a client at http://HOST:PORT/v1.
    """
    quiet_logs()
    if new_key is not None:
        from ..serve.keys import new_key as make_key

        key, entry = make_key(new_key)
        click.echo(f"key, shown once: {key}")
        click.echo(f"a line for the key file: {json.dumps(entry)}")
        return
    missing = [name for name in ("fastapi", "uvicorn", "python_multipart") if not find_spec(name)]
    if missing:
        raise AttachError(f"{', '.join(missing)} is missing; pip install 'st2i_dask[serve]'")
    if bool(ssl_cert) != bool(ssl_key):
        raise click.UsageError("give both --ssl-cert and --ssl-key, or neither")
    keys = _keys(key_file, no_keys, host)
    if verbose:
        logging.basicConfig(format="%(asctime)s %(message)s")
        logging.getLogger("st2i.serve").setLevel(logging.INFO)
    logs.set_up()

    from ..serve.limits import Limits
    from ..serve.models import Models
    from ..serve.server import application, server

    models = Models(workflow_root, dict(_named(text, "--lora") for text in loras))
    if loaded and len(sources) > 1:
        raise ParameterError(
            f"{', '.join(loaded)} can be given for one --model, not for {len(sources)}; load them with "
            "st2i.load in a file and serve FILE.py:WORKFLOW"
        )
    for source in sources or ("shapes",):
        name, source = _named(source, "--model")
        models.add(name, source, **loaded)
    limits = Limits(open_images=max_open, request_s=max_seconds)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(
            running_cluster(scheduler, or_own=True)
            if scheduler
            else own_cluster(workers, announce=True)
        )
        address = scheduler or client.scheduler.address
        click.echo(dashboard(client))
        app = application(address, models, keys, limits, public_url)
        more = {"ssl_certfile": ssl_cert, "ssl_keyfile": ssl_key} if ssl_cert else {}
        made = server(app, limits, host, port, **more)
        scheme = "https" if ssl_cert else "http"
        socket = made.config.bind_socket()
        stack.callback(socket.close)
        shown = f"[{host}]" if ":" in host else host
        click.echo(f"serving {scheme}://{shown}:{socket.getsockname()[1]}/v1  (stop: Ctrl-C)")
        made.run(sockets=[socket])
        if not made.started:
            raise AttachError(
                f"the server could not connect to {address} within {CONNECT_SECONDS:.0f} s; "
                "see the message above"
            )


def _named(text: str, option: str) -> tuple[str, str]:
    """The name and the source of what an option gives."""
    name, equals, source = text.partition("=")
    if not equals:
        name, source = Path(text.partition(":")[0]).name.removesuffix(".py"), text
    if not _NAME.fullmatch(name) or not source:
        raise ParameterError(
            f"{option} {quoted(text)}: the name is 1 to 100 letters, digits, '.', '_', ':', '-'; "
            "write NAME=SOURCE"
        )
    return name, source


def _keys(file: Path | None, no_keys: bool, host: str) -> KeyRing:
    from ..serve.keys import VARIABLE, OpenDoor, read_key_file, read_keys

    written = os.environ.get(VARIABLE)
    if no_keys:
        if file is not None:
            raise click.UsageError("give either --keys or --no-keys")
        return OpenDoor(admin=_is_local(host))
    if file is not None:
        return read_key_file(file)
    if written:
        return read_keys(written, f"variable {VARIABLE}")
    if _is_local(host):
        return OpenDoor(admin=True)
    raise ParameterError(
        f"--host {host} can be reached from other machines, and there are no API keys; give --keys "
        "FILE (st2i serve --new-key TENANT makes one), or --no-keys"
    )


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
