"""A stand-in for wandb's server: what a run needs of it, and a record of all that it gets."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROJECT = {"id": "p", "name": "a_project", "entity": {"id": "e", "name": "an_entity"}}

VIEWER: dict[str, Any] | None = {
    "id": "u",
    "entity": "an_entity",
    "name": "u",
    "username": "u",
    "email": "",
    "admin": False,
    "flags": "{}",
    "deletedAt": None,
    "apiKeys": {"edges": []},
    "teams": {"edges": []},
}


class Run:
    """What the server knows of one run: the lines of its streamed files, its config and how it
    ended.
    """

    def __init__(self) -> None:
        self.lines: dict[str, list[str]] = {}
        self.config: dict[str, Any] = {}
        self.names: list[str | None] = []
        self.exit_code: int | None = None
        self.num_starts = 0

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The history as it is shown: one row per step that was logged."""
        return [json.loads(line) for line in self.lines.get("wandb-history.jsonl", [])]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads(self.lines.get("wandb-summary.json", ["{}"])[-1])

    def take(self, request: dict[str, Any]) -> None:
        """Write lines from an offset on, as the server does: a retry writes the same lines to the
        same place.
        """
        for name, piece in request.get("files", {}).items():
            lines = self.lines.setdefault(name, [])
            offset = piece["offset"]
            assert offset <= len(lines), f"lines {len(lines)} to {offset} of {name} never came"
            lines[offset : offset + len(piece["content"])] = piece["content"]
        if request.get("complete"):
            self.exit_code = request["exitcode"]

    def lose_rows(self, number: int) -> None:
        """Be as if the last rows had never been uploaded."""
        del self.lines["wandb-history.jsonl"][-number:]
        self.lines["wandb-summary.json"] = ["{}"]
        for row in self.rows:
            self.lines["wandb-summary.json"] = [json.dumps({**self.summary, **row})]


class WandbServer:
    """Answers wandb on a port of its own.

    With another `status` than 200 that is every answer, and nothing is taken; with 0 there is none
    until it changes.
    """

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.status = 200
        self.errors: list[Exception] = []
        self.num_requests = 0
        self._port = 0
        self._lock = threading.Lock()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def run(self) -> Run:
        """The one run it knows."""
        (run,) = self.runs.values()
        return run

    def start(self) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                server.num_requests += 1
                if server.status == 0:
                    while server.status == 0:
                        time.sleep(0.05)
                    return
                with server._lock:
                    status = server.status
                    content = {}
                    if status == 200:
                        try:
                            content = server._reply(self.path, body)
                        except Exception as error:
                            server.errors.append(error)
                            status = 500
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = answer

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:  # a client that hung up
                pass

        self._http = Server(("127.0.0.1", self._port), Handler)
        self._port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Listen no more, so that connections are refused, until `start`."""
        self._http.shutdown()
        self._http.server_close()

    def _reply(self, path: str, body: bytes) -> dict[str, Any]:
        if path.endswith("/file_stream"):
            self.runs[path.split("/")[-2]].take(json.loads(body))
            return {}
        if path != "/graphql":  # an uploaded file
            return {}
        request = json.loads(body)
        values = request.get("variables") or {}
        match request.get("operationName"):
            case "UpsertBucket":
                return {"data": {"upsertBucket": self._upsert(values)}}
            case "RunResumeStatus":
                return {
                    "data": {"model": {**PROJECT, "bucket": self._resume_status(values["name"])}}
                }
            case "CreateRunFiles":
                files = [
                    {"name": name, "uploadUrl": f"{self.url}/upload/{name}"}
                    for name in values["files"]
                ]
                return {
                    "data": {
                        "createRunFiles": {
                            "runID": values["run"],
                            "uploadHeaders": [],
                            "files": files,
                        }
                    }
                }
            case "Viewer":
                return {"data": {"viewer": VIEWER}}
        return {"data": {}}  # questions about features: there are none

    def _upsert(self, values: dict[str, Any]) -> dict[str, Any]:
        is_new = values["name"] not in self.runs
        run = self.runs.setdefault(values["name"], Run())
        if values.get("displayName"):  # not given where a running run updates its config
            run.num_starts += 1
            run.names = [
                values.get(name) for name in ("entity", "project", "groupName", "displayName")
            ]
        if values.get("config"):
            run.config = json.loads(values["config"])
        bucket = {**self._about(values["name"]), "project": PROJECT}
        return {"bucket": bucket, "inserted": is_new}

    def _resume_status(self, name: str) -> dict[str, Any] | None:
        if name not in self.runs:
            return None
        run = self.runs[name]
        return {
            **self._about(name),
            "summaryMetrics": json.dumps(run.summary),
            "logLineCount": 0,
            "eventsLineCount": 0,
            "historyTail": json.dumps(run.lines.get("wandb-history.jsonl", [])[-1:]),
            "eventsTail": "[]",
            "tags": [],
            "wandbConfig": json.dumps({"t": run.config["_wandb"]["value"]["t"]}),
        }

    def _about(self, name: str) -> dict[str, Any]:
        return {
            "id": f"id of {name}",
            "name": name,
            "displayName": "a_name",
            "config": json.dumps(self.runs[name].config),
            "historyLineCount": len(self.runs[name].rows),
        }
