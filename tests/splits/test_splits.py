"""The same rows give the same losses, however they are split over ranks and micro-batches: for
every train type.
"""

from collections.abc import Callable
from typing import Any

import pytest

from fsdp_qlora.config.train_types import TRAIN_TYPES
from fsdp_qlora.export.expand import expand_model
from fsdp_qlora.model.architecture import chunking as pieces
from tests.helpers.metrics import read_metrics
from tests.helpers.models import SIZES, Models
from tests.helpers.rounding import SGD, rounding
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import all_slow_but, flags, on_ranks, train_ok, train_rank

OFF = rounding(SIZES["vocab_size"])  # in parts on ranks, the longest sum
# two whole steps, and one of 6 rows
ROWS_PER_STEP = 12
NUM_ROWS = 30
# Ranks, micro-batches per rank, and ranks that share each row: micro-batches of 1, 12 and 4 rows,
# and parts of one.
SPLITS = [(1, 12, 1), (1, 1, 1), (3, 1, 1), (2, 12, 2)]
# Of one row each: what int8 makes of a token depends on the padding beside it.
ROW_BY_ROW = [(1, 12, 1), (3, 4, 1), (2, 12, 2)]
# 60 columns: rows end within blocks of 64 weights, shards within rows, and nothing divides by 3
# ranks' shares.
UNEVEN = {"intermediate_size": 100, "hidden_size": 60, "head_dim": 10, "num_attention_heads": 6}

# Every row of TRAIN_TYPES once, by its first name.
CASES: dict[str, dict[str, Any]] = {
    name: {"train_type": name}
    for name in dict(reversed([(row, name) for name, row in TRAIN_TYPES.items()])).values()
}
CASES["int8_lora"]["int8_threshold"] = 2.5  # below which there are outliers
CASES["loftq"] = {"train_type": "qlora", "init_lora_weights": "loftq", "lora_rank": 4}
# Those whose quantizer or adapter is in others.
ALIKE = ("hqq_llama_pro", "hqq_dora", "bnb_dora", "bnb_llama_pro", "loftq", "dora")


@pytest.fixture(scope="module")
def train(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[float]]:
    folder = tmp_path_factory.mktemp("splits")
    data = write_rows(folder / "rows.jsonl", make_rows(NUM_ROWS))
    plain = models("llama", **UNEVEN)
    expanded = folder / "expanded"
    expand_model(str(plain), expanded, expansion_rate=0.5)

    def losses_and_norms(case: str, ranks: int, micro_batches: int, context: int) -> list[float]:
        options = CASES[case]
        output = folder / f"{case}_{ranks}x{micro_batches}_{context}"
        train_ok(
            ranks,
            output,
            model_name=expanded if TRAIN_TYPES[options["train_type"]].trains_new_blocks else plain,
            dataset=data,
            batch_size=ROWS_PER_STEP * context // (ranks * micro_batches),
            gradient_accumulation_steps=micro_batches,
            context_parallel_size=context,
            precision="fp32",
            **SGD,
            **options,
        )
        return read_metrics(output) + read_metrics(output, "grad_norm")

    return losses_and_norms


@pytest.mark.parametrize("case", all_slow_but("qlora", CASES, nightly=ALIKE))
def test_losses_do_not_depend_on_the_split_over_ranks(case, train):
    first, *others = [
        train(case, *split) for split in (ROW_BY_ROW if case == "int8_lora" else SPLITS)
    ]
    assert len(set(first)) == 6
    # An activation at the edge between two of int8's steps goes to the one or the other for the
    # last bit of a sum.
    tolerance = 2e-4 if case == "int8_lora" else OFF
    assert others == [pytest.approx(first, rel=tolerance)] * len(others)


def _train_in_pieces(argv: list[str]) -> int:
    pieces.PIECE_TOKENS = 16
    return train_rank(argv)


@pytest.mark.parametrize(
    "train_type", all_slow_but("qlora", ["qlora", "bnb_dora", "full"], nightly=["bnb_dora"])
)
def test_losses_are_the_same_where_mlps_are_computed_in_pieces(train_type, models, tmp_path):
    options = {
        "model_name": models("llama", **UNEVEN),
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(12)),
    }
    options |= {
        "train_type": train_type,
        "gradient_accumulation_steps": 2,
        "precision": "fp32",
        **SGD,
    }
    # Between steps an evaluation, which ends with weights that are sharded again.
    options |= {"eval_fraction": 0.2, "eval_steps": 1, "recompute": "offload"}
    whole = tmp_path / "whole"
    in_pieces = tmp_path / "pieces"
    train_ok(2, whole, **options)
    argv = flags(output_dir=in_pieces, log_to="stdout", quant_cache="off", verbose=True, **options)
    statuses, output = on_ranks(2, _train_in_pieces, (argv,), tmp_path / "logs")
    assert statuses == [0, 0] and "pieces of tokens" in output, output
    for key in ("loss", "grad_norm", "eval_loss"):
        found = read_metrics(in_pieces, key)
        assert len(set(found)) > 1 and found == pytest.approx(read_metrics(whole, key), rel=OFF)
