"""Blocks that recompute and keep attention's output: the numbers of a run without, to the bit."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_qlora.model.architecture import kept_attention
from fsdp_qlora.model.architecture.kept_attention import KeptAttention
from fsdp_qlora.run import build_trainer, load_model
from fsdp_qlora.sharding import recompute
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import all_slow_but, flags, on_ranks
from tests.helpers.short_runs import options_of, trained

BLOCKS = 3
MICRO_BATCHES = 2 * 4
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank in fp32": (1, {"precision": "fp32"}),
    "full_shard in bf16": (2, {"sharding_strategy": "full_shard", "precision": "bf16"}),
    "inputs on the host": (2, {"recompute": "offload", "precision": "bf16"}),
    "both offloads": (1, {"recompute": "offload", "use_cpu_offload": True}),
    "two blocks of three": (1, {"recompute": 2, "precision": "bf16"}),
    "beside a reference": (1, {"objective": "dpo", "precision": "bf16"}),
    "shared rows": (2, {"context_parallel_size": 2, "precision": "fp32"}),
    "windows": (1, {"family": "gemma3_text", "precision": "bf16"}),
    "all weights": (2, {"train_type": "full", "precision": "bf16", "lr": 1e-4}),
}

NIGHTLY = ("shared rows", "windows", "all weights", "both offloads")


def train_rank(argv: list[str], keeps: bool) -> int:
    """A run in which documents of any length, or of none, are long."""
    import train

    taken = 0
    take = KeptAttention.take

    def counting(kept: KeptAttention, name: str) -> Any:
        nonlocal taken
        results = take(kept, name)
        taken += results is not None
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_attention, "LONG", 1 if keeps else math.inf)
        patch.setattr(KeptAttention, "take", counting)
        status = train.main(argv)
    assert taken >= MICRO_BATCHES * 2 if keeps else taken == 0
    return status


@pytest.mark.parametrize("case", all_slow_but("full_shard in bf16", CASES, nightly=NIGHTLY))
def test_a_run_has_the_bits_of_one_that_computes_attention_again(case, models, tmp_path):
    ranks, changes = CASES[case]
    changes = {"recompute": "all"} | changes
    options = options_of(changes, models, tmp_path, num_blocks=BLOCKS)
    losses, weights = trained(ranks, tmp_path / "keeps", options, train_rank, True)
    assert len(losses) == 4 and all(map(math.isfinite, losses))
    others, own = trained(ranks, tmp_path / "again", options, train_rank, False)
    assert others == losses and own.keys() == weights.keys()
    assert all(torch.equal(weights[name], each) for name, each in own.items())


def train_padded_rank(argv: list[str]) -> int:
    """A run of long documents whose loaded model turns out to need padding."""
    import train

    chosen: list[bool] = []
    choose = recompute.set_keeps_attention

    def noting(model: nn.Module, enabled: bool) -> None:
        chosen.append(enabled)
        choose(model, enabled)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_attention, "LONG", 1)
        patch.setattr(build_trainer, "probe_packing", lambda _: "documents are not apart")
        for module in (load_model, build_trainer):
            patch.setattr(module, "set_keeps_attention", noting)
        status = train.main(argv)
    assert chosen == [True, False]
    return status


def test_a_model_that_turns_out_to_need_padding_keeps_none(models, tmp_path):
    options = {
        "model_name": models("llama", num_hidden_layers=BLOCKS),
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(4)),
        "recompute": "all",
        "max_steps": 1,
    }
    argv = flags(output_dir=tmp_path / "out", quant_cache="off", **options)
    statuses, output = on_ranks(1, train_padded_rank, (argv,), tmp_path / "logs")
    assert statuses == [0] and "Rows are padded with this model" in output, output[-4000:]
