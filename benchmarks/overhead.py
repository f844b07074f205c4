"""Our training step against a minimal hand-written loop on the same tiny qlora model: `python benchmarks/overhead.py`.

One process on the CPU, fp32, gloo; all checkpoint each block (non-reentrant). Three models with equal weights take
turns, one optimizer step each:

- ours: `Trainer.train_step` on a model built, sharded and loaded by the package's own functions, its batches
  collated and its numbers checked and reduced in the step, as in a real run;
- hand-written: transformers + PEFT + bitsandbytes' Linear4bit, AdamW, clipping, batches made in advance, and
  logits only at positions with a target, as in our step. The limit applies to the ratio to this one;
- hand-written, all logits: the same loop in its most common form, with the logits of every position.

Exits with 1 if ours takes more than 1.05 times the hand-written step (medians), or if the losses differ.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# So that it runs from a clone that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from benchmarks.common import build_run, describe_machine, random_rows, write_results
from fsdp_qlora.adapters.first_values import first_adapter_value
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches import collate
from fsdp_qlora.data.rows import TokenizedRows
from fsdp_qlora.loading.weight_files import WeightFiles
from fsdp_qlora.ranks import distributed

MAX_RATIO = 1.05
# Adam amplifies the order of fp32 sums over the steps; tests/splits/test_splits.py allows the same.
LOSS_TOLERANCE = 1e-4
SEED, LR, LORA_RANK = 0, 1e-3, 16
# On the CPU, where there is a GPU as well: the fixed cost of a step is the same code.
RANKS = distributed.Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))

Step = Callable[[], float]  # runs one optimizer step, returns its loss


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each loop")
    parser.add_argument("--warmup_steps", type=int, default=2, help="steps before them")
    parser.add_argument("--hidden", type=int, default=576, help="hidden size of the model; a multiple of 64")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--batch_size", type=int, default=4, help="rows per micro-batch")
    parser.add_argument("--micro_batches", type=int, default=2, help="per optimizer step")
    parser.add_argument("--length", type=int, default=128, help="tokens per row; the first third is a prompt")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; 1 is the steadiest")
    parser.add_argument("--output", default="", help="JSON file to write")
    return parser.parse_args(argv)


def make_checkpoint(folder: Path, args: argparse.Namespace) -> LlamaConfig:
    """Save a random llama for all loops."""
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        max_position_embeddings=args.length,
        initializer_range=0.1,
    )
    torch.manual_seed(SEED)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return config


def our_step(folder: Path, config: LlamaConfig, data: TokenizedRows, args: argparse.Namespace) -> Step:
    options = TrainConfig(
        precision="fp32",
        attn_implementation="sdpa",
        batch_size=args.batch_size,
        gradient_accumulation_steps=args.micro_batches,
        lora_rank=LORA_RANK,
        lora_alpha=2 * LORA_RANK,
        lr=LR,
        lr_scheduler="constant",
        quant_cache="off",
        wd=0.0,
        seed=SEED,
    )
    run = build_run(options, config, WeightFiles(folder), data, RANKS)
    rows = torch.arange(len(data)).numpy()
    return lambda: float(run.trainer.train_step(0, rows)["loss"])


def load_reference(folder: Path) -> nn.Module:
    """The model as a user of transformers, PEFT and bitsandbytes sets it up, with our adapters' initial values."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", quantization_config=quantization, device_map="cpu"
    )
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lora = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                name = name.replace(".default", "")
                parameter.copy_(first_adapter_value(name, parameter.shape, seed=SEED))
    return model.train()


def hand_written_step(
    folder: Path, micro_batches: list[tuple[torch.Tensor, torch.Tensor]], *, all_logits: bool
) -> Step:
    model = load_reference(folder)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=LR, weight_decay=0.0)
    num_targets = sum(int((labels != -100).sum()) for _, labels in micro_batches)

    def step() -> float:
        total = torch.zeros(())
        for input_ids, labels in micro_batches:
            targets = labels[:, 1:]
            if all_logits:
                logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
            else:
                positions = (targets != -100).any(dim=0).nonzero().flatten()
                logits = model(input_ids=input_ids, use_cache=False, logits_to_keep=positions).logits
                targets = targets[:, positions]
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / num_targets
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return step


