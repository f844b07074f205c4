"""Rows to train on."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.helpers.tokenizers import WORDS


def make_rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Alpaca rows of uneven lengths."""
    generator = torch.Generator().manual_seed(seed)

    def words(most: int) -> str:
        length = int(torch.randint(1, most, (1,), generator=generator))
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator))

    return [
        {"instruction": words(6), "input": words(5) if i % 3 == 0 else "", "output": words(12)}
        for i in range(count)
    ]


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]
