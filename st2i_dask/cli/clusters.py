"""The cluster behind a command: one of its own, or one that runs already. And quiet logs."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from ..errors import AttachError
from ..quoting import quoted

if TYPE_CHECKING:
    from distributed import Client

CONNECT_SECONDS = 10.0

_PRINTED = "give the address that dask-scheduler prints, for example tcp://10.0.0.5:8786"

scheduler_option = click.option(
    "--scheduler", required=True, metavar="ADDR", help="Address of the Dask scheduler."
)


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--scheduler and --workers, of a command that starts a local cluster where none is given."""
    scheduler = click.option(
        "--scheduler", metavar="ADDRESS", help="A running cluster, tcp://HOST:PORT."
    )
    workers = click.option(
        "--workers",
        type=click.IntRange(1),
        default=2,
        show_default=True,
        help="Workers of the local cluster, where no scheduler is given.",
    )
    return scheduler(workers(command))


def quiet_logs() -> None:
    """Errors only, from Dask and from the model libraries, here and in workers started from here.

    What a user has configured stays. Call before anything imports distributed.
    """
    import dask

    if dask.config.get("logging", None) is None:
        level = dict.fromkeys(("distributed", "distributed.client", "bokeh"), "error")
        dask.config.set({"logging": {**level, "tornado": "critical"}})
        for name in level:  # distributed may be imported already
            logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")


@contextlib.contextmanager
def own_cluster(workers: int, *, announce: bool = False) -> Iterator[Client]:
    """A client of a new local cluster, which ends with the context.

    announce: say so when the dashboard is not where it usually is.
    """
    from distributed import Client

    from ..cluster import local_cluster

    quiet_logs()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            cluster = local_cluster(workers, silence_logs=logging.ERROR)
        except (OSError, RuntimeError) as error:  # a time-out is an OSError
            raise AttachError(
                f"a local cluster with {workers} workers could not be started: {error}; try fewer "
                "--workers, or give a running cluster's address by --scheduler"
            ) from error
    for warning in caught:
        if "already in use" in str(warning.message):
            if announce:
                click.echo("the dashboard's usual port is taken; it gets another one", err=True)
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    with cluster, Client(cluster, set_as_default=False) as client:
        client.run(_drop_noise)
        yield client


def _drop_noise() -> None:
    """On a worker of ours: do not log as errors what is none.

    A failed task is reported by the command, once; a cluster that closes while tasks run breaks off
    messages.
    """
    from distributed.comm import CommClosedError

    def keep(record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        broken_off = kind is not None and issubclass(kind, CommClosedError)
        return not broken_off and not record.getMessage().startswith("Compute Failed")

    for name in ("distributed.worker", "tornado.application"):
        logging.getLogger(name).addFilter(keep)


@contextlib.contextmanager
def running_cluster(address: str, *, or_own: bool = False) -> Iterator[Client]:
    """A client of the cluster at this address. AttachError when nobody answers.

    or_own: the command starts a cluster of its own where no address is given, and errors say so.
    """
    from distributed import Client

    quiet_logs()
    cure = f"{_PRINTED}, or leave --scheduler out to use this machine" if or_own else _PRINTED
    check_reachable(address, cure)
    try:
        client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:  # TimeoutError is an OSError
        reason = (
            "it is no address"
            if isinstance(error, (ValueError, TypeError))
            else (f"nobody answered within {CONNECT_SECONDS:.0f} s")
        )
        raise AttachError(
            f"cannot connect to the scheduler {quoted(address)}: {reason}; {cure}"
        ) from error
    with client:
        if not client.nthreads():
            click.echo(f"the cluster at {address} has no worker yet; waiting", err=True)
        yield client


def check_reachable(address: str, cure: str = _PRINTED) -> None:
    """AttachError when nothing listens there. A Client that fails later leaves a trace of its own."""
    import socket

    from distributed.comm import parse_address, parse_host_port

    try:
        scheme, location = parse_address(address)
        host, port = parse_host_port(location, 0)
    except (ValueError, TypeError):
        return  # said by Client itself
    if scheme not in ("tcp", "tls"):
        return
    if not port:
        raise AttachError(
            f"the scheduler's address {quoted(address)} has no port; write it as dask-scheduler "
            f"prints it, for example tcp://{host[:100]}:8786"
        )
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:
        # A name that is too long for any machine is no UnicodeError that a user knows.
        reason = (
            error.strerror or error if isinstance(error, OSError) else "no machine has such a name"
        )
        raise AttachError(
            f"cannot connect to the scheduler {quoted(address)}: {reason}; {cure}"
        ) from error


def dashboard(client: Client) -> str:
    """Where the dashboard's pages about workflows are once the cluster is attached, or what they need."""
    if find_spec("bokeh") is None:
        return "no dashboard here; it needs bokeh: pip install 'st2i_dask[dashboard]'"
    return f"dashboard: {client.dashboard_link.removesuffix('/status')}/st2i"
