"""Is this cluster fit to serve: versions, devices, arenas, transports, the scheduler's seams.

It changes nothing: plugins stay as they are, and it works beside requests that run.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .cluster import PIXEL_PACKAGES, by_value
from .config import check_node, worker_options
from .errors import AttachError
from .node_facts import package_versions, scheduler_facts, worker_facts

if TYPE_CHECKING:
    from distributed import Client

#: How long a worker may take to answer, seconds.
ANSWER_SECONDS = 20.0

_PACKAGES = ("st2i_dask", "distributed", "dask", *PIXEL_PACKAGES)


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at on which node. level: "ok", "note" (slower than it could be, or not looked
    at) or "wrong". cure: what to do, empty for ok."""

    level: Literal["ok", "note", "wrong"]
    node: str
    what: str
    cure: str = ""


def examine(client: Client) -> list[Finding]:
    """Look at client, scheduler and workers of the client's cluster."""
    found: list[Finding] = list(_here())
    versions, facts = by_value(package_versions), by_value(worker_facts)
    scheduler = client.run_on_scheduler(by_value(scheduler_facts))
    nodes = {
        "client": package_versions(_PACKAGES),
        "scheduler": client.run_on_scheduler(versions, _PACKAGES),
    }
    answers = _on_workers(client, scheduler["workers"], facts)
    workers = {address: answer for address, answer in answers.items() if isinstance(answer, dict)}
    nodes.update(
        (address, answer)
        for address, answer in _on_workers(client, list(workers), versions, _PACKAGES).items()
        if isinstance(answer, dict)
    )
    found += _versions(nodes)
    found += _scheduler(scheduler)
    found += _configuration("scheduler", scheduler["configuration"])
    found += [
        Finding("wrong", address, str(answer), "see its log; restart it if it hangs")
        for address, answer in sorted(answers.items())
        if address not in workers
    ]
    if not scheduler["workers"]:
        found.append(
            Finding(
                "wrong", "scheduler", "the cluster has no worker",
                f"start some: dask worker {client.scheduler.address} --nthreads 1 --preload "
                "worker_plugin.preload",
            )
        )  # fmt: skip
    serving = []
    for address, facts in sorted(workers.items()):
        found += _worker(address, facts, scheduler["attached"])
        if facts["serves"]:
            serving.append(address)
    if serving:
        found += client.sync(_checkups, client, serving)
    return found


# -- looking ---------------------------------------------------------------------------------------


def _here() -> Iterator[Finding]:
    try:
        check_node()
        worker_options()
        yield Finding("ok", "client", "configuration st2i: every key is known")
    except AttachError as error:
        yield from _configuration("client", str(error))


def _configuration(node: str, wrong: str) -> Iterator[Finding]:
    """wrong: what is, and its cure; empty: nothing."""
    if wrong:
        what, _, cure = wrong.partition("; ")
        yield Finding("wrong", node, what, cure)


def _versions(nodes: dict[str, dict[str, str | None]]) -> Iterator[Finding]:
    for package in _PACKAGES:
        # The scheduler needs no model library, and a client draws no picture.
        pixel = package in PIXEL_PACKAGES
        asked = {
            node: found[package]
            for node, found in nodes.items()
            if not (pixel and node in ("client", "scheduler"))
        }
        by_version: dict[str | None, list[str]] = defaultdict(list)
        for node, version in asked.items():
            by_version[version].append(node)
        listing = "; ".join(
            f"{version or 'not installed'}: {_some(names)}" for version, names in by_version.items()
        )
        if len(by_version) > 1:
            yield Finding(
                "wrong", "versions", f"{package} differs ({listing})",
                f"install one version of {package} on every node"
                + ("; images depend on it" if pixel else ""),
            )  # fmt: skip
        elif None in by_version:
            yield Finding(
                "wrong", "versions", f"{package} is nowhere installed", f"pip install {package}"
            )
        elif by_version:
            yield Finding(
                "ok", "versions", f"{package} {listing.partition(':')[0]} on {len(asked)} nodes"
            )


def _scheduler(facts: dict[str, Any]) -> Iterator[Finding]:
    if facts["seams"]:
        yield Finding(
            "wrong", "scheduler", f"the plugin cannot work in it: {facts['seams']}",
            "install the release of distributed that is named, and restart the scheduler",
        )  # fmt: skip
    elif not facts["attached"]:
        yield Finding(
            "note", "scheduler", "the plugin is not there yet; its seams are those that are known",
            "start it with --preload scheduler_plugin.preload; else the first request attaches",
        )  # fmt: skip
    elif not facts["installed"]:
        yield Finding(
            "wrong", "scheduler", "the plugin is there, but its seams are not in place",
            "restart the scheduler; look in its log for what failed",
        )  # fmt: skip
    else:
        yield Finding("ok", "scheduler", "the plugin decides: all seams are in place")


def _worker(address: str, facts: dict[str, Any], attached: bool) -> Iterator[Finding]:
    if facts["nthreads"] != 1:
        yield Finding(
            "note", address, f"{facts['nthreads']} threads; an executor has one",
            "start it with --nthreads 1",
        )  # fmt: skip
    if facts["driver"] and not facts["cuda"]:
        yield Finding(
            "wrong", address, "the machine has a CUDA driver, but torch sees no device",
            "install a torch built for CUDA, or check CUDA_VISIBLE_DEVICES; to use the CPU on "
            "purpose, set device: cpu",
        )  # fmt: skip
    yield from _configuration(address, facts["configuration"])
    if not facts["serves"]:
        failed = facts["plugin"]
        yield Finding(
            "wrong" if failed or attached else "note",
            address,
            "its plugin did not start" if failed else "it has no plugin yet",
            "see its log, and restart it"
            if failed
            else "start it with --preload worker_plugin.preload; else the first request attaches",
        )


