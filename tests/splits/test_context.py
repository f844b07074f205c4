"""Ranks that share the tokens of a row (context parallelism): the same numbers, and refused where
that cannot be.
"""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_qlora.__main__ import main
from fsdp_qlora.data.batches.micro_batch import IGNORE_INDEX, MicroBatch, concatenate_rows
from fsdp_qlora.data.batches.rows import TokenizedRows
from tests.helpers.metrics import read_metrics
from tests.helpers.models import Models
from tests.helpers.rounding import SGD
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import all_slow_but, flags, train_ok
from tests.parity.test_hybrids import HYBRIDS
from tests.preferences.pairs import make_labeled, make_pairs

# Queries of two heads on each of four ranks, which have to repeat their keys and values.
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
ROWS_PER_STEP = 8
# Name -> (family, its sizes, rows, options). Two steps an epoch, whose rows are longer than a
# window.
CASES: dict[str, tuple[str, dict[str, Any], Callable[[int], list[Any]], dict[str, Any]]] = {
    "sft": ("mistral", {"sliding_window": 6}, make_rows, {"lora_dropout": 0}),
    "dpo": ("llama", {}, make_pairs, {"objective": "dpo", "sft_weight": 0.5, "beta": 1.0}),
    "precomputed": ("llama", {}, make_pairs, {"objective": "dpo", "precompute_reference": True}),
    "kto": ("qwen2", {}, make_labeled, {"objective": "kto", "batching": "packed"}),
    "sinks": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        make_rows,
        {"train_type": "lora"},
    ),
}


def run_of(
    case: str, models: Models, folder: Path, data_size: int, **changed: Any
) -> dict[str, Any]:
    family, sizes, rows, options = CASES[case]
    return {
        "model_name": models(family, **HEADS, **sizes),
        "dataset": write_rows(folder / "rows.jsonl", rows(16)),
        "batch_size": 2,
        "gradient_accumulation_steps": ROWS_PER_STEP // (2 * data_size),
        "num_epochs": 5,
        "precision": "fp32",
        **SGD,
        **options,
        **changed,
    }


def numbers(output: Path) -> list[float]:
    return read_metrics(output) + read_metrics(output, "grad_norm")


@pytest.mark.parametrize("case", all_slow_but("sft", CASES, nightly=["precomputed"]))
def test_numbers_do_not_depend_on_context_parallelism(case, models, tmp_path):
    # ranks, and how many of them share rows
    shared = [(4, 4), (4, 2)] if case == "dpo" else [(2, 2)]
    found = []
    for ranks, size in [(1, 1), *shared]:
        output = tmp_path / f"{size}_of_{ranks}"
        changed: dict[str, Any] = {
            "context_parallel_size": size,
            "eval_fraction": 0.0,
            "num_epochs": 2,
        }
        run = run_of(case, models, tmp_path, ranks // size, **changed)
        train_ok(ranks, output, **run)
        found.append(numbers(output))
    assert len(set(found[0])) == 8
    assert found[1:] == [pytest.approx(found[0], rel=1e-5)] * len(found[1:])


@pytest.mark.slow
def test_run_resumes_with_another_context_parallel_size(models, tmp_path):
    run = run_of(
        "sft",
        models,
        tmp_path,
        1,
        save_every=3,
        save_total_limit=9,
        eval_fraction=0.2,
        eval_steps=4,
    )
    folders = [tmp_path / name for name in ("whole", "alone", "shared")]
    starts = ["off", folders[0] / "checkpoints/step_000003", folders[1] / "checkpoints/step_000006"]
    for folder, size, start in zip(folders, (2, 1, 2), starts, strict=True):
        said = train_ok(2, folder, **run, context_parallel_size=size, resume=start)
        assert ("stays at the 8 rows" in said) == (size == 1)
    whole, alone, shared = (
        [*numbers(folder), *read_metrics(folder, "eval_loss")] for folder in folders
    )
    assert len(whole) > 20
    assert alone == pytest.approx(whole, rel=1e-5) and shared == pytest.approx(whole, rel=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("num_parts", [2, 3, 4])
def test_parts_of_a_micro_batch_have_its_targets_and_positions_once(num_parts):
    lengths = [7, 6, 4, 5]
    shared = [3, 0]
    ids = np.arange(sum(lengths), dtype=np.int32)
    ids[[7, 8, 9]] = ids[:3]
    offsets = np.array([0, 13, 22])
    table = TokenizedRows(ids, np.ones(len(ids), np.bool_), offsets, np.arange(2), np.array([7, 4]))
    for shares in (False, True):
        whole = concatenate_rows(
            table, [0, 1], pad_token_id=99, shares_prompts=shares, num_parts=num_parts
        )
        parts = [whole.part(number, num_parts) for number in range(num_parts)]
        tokens = sum(lengths) - shares * sum(shared)
        assert torch.cat([part.input_ids for part in parts], dim=1)[0, :tokens].tolist() == [
            token for i, token in enumerate(ids.tolist()) if not (shares and 7 <= i < 10)
        ]
        positions = torch.cat([part.documents["position_ids"] for part in parts], dim=1)
        assert torch.equal(positions, whole.documents["position_ids"])
        assert sum(whole.documents["document_lengths"]) - sum(lengths) == -tokens % num_parts
        assert (
            np.sum([part.num_targets for part in parts], axis=0).tolist()
            == whole.num_targets
            == [6, 5, 3, 4]
        )
        assert sorted(itertools.chain(*map(predictions, parts))) == sorted(predictions(whole))


def predictions(batch: MicroBatch) -> list[tuple[int, int]]:
    """Each target, and the token that predicts it."""
    known = batch.targets != IGNORE_INDEX
    sources = batch.input_ids.flatten()[batch.target_rows[known]]
    return list(zip(sources.tolist(), batch.targets[known].tolist(), strict=True))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("family", "ranks", "changed", "reason"),
    [
        (
            "llama",
            3,
            {"context_parallel_size": 3},
            r"attention has 8 heads.*Give one of 1, 2, 4, 8",
        ),
        ("llama", 3, {"context_parallel_size": 2}, r"must divide both the 3 ranks of a machine"),
        (
            "llama",
            2,
            {"context_parallel_size": 2, "batching": "padded"},
            "leave out --batching padded",
        ),
        ("llama", 2, {"context_parallel_size": 0}, "1 or more if it is a number"),
        (
            "bloom",
            2,
            {"context_parallel_size": 2},
            "cannot divide BloomForCausalLM: it takes no positions",
        ),
        (
            "jamba",
            2,
            {"context_parallel_size": 2},
            "JambaMambaMixer takes no state from other ranks",
        ),
    ],
)
def test_unsupported_context_parallel_models_are_refused(
    family, ranks, changed, reason, models, tmp_path, capsys
):
    mixers = HYBRIDS[family].shape if family in HYBRIDS else {}
    run = {
        "model_name": models(family, **HEADS, **mixers),
        "train_type": "lora",
        "nproc_per_node": ranks,
        **changed,
    }
    argv = flags(
        dataset=write_rows(tmp_path / "rows.jsonl", make_rows(4)), dry_run=True, device="cpu", **run
    )
    assert main(["train", *argv]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(reason, said), said
