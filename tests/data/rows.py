"""Rows, a tokenizer and files of every kind for the tests of data."""

import contextlib
import csv
import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.data.content import Segment
from fsdp_qlora.data.sources import source as sources
from fsdp_qlora.data.text.formats import FORMATS
from fsdp_qlora.data.text.templates import TEMPLATES
from tests.helpers.tokenizers import spelled_tokenizer

ROWS = [
    {"instruction": "Add the numbers.", "input": "2 and 3", "output": "The sum is 5."},
    {"instruction": "Name a colour.", "input": "", "output": "Blue."},
    {
        "instruction": "Say hello in French, twice.",
        "input": "",
        "output": "Bonjour, bonjour! Ça va?",
    },
]


def render_alpaca(row: dict[str, Any]) -> list[Segment]:
    return TEMPLATES["alpaca"].fill(FORMATS["alpaca"].read(row))


def make_tokenizer(*, ends_with_eos: bool = False) -> PreTrainedTokenizerFast:
    """Begins texts with <s>, as many decoders' tokenizers do; some end them too."""
    found = spelled_tokenizer("byte_level")
    found.pad_token = found.eos_token
    if ends_with_eos:
        found.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return found


TOKENIZER = make_tokenizer()


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_json(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return path


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


def rows_of(dataset: object, limit: int | None = None) -> list[Any]:
    return [entry.row for entry in sources.find_source(str(dataset)).entries(limit)]


WRITERS = {".jsonl": write_jsonl, ".json": write_json, ".csv": write_csv, ".parquet": write_parquet}


@contextlib.contextmanager
def counting_memory() -> Iterator[Callable[[], int]]:
    """Gives a function that tells the most bytes that Python and pyarrow had allocated at once."""
    usual = pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(usual)
    pyarrow.set_memory_pool(pool)
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pyarrow.set_memory_pool(usual)
