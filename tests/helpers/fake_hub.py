"""A stand-in for the hub on loopback: who a token belongs to, new repositories, and commits of small files."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_secret"


@dataclass
class FakeHub:
    """Requests that it got. created: names, and whether they are private. files: by repository and path.

    fails: a commit is answered with this status.
    """

    role: str = "write"
    fails: int | None = None
    created: list[tuple[str, bool]] = field(default_factory=list)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    url: str = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/api/whoami-v2":
            return 200, {"name": "me", "orgs": [{"name": "team"}], "auth": {"accessToken": {"role": self.role}}}
        if path == "/api/repos/create":
            asked = json.loads(body)
            # Older versions of the library say `private`.
            self.created.append((asked["name"], asked.get("private", asked.get("visibility") == "private")))
            owner = asked.get("organization") or "me"
            return 200, {"url": f"{self.url}/{owner}/{asked['name']}", "name": f"{owner}/{asked['name']}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            return 200, {
                "files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in files]
            }
        if path.endswith("/commit/main"):
            if self.fails is not None:
                return self.fails, {"error": "no more room"}
            repo = path.removeprefix("/api/models/").removesuffix("/commit/main")
            for line in body.decode().splitlines():
                item = json.loads(line)
                if item["key"] == "file":
                    content = base64.b64decode(item["value"]["content"])
                    self.files.setdefault(repo, {})[item["value"]["path"]] = content
            return 200, {"commitUrl": f"{self.url}/{repo}/commit/1", "commitOid": "1"}
        return 404, {"error": f"{method} {path}"}


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            hub.tokens.add(token)
            path = self.path.partition("?")[0]
            status, reply = hub.answer(self.command, path, body) if token == TOKEN else (401, {"error": "who?"})
            text = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = _answer

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
