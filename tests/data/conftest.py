import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.report import DataReport
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.run_data import RunData, read_dataset, read_rows
from fsdp_qlora.data.text.chat_template import TemplateWorker
from fsdp_qlora.planning.reading import pick_data
from tests.data.rows import TOKENIZER

WORKER = TemplateWorker()  # for all tests: a start takes seconds


class SharedWorker:
    """WORKER, for what would end a worker of its own."""

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return WORKER.ask(request)

    def close(self) -> None:
        pass


@pytest.fixture(scope="session", autouse=True)
def _end_worker() -> Iterator[None]:
    yield
    WORKER.close()


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return TOKENIZER


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """read_dataset with a tiny tokenizer and a cache of the test's own, cache/tokenized below
    tmp_path.
    """
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / "cache"))

    def call(dataset: object, **given: Any) -> tuple[TokenizedRows, DataReport]:
        chosen = given.pop("tokenizer", TOKENIZER)
        config = TrainConfig(dataset=(str(dataset),), **{"context_length": 512, **given})
        return read_dataset(str(dataset), chosen, pick_data(config), vocab_size=2**31)[:2]

    return call


Read = Callable[..., tuple[TrainConfig, RunData]]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> Read:
    """read_rows with options; what it logs is in caplog."""
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("fsdp_qlora.data.run_data.TemplateWorker", SharedWorker)
    caplog.set_level(logging.INFO, "fsdp_qlora")

    def call(*datasets: object, **given: Any) -> tuple[TrainConfig, RunData]:
        config = TrainConfig(dataset=tuple(map(str, datasets)), **{"context_length": 512, **given})
        return config, read_rows(TOKENIZER, pick_data(config), vocab_size=len(TOKENIZER))

    return call
