"""A stand-in for the hub that serves one dataset, as much of its protocol as the `datasets` library asks for."""

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Mapping

COMMIT = "a" * 40


class DatasetHub:
    """files: of the dataset `owner/rows`. ranges: (file, first byte, last byte) of each request for a part of one."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files
        self.ranges: list[tuple[str, int, int]] = []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            def do_HEAD(self) -> None:
                hub.answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        path, api = request.path.partition("?")[0], "/api/datasets/owner/rows"
        if path in (api, f"{api}/revision/{COMMIT}"):
            about = {"id": "owner/rows", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]}
            self.send(request, 200, json.dumps(about).encode())
        elif path.startswith(f"{api}/tree/"):
            folder = path.removeprefix(f"{api}/tree/{COMMIT}").strip("/")
            inside = [name for name in self.files if name.rpartition("/")[0] == folder]
            found = [
                {"type": "file", "path": name, "size": len(self.files[name]), "oid": self.hash(name)} for name in inside
            ]
            found += [{"type": "directory", "path": "data", "size": 0, "oid": "d" * 40}] if not folder else []
            self.send(request, 200, json.dumps(found).encode())
        elif (match := re.match(r"/datasets/owner/rows/resolve/[^/]+/(.+)", path)) and match[1] in self.files:
            self.send_file(request, match[1])
        else:
            self.send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def send_file(self, request: http.server.BaseHTTPRequestHandler, name: str) -> None:
        content = self.files[name]
        about = {"ETag": f'"{self.hash(name)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        asked = re.match(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if asked is None:
            self.send(request, 200, content, about)
            return
        first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
        self.ranges.append((name, first, last))
        about["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self.send(request, 206, content[first : last + 1], about)

    def hash(self, name: str) -> str:
        return hashlib.sha1(self.files[name]).hexdigest()

    def send(
        self,
        request: http.server.BaseHTTPRequestHandler,
        status: int,
        content: bytes,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content)
