"""Parts of a step and a whole step against others' on one CPU core: `python benchmarks/cpu.py`.

fp32, one thread, interleaved: in each round everyone takes one turn. What counts is the CPU time of
a turn, ours divided by the other's in the same round: median and quartiles over the rounds. Memory
is the peak of tensors alive during a turn beyond those alive before, counted by torch's profiler.

- lora linear: forward and backward of a 4-bit layer with LoRA, 512 tokens, 5632 x 2048, rank 16,
  against PEFT on bitsandbytes' Linear4bit;
- dora linear: the same with DoRA, against our LoRA too;
- head and loss: of 2,048 tokens of which 60% are a prompt, vocabulary 128 Ki, hidden size 256,
  against all logits and cross entropy; the head is frozen;
- small model: a training step of a llama (hidden size 768, 6 layers, vocabulary 8,192; rows of 256
  tokens, 60% of them prompt, 2 micro-batches of 4) against transformers' Trainer with PEFT and
  bitsandbytes, and TRL's where installed; and against our own step with --kernels plain;
- small model, kept: the same without recomputation, by ours and by theirs;
- dpo: a step of the same model on 4 pairs of rows of 128 tokens, 60% of them prompt, 2
  micro-batches of 2, against TRL's DPOTrainer;
- distill: a step of the same model, in fp32, on the top 64 tokens of a teacher of 12 layers,
  which were found before, and the same with finding them, against TRL's GKDTrainer, whose teacher
  passes in each step.

Exits with 1 if a limit of LIMITS is not held.
"""

import argparse
import functools
import importlib.util
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

# So that it runs from a clone that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import bitsandbytes as bnb
import numpy as np
import peft
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.common import (
    Run,
    build_run,
    describe_machine,
    peak_bytes,
    quiet_on_one_thread,
    random_rows,
    write_results,
)
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.schedule import StepRows
from fsdp_qlora.data.batches.target_values import TargetValues, number_targets
from fsdp_qlora.distributed.process_group import start_process_group, stop_process_group
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.model.adapters.dora import DoraLinear
from fsdp_qlora.model.adapters.first_values import first_adapter_value
from fsdp_qlora.model.adapters.lora import LoraLinear
from fsdp_qlora.model.kernels.in_use import using_ways, ways_in_use
from fsdp_qlora.model.quantizers.base import QuantizedLinear
from fsdp_qlora.model.quantizers.table import QUANTIZERS
from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from fsdp_qlora.training.cross_entropy import CrossEntropy
from fsdp_qlora.training.forward import top_tokens_of_rows
from fsdp_qlora.training.head_loss import chunked_loss
from fsdp_qlora.training.token_loss import whole_head
from fsdp_qlora.training.top_tokens import TopTokens

# part -> the other -> what ours may take of its CPU time and peak memory
LIMITS: dict[str, dict[str, tuple[float, float | None]]] = {
    "lora linear": {"PEFT": (0.95, 0.35)},
    "dora linear": {"our LoRA": (1.15, None), "PEFT": (0.95, 0.35)},
    "head and loss": {"all logits": (0.5, 0.2)},
    "small model": {
        "HF Trainer": (0.9, None),
        "TRL": (0.8, None),
        "ours, plain": (1.02, None),
    },
    "small model, kept": {
        "HF Trainer": (0.95, None),
        "TRL": (0.85, None),
        "ours, plain": (1.02, None),
    },
    "dpo": {"TRL": (0.66, None)},
    "distill": {"TRL": (0.66, None)},
}
MASKED = 0.6  # of a row's tokens
SEED = 0
LR = 1e-3
LORA_RANK = 16
# On the CPU, where there is a GPU as well: the fixed cost of a step is the same code.
RANKS = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))

Step = Callable[[], float]  # runs one turn, returns its loss


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--rounds", type=int, default=20, help="number of measured rounds, after two for warm-up"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="shapes too small to measure anything, for tests"
    )
    parser.add_argument("--output", default="", help="JSON file to write")
    return parser.parse_args(argv)