@dataclass
class Record:
    """Wall time and CPU time of the steps of one loop, and their losses."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def take_turns(steps: dict[str, Step], *, rounds: int) -> dict[str, Record]:
    """Run one step of each loop in turn, starting with another loop in every round."""
    records = {name: Record() for name in steps}
    names = list(steps)
    for index in range(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            started, cpu_started = time.perf_counter(), time.process_time()
            loss = steps[name]()
            records[name].cpu_seconds.append(time.process_time() - cpu_started)
            records[name].seconds.append(time.perf_counter() - started)
            records[name].losses.append(loss)
    return records


def compare(records: dict[str, Record], *, warmup_steps: int) -> dict[str, dict[str, float]]:
    """For each loop: medians, the ratio of ours to it, and the largest relative difference of its losses to ours."""
    ours = records["ours"]
    table = {}
    for name, other in records.items():
        ours_wall, wall, ours_cpu, cpu = (
            statistics.median(times[warmup_steps:])
            for times in (ours.seconds, other.seconds, ours.cpu_seconds, other.cpu_seconds)
        )
        table[name] = {
            "median_step_seconds": wall,
            "fastest_step_seconds": min(other.seconds[warmup_steps:]),
            "median_cpu_seconds": cpu,
            "ratio": ours_wall / wall,
            # These two vary less when other programs use the cores: neighbouring steps see the same load.
            "paired_ratio": statistics.median(
                mine / theirs
                for mine, theirs in zip(ours.seconds[warmup_steps:], other.seconds[warmup_steps:], strict=True)
            ),
            "cpu_ratio": ours_cpu / cpu,
            "first_loss": other.losses[0],
            "last_loss": other.losses[-1],
            "loss_difference": max(
                abs(mine - theirs) / abs(theirs) for mine, theirs in zip(ours.losses, other.losses, strict=True)
            ),
        }
    return table


def print_table(table: dict[str, dict[str, float]]) -> None:
    """Print times in milliseconds, and the ratio of our step to each row's."""
    columns = {"median ms": 10, "fastest": 9, "CPU ms": 9, "ratio": 8, "paired": 8, "CPU ratio": 11}
    columns |= {"first loss": 12, "last loss": 11, "difference": 12}
    print(" " * 26 + "".join(f"{name:>{width}}" for name, width in columns.items()))
    for name, row in table.items():
        print(
            f"{name:26}{1e3 * row['median_step_seconds']:10.1f}{1e3 * row['fastest_step_seconds']:9.1f}"
            f"{1e3 * row['median_cpu_seconds']:9.1f}"
            f"{row['ratio']:8.3f}{row['paired_ratio']:8.3f}{row['cpu_ratio']:11.3f}"
            f"{row['first_loss']:12.5f}{row['last_loss']:11.5f}{row['loss_difference']:12.1e}"
        )


def run_benchmark(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    distributed.start_process_group(RANKS)
    num_rows = args.batch_size * args.micro_batches
    data = random_rows(num_rows, args.length, args.vocab, masked=args.length // 3, seed=SEED)
    rows = torch.arange(num_rows).view(args.micro_batches, args.batch_size)
    batches = [collate(data, part.numpy(), pad_token_id=0) for part in rows]
    micro_batches = [(batch["input_ids"], batch["labels"]) for batch in batches]
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = make_checkpoint(Path(folder), args)
            steps = {
                "ours": our_step(Path(folder), config, data, args),
                "hand-written": hand_written_step(Path(folder), micro_batches, all_logits=False),
                "hand-written, all logits": hand_written_step(Path(folder), micro_batches, all_logits=True),
            }
        records = take_turns(steps, rounds=args.warmup_steps + args.steps)
    finally:
        distributed.stop_process_group()
    table = compare(records, warmup_steps=args.warmup_steps)
    return {
        "machine": describe_machine(torch.device("cpu")),
        "options": {name: value for name, value in vars(args).items() if name != "output"},
        "ratio": table["hand-written"]["ratio"],
        "loss_difference": max(row["loss_difference"] for row in table.values()),
        "loops": table,
        "step_seconds": {name: record.seconds for name, record in records.items()},
    }


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)
    result = run_benchmark(args)
    print_table(result["loops"])
    if args.output:
        write_results(args.output, " ".join(["python benchmarks/overhead.py", *argv]), result)
    failed = False
    if (difference := result["loss_difference"]) > LOSS_TOLERANCE:
        print(f"FAILED: losses differ by {difference:.1e}, allowed {LOSS_TOLERANCE:.0e}: not the same work.")
        failed = True
    if result["ratio"] > MAX_RATIO:
        print(f"FAILED: our step takes {result['ratio']:.3f} times the hand-written one, allowed {MAX_RATIO}.")
        failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
