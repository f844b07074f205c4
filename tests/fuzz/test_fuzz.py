"""Damaged input of every kind, in seeded cases: success or a refusal in our own words, in time.

FUZZ_CASES is how many of each kind, FUZZ_SEED the first one's seed.
"""

import csv
import errno
import gzip
import io
import json
import os
import random
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml

from fsdp_qlora.checkpoint import checkpoint
from fsdp_qlora.checkpoint.mirror import open_store
from fsdp_qlora.checkpoint.resume import RunFolder
from fsdp_qlora.checkpoint.run_folder import StartRequest
from fsdp_qlora.commands.run_config import parse_train_config, run_options
from fsdp_qlora.config.options import DEFAULTS, RESULT_OPTIONS, TrainConfig, option_types
from fsdp_qlora.config.text import resolved_yaml
from fsdp_qlora.data.sources.files import FILE_KINDS
from fsdp_qlora.distributed.process_group import start_process_group, stop_process_group
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.run.load_model import open_weights
from fsdp_qlora.run.prepare import prepare_run
from fsdp_qlora.sharding.loading.quant_cache import open_entry
from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from fsdp_qlora.utils import hub
from fsdp_qlora.utils.errors import ENDINGS, RunStopped
from tests.fuzz.harness import (
    CASES,
    VALUES,
    damage_a_file,
    damaged_bytes,
    damaged_value,
    fuzz,
    outcome,
)
from tests.helpers.models import Models
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, train_ok

pytestmark = pytest.mark.slow