async def _checkups(client: Client, addresses: list[str]) -> list[Finding]:
    answers = await asyncio.gather(*(_ask(client, a, "st2i_checkup") for a in addresses))
    found: list[Finding] = []
    sound: dict[str, dict[str, Any]] = {}
    for address, answer in zip(addresses, answers, strict=True):
        if "error" in answer:
            found.append(Finding("wrong", address, answer["error"], "see its log, and restart it"))
        else:
            sound[address] = answer
            found += _arena(address, answer)
    found += _shared_devices(sound)
    if len(sound) < 2:
        found.append(
            Finding("note", "transports", "no pull was tried", "it takes two workers that serve")
        )
    for owner, taker in _pairs(sound):
        found.append(await _trial(client, owner, taker, sound))
    return found


def _arena(address: str, facts: dict[str, Any]) -> Iterator[Finding]:
    arena, nvshmem = facts["arena"], facts["nvshmem"]
    size = f"{arena['nbytes'] / 2**20:,.0f} MiB"
    where = f"{facts['device']['name']} on {facts['host']}, {arena['kind']} arena of {size}"
    yield Finding("ok", address, where)
    if nvshmem == "off" and facts["device"]["name"] != "cpu":
        yield Finding(
            "note", address, "NVSHMEM is off: tensors go through host memory",
            "leave nvshmem out, or set nvshmem: true",
        )  # fmt: skip
    elif nvshmem not in ("on", "off"):
        what, _, cure = nvshmem.partition("; ")
        yield Finding("wrong", address, what, cure)


def _shared_devices(workers: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    users: dict[str, list[str]] = defaultdict(list)
    for address, facts in workers.items():
        if facts["device"]["uuid"]:
            users[facts["device"]["uuid"]].append(address)
    for device, addresses in users.items():
        if len(addresses) > 1:
            yield Finding(
                "wrong", _some(addresses), f"they share the device {device}",
                "give every worker its own: dask cuda worker, or CUDA_VISIBLE_DEVICES",
            )  # fmt: skip


def _pairs(workers: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Every worker gives to the next one of its host, and the first one of a host to the next host's."""
    hosts: dict[str, list[str]] = defaultdict(list)
    for address, facts in sorted(workers.items()):
        hosts[facts["host"]].append(address)
    rings = [*hosts.values(), [addresses[0] for addresses in hosts.values()]]
    return [
        (owner, ring[(i + 1) % len(ring)])
        for ring in rings
        if len(ring) > 1
        for i, owner in enumerate(ring)
    ]


async def _trial(
    client: Client, owner: str, taker: str, workers: dict[str, dict[str, Any]]
) -> Finding:
    node = f"{owner} -> {taker}"
    taken = await _ask(client, taker, "st2i_trial", owner=owner)
    if "error" in taken:
        return Finding(
            "wrong", node, f"a pull failed: {taken['error']}",
            "see the logs of both workers; is the port of the first one open to the second?",
        )  # fmt: skip
    way = taken["transport"]
    if way != "comm":
        return Finding("ok", node, f"pulled by transport {way}")
    if not taken["stored"]:
        return Finding(
            "note", node, "pulled inside a message: the arena of the first one is full",
            "give it a larger one (arena_bytes)",
        )  # fmt: skip
    if workers[owner]["host"] == workers[taker]["host"]:
        return Finding(
            "wrong", node, "on one machine, but the second cannot read the first one's arena",
            "run both as one user, in one container or with a shared process namespace, with arenas "
            "of one kind",
        )  # fmt: skip
    return Finding("ok", node, "pulled inside a message (transport comm), between machines")


async def _ask(client: Client, address: str, op: str, **arguments: Any) -> dict[str, Any]:
    """The worker's answer, through the scheduler: a client need not reach workers."""
    try:
        answers = await asyncio.wait_for(
            client.scheduler.broadcast(
                msg={"op": op, **arguments}, workers=[address], on_error="return"
            ),
            ANSWER_SECONDS,
        )
    except TimeoutError:
        return {"error": f"it did not answer {op} within {ANSWER_SECONDS:.0f} s"}
    answer = answers.get(address)
    if isinstance(answer, BaseException):
        return {"error": f"{op}: {type(answer).__name__}: {answer}"}
    if answer is None:
        return {"error": f"it does not answer {op}"}
    found: dict[str, Any] = answer
    return found


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _on_workers(
    client: Client, addresses: list[str], function: Any, *arguments: Any
) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        asked = [
            asyncio.ensure_future(
                client._run(function, *arguments, workers=[address], on_error="return")
            )
            for address in addresses
        ]
        if asked:
            await asyncio.wait(asked, timeout=ANSWER_SECONDS)
        answers: dict[str, Any] = {}
        for address, task in zip(addresses, asked, strict=True):
            task.cancel()
            if not task.done():
                answers[address] = f"it did not answer within {ANSWER_SECONDS:.0f} s"
            elif task.exception() is not None:
                answers[address] = f"it did not answer: {task.exception()}"
            else:
                answers[address] = task.result().get(address, "it has gone")
        return answers

    found: dict[str, Any] = client.sync(ask)
    return found
