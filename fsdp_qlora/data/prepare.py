"""The run's rows: training and held-out, tokenized, checked and described."""

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data.schedule import split_eval
from fsdp_qlora.data.tokenization import TokenizedRows, check_vocabulary, describe_sample, prepare_rows
from fsdp_qlora.redact import redact_values

log = logging.getLogger("fsdp_qlora")


@dataclass(frozen=True)
class RunData:
    """train_rows, eval_rows: int64 indices of the rows used of `train` and of `evaluation`.
    sample: one row as text, its masked and learned parts marked.
    rejected: (place, reason) of every row that was left out.
    """

    train: TokenizedRows
    train_rows: np.ndarray
    evaluation: TokenizedRows
    eval_rows: np.ndarray
    sample: str
    rejected: list[tuple[str, str]]

    def files(self) -> dict[str, str]:
        """What a run's folder says of its data, name -> text: rejected.jsonl, where rows were left out."""
        lines = [json.dumps(redact_values({"row": place, "reason": reason})) + "\n" for place, reason in self.rejected]
        return {"rejected.jsonl": "".join(lines)} if lines else {}


def prepare_data(
    tokenizer: PreTrainedTokenizerBase,
    *,
    dataset: str,
    eval_dataset: str | None,
    eval_fraction: float,
    context_length: int,
    dataset_format: str,
    dataset_samples: int | None,
    on_bad_row: str,
    max_bad_rows: float,
    seed: int,
    vocab_size: int,
) -> RunData:
    """Tokenize the datasets (or take them from the cache) and hold rows out for evaluation.

    Raises:
        UserError: a dataset cannot be used; see tokenization.prepare_rows.
    """

    def prepare(name: str, samples: int | None) -> TokenizedRows:
        rows, report = prepare_rows(
            name,
            tokenizer=tokenizer,
            context_length=context_length,
            dataset_format=dataset_format,
            dataset_samples=samples,
            on_bad_row=on_bad_row,
            max_bad_rows=max_bad_rows,
            seed=seed,
            cache_dir=cache_dir(),
            show_progress=True,
        )
        check_vocabulary(rows, vocab_size)
        rejected.extend(report.places())
        return rows

    rejected: list[tuple[str, str]] = []
    train = prepare(dataset, dataset_samples)
    train_rows, eval_rows = split_eval(train, fraction=eval_fraction, seed=seed)
    evaluation = train
    if eval_dataset is not None:
        evaluation = prepare(eval_dataset, None)
        eval_rows = np.arange(len(evaluation))
    sample = describe_sample(train, int(train_rows[0]), tokenizer)
    return RunData(train, train_rows, evaluation, eval_rows, sample, rejected)


def cache_dir() -> Path:
    """Where tokenized rows are kept between runs: FSDP_QLORA_CACHE, or the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FSDP_QLORA_CACHE") or Path(base) / "fsdp_qlora") / "tokenized"