ALONE = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, models: Models, tmp_path: Path) -> None:
    models()  # made here, since a case may write in its own folder only

    def refuse(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def plan(*argv: str) -> Any:
    """What a run does before it loads its weights."""
    config = parse_train_config([*argv, "--dry_run", "true"])
    return prepare_run(config, ALONE, None).plan


# --- data ---


def as_text(rng: random.Random, kind: str) -> bytes:
    rows = make_rows(rng.choice([1, 3, 40]), seed=rng.randrange(99))
    if rng.random() < 0.5:
        rows = damaged_value(rng, rows)
    if kind == ".jsonl" and isinstance(rows, list):
        return "\n".join(map(json.dumps, rows)).encode()
    if kind in (".json", ".jsonl") or not isinstance(rows, list):
        return json.dumps(rows).encode()
    stream = io.StringIO()
    csv.writer(stream).writerows(
        [["instruction", "input", "output"], *[[str(row)] * 3 for row in rows]]
    )
    return stream.getvalue().encode(errors="surrogatepass")


def as_parquet(rng: random.Random) -> bytes:
    rows = make_rows(rng.choice([1, 40, 3000]), seed=rng.randrange(99))
    if rng.random() < 0.2:  # small until it is unpacked
        rng.choice(rows)["output"] = "a" * (16 << 20)
    table = pyarrow.Table.from_pylist(rows)
    table = table.append_column(
        "more", pyarrow.array([rng.randrange(2**62)] * len(table), pyarrow.timestamp("us"))
    )
    stream = io.BytesIO()
    compression = rng.choice(["snappy", "none", "gzip", "zstd"])
    pyarrow.parquet.write_table(table, stream, compression=compression, row_group_size=1000)
    return stream.getvalue()


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_data_files(kind, models, tmp_path, monkeypatch):
    model = str(models())
    is_text = kind != ".parquet"
    monkeypatch.setenv("FSDP_QLORA_MAX_ROW_MIB", "1")

    def case(rng: random.Random, place: Path) -> None:
        name = f"rows{kind}"
        content = as_text(rng, kind) if is_text else as_parquet(rng)
        if is_text and rng.random() < 0.2:  # small until it is unpacked
            at = rng.randrange(len(content) + 1)
            bomb = rng.choice([b"a", b"[", b'"', b'{"a":']) * (16 << 20)
            name = f"{name}.gz"
            content = gzip.compress(content[:at] + bomb + content[at:], 1)
        (place / name).write_bytes(content if name.endswith(".gz") else damaged_bytes(rng, content))
        dataset = rng.choice([str(place), name])
        plan(*flags(model_name=model, dataset=dataset, max_bad_rows=0.5))

    fuzz(case, tmp_path)


# --- models ---


def test_configs_of_models(models, tmp_path):
    def case(rng: random.Random, place: Path) -> None:
        shutil.copytree(models(), place / "model")
        path = place / "model" / rng.choice(["config.json", "config.json", "tokenizer_config.json"])
        path.write_text(json.dumps(damaged_value(rng, json.loads(path.read_text()))))
        open_weights(plan("--model_name", "model", "--dataset", "alpaca_demo").model)

    fuzz(case, tmp_path)


def test_files_of_models(models, tmp_path):
    def case(rng: random.Random, place: Path) -> None:
        shutil.copytree(models(), place / "model")
        damage_a_file(rng, place / "model")
        weights = open_weights(plan("--model_name", "model", "--dataset", "alpaca_demo").model)
        weights.read_whole("model.norm.weight")

    fuzz(case, tmp_path)


def test_headers_of_weight_files(models, tmp_path):
    whole = (models() / "model.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little")

    def case(rng: random.Random, place: Path) -> None:
        header = json.dumps(damaged_value(rng, json.loads(whole[8 : 8 + size])))
        text = header.encode() if rng.random() < 0.7 else damaged_bytes(rng, whole[8 : 8 + size])
        (place / "model.safetensors").write_bytes(
            len(text).to_bytes(8, "little") + text + whole[8 + size :]
        )
        files = WeightFiles(place)
        for name in files.files:
            files.read_flat(name, 0, files.shape(name).numel())

    fuzz(case, tmp_path)


# --- runs ---


@pytest.fixture(scope="module")
def finished(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of four steps and its checkpoints, and the cache of its quantized
    weights.
    """
    folder = tmp_path_factory.mktemp("finished")
    rows = write_rows(folder / "rows.jsonl", make_rows(8))
    options = {"batch_size": 2, "save_every": 2, "quant_cache": folder / "cache"}
    train_ok(1, folder / "run", model_name=models(), dataset=rows, **options)
    status = json.loads((folder / "run" / "status.json").read_text())
    (folder / "running.json").write_text(json.dumps(status | {"state": "running"}))
    return folder


@pytest.fixture(scope="module")
def recorded(finished: Path) -> tuple[Any, dict[str, Any]]:
    """The options of the run, and by what it is recognized."""
    about = json.loads((finished / "run" / "run.json").read_text())
    of_one_start = ("run_id", "started_from")
    return about["options"], {name: about[name] for name in about if name not in of_one_start}


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    start_process_group(ALONE)
    yield
    stop_process_group()


def test_run_folders(finished, recorded, group, tmp_path):
    options, identity = recorded

    def case(rng: random.Random, place: Path) -> None:
        shutil.copytree(finished / "run", place / "run")
        status = json.loads((place / "run" / "status.json").read_text())
        (place / "run" / "status.json").write_text(
            json.dumps(status | {"state": rng.choice(["finished", "running"])})
        )
        if rng.random() < 0.5:
            path = place / "run" / rng.choice(["run.json", "status.json"])
            path.write_text(json.dumps(damaged_value(rng, json.loads(path.read_text()))))
        else:
            damage_a_file(rng, place / "run")
        request = StartRequest(options=options, resume=rng.choice(["auto", "auto", "off", "run"]))
        with RunFolder(place / "run", ALONE, request).claimed() as folder:
            folder.choose_start(identity)

    fuzz(case, tmp_path)


def test_reads_of_a_run_folder_that_fail(finished, recorded, group, tmp_path, monkeypatch):
    options, identity = recorded
    original = Path.open

    def case(rng: random.Random, place: Path) -> None:
        run = place / "run"
        shutil.copytree(finished / "run", run)
        shutil.copy(finished / "running.json", run / "status.json")
        before = sorted(run.rglob("*"))
        number = rng.choice([errno.ESTALE, errno.EIO, errno.EMFILE, errno.EACCES])
        healthy = rng.randrange(8)

        def fails(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
            nonlocal healthy
            if run in path.parents and "r" in mode and path.is_file():
                healthy -= 1
                if healthy < 0:
                    raise OSError(number, os.strerror(number), str(path))
            return original(path, mode, *args, **options)

        def start() -> int:
            with RunFolder(run, ALONE, StartRequest(options)).claimed() as folder:
                return folder.choose_start(identity).step

        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", fails)
            try:
                assert start() == 4
            except RunStopped as stop:
                assert stop.ending == ENDINGS["unreadable"], stop
        assert sorted(run.rglob("*")) == before and start() == 4

    fuzz(case, tmp_path)


HOSTILE = {
    "trust_remote_code": True,
    "push_to_hub": "owner/name:public",
    "mirror": "elsewhere",
    "resume": "off:replace",
    "log_to": "wandb",
    "sample_prompts": "elsewhere",
    "quant_cache": "elsewhere",
    "dataset": "elsewhere.jsonl",
    "world_size": 3,
    "master_addr": "elsewhere",
}


def test_results_of_strangers(finished, tmp_path):
    said_by_the_user = {
        name: value for name, value in vars(DEFAULTS).items() if name not in RESULT_OPTIONS
    }
    del said_by_the_user["output_dir"]  # of a command, a folder that it does not make

    def case(rng: random.Random, place: Path) -> None:
        run = Path(shutil.copytree(finished / "run", place / "run"))
        hostile: dict[str, Any] = {name: HOSTILE[name] for name in rng.sample(sorted(HOSTILE), 3)}
        if rng.random() < 0.5:
            hostile[rng.choice(sorted(option_types()))] = rng.choice(VALUES)
        if rng.random() < 0.5:
            (run / "config.yaml").unlink()
            record = json.loads((run / "training.json").read_text())
            record["settings"] |= hostile
            (run / "training.json").write_text(json.dumps(record))
        else:
            (run / "config.yaml").write_text(json.dumps(hostile))
        if rng.random() < 0.2:
            damage_a_file(rng, run)
        read = vars(run_options(run, []))
        assert {name: read[name] for name in said_by_the_user} == said_by_the_user

    fuzz(case, tmp_path)


def test_a_pipe_in_place_of_any_file_of_a_run_is_not_waited_for(
    finished, recorded, group, tmp_path
):
    options, identity = recorded
    files = [path for path in (finished / "run").rglob("*") if path.is_file()]
    names = sorted(path.relative_to(finished / "run") for path in files)
    bad = []
    for number, name in enumerate(names):
        place = tmp_path / str(number)
        shutil.copytree(finished / "run", place / "run")
        (place / "run" / name).unlink()
        os.mkfifo(place / "run" / name)

        def start(_: random.Random, place: Path) -> None:
            request = StartRequest(options=options, resume="auto")
            with RunFolder(place / "run", ALONE, request).claimed() as folder:
                folder.choose_start(identity)

        def read(_: random.Random, place: Path) -> None:
            run_options(place / "run", [])

        def mirrored(_: random.Random, place: Path) -> None:
            try:
                open_store(str(place / "run")).run()
            except OSError as error:
                assert "more than" not in str(error)

        bad += [
            f"{name}, {use.__name__}: {why}"
            for use in (start, read, mirrored)
            if (why := outcome(use, 0, place))
        ]
    assert not bad, "\n".join(bad)


def test_checkpoints(finished, tmp_path):
    newest = sorted((finished / "run" / "checkpoints").glob("step_*"))[-1]

    def case(rng: random.Random, place: Path) -> None:
        shutil.copytree(newest, place / newest.name)
        damage_a_file(rng, place / newest.name)
        checkpoint.verify(place / newest.name)

    fuzz(case, tmp_path)


def test_caches_of_quantized_weights(finished, models, tmp_path):
    [entry] = (path.parent for path in (finished / "cache").glob("*/checksums.json"))
    original = WeightFiles(models())

    def case(rng: random.Random, place: Path) -> None:
        shutil.copytree(entry, place / entry.name)
        damage_a_file(rng, place / entry.name)
        cached = open_entry(place / entry.name)
        cached.borrow(original)
        for name in cached.files:
            cached.read_flat(name, 0, cached.shape(name).numel())

    fuzz(case, tmp_path)


def test_caches_of_tokenized_rows(models, tmp_path, monkeypatch):
    argv = flags(model_name=models(), dataset="alpaca_demo", dataset_samples=8, max_bad_rows=0.5)
    expected = plan(*argv).data.train.digest

    def case(rng: random.Random, place: Path) -> None:
        shutil.copytree(tmp_path / "cache", place / "cache")
        monkeypatch.setenv("FSDP_QLORA_CACHE", str(place / "cache"))
        damage_a_file(rng, place / "cache")
        assert plan(*argv).data.train.digest == expected

    fuzz(case, tmp_path / "cases")


# --- options ---


def test_yaml_files(tmp_path):
    text = resolved_yaml(TrainConfig())

    def case(rng: random.Random, place: Path) -> None:
        if rng.random() < 0.5:
            content = damaged_bytes(rng, text.encode())
        else:
            content = yaml.safe_dump(damaged_value(rng, yaml.safe_load(text))).encode(
                errors="surrogatepass"
            )
        (place / "run.yaml").write_bytes(content)
        parse_train_config(["--config", "run.yaml"])

    fuzz(case, tmp_path)


def test_flags(tmp_path):
    names = [*option_types(), "nothing", "config", "", "lr="]

    def case(rng: random.Random, place: Path) -> None:
        given = {
            rng.choice(names): rng.choice([*VALUES, 3, 0.5, "true", "a,b", "=", "a=1", "("])
            for _ in range(3)
        }
        parse_train_config(
            flags(**{name: value for name, value in given.items() if name != "help"})
        )

    fuzz(case, tmp_path, cases=4 * CASES)


PATHS = [
    "nowhere",
    "file",
    "file/x",
    "loop",
    ".",
    "..",
    "",
    " ",
    "~nobody/x",
    "a\nb",
    "\x1b[2J",
    "owner/name",
    "a/b/c",
    "https://x.y/z",
    "-x",
    "$HOME",
    "/",
    "/proc",
    "empty",
    "empty/../empty",
]
PATH_OPTIONS = ["model_name", "dataset", "output_dir", "eval_dataset", "config", "llama_pro_path"]


def test_paths(models, tmp_path):
    def case(rng: random.Random, place: Path) -> None:
        (place / "file").write_text("x")
        (place / "loop").symlink_to("loop")
        (place / "empty").mkdir()
        good = {
            "model_name": models(),
            "dataset": "alpaca_demo",
            "output_dir": "out",
            "dataset_samples": 8,
        }
        bad: dict[str, object] = {
            rng.choice(PATH_OPTIONS): rng.choice(PATHS) for _ in range(rng.choice([1, 1, 2]))
        }
        bad |= {"train_type": "bnb_llama_pro"} if "llama_pro_path" in bad else {}
        argv = flags(**(good | bad))
        config = parse_train_config(argv)
        with RunFolder(Path(config.output_dir), ALONE, StartRequest(options={})).claimed():
            plan(*argv)

    fuzz(case, tmp_path)
