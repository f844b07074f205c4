"""Time of an epoch of real rows on a small model: ours, ours with padding, and TRL's packed and
not.

    python -m benchmarks.epoch_time --model_name MODEL --dataset ROWS --output
    benchmarks/results/epoch_time.json

One process, fp32, one thread, interleaved: in each round everyone takes a whole epoch in turn. What
counts is the CPU time of an epoch, the others' divided by ours in the same round: median and
quartiles of the rounds after the first, which warms up. The model is a random llama of hidden size
256 and 4 blocks with a 4-bit base and LoRA of rank 16 on all linear layers; MODEL gives the
tokenizer only, whose ids are taken modulo the vocabulary. Everyone learns the answers only. A
micro-batch is 8 rows. TRL packed takes 8 rows of the context's length, and ours packed the rows of
two micro-batches, which is about as many tokens.

Exits with 1 if someone's mean loss is another's by more than 2%: not the same work.
"""

import argparse
import importlib.util
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, TrainerCallback

from benchmarks.common import (
    build_run,
    describe_machine,
    quiet_on_one_thread,
    seconds_of,
    write_results,
)
from benchmarks.cpu import (
    LORA_RANK,
    LR,
    RANKS,
    SEED,
    StepByStep,
    load_reference,
    make_checkpoint,
    training_options,
)
from benchmarks.peers import tokenizer
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.schedule import RowsInMemory
from fsdp_qlora.data.run_data import read_rows
from fsdp_qlora.distributed.process_group import start_process_group, stop_process_group
from fsdp_qlora.planning.reading import pick_data
from fsdp_qlora.sharding.loading.weight_files import WeightFiles

VOCABULARY = 8192
LOSS_TOLERANCE = 0.02
Epoch = Callable[[], list[float]]  # runs an epoch, returns the loss of each of its steps


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_name", required=True, help="folder with a tokenizer")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--rows", type=int, default=96, help="number of rows per epoch")
    parser.add_argument("--rounds", type=int, default=3, help="number of measured rounds")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--context_length", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--output", default="")
    return parser.parse_args(argv)


def training_rows(args: argparse.Namespace) -> TokenizedRows:
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    config = TrainConfig(
        dataset=(args.dataset,), context_length=args.context_length, dataset_samples=args.rows
    )
    found = read_rows(tokenizer, pick_data(config), vocab_size=len(tokenizer)).train
    return TokenizedRows(
        found.input_ids[:] % VOCABULARY, found.learned, found.offsets, found.row_numbers
    )


def our_epoch(
    folder: Path, config: LlamaConfig, data: TokenizedRows, args: argparse.Namespace, **more: Any
) -> Epoch:
    options = TrainConfig(
        precision="fp32",
        attn_implementation="sdpa",
        batch_size=args.batch_size,
        context_length=args.context_length,
        lora_rank=LORA_RANK,
        lora_alpha=2 * LORA_RANK,
        lr=LR,
        lr_scheduler="constant",
        quant_cache="off",
        seed=SEED,
        **more,
    )
    run = build_run(options, config, WeightFiles(folder), data, RANKS)
    rows = np.arange(len(data))

    def epoch() -> list[float]:
        return [
            run.trainer.train_step(each)["loss"]
            for each in RowsInMemory(data, rows).steps(run.plan.schedule)
        ]

    return epoch


def trl_epoch(
    folder: Path, data: TokenizedRows, args: argparse.Namespace, *, packing: bool
) -> Epoch:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    parts = [slice(*data.offsets[i : i + 2]) for i in range(len(data))]
    ids = [data.input_ids[part].tolist() for part in parts]
    labels = [np.where(data.learned[part], data.input_ids[part], -100).tolist() for part in parts]
    batch = {"per_device_train_batch_size": args.batch_size, "gradient_accumulation_steps": 1}
    steps_per_epoch = 0

    def make(callback: TrainerCallback) -> Any:
        nonlocal steps_per_epoch
        options = SFTConfig(
            **(training_options(folder, 10**6) | batch),
            max_length=args.context_length,
            packing=packing,
            bf16=False,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )
        trainer = SFTTrainer(
            load_reference(folder),
            options,
            train_dataset=Dataset.from_dict({"input_ids": ids, "labels": labels}),
            processing_class=tokenizer(),
            callbacks=[callback],
        )
        steps_per_epoch = -(-len(trainer.train_dataset) // args.batch_size)
        return trainer

    step = StepByStep(make)
    return lambda: [step() for _ in range(steps_per_epoch)]


def run_rounds(epochs: dict[str, Epoch], rounds: int) -> dict[str, dict[str, Any]]:
    """Everyone's epochs in turn: CPU seconds, and mean losses of all rounds."""
    found: dict[str, dict[str, Any]] = {name: {"cpu_seconds": [], "losses": []} for name in epochs}
    for number in range(1 + rounds):
        for name in [*epochs][number % len(epochs) :] + [*epochs][: number % len(epochs)]:
            losses: list[float] = []
            _, cpu = seconds_of(lambda name=name, losses=losses: losses.extend(epochs[name]()))  # type: ignore[misc]
            # the first round warms up
            if number > 0:
                found[name]["cpu_seconds"].append(cpu)
            found[name]["losses"].append(statistics.fmean(losses))
            found[name]["steps"] = len(losses)
            print(f"round {number}: {name}: {cpu:.1f} CPU s, {len(losses)} steps", flush=True)
    ours = found["ours"]["cpu_seconds"]
    for record in found.values():
        ratios = [other / own for own, other in zip(ours, record["cpu_seconds"], strict=True)]
        record["median_cpu_seconds"] = statistics.median(record["cpu_seconds"])
        record["ratio_to_ours"] = (
            statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        )
    return found


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    quiet_on_one_thread()
    data = training_rows(args)
    start_process_group(RANKS)
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            shape = {
                "hidden": args.hidden,
                "layers": args.layers,
                "vocab": VOCABULARY,
                "length": args.context_length,
            }
            config = make_checkpoint(folder, argparse.Namespace(**shape))
            epochs = {
                "ours": our_epoch(folder, config, data, args),
                "ours, packed": our_epoch(
                    folder, config, data, args, batching="packed", gradient_accumulation_steps=2
                ),
                "ours, padded": our_epoch(folder, config, data, args, batching="padded"),
            }
            if importlib.util.find_spec("trl"):
                epochs["TRL"] = trl_epoch(folder, data, args, packing=False)
                epochs["TRL, packed"] = trl_epoch(folder, data, args, packing=True)
            found = run_rounds(epochs, args.rounds)
    finally:
        stop_process_group()
    for who, record in found.items():
        low, middle, high = record["ratio_to_ours"]
        print(
            f"{who:14} {record['median_cpu_seconds']:7.1f} CPU s, {middle:.2f} times ours "
            f"({low:.2f} to {high:.2f})"
        )
    if args.output:
        sizes = {
            "rows": len(data),
            "tokens": int(data.lengths.sum()),
            "targets": int(data.num_targets.sum()),
        }
        result = {"machine": describe_machine(torch.device("cpu")), **sizes, "who": found}
        write_results(args.output, " ".join(["python -m benchmarks.epoch_time", *argv]), result)
    ours = found["ours"]["losses"][0]
    others = [
        who
        for who, record in found.items()
        if abs(record["losses"][0] - ours) > LOSS_TOLERANCE * ours
    ]
    for who in others:
        print(
            f"FAILED: the mean loss of {who} is {found[who]['losses'][0]:.3f} and not "
            f"{ours:.3f}: not the same work."
        )
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
