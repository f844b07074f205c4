"""Downloads from a hub: a small local server that speaks as much of its protocol as the client asks
for.
"""

import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_qlora.sharding.loading.weight_files import BUFFER
from fsdp_qlora.utils.hub import conversion_advice
from stand_in.environment import free_port
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import ROOT, flags
from tests.loading.test_heads import tied_model
from tests.loading.test_named_layers import BLOCKS, unquantize
from tests.loading.test_prequantized import save_fp8, set_config

COMMIT = "c" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 48_000,
    "original/other.safetensors": b"no",
}
FIND = """
import functools, logging, os, sys
from fsdp_qlora.utils.errors import LostRank, UserError
from fsdp_qlora.utils.hub import find_model_folder
from fsdp_qlora.distributed.ranks import read_ranks
from fsdp_qlora.distributed.store import connect, once_per_machine
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
ranks = read_ranks()
store = connect(ranks)
print("CONNECTED", flush=True)
try:
    with_weights = os.environ.get("WITH_WEIGHTS", "1") == "1"
    once = functools.partial(once_per_machine, ranks, store)
    print("FOLDER", find_model_folder("owner/model", with_weights=with_weights, once=once))
except UserError as error:
    print("REFUSED", error)
except LostRank as error:
    print("LOST", error)
"""


class Hub:
    """files: of owner/model. moves: whether somebody commits to it each time after it was asked for
    its newest commit.

    It answers nothing while `may_answer` is not set.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.gated = False
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.commit = COMMIT
        self.moves = False
        self.requests: Counter[str] = Counter()
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        self.is_asked.set()
        self.may_answer.wait(600)
        path = request.path.partition("?")[0]
        files: list[dict[str, Any]] = [
            {"path": name, "rfilename": name, "type": "file"} for name in self.files
        ]
        for file in files:
            file |= {"size": len(self.files[file["path"]]), "oid": self.hash(file["path"])}
        if self.gated:
            self.send(request, 403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path.startswith("/api/models/owner/model/tree/"):
            self.send(request, 200, json.dumps(files).encode(), {})
        elif path.startswith("/api/models/owner/model"):
            asked = path.partition("/revision/")[2]
            commit = asked if re.fullmatch(r"[0-9a-f]{40}", asked) else self.commit
            if commit == self.commit and self.moves:
                self.commit = hashlib.sha1(self.commit.encode()).hexdigest()
            about = {"id": "owner/model", "sha": commit, "siblings": files}
            self.send(request, 200, json.dumps(about).encode(), {})
        elif found := re.fullmatch(r"/owner/model/resolve/([^/]+)/(.+)", path):
            commit, name = found.groups()
            self.requests[name] += request.command == "GET"
            about = {"ETag": f'"{self.hash(name)}"', "X-Repo-Commit": commit}
            self.send(request, 200, self.files[name], about)
        else:
            self.send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def hash(self, name: str) -> str:
        return hashlib.sha1(self.files[name]).hexdigest()

    def send(self, request: Any, status: int, body: bytes, headers: dict[str, str]) -> None:
        request.send_response(status)
        usual = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        for name, value in {**usual, **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub(dict(FILES))
    yield hub
    hub.server.shutdown()


def hub_environment(hub: Hub, home: Path) -> dict[str, str]:
    """The environment of a process whose hub this is."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    address = f"http://127.0.0.1:{hub.server.server_port}"
    return clean | {"HF_ENDPOINT": address, "HF_HOME": str(home / "hub")}


@pytest.fixture
def start(hub: Hub, tmp_path: Path) -> Callable[..., list[subprocess.Popen[str]]]:
    """start(ranks, **environment): the processes of one launch, rank 0 the last to be started."""

    def start(ranks: int, **environment: str) -> list[subprocess.Popen[str]]:
        common = hub_environment(hub, tmp_path) | {"TMPDIR": str(tmp_path)}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), **environment}
        output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        argv = [sys.executable, "-c", FIND]
        started = []
        for rank in reversed(range(ranks)):
            own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(subprocess.Popen(argv, cwd=ROOT, env=own, **output))
        return started[::-1]

    return start