def adapted_linear(args: argparse.Namespace, folder: Path, *, use_dora: bool) -> dict[str, Step]:
    in_features, out_features, tokens = (64, 128, 8) if args.tiny else (2048, 5632, 512)
    linear = nn.Linear(in_features, out_features, bias=False)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    x = torch.randn(1, tokens, in_features, requires_grad=True)
    grad = torch.randn(1, tokens, out_features)
    base = quantized_linear(linear, mesh)
    layers = {
        "ours": our_layer(DoraLinear if use_dora else LoraLinear, base, LORA_RANK),
        **({"our LoRA": our_layer(LoraLinear, base, LORA_RANK)} if use_dora else {}),
        "PEFT": peft_layer(linear, LORA_RANK, use_dora=use_dora),
    }

    def run(layer: nn.Module) -> float:
        step(layer, x, grad)
        return 0.0

    return {name: functools.partial(run, layer) for name, layer in layers.items()}


def quantized_linear(linear: nn.Linear, mesh: DeviceMesh) -> QuantizedLinear:
    """The package's 4-bit layer, gathered from its single shard."""
    options = {"quant_type": "nf4", "double_quant": True, "compute_dtype": torch.float32}
    layer = QUANTIZERS["bnb_4bit"].linear(linear, **options)
    layer.to_empty(device="cpu")
    for name, parameter in list(layer.named_parameters()):
        sharded = distribute_tensor(parameter.data, mesh, [Shard(0)])
        setattr(layer, name, nn.Parameter(sharded, requires_grad=False))
    layer.load_shard(linear.weight.detach().flatten(), mesh)
    for name, parameter in list(layer.named_parameters()):
        assert isinstance(parameter.data, DTensor)
        setattr(layer, name, nn.Parameter(parameter.data.to_local(), requires_grad=False))
    return layer


def our_layer(kind: type[LoraLinear | DoraLinear], base: QuantizedLinear, rank: int) -> nn.Module:
    layer = kind(base, rank=rank, scaling=2.0, dropout=0.0)
    layer.lora.to_empty(device="cpu")
    nn.init.normal_(layer.lora.lora_A.weight, std=0.02)
    nn.init.normal_(layer.lora.lora_B.weight, std=0.02)
    if isinstance(layer, DoraLinear):
        squares = layer.base_row_squares()
        with torch.no_grad():
            layer.lora.magnitude.row_squares.copy_(squares)
            layer.lora.magnitude.weight.copy_(squares.sqrt())
    return layer


def peft_layer(linear: nn.Linear, rank: int, *, use_dora: bool) -> nn.Module:
    base = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32
    )
    base.weight = bnb.nn.Params4bit(
        linear.weight.detach().clone(), requires_grad=False, quant_type="nf4"
    )
    model = nn.Sequential(base.to("cpu"))
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["0"], use_dora=use_dora)
    return peft.get_peft_model(model, config)


