"""`train` from Python: its failures, its results, and rows from PIL, pandas and datasets."""

import datetime
import os
import signal
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
from PIL import Image
from transformers.image_utils import load_image

from fsdp_qlora import api
from fsdp_qlora.commands.run_config import parse_train_config
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.sources.source import find_source
from fsdp_qlora.data.text.image_store import keep_all
from fsdp_qlora.data.text.images import Images
from fsdp_qlora.distributed.supervision import launch
from fsdp_qlora.distributed.supervision.launch import is_from_an_agent
from fsdp_qlora.training.trainer import Trainer
from fsdp_qlora.utils.errors import RunStopped, TrainingError, UserError
from tests.helpers.metrics import read_metrics
from tests.helpers.rows import make_rows
from tests.helpers.run import on_ranks


@pytest.fixture(autouse=True)
def without_torchrun(monkeypatch):
    """No variables of a torchrun that may have started pytest."""
    for name in filter(is_from_an_agent, list(os.environ)):
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("status", "raised"),
    [
        (2, UserError),
        (1, TrainingError),
        (137, TrainingError),
        (75, RunStopped),
        (130, KeyboardInterrupt),
    ],
)
def test_python_api_raises_the_workers_failure_with_its_reason(status, raised, monkeypatch):
    seen = {}

    def run_in_workers(config, argv):
        seen.update(config=config, again=parse_train_config(argv))
        signal.signal(signal.SIGUSR2, lambda *_: None)  # as torch's agent does with others
        return launch.WorkersEnd(status, "the reason")

    monkeypatch.setattr(launch, "run_in_workers", run_in_workers)
    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(raised, match="the reason"):
        api.train(
            dataset=["a.jsonl:0.7", "b c.jsonl:0.3"], lr=1e-3, output_dir="x", double_quant=False
        )
    dataset = ("a.jsonl:0.7", "b c.jsonl:0.3")
    config = TrainConfig(dataset=dataset, lr=1e-3, output_dir="x", double_quant=False)
    assert seen["config"] == seen["again"] == config
    assert signal.getsignal(signal.SIGUSR2) == before


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_of_a_run_from_python_is_said_by_its_caller_alone(
    ranks, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(launch, "is_started_by_others", lambda: False)
    with pytest.raises(UserError, match="no/such_model") as raised:
        own = {"nproc_per_node": ranks, "device": "cpu", "output_dir": tmp_path / "x"}
        api.train(model_name="no/such_model", **own)
    said = "".join(capfd.readouterr())
    assert "there is no such local folder" in str(raised.value)
    assert "there is no such local folder" not in said
    assert "error" not in said.replace("ConnectError", "")


ROWS = [
    {"question": "why?", "answer": "so", "context": None},
    {"question": "h\u00f6w", "answer": "no", "context": "x"},
]
IN_MEMORY = {
    "a list": list,
    "a table": datasets.Dataset.from_list,
    "a frame": pandas.DataFrame,
}


@pytest.mark.parametrize("kind", IN_MEMORY)
def test_rows_in_memory_train_like_rows_in_a_file(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path))
    monkeypatch.setattr(launch, "is_started_by_others", lambda: False)
    seen = []
    monkeypatch.setattr(
        launch,
        "run_in_workers",
        lambda config, argv: seen.append(parse_train_config(argv)) or launch.WorkersEnd(0, ""),
    )
    for _ in range(2):
        api.train(
            dataset=IN_MEMORY[kind](ROWS), eval_dataset="alpaca_demo", output_dir=tmp_path / "x"
        )
    assert seen[0] == seen[1] and seen[0].eval_dataset == ("alpaca_demo",)
    read = [entry.row for entry in find_source(seen[0].dataset[0]).entries()]

    def filled(row: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in row.items() if value}

    assert [*map(filled, read)] == [*map(filled, ROWS)]


@pytest.mark.parametrize("kind", IN_MEMORY)
def test_images_and_arrays_in_memory_are_written_with_their_rows(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path))
    picture = Image.fromarray(np.arange(105, dtype=np.uint8).reshape(7, 5, 3))
    turned = Image.Exif()
    turned[0x0112] = 6
    picture.save(tmp_path / "a.jpg", exif=turned)
    converted = (picture.convert(mode) for mode in ("RGBA", "CMYK"))
    images = [picture, *converted, Image.open(tmp_path / "a.jpg")]
    beside = {"ids": np.arange(3), "day": datetime.date(2026, 1, 2)}
    rows = [{"image": image, **beside} for image in images]
    read = [entry.row for entry in find_source(api._in_file(IN_MEMORY[kind](rows))).entries()]
    for row, made in zip(rows, read, strict=True):
        assert (made["ids"], made["day"][:10]) == ([0, 1, 2], "2026-01-02")
        [image] = Images({"images": made["image"]})._listed
        assert np.array_equal(keep_all([image])[1][0], load_image(row["image"]))
    if kind == "a list":
        said = r"dataset: row 2 cannot be written as JSON \(set is not"
        with pytest.raises(UserError, match=said):
            api._in_file([{"a": 1}, {"a": {1}}])


def test_json_of_a_table_in_memory_keeps_its_nulls(tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path))
    kinds = datasets.Features(
        {"a": datasets.List(datasets.Json()), "b": {"c": datasets.Value("string")}}
    )
    table = datasets.Dataset.from_list(
        [{"a": [{"n": None, "m": 1}], "b": {"c": None}}], features=kinds
    )
    for given in (table, table.to_iterable_dataset()):
        [entry] = find_source(api._in_file(given)).entries()
        assert entry.row == {"a": [{"n": None, "m": 1}], "b": {}}


def train_rows(rows, dies, options):
    """A rank of api.train, which kills itself after a step if it `dies`."""
    if dies:
        step = Trainer.train_step
        Trainer.train_step = lambda *args: (
            os.kill(os.getpid(), signal.SIGKILL) if args[1].step == 2 else step(*args)
        )
    result = api.train(dataset=rows, **options)
    return 0 if os.environ["RANK"] != "0" or (result.state, result.steps) == ("finished", 4) else 1


@pytest.mark.slow
def test_runs_on_rows_in_memory_resume_by_content(models, tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / "cache"))
    rows = make_rows(16)
    options = {"model_name": models(), "max_steps": 4, "batch_size": 2, "save_every": 1}
    options["quant_cache"] = "off"
    ends = {}
    for name, given, dies in (
        ("whole", rows, False),
        ("killed", rows, True),
        ("killed", IN_MEMORY["a frame"](rows), False),
    ):
        chosen = options | {"output_dir": tmp_path / name}
        ends[name], said = on_ranks(
            2, train_rows, (given, dies, chosen), tmp_path / f"{name}{dies}"
        )
        assert (ends[name] != [0, 0]) == dies, said
    assert "Resuming at step 2" in said
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "killed")


def test_from_python_an_exhausted_budget_is_returned_as_a_result(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "is_started_by_others", lambda: False)
    end = launch.WorkersEnd(3, "--max_hours is used up")
    monkeypatch.setattr(launch, "run_in_workers", lambda config, argv: end)
    (tmp_path / "status.json").write_text('{"state": "over_budget", "step": 2}')
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "eval_loss": 3.0}\n{"step": 1, "loss": 2.0}\n'
    )
    result = api.train(output_dir=tmp_path, max_hours=1)
    assert (result.state, result.steps) == ("over_budget", 2)
    assert (result.losses, result.eval_losses) == ([2.0], {0: 3.0})
    assert result.records()[1]["loss"] == 2.0
