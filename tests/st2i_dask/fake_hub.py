"""A hub on this machine: as much of its HTTP interface as `snapshot_download` uses, over real sockets.

Like the hub it sends clients elsewhere for weights: to a second server, at another address, that is
not to see tokens. It counts what is asked for, and goes wrong on demand.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REPOSITORY = "some-one/some-model"
COMMIT = "c0ffee" + "0" * 34


@dataclass
class Request:
    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class FakeHub:
    """Serves `files`, bytes by name, as one repository. A context."""

    files: dict[str, bytes]
    #: What was asked for, in order.
    requests: list[Request] = field(default_factory=list)
    #: Bytes after which every body of a file ends and its connection with it.
    cut: dict[str, int] = field(default_factory=dict)
    #: Bytes after which bodies of a file wait for `gate`.
    hold: dict[str, int] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    #: Bodies that are sent instead of a file's own, one after the other.
    instead: dict[str, list[bytes]] = field(default_factory=dict)
    #: What answers the next requests for a file's body: a status, or None: the body.
    failures: dict[str, list[int | None]] = field(default_factory=dict)

    def __enter__(self) -> FakeHub:
        self._lock = threading.Lock()
        self._servers = [_server(self, handler) for handler in (_Hub, _Storage)]
        self._threads = [
            threading.Thread(target=s.serve_forever, args=(0.02,)) for s in self._servers
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.gate.set()
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()  # waits for the threads that serve

    @property
    def address(self) -> str:
        return _address(self._servers[0])

    @property
    def storage(self) -> str:
        return _address(self._servers[1])

    def bodies(self, name: str) -> list[Request]:
        """The requests for a file's body."""
        path = f"/{hashlib.sha256(self.files[name]).hexdigest()}"
        paths = (path, f"/{REPOSITORY}/resolve/{COMMIT}/{name}")
        with self._lock:
            return [r for r in self.requests if r.method == "GET" and r.path in paths]

    def _count(self, handler: BaseHTTPRequestHandler) -> None:
        request = Request(
            handler.command,
            unquote(urlsplit(handler.path).path),
            handler.headers["Range"],
            handler.headers["Authorization"],
        )
        with self._lock:
            self.requests.append(request)


def is_large(name: str) -> bool:
    """Whether the hub keeps it in its storage (in Git LFS)."""
    return name.endswith((".safetensors", ".bin"))


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _server(hub, handler) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = False
    server.hub = hub
    return server


def _address(server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    @property
    def hub(self) -> FakeHub:
        return self.server.hub

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_file(self, name):
        """With whatever is to go wrong."""
        hub, data = self.hub, self.hub.files[name]
        with hub._lock:
            status = hub.failures[name].pop(0) if hub.failures.get(name) else None
            if status is not None:
                return self.answer(status)
            if hub.instead.get(name):
                data = hub.instead[name].pop(0)
        start, whole = 0, len(data)
        if self.headers["Range"]:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            start, data = int(first), data[: int(last or whole) + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{whole}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        end = min(len(data), hub.cut.get(name, len(data)))
        held = min(end, hub.hold.get(name, end))
        try:
            self.wfile.write(data[start:held])
            if held < end:
                hub.gate.wait(60)
                self.wfile.write(data[max(start, held) : end])
        except (BrokenPipeError, ConnectionResetError):  # whoever asked is gone
            self.close_connection = True


class _Hub(_Handler):
    def do_GET(self):
        self.hub._count(self)
        path = unquote(urlsplit(self.path).path).replace("/resolve/main/", f"/resolve/{COMMIT}/")
        api, resolve = f"/api/models/{REPOSITORY}", f"/{REPOSITORY}/resolve/{COMMIT}/"
        if path == "/open":
            self.hub.gate.set()
            self.answer(200)
        elif path == f"{api}/revision/main":
            self.answer(200, json.dumps({"id": REPOSITORY, "sha": COMMIT}).encode())
        elif path.startswith((f"{api}/tree/{COMMIT}", f"{api}/tree/main")):
            folder = path.removeprefix(f"{api}/tree/").partition("/")[2]
            entries = [self.entry(name) for name in self.hub.files if name.startswith(folder)]
            self.answer(200, json.dumps(entries).encode())
        elif path.startswith(resolve) and path.removeprefix(resolve) in self.hub.files:
            self.resolve(path.removeprefix(resolve))
        else:
            self.answer(404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET

    def entry(self, name):
        data = self.hub.files[name]
        entry = {"type": "file", "path": name, "size": len(data), "oid": git_hash(data)}
        if is_large(name):
            digest = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 134}
        return entry

    def resolve(self, name):
        data = self.hub.files[name]
        digest = hashlib.sha256(data).hexdigest()
        if is_large(name):
            self.answer(
                302,
                X_Repo_Commit=COMMIT,
                X_Linked_Size=str(len(data)),
                X_Linked_Etag=f'"{digest}"',
                Location=f"{self.hub.storage}/{digest}",
            )
        elif self.command == "HEAD":
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{git_hash(data)}"')
            self.end_headers()
        else:
            self.send_file(name)


class _Storage(_Handler):
    def do_GET(self):
        self.hub._count(self)
        digest = urlsplit(self.path).path[1:]
        for name, data in self.hub.files.items():
            if hashlib.sha256(data).hexdigest() == digest:
                return self.send_file(name)
        return self.answer(404)