def step(layer: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> None:
    layer(x).backward(grad)
    x.grad = None
    layer.zero_grad()


def head_and_loss(args: argparse.Namespace, folder: Path) -> dict[str, Step]:
    tokens, hidden_size, vocabulary = (20, 16, 256) if args.tiny else (2048, 256, 2**17)
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = 0.05 * torch.randn(vocabulary, hidden_size)
    labels = torch.randint(vocabulary, (tokens,))
    labels[: int(MASKED * tokens)] = -100

    def ours() -> float:
        rows = (labels != -100).nonzero().flatten()
        return backward(
            chunked_loss(
                hidden.index_select(0, rows), whole_head(weight), labels[rows], CrossEntropy()
            )
        )

    def all_logits() -> float:
        logits = F.linear(hidden, weight)
        return backward(F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum"))

    def backward(loss: torch.Tensor) -> float:
        loss.backward()
        hidden.grad = None
        return loss.item()

    return {"ours": ours, "all logits": all_logits}


def small_shape(args: argparse.Namespace) -> argparse.Namespace:
    hidden, layers, vocab, length = (128, 1, 256, 20) if args.tiny else (768, 6, 8192, 256)
    return argparse.Namespace(
        hidden=hidden, layers=layers, vocab=vocab, length=length, batch_size=4, micro_batches=2
    )


def small_model(
    args: argparse.Namespace, folder: Path, *, recomputes: bool = True
) -> dict[str, Step]:
    shape = small_shape(args)
    config = make_checkpoint(folder, shape)
    length = shape.length
    data = random_rows(8, length, shape.vocab, masked=int(MASKED * length), seed=SEED)
    ids, learned = (
        torch.from_numpy(values).view(8, length) for values in (data.input_ids, data.learned)
    )
    labels = torch.where(learned, ids, -100)
    rows = [
        {"input_ids": row.tolist(), "labels": label.tolist()}
        for row, label in zip(ids, labels, strict=True)
    ]
    recompute = "all" if recomputes else "none"
    steps = {
        "ours": our_step(folder, config, data, shape, recompute=recompute),
        "ours, plain": our_step(folder, config, data, shape, recompute=recompute, kernels="plain"),
    }
    trainers = {"HF Trainer": hf_trainer} | (
        {"TRL": trl_trainer} if importlib.util.find_spec("trl") else {}
    )
    for name, make in trainers.items():
        start = partial(make, folder, rows, args.rounds + 3, recomputes=recomputes)
        steps[name] = StepByStep(start)
    return steps


def dpo(args: argparse.Namespace, folder: Path) -> dict[str, Step]:
    shape = small_shape(args)
    shape.length = shape.length // 2
    shape.batch_size = 2
    config = make_checkpoint(folder, shape)
    length = shape.length
    prompt = int(MASKED * shape.length)
    answers = random_rows(8, length, shape.vocab, masked=prompt, seed=SEED)
    ids = answers.input_ids[:].reshape(4, 2, length)
    ids[:, 1, :prompt] = ids[:, 0, :prompt]
    data = TokenizedRows(
        ids.ravel(),
        answers.learned,
        answers.offsets[::2],
        answers.row_numbers[:4],
        splits=np.full(4, length),
    )
    steps = {"ours": our_step(folder, config, data, shape, objective="dpo")}
    if importlib.util.find_spec("trl"):
        rows = [
            {
                "prompt_ids": a[:prompt].tolist(),
                "chosen_ids": a[prompt:].tolist(),
                "rejected_ids": b[prompt:].tolist(),
            }
            for a, b in ids
        ]
        steps["TRL"] = StepByStep(
            lambda callback: trl_dpo_trainer(folder, rows, args.rounds + 3, callback)
        )
    return steps


def distill(args: argparse.Namespace, folder: Path) -> dict[str, Step]:
    shape = small_shape(args)
    numbers = np.arange(8)
    of_teacher = argparse.Namespace(**vars(shape) | {"layers": 2 * shape.layers})
    teacher = make_checkpoint(folder / "teacher", of_teacher)
    config = make_checkpoint(folder, shape)
    data = random_rows(8, shape.length, shape.vocab, masked=int(MASKED * shape.length), seed=SEED)
    wanted = TopTokens(TrainConfig.top_k, shape.vocab)
    plain: dict[str, Any] = {"train_type": "lora"}
    forward = our_run(folder / "teacher", teacher, data, of_teacher, **plain).trainer.forward
    found = top_tokens_of_rows(forward, data, numbers, wanted)

    def told(table: TokenizedRows, rows: np.ndarray) -> dict[str, torch.Tensor]:
        values = torch.from_numpy(found)[number_targets(table, rows)["numbers"]]
        return {"teacher_ids": values[:, : wanted.k].long(), "teacher_logps": values[:, wanted.k :]}

    ours = our_step(
        folder, config, data, shape, told, objective="distill", teacher="another", **plain
    )

    def with_teacher() -> float:
        top_tokens_of_rows(forward, data, numbers, wanted)
        return ours()

    steps: dict[str, Step] = {"ours": ours, "ours, both": with_teacher}
    if importlib.util.find_spec("trl"):
        learned = [
            int(MASKED * shape.length) * [0] + (shape.length - int(MASKED * shape.length)) * [1]
        ] * 8
        ids = data.input_ids[:].reshape(8, -1).tolist()
        rows = [
            {"prompt": "", "input_ids": a, "completion_mask": b}
            for a, b in zip(ids, learned, strict=True)
        ]
        steps["TRL"] = StepByStep(
            lambda callback: trl_gkd_trainer(folder, rows, args.rounds + 3, callback)
        )
    return steps


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


def our_step(
    folder: Path, config: LlamaConfig, data: TokenizedRows, *of_run: Any, **given: Any
) -> Step:
    trainer = our_run(folder, config, data, *of_run, **given).trainer
    rows = StepRows(0, data, torch.arange(len(data)).numpy())
    ways = ways_in_use()  # those that this run has chosen

    def run() -> float:
        with using_ways(ways):
            return float(trainer.train_step(rows)["loss"])

    return run


def our_run(
    folder: Path,
    config: LlamaConfig,
    data: TokenizedRows,
    args: argparse.Namespace,
    target_values: TargetValues | None = None,
    **given: Any,
) -> Run:
    options = TrainConfig(
        **given,
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
    return build_run(options, config, WeightFiles(folder), data, RANKS, target_values=target_values)


def load_reference(folder: Path, *, quantized: bool = True, recomputes: bool = True) -> nn.Module:
    """The model as a user of transformers, PEFT and bitsandbytes sets it up, with our adapters'
    initial values.
    """
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="sdpa",
        **({"quantization_config": quantization, "device_map": "cpu"} if quantized else {}),
    )
    if recomputes:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lora = peft.LoraConfig(
        r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                name = name.replace(".default", "")
                parameter.copy_(first_adapter_value(name, parameter.shape, seed=SEED))
    return model.train()


def training_options(folder: Path, num_steps: int) -> dict[str, Any]:
    """The options of transformers' and TRL's trainers."""
    return {
        "output_dir": str(folder / "trainer"),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": num_steps,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "optim": "adamw_torch",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }


def hf_trainer(
    folder: Path,
    rows: list[dict[str, Any]],
    num_steps: int,
    callback: TrainerCallback,
    *,
    recomputes: bool,
) -> Trainer:
    options = TrainingArguments(**training_options(folder, num_steps))
    collate = transformers.default_data_collator
    return Trainer(
        load_reference(folder, recomputes=recomputes),
        options,
        collate,
        train_dataset=rows,
        callbacks=[callback],
    )


def trl_trainer(
    folder: Path,
    rows: list[dict[str, Any]],
    num_steps: int,
    callback: TrainerCallback,
    *,
    recomputes: bool,
) -> Trainer:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from benchmarks.peers import tokenizer

    options = SFTConfig(
        **training_options(folder, num_steps),
        max_length=len(rows[0]["input_ids"]),
        dataset_kwargs={"skip_prepare_dataset": True},
        bf16=False,
        gradient_checkpointing=recomputes,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    dataset = Dataset.from_list(rows)
    trainer: Trainer = SFTTrainer(
        load_reference(folder, recomputes=recomputes),
        options,
        train_dataset=dataset,
        processing_class=tokenizer(),
        callbacks=[callback],
    )
    return trainer


def trl_dpo_trainer(
    folder: Path, rows: list[dict[str, Any]], num_steps: int, callback: TrainerCallback
) -> Trainer:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from benchmarks.peers import tokenizer

    options = DPOConfig(
        **training_options(folder, num_steps) | {"per_device_train_batch_size": 2},
        bf16=False,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    # what it makes of it is replaced
    text = Dataset.from_list([{"prompt": "1", "chosen": "2", "rejected": "3"}])
    trainer: Trainer = DPOTrainer(
        load_reference(folder),
        args=options,
        train_dataset=text,
        processing_class=tokenizer(),
        callbacks=[callback],
    )
    trainer.train_dataset = Dataset.from_list(rows)
    return trainer


def trl_gkd_trainer(
    folder: Path, rows: list[dict[str, Any]], num_steps: int, callback: TrainerCallback
) -> Trainer:
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    from benchmarks.peers import tokenizer

    options = GKDConfig(
        **training_options(folder, num_steps),
        lmbda=0.0,
        beta=0.0,
        bf16=False,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    teacher = AutoModelForCausalLM.from_pretrained(
        folder / "teacher", dtype=torch.float32, attn_implementation="sdpa"
    )
    trainer: Trainer = GKDTrainer(
        load_reference(folder, quantized=False),
        teacher,
        options,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        callbacks=[callback],
    )
    return trainer


class StepByStep(TrainerCallback):  # type: ignore[misc]
    """Runs transformers' trainer in a thread of its own, one optimizer step at a time."""

    def __init__(self, make: Callable[[TrainerCallback], Trainer]) -> None:
        self._go = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._failure: BaseException | None = None
        trainer = make(self)
        self._history = trainer.state
        threading.Thread(target=self._train, args=(trainer,), daemon=True).start()
        self._wait()

    def _train(self, trainer: Trainer) -> None:
        torch.set_num_threads(1)
        try:
            trainer.train()
        except BaseException as error:
            self._failure = error
        self._done.release()

    def _wait(self) -> None:
        self._done.acquire()
        if self._failure is not None:
            raise self._failure

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._history = state
        self._done.release()
        self._go.acquire()

    def __call__(self) -> float:
        """Run from the beginning of a step to the beginning of the next; returns its loss."""
        self._go.release()
        self._wait()
        return float([entry["loss"] for entry in self._history.log_history if "loss" in entry][-1])


PARTS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Step]]] = {
    "lora linear": functools.partial(adapted_linear, use_dora=False),
    "dora linear": functools.partial(adapted_linear, use_dora=True),
    "head and loss": head_and_loss,
    "small model": small_model,
    "small model, kept": functools.partial(small_model, recomputes=False),
    "dpo": dpo,
    "distill": distill,
}


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
            started = time.perf_counter()
            cpu_started = time.process_time()
            loss = steps[name]()
            records[name].cpu_seconds.append(time.process_time() - cpu_started)
            records[name].seconds.append(time.perf_counter() - started)
            records[name].losses.append(loss)
    return records


def measure(part: str, args: argparse.Namespace) -> dict[str, Any]:
    """CPU seconds, ratios and peaks of everyone in a part."""
    torch.manual_seed(SEED)
    with tempfile.TemporaryDirectory() as folder:
        steps = PARTS[part](args, Path(folder))
        records = take_turns(steps, rounds=2 + args.rounds)
        counted = any(limit[1] is not None for limit in LIMITS[part].values())
        peaks = {name: peak_bytes(run) for name, run in steps.items()} if counted else {}
    ours = records["ours"]
    table: dict[str, Any] = {}
    for name, record in records.items():
        ratios = [a / b for a, b in zip(ours.cpu_seconds[2:], record.cpu_seconds[2:], strict=True)]
        table[name] = {
            "median_cpu_seconds": statistics.median(record.cpu_seconds[2:]),
            "first_loss": record.losses[0],
            "ratio_quartiles": statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3,
            "ratio_limit": LIMITS[part].get(name, (None, None))[0],
        }
        if peaks:
            table[name] |= {"peak_bytes": peaks[name], "peak_ratio": peaks["ours"] / peaks[name]}
            table[name]["peak_limit"] = LIMITS[part].get(name, (None, None))[1]
    return table


def failures(table: dict[str, dict[str, Any]]) -> list[str]:
    """The limits that a part does not hold, in words."""
    found = []
    for part, rows in table.items():
        for name, row in rows.items():
            ratio = row["ratio_quartiles"][1]
            peak = row.get("peak_ratio")
            if row["ratio_limit"] and ratio > row["ratio_limit"]:
                found.append(
                    f"{part}: {ratio:.3f} times the CPU time of {name}, allowed "
                    f"{row['ratio_limit']}"
                )
            if row.get("peak_limit") and peak > row["peak_limit"]:
                found.append(
                    f"{part}: {peak:.3f} times the peak memory of {name}, allowed "
                    f"{row['peak_limit']}"
                )
            # Ours compares k + 1 outcomes.
            if part != "distill" and abs(
                row["first_loss"] - rows["ours"]["first_loss"]
            ) > 1e-3 * abs(row["first_loss"]):
                found.append(f"{part}: the loss of {name} is another: not the same work")
    return found


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    quiet_on_one_thread()
    start_process_group(RANKS)
    try:
        table = {part: measure(part, args) for part in args.parts}
    finally:
        stop_process_group()
    for part, rows in table.items():
        for name, row in rows.items():
            low, middle, high = row["ratio_quartiles"]
            peak = (
                f", peak {row['peak_bytes'] / 2**20:.1f} MiB, ratio {row['peak_ratio']:.3f}"
                if "peak_ratio" in row
                else ""
            )
            print(
                f"{part:14} {name:11} {1e3 * row['median_cpu_seconds']:9.1f} ms, ours to it "
                f"{middle:.3f} ({low:.3f} to {high:.3f}){peak}"
            )
    if args.output:
        result = {
            "machine": describe_machine(torch.device("cpu")),
            "rounds": args.rounds,
            "parts": table,
        }
        write_results(args.output, " ".join(["python benchmarks/cpu.py", *argv]), result)
    broken = failures(table)
    for line in broken:
        print(f"FAILED: {line}.")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
