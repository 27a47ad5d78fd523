"""Requests that are watched while a test holds up their runs: on a cluster of `live`."""

from __future__ import annotations

import threading

from ..scheduler_plugin.live import chain, hooks, rest

TIMEOUT = 60
_gates: list[threading.Event] = []


def gate(label, *values):
    """Runs of `label` with one of these values wait for the event that is returned."""
    go = threading.Event()
    _gates.append(go)
    hooks[label] = lambda value: value in values and go.wait(TIMEOUT)
    return go


def submit(client, tenant, n=1, **more):
    return [
        chain.submit(client, tenant=tenant, value=0.0, label=tenant, **{"seconds": 0.01, **more})
        for _ in range(n)
    ]


def open_gates(request):
    """After a test: whatever waits goes on, and nothing is left on the cluster of its `client`."""
    hooks.clear()
    while _gates:
        _gates.pop().set()
    if "client" in request.fixturenames:
        rest(request.getfixturevalue("client"))
