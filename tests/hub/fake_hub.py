"""A model hub on this machine, as far as downloads need one: repository listings, file headers, ranged downloads."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class FakeHub:
    """Repositories by name, each from file name to contents. `requests` are those seen, as "METHOD path"."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    cut_after: int | None = None  # the next file download ends after this many bytes
    url: str = ""

    def revision(self, repository: str) -> str:
        contents = json.dumps(sorted((k, v.hex()) for k, v in self.repositories[repository].items()))
        return hashlib.sha1(contents.encode()).hexdigest()

    def downloads(self) -> list[str]:
        return [
            request.rpartition("/")[2]
            for request in self.requests
            if request.startswith("GET") and "/resolve/" in request
        ]


@contextmanager
def serving() -> Iterator[FakeHub]:
    """The hub, answering on a free port of the loopback address while the block runs."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the requests are recorded."""

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            if authorization := self.headers.get("Authorization"):
                hub.tokens.add(authorization.removeprefix("Bearer "))
            parts = path.strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self._listing("/".join(parts[2:4]), body)
            else:
                self._file("/".join(parts[:2]), "/".join(parts[4:]), body)

        def _listing(self, repository: str, body: bool) -> None:
            if repository in hub.gated:
                return self._send(403, {"X-Error-Code": "GatedRepo"}, b"{}", body)
            if repository not in hub.repositories:
                return self._send(404, {"X-Error-Code": "RepoNotFound"}, b"{}", body)
            files = hub.repositories[repository]
            siblings = [{"rfilename": name, "size": len(data), "blobId": etag(data)} for name, data in files.items()]
            answer = {"id": repository, "modelId": repository, "sha": hub.revision(repository), "siblings": siblings}
            return self._send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode(), body)

        def _file(self, repository: str, name: str, body: bool) -> None:
            files = hub.repositories.get(repository, {})
            if name not in files:
                return self._send(404, {"X-Error-Code": "EntryNotFound"}, b"", body)
            data = files[name]
            headers = {"X-Repo-Commit": hub.revision(repository), "ETag": f'"{etag(data)}"', "Accept-Ranges": "bytes"}
            if wanted := self.headers.get("Range"):
                start = int(wanted.removeprefix("bytes=").partition("-")[0])
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
                return self._send(206, headers, data[start:], body)
            return self._send(200, headers, data, body)

        def _send(self, status: int, headers: dict[str, str], data: bytes, body: bool) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body and hub.cut_after is not None and "/resolve/" in self.path:
                data, hub.cut_after = data[: hub.cut_after], None
                self.close_connection = True
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
