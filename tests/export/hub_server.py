"""A stand-in of the Hugging Face Hub on the loopback interface: repositories are created, committed to and downloaded from."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the server has been given."""

    url: str = ""
    created: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    """By repository and path."""
    tokens: set[str] = field(default_factory=set)


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.tokens.add(self.headers.get("Authorization", ""))
            part = self.path.split("/")
            if self.path == "/api/repos/create":
                hub.created.append(json.loads(body))
                self._answer({"url": f"{hub.url}/{json.loads(body)['organization']}/{json.loads(body)['name']}"})
            elif self.path == "/api/validate-yaml":
                self._answer({"errors": [], "warnings": []})
            elif part[5] == "preupload":
                files = [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
                self._answer({"files": files})
            else:  # a commit: a header, then one line for each file
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        value = line["value"]
                        hub.files[f"{part[3]}/{part[4]}/{value['path']}"] = base64.b64decode(value["content"])
                self._answer(
                    {
                        "success": True,
                        "commitOid": COMMIT,
                        "commitUrl": f"{hub.url}/{part[3]}/{part[4]}/commit/{COMMIT}",
                    }
                )

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            name = (
                self.path.partition("?")[0].lstrip("/").replace("resolve/main/", "").replace(f"resolve/{COMMIT}/", "")
            )
            if name in hub.files:
                self._answer(hub.files[name])
            else:
                self._answer(
                    {"id": "model", "sha": COMMIT, "siblings": []}, status=200 if "/api/" in self.path else 404
                )

        def _answer(self, content: Any, status: int = 200) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header(
                "Content-Type", "application/octet-stream" if isinstance(content, bytes) else "application/json"
            )
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    return Handler


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
