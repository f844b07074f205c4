"""A result is uploaded to a hub: a small local server that speaks as much of its protocol as an upload needs."""

import base64
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from fsdp_qlora.errors import UserError
from fsdp_qlora.results import write
from tests.tiny import ROOT, flags, make_rows, write_rows

Models = Callable[..., Path]
TOKEN = "hf_" + "s" * 34


class Hub:
    """files: what was uploaded to owner/result, by path. is_private: None before it was made. fails: refuse commits."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.is_private: bool | None = None
        self.fails = False
        self.tokens: set[str | None] = set()
        self.blobs: dict[str, bytes] = {}
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_POST = do_PUT = do_HEAD = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        path, about = request.path.partition("?")[0], {}
        status = 200
        if "blob" not in path:
            self.tokens.add(request.headers.get("Authorization"))
        if path == "/api/whoami-v2":
            about = {"name": "owner", "orgs": [], "auth": {"accessToken": {"role": "write"}}}
        elif path == "/api/repos/create":
            made = json.loads(body)
            self.is_private = made.get("visibility") == "private" or made.get("private") is True
            about = {"url": f"{self.address}/owner/result"}
        elif path.endswith("/preupload/main"):
            wanted = json.loads(body)["files"]
            about = {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if "safetensors" in file["path"] else "regular",
                        "shouldIgnore": False,
                    }
                    for file in wanted
                ]
            }
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            href = {o["oid"]: {"href": f"{self.address}/blob/{o['oid']}"} for o in objects}
            about = {"transfer": "basic", "objects": [{**o, "actions": {"upload": href[o["oid"]]}} for o in objects]}
        elif path.startswith("/blob/"):
            self.blobs[path.rpartition("/")[2]] = body
        elif path.endswith("/commit/main") and self.fails:
            status = 403
        elif path.endswith("/commit/main"):
            self.commit([json.loads(line) for line in body.splitlines()])
            about = {"commitUrl": f"{self.address}/owner/result/commit/{'c' * 40}", "commitOid": "c" * 40}
        elif self.is_private is None:
            status = 404
        elif path == "/api/models/owner/result":
            about = {"id": "owner/result", "private": self.is_private}
        self.send(request, status, json.dumps(about).encode())

    def commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.blobs[value["oid"]]

    def send(self, request: http.server.BaseHTTPRequestHandler, status: int, body: bytes) -> None:
        request.send_response(status)
        headers = {"Content-Type": "application/vnd.git-lfs+json" if "lfs" in request.path else "application/json"}
        if status == 404:
            headers["X-Error-Code"] = "RepoNotFound"
        if status == 403:
            headers["X-Error-Message"] = "You have no right to write here."
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.server.shutdown()


def start(hub: Hub, home: Path, *words: object) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    more = {"HF_ENDPOINT": hub.address, "HF_HOME": str(home / "hub"), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env={**clean, **more, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_a_result_is_uploaded_with_the_best_adapter_and_a_failure_is_one_sentence(
    hub: Hub, models: Models, tmp_path: Path
) -> None:
    rows, out = write_rows(tmp_path / "rows.jsonl", make_rows(12)), tmp_path / "out"
    hub.fails = True
    options = {"model_name": models(), "dataset": rows, "max_steps": 2, "eval_fraction": 0.1, "lora_rank": 2}
    more = {"output_dir": out, "push_to_hub": "owner/result", "quant_cache": "off", "nproc_per_node": 1}
    done = start(hub, tmp_path, "train.py", *flags(**options, **more))
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "The upload to owner/result failed: " in said and "You have no right to write here" in said, said
    assert (out / "adapter_model.safetensors").is_file() and not hub.files and TOKEN not in said
    hub.fails = False
    made = tmp_path / "made"
    done = start(hub, tmp_path, "-m", "fsdp_qlora", "export", out, "--out", made, "--push_to_hub", "owner/result")
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "Uploaded to the hub: owner/result (" in said and TOKEN not in said, said
    names = set(json.loads((made / "result.json").read_text())["files"])
    assert set(hub.files) == names and hub.is_private is True
    assert hub.files["adapter_model.safetensors"] == (out / "adapter_model.safetensors").read_bytes()
    assert hub.tokens - {None} == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize(
    ("repo", "is_public", "more", "says"),
    [
        ("owner/result", False, {}, None),
        ("owner/new", None, {}, None),
        ("team/new", None, {"orgs": [{"name": "Team"}]}, None),
        ("owner/result", True, {}, "owner/result is public"),
        ("other/result", False, {}, "the login owner may not write there"),
        ("owner/result", False, {"auth": {"accessToken": {"role": "read"}}}, "may not write there"),
        ("owner/result", False, {"status": 401}, "the hub refuses this machine's login"),
        ("owner/result", False, {"status": 500}, None),  # it may answer at the end
        ("owner/result", False, {"token": None}, "there is no login"),
    ],
)
def test_a_repository_is_checked_before_training(
    repo: str, is_public: bool | None, more: dict[str, Any], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repo_info(name: str, timeout: float) -> SimpleNamespace:
        if is_public is None:
            response: Any = SimpleNamespace(headers={}, request=None)
            raise RepositoryNotFoundError("404", response=response)
        return SimpleNamespace(private=not is_public)

    def whoami() -> dict[str, Any]:
        if "status" in more:
            error = OSError("refused")
            error.response = SimpleNamespace(status_code=more["status"])  # type: ignore[attr-defined]
            raise error
        return {"name": "owner", **more}

    monkeypatch.setattr(write, "get_token", lambda: more.get("token", TOKEN))
    monkeypatch.setattr(write, "HfApi", lambda: SimpleNamespace(repo_info=repo_info, whoami=whoami))
    if says is None:
        write.check_repository("--push_to_hub", repo, may_be_public=False)
        return
    with pytest.raises(UserError, match=says):
        write.check_repository("--push_to_hub", repo, may_be_public=False)
    if is_public:
        write.check_repository("--push_to_hub", repo, may_be_public=True)
