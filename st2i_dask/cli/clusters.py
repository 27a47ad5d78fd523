"""The cluster behind a command: one of its own, or one that runs already. And quiet logs."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from ..errors import AttachError
from .interrupts import shielded_children

if TYPE_CHECKING:
    from distributed import Client

CONNECT_SECONDS = 10.0


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
def own_cluster(workers: int) -> Iterator[Client]:
    """A client of a new local cluster, which ends with the context."""
    from distributed import Client

    from ..cluster import local_cluster

    quiet_logs()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with shielded_children():
            cluster = local_cluster(workers, silence_logs=logging.ERROR)
    for warning in caught:
        if "already in use" in str(warning.message):
            click.echo("the dashboard's usual port is taken; it gets another one", err=True)
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    with cluster, Client(cluster, set_as_default=False) as client:
        client.run(_drop_noise)
        yield client


#: What workers log as errors although it is none: a failed task is reported by the command, once;
#: a cluster that closes while tasks run breaks off heartbeats.
_NOISE = ("Compute Failed", "Failed to communicate with scheduler during heartbeat")


def _drop_noise() -> None:
    """On a worker of ours."""
    logging.getLogger("distributed.worker").addFilter(
        lambda record: not record.getMessage().startswith(_NOISE)
    )


@contextlib.contextmanager
def running_cluster(address: str) -> Iterator[Client]:
    """A client of the cluster at this address. AttachError when nobody answers."""
    from distributed import Client

    quiet_logs()
    try:
        client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:  # TimeoutError is an OSError
        reason = (
            "it is no address"
            if isinstance(error, (ValueError, TypeError))
            else (f"nobody answered within {CONNECT_SECONDS:.0f} s")
        )
        raise AttachError(
            f"cannot connect to the scheduler {address!r}: {reason}; give the address that "
            "dask-scheduler prints, for example tcp://10.0.0.5:8786, or leave --scheduler out to "
            "use this machine"
        ) from error
    with client:
        if not client.nthreads():
            click.echo(f"the cluster at {address} has no worker yet; waiting", err=True)
        yield client


def dashboard(client: Client) -> str:
    """Where the dashboard is, or what it needs."""
    if find_spec("bokeh") is None:
        return "no dashboard here; it needs bokeh: pip install 'st2i_dask[dashboard]'"
    return f"dashboard: {client.dashboard_link}"