@pytest.fixture
def find(start: Callable[..., list[subprocess.Popen[str]]]) -> Callable[..., list[str]]:
    """find(ranks, **environment): what each rank of one launch prints."""
    return lambda ranks, **environment: [
        process.communicate(timeout=600)[0] for process in start(ranks, **environment)
    ]


def test_two_ranks_fetch_each_file_once_and_offline_finds_it_again(hub, find, tmp_path):
    outputs = find(2)
    (folder,) = {output.partition("FOLDER ")[2].strip() for output in outputs}
    assert Path(folder).is_relative_to(tmp_path), outputs
    assert (Path(folder) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    # and not the copy in another layout
    assert hub.requests == {"config.json": 1, "model.safetensors": 1}
    assert "Downloading owner/model: 2 files" in outputs[0]
    assert "Downloading" not in outputs[1].partition("FOLDER")[0]
    (offline,) = find(1, HF_HUB_OFFLINE="1")
    assert f"FOLDER {folder}" in offline and sum(hub.requests.values()) == 2


def test_every_rank_reports_why_a_download_failed(hub, find):
    (output,) = find(1, HF_HUB_OFFLINE="1")
    assert "REFUSED model_name owner/model: there is no such local folder" in output
    hub.gated = True
    for output in find(2):
        assert "REFUSED" in output and "it is gated: accept its terms on its page there" in output
        assert "HF_TOKEN" in output
    hub.gated = False
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    for ranks, with_weights in ((2, "1"), (1, "0")):  # a run fetches them last
        for output in find(ranks, WITH_WEIGHTS=with_weights):
            assert "has only pickled weights (pytorch_model.bin)" in output
            assert conversion_advice("owner/model") in output
    assert not hub.requests


def test_a_download_larger_than_the_free_disk_is_refused(hub, find):
    class Huge(bytes):
        def __len__(self) -> int:
            return 2**60

    hub.files["model.safetensors"] = Huge(b"")
    # there must be room for them too, which a run fetches later
    (output,) = find(1, WITH_WEIGHTS="0")
    assert "1073741824.0 GiB in" in output and "set HF_HUB_CACHE" in output
    assert not hub.requests


def test_ranks_report_a_killed_download(hub, start):
    hub.may_answer.clear()
    downloader, waiting = start(2)
    assert waiting.stdout and waiting.stdout.readline() == "CONNECTED\n" and hub.is_asked.wait(600)
    downloader.kill()
    downloader.wait()
    said = waiting.communicate(timeout=600)[0]
    assert "LOST Rank 0 has ended while rank 1 waited for the download of owner/model." in said
    hub.may_answer.set()


def test_the_table_of_known_models_is_compared_with_the_hub(hub, tmp_path):
    sizes = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    config = {"text_config": {**sizes, "head_dim": None}, "num_hidden_layers": 2}
    hub.files["config.json"] = json.dumps(config).encode()

    right = {"hub": "owner/model", **sizes, "num_hidden_layers": 2, "head_dim": 16}
    others = {
        "absent": {**right, "hub": "owner/other"},
        "wrong": {**right, "hidden_size": 32},
        "lost": "no_model",
    }
    tables = [tmp_path / "right.yaml", tmp_path / "others.yaml"]
    for path, table in zip(tables, ({"right": right, "again": "right"}, others), strict=True):
        path.write_text(json.dumps(table))
    said = output_of(hub, tmp_path, CHECK_MODELS, *map(str, tables))
    assert said.startswith("right (owner/model): as on the hub\n") and said.endswith("[0, 2]\n")
    assert "absent (owner/other): cannot be read" in said
    assert "hidden_size is 64 there, and 32 here" in said and "names of no model: lost" in said


CASES: dict[str, dict[str, object]] = {
    "a dataset that is not there": {"dataset": "no/such.jsonl"},
    "columns of no known format": {"dataset": "columns.jsonl"},
    "a wrong held-out set": {"eval_dataset": "no/such.jsonl"},
    "a layer that the model has not": {"lora_target_modules": "q_prj"},
    "more memory than there is": {},  # of BUFFER
}
CHECK_MODELS = """
import sys
from scripts.check_models import main
print([main([path]) for path in sys.argv[1:]])
"""
REFUSE = """
import json, sys, train
for argv in json.loads(sys.argv[1]):
    print("STATUS", train.main(argv), flush=True)
"""


def run_in_turn(
    hub: Hub, folder: Path, cases: list[dict[str, object]], *, buffer_mib: str = "128"
) -> tuple[list[int], str]:
    """Runs of train.py in one process, whose hub this is: their exit statuses and all that they
    print.
    """
    rows = write_rows(folder / "rows.jsonl", make_rows(4))
    write_rows(folder / "columns.jsonl", [{"a": "1", "b": "2"}])
    common = {"model_name": "owner/model", "dataset": rows, "max_steps": 1}
    common |= {"log_to": "stdout", "quant_cache": "off"}
    argvs = [
        flags(**{**common, "output_dir": folder / f"out{number}", **case})
        for number, case in enumerate(cases)
    ]
    said = output_of(hub, folder, REFUSE, json.dumps(argvs), **{BUFFER: buffer_mib})
    ends = [line for line in said.splitlines() if line.startswith("STATUS")]
    return [int(line.split()[1]) for line in ends], said


def output_of(hub: Hub, folder: Path, code: str, *argv: str, **environment: str) -> str:
    """All that a process prints which runs this code, and whose hub this is."""
    own = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), **environment}
    done = subprocess.run(
        [sys.executable, "-c", code, *argv],
        cwd=folder,
        env=hub_environment(hub, folder) | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    return done.stdout


@pytest.mark.slow
def test_weights_that_decide_about_the_head_are_downloaded_before_the_plan(hub, tmp_path):
    folder = tied_model(tmp_path / "model")
    hub.files = {path.name: path.read_bytes() for path in folder.iterdir()}
    statuses, output = run_in_turn(hub, tmp_path, [{"train_type": "lora"}])
    assert statuses == [0] and hub.requests["model.safetensors"] == 1, output
    assert output.index("have a separate head") < output.index("Model: LlamaForCausalLM")


@pytest.mark.slow
def test_a_model_is_refused_before_its_weights_are_downloaded(hub, models, tmp_path):
    hub.files = {path.name: path.read_bytes() for path in models().iterdir()}
    hub.moves = True
    statuses, output = run_in_turn(hub, tmp_path, list(CASES.values()), buffer_mib="1e9")
    assert dict(zip(CASES, statuses, strict=True)) == dict.fromkeys(CASES, 2), output
    assert hub.requests["config.json"] > 0 and hub.requests["model.safetensors"] == 0, output
    # Then a run that is accepted gets them, of the commit that it has planned with, and the next
    # one needs no hub.
    statuses, output = run_in_turn(hub, tmp_path, [{}])
    assert statuses == [0] and hub.requests["model.safetensors"] == 1, output
    [weights] = (tmp_path / "hub").glob("hub/models--owner--model/snapshots/*/*.safetensors")
    assert (weights.parent / "config.json").exists() and len(list(weights.parents[1].iterdir())) > 1
    hub.gated = True
    statuses, output = run_in_turn(hub, tmp_path, [{"output_dir": tmp_path / "again"}])
    assert statuses == [0], output
    # A resumed run with other rows is refused before the weights of a newer commit.
    hub.gated = False
    more = write_rows(tmp_path / "more.jsonl", make_rows(5))
    again = {"output_dir": tmp_path / "again", "dataset": more}
    statuses, output = run_in_turn(hub, tmp_path, [again])
    assert statuses == [2] and "the rows (--dataset, --eval_dataset) are not the same" in output
    assert hub.requests["model.safetensors"] == 1


@pytest.mark.slow
def test_the_only_file_of_a_quantized_model_tells_its_layers(hub, models, tmp_path):
    folder = tmp_path / "model"
    save_fp8(models("llama"), folder, "blocks")
    unquantize(folder)
    set_config(folder, quantization_config=BLOCKS)  # without a list of other layers
    hub.files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.moves = True
    statuses, output = run_in_turn(hub, tmp_path, [{"allow_unquantized": True}])
    assert statuses == [0] and hub.requests["model.safetensors"] == 1, output
    assert "its weights are trained on as they are" in output
