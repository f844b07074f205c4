"""Shares of the computed tokens that are the rows' own: padded, padding-free, and packed.

    python -m benchmarks.useful_tokens --model_name MODEL --dataset ROWS --output
    benchmarks/results/useful_tokens.json

Only the tokenizer of the model is needed: the shares follow from the rows' lengths and the schedule
of a run.

Also the targets per row of logits, which are computed for targets alone: of a padded micro-batch
they once were computed for every column in which some row had a target.
"""

import argparse
import itertools
import sys
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.common import write_results
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.micro_batch import concatenate_rows, pad_rows
from fsdp_qlora.data.batches.schedule import Schedule
from fsdp_qlora.data.run_data import RunData, read_rows
from fsdp_qlora.planning.reading import pick_data

LAYOUTS = ("padded", "padding_free", "packed")


def shares(schedule: Schedule, data: RunData) -> dict[str, float]:
    """The rows' tokens of an epoch per computed token, and per token that the ranks could compute
    in that time.
    """
    lengths = data.train.lengths
    dealt = [schedule.rounds(rows, lengths) for _, rows in schedule.rows_of_steps(data.train_rows)]
    steps = [schedule.useful_shares(rounds, lengths) for rounds in dealt]
    sizes = [sum(lengths[piece].sum() for piece in itertools.chain(*rounds)) for rounds in dealt]
    # Means over tokens and not over steps, of which the last may be small.
    of_computed, of_lock_step = (
        np.sum(sizes) / np.sum(np.array(sizes) / column) for column in zip(*steps, strict=True)
    )
    return {
        "useful_of_computed": round(float(of_computed), 4),
        "useful_of_lock_step": round(float(of_lock_step), 4),
        "micro_batches_per_rank": sum(map(len, dealt)),
        "targets_per_logit": targets_per_logit(schedule, data),
    }


def targets_per_logit(schedule: Schedule, data: RunData) -> float:
    """Targets per row of logits, in an epoch."""
    targets = rows_computed = 0
    for _, rows in schedule.rows_of_steps(data.train_rows):
        for piece in itertools.chain(*schedule.rounds(rows, data.train.lengths)):
            if len(piece):
                lay_out = pad_rows if schedule.padding else concatenate_rows
                targets += int(data.train.num_targets[piece].sum())
                rows_computed += len(lay_out(data.train, piece, pad_token_id=0).targets)
    return targets / rows_computed


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_name", required=True, help="folder with a tokenizer")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--context_length", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--world_size", type=int, default=2)
    parser.add_argument("--output")
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    found: dict[str, dict[str, Any]] = {}
    for context_length in args.context_length:
        config = TrainConfig(
            dataset=(args.dataset,), context_length=context_length, batch_size=args.batch_size
        )
        data = read_rows(tokenizer, pick_data(config), vocab_size=len(tokenizer))
        for accumulation in args.gradient_accumulation_steps:
            for name in LAYOUTS:
                schedule = config.pick(
                    Schedule,
                    num_rows=data.rows_per_epoch,
                    data_size=args.world_size,
                    global_batch_size=args.batch_size * accumulation * args.world_size,
                    batching=name,
                    mixture=data.mixture,
                )
                key = f"context {context_length}, {accumulation} micro-batches, {name}"
                found[key] = shares(schedule, data)
                print(key, found[key], flush=True)
    if args.output:
        write_results(
            args.output, " ".join(["python -m benchmarks.useful_tokens", *argv]), {"shares": found}
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
