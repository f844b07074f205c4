"""Every option of train.py, once: its name, type, default, help and the checks on its value.

A field of `TrainConfig` is the flag, the YAML key and the attribute. The sentence under it is its help
(`option_help` reads it from here), and the `== ... ==` comments are the headings of `--help`.
"""

import ast
import importlib.util
import inspect
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import yaml

from fsdp_qlora.adapters.targets import ALL, is_regex
from fsdp_qlora.redact import redact_values
from fsdp_qlora.train_types import QUANTIZER_OPTIONS, TRAIN_TYPES

Group = TypeVar("Group")


@dataclass(frozen=True)
class TrainConfig:
    """Options of one training run."""

    # == launch ==
    world_size: int = -1
    """Processes on this machine when started as one process; -1 is one per visible GPU, one on a CPU."""
    nproc_per_node: int = -1
    """The same as world_size under torchrun's name; 1 keeps a run to one process on a machine with several
    GPUs."""
    master_addr: str = "localhost"
    """Address where the processes meet when train.py starts them itself; under torchrun, torchrun's."""
    master_port: int = 0
    """Port where the processes meet when train.py starts them itself; 0 takes a free one."""

    # == model ==
    model_name: str = "Qwen/Qwen3-8B-Base"
    """Name on the Hugging Face hub, or local folder, of the decoder-only model to fine-tune."""
    trust_remote_code: bool = False
    """Run the Python code that a model or tokenizer brings along, with your rights; models that transformers does
    not know need it. Read that code first."""
    llama_pro_path: str | None = None
    """Folder that scripts/block_expansion.py made, for bnb_llama_pro and hqq_llama_pro; the same as giving it as
    model_name."""
    attn_implementation: Literal["auto", "sdpa", "flash_attention_2", "eager"] = "auto"
    """Attention kernels; auto takes flash-attn where it is installed and the GPU is Ampere or newer, else
    SDPA, or eager for models whose attention SDPA cannot compute."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp16_autocast", "bf16_autocast", "bf16_buffers_autocast"] = (
        "auto"
    )
    """Number format of the computation; auto is bf16 where the GPU computes in it, fp16 on older GPUs and fp32 on
    the CPU. Weights that train are kept in fp32; with fp16 the loss is scaled, and a step whose gradients overflow
    is skipped. Set fp32 to compare runs digit by digit."""

    # == training ==
    train_type: Literal[
        "full",
        "lora",
        "qlora",
        "custom_lora",
        "custom_qlora",
        "hqq_lora",
        "int8_lora",
        "dora",
        "bnb_dora",
        "hqq_dora",
        "bnb_llama_pro",
        "hqq_llama_pro",
    ] = "qlora"
    """What trains: an adapter on a 4-bit base (qlora), on an HQQ base of 8 to 2 bits (hqq_lora), on an 8-bit base
    (int8_lora), on a 16-bit base (lora), a DoRA adapter on such a base (bnb_dora, hqq_dora, dora), the blocks that
    block_expansion.py added to a quantized base (bnb_llama_pro, hqq_llama_pro), or all weights (full); the custom_
    names are the 2024 program's and mean the same as those without it."""
    lora_rank: int = 16
    """Rank of the adapter; raise it when the training loss stays high, at the cost of memory."""
    lora_alpha: int = 32
    """Scale of the adapter: its output is multiplied by lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Dropout on the adapter's input; try 0.05 to 0.1 when a small dataset is overfitted."""
    lora_target_modules: tuple[str, ...] = ("all",)
    """Linear layers that get an adapter: all (or all-linear), default (PEFT's choice for the model), layer names such
    as q_proj,v_proj, or one regular expression for whole paths such as .*layers.1\\d.*_proj (without commas)."""
    lora_target_parameters: tuple[str, ...] = ()
    """Expert weights of a mixture-of-experts model that get an adapter too, named as in PEFT, such as
    mlp.experts.gate_up_proj,mlp.experts.down_proj; by default none."""
    modules_to_save: tuple[str, ...] = ()
    """Embeddings and head to train in full beside the adapter and save in its file, such as embed_tokens,lm_head; for
    new tokens or another language. Each takes 16 bytes per weight, shared by the ranks."""
    use_rslora: bool = False
    """Scale the adapter by lora_alpha / sqrt(lora_rank), which keeps high ranks learning (rsLoRA)."""
    init_lora_weights: str = "true"
    """First values of the adapter: true (A random, B zero), or read off each weight: pissa or olora (its main
    directions, which the base then lacks), pissa_niter_16 (pissa, approximate and much quicker), loftq (what
    quantization lost)."""
    rank_pattern: tuple[str, ...] = ()
    """Other ranks for some layers, such as down_proj=32,layers.0.self_attn.q_proj=4; a name is a regular expression
    for the end of a path, as in PEFT, and the first that matches counts."""
    alpha_pattern: tuple[str, ...] = ()
    """Other values of lora_alpha for some layers, written like rank_pattern."""
    batch_size: int = 1
    """Rows per process in one forward pass; raise it until memory is full."""
    context_length: int = 512
    """Longest row in tokens; what is longer is cut, and a row whose prompt alone is as long is left out: the
    report on the data counts both."""
    gradient_accumulation_steps: int = 1
    """Forward and backward passes per optimizer step; raise it for a larger batch in the same memory."""
    num_epochs: int = 1
    """Passes over the dataset."""
    max_steps: int = -1
    """Stop after this many optimizer steps of the whole run; -1 runs all epochs."""
    lr: float | None = None
    """Peak learning rate; by default 2e-4 for adapters and new blocks, and 1e-5 for full."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    """Course of the learning rate after the warm-up: constant, or falling so that it would be 0 after the last
    step."""
    warmup_ratio: float = 0.03
    """Share of the steps over which the learning rate rises from 0."""
    warmup_steps: int = -1
    """Optimizer steps over which the learning rate rises from 0; 0 or more replaces warmup_ratio."""
    optimizer: Literal[
        "adamw", "adam", "sgd", "adadelta", "fused_adamw", "fused_adam", "adamw_8bit", "paged_adamw_8bit", "lion",
        "lion_8bit", "adafactor", "muon", "schedule_free_adamw",
    ] = "adamw"  # fmt: skip
    """Optimizer; the fused ones are faster when many weights train on a GPU, the 8-bit ones and adafactor need less
    memory, paged ones move what does not fit to the host, muon is for LoRA alone."""
    loraplus_lr_ratio: float = 1.0
    """Learning rate of the adapter's B over that of A (LoRA+); 16 with a lower lr often learns faster."""
    wd: float = 0.0
    """Weight decay; 0.01 to 0.1 is usual when all weights train."""
    apply_gradient_clipping: bool = True
    """Scale gradients down whose global norm is above grad_norm."""
    grad_norm: float = 1.0
    """Largest global gradient norm; lower it when the loss jumps."""
    seed: int = 42
    """Seed of the adapter's initial values, the dropout, the order of the rows and the choice of those held out."""
    deterministic: bool = False
    """Use only kernels that give the same bits every time, so that a run on a GPU can be repeated and resumed to the
    last bit; slower, and refused by operations that have no such kernel. A CPU run is always so."""

    # == memory ==
    sharding_strategy: Literal["full_shard", "shard_grad_op", "ddp", "hybrid_full_shard", "hybrid_shard_grad_op"] = (
        "full_shard"
    )
    """How the model is spread: full_shard needs least memory, shard_grad_op keeps gathered weights until the
    backward pass, ddp copies the model to every process, hybrid_ shards within a machine and copies
    between machines."""
    use_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass; turn it off for speed when memory allows."""
    use_cpu_offload: bool = False
    """Keep the frozen base (with full: the weights, gradients and optimizer) in host memory, and copy each block
    to the GPU when it is needed; for models that do not fit otherwise."""
    use_activation_cpu_offload: bool = False
    """Keep the checkpointed activations in host memory; for long contexts that do not fit otherwise."""

    loading_buffer_mib: int = 128
    """Host memory per process, in MiB, for weights that are read from the files and not yet stored; raise it
    when a network disk is slow to answer."""

    # == quantization ==
    quant_type: Literal["nf4", "fp4"] = "nf4"
    """4-bit format of the frozen base; nf4 fits normally distributed weights better."""
    double_quant: bool = True
    """Quantize the scales too: saves about 0.4 bits per weight."""
    n_bits: int = 4
    """Bits per weight of an HQQ base: 8, 4, 3 or 2; fewer save memory and cost quality."""
    group_size: int = 64
    """Weights that share a scale and a zero in an HQQ base, a multiple of 32; smaller groups are more exact and take
    32 bits each."""
    int8_threshold: float = 6.0
    """Activations as large as this are not rounded to 8 bits with an int8 base (LLM.int8's outliers); 0 rounds
    all, which is faster and less exact."""
    quant_storage: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """Type under which packed weights are sharded; it has to be the compute dtype, which auto takes."""
    allow_unquantized: bool = False
    """Go on when less than 90% of the parameters of the decoder blocks can be quantized (embeddings and head are
    not counted); needs memory for the rest."""
    quant_cache: str = "auto"
    """Folder that keeps the quantized weights (in 4 bits a quarter of the model's size) for the next start, with any
    number of processes; auto is quantized/ in FSDP_QLORA_CACHE or the user's cache folder, off keeps nothing."""

    # == data ==
    dataset: str = "alpaca_sample"
    """Rows to train on: alpaca, alpaca_sample, alpaca_demo (no network needed), dummy (to measure speed),
    owner/name on the Hugging Face hub, or a .json, .jsonl, .csv or .parquet file or a folder of them."""
    dataset_samples: int | None = None
    """Use only the first so many rows; by default all of them (alpaca_sample and dummy have a size of their own)."""
    dataset_format: Literal["auto", "alpaca"] = "auto"
    """Meaning of the columns; auto tells it from their names."""
    on_bad_row: Literal["skip", "error"] = "skip"
    """What to do with a row that cannot be used (malformed, no output, or no room for one): skip leaves it out and
    lists it in rejected.jsonl, error stops."""
    max_bad_rows: float = 0.01
    """Share of the rows that on_bad_row skip may leave out before the run refuses."""
    eval_fraction: float = 0.0
    """Share of the rows held out to measure the loss on."""
    eval_dataset: str | None = None
    """Dataset to measure the loss on, named as in dataset."""
    eval_steps: int = 0
    """Measure the held-out loss every so many optimizer steps; 0 is only before and after training."""

    # == output ==
    save_model: bool = True
    """Save checkpoints, and the adapter (or the model, for full) at the end; turn it off when only speed is
    measured."""
    output_dir: str = "output"
    """Folder for the results: the adapter, the tokenizer, config.yaml, metrics.jsonl and the checkpoints."""
    overwrite_output_dir: bool = False
    """Allow output_dir to hold the results of a finished or another run, which are replaced; this run's own,
    unfinished, is gone on with all the same, unless resume is off."""
    log_to: tuple[Literal["tqdm", "stdout", "wandb", "jsonl"], ...] = ("tqdm",)
    """Where metrics go, one or more; metrics.jsonl in output_dir is always written."""
    project_name: str = "fsdp_qlora"
    """Project of the run on wandb."""
    name: str | None = None
    """Name of the run on wandb."""
    group: str | None = None
    """Group of the run on wandb, for runs that belong together."""
    entity: str | None = None
    """User or team on wandb that owns the run."""
    verbose: bool = False
    """Print the model's structure too."""
    dry_run: bool = False
    """Build everything without weights, print sizes, memory per process and steps, and stop."""

    # == never losing a run ==
    resume: str = "auto"
    """Where to begin: auto goes on from the newest good checkpoint of this run in output_dir, off starts at zero, and
    a checkpoint's or another run's folder goes on from there."""
    save_steps: int = 0
    """Save a checkpoint every so many optimizer steps, besides save_minutes; 0 is by the clock alone. There is one at
    the end, at a stop, and after each evaluation that is the best so far, in any case."""
    save_minutes: float = 15.0
    """Save a checkpoint every so many minutes; raise it when all weights train and the disk is slow, 0 is never."""
    save_total_limit: int = 3
    """Newest checkpoints that are kept, besides the one with the lowest held-out loss."""
    mirror: str | None = None
    """Where each checkpoint is copied while training goes on: a folder on another disk or machine, rclone:REMOTE, or
    hf:OWNER/NAME (a private repository); an empty output_dir, as on a new machine, is filled from it."""
    max_hours: float | None = None
    """Stop with a checkpoint before the run has taken so many hours, earlier starts of it included."""
    max_cost_usd: float | None = None
    """Stop with a checkpoint before the run has cost so much, at price_per_hour."""
    price_per_hour: float | None = None
    """US dollars per hour for all machines of the run."""
    on_nonfinite: Literal["halt", "skip"] = "halt"
    """What to do when a loss or gradient is not a finite number: end the run, or leave out the step (10 steps or 1% at
    most)."""
    hang_minutes: float = 15.0
    """End the run when a process has not moved for so long, and say which; raise it when one micro-batch, or
    saving, takes longer, 0 is never."""

    # == profiling ==
    profile_memory: bool = False
    """Log the memory in use after each phase of the start and after the first steps."""
    profile: bool = False
    """Run torch.profiler during training, in cycles of steps; by default it records the last two of every ten,
    so a run of fewer steps needs a shorter profiling_frequency."""
    profiling_output: str = "profiles"
    """Folder for the profiler's files."""
    with_stack: bool = False
    """Record the source line of each operation; it slows the steps that are profiled."""
    with_shapes: bool = False
    """Record the shapes of each operation's inputs."""
    export_trace: bool = True
    """Write a trace that chrome://tracing and Perfetto open."""
    export_memory_timeline: bool = False
    """Write the memory in use over time by category."""
    wait_steps: int = 0
    """Steps that the profiler skips at the start of a cycle; used when repeat is above 0."""
    profiling_warmup_steps: int = 1
    """Steps that the profiler runs and throws away before it records (warmup_steps in the 2024 program; that
    name is now the learning rate's)."""
    active_steps: int = 2
    """Steps that the profiler records in a cycle."""
    repeat: int = 0
    """Cycles of the profiler; 0 repeats to the end, one cycle every profiling_frequency steps."""
    profiling_frequency: int = 10
    """Length of a profiler cycle in steps; used when repeat is 0."""

    # == accepted for the 2024 program's commands, and without effect ==
    low_memory: bool | None = None
    """Needless: loading never holds more than loading_buffer_mib besides the shard."""
    no_sync: bool | None = None
    """Needless: an adapter's gradients are always synchronised once per optimizer step."""
    reentrant_checkpointing: bool | None = None
    """Needless: checkpointing is always the non-reentrant kind."""
    loading_workers: int | None = None
    """Needless: weights are read ahead as far as loading_buffer_mib allows."""

    @property
    def learning_rate(self) -> float:
        """`lr`, or what suits the train type where it is not given."""
        if self.lr is not None:
            return self.lr
        return 1e-5 if TRAIN_TYPES[self.train_type].trains == "all" else 2e-4

    @property
    def model(self) -> str:
        """Name or folder of the model: `llama_pro_path` where it is given."""
        return self.llama_pro_path or self.model_name

    @property
    def requested_processes(self) -> int:
        """Processes asked for on this machine, or -1 for one per visible GPU."""
        return max(self.nproc_per_node, self.world_size)

    def pick(self, cls: type[Group], *, prefix: str = "", **given: Any) -> Group:
        """The options that belong together, as the dataclass that a library function takes.

        Args:
            cls: a dataclass; each field that is not in `given` is the option of that name.
            prefix: what the options' names begin with and the fields' do not; an option without it is taken where
                there is none with it.
        Raises:
            AttributeError: a field is no option and not given, even if it has a default.
        """
        names = [field.name for field in fields(cls) if field.init and field.name not in given]  # type: ignore[arg-type]
        found = {name: prefix + name if hasattr(self, prefix + name) else name for name in names}
        return cls(**{name: getattr(self, option) for name, option in found.items()}, **given)


NEEDLESS = {
    "low_memory": "weights are always streamed from the files; no process ever holds more than its shard and "
    "--loading_buffer_mib.",
    "no_sync": "an adapter's gradients are always synchronised once per optimizer step, with offload too; those of "
    "a whole model after every micro-batch, which keeps them sharded.",
    "reentrant_checkpointing": "activation checkpointing is always non-reentrant.",
    "loading_workers": "reading runs ahead of quantizing by --loading_buffer_mib.",
}
"""Options of the 2024 program that are accepted and do nothing, and what happens instead."""

DEFAULTS = TrainConfig()


def needless_lines(config: TrainConfig) -> list[str]:
    """One line for each option that was given and has no effect any more."""
    given = [name for name in NEEDLESS if getattr(config, name) is not None]
    return [f"--{name} is no longer needed: {NEEDLESS[name]}" for name in given]


def option_help() -> dict[str, dict[str, str]]:
    """Heading -> option -> help, in the order of the fields, read from the source of `TrainConfig`."""
    source = textwrap.dedent(inspect.getsource(TrainConfig))
    headings = {number: line.strip(" #=") for number, line in enumerate(source.splitlines(), 1) if "# ==" in line}
    body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    options: dict[str, dict[str, str]] = {heading: {} for heading in headings.values()}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            heading = headings[max(number for number in headings if number < field.lineno)]
            name, sentence = ast.unparse(field.target), ast.literal_eval(text.value)
            options[heading][name] = " ".join(sentence.split())
    return options


def resolved_options(config: TrainConfig) -> dict[str, Any]:
    """All options of the run, with the learning rate that is used; a dry run's are those of the run it plans.

    For files, logs and other machines: secrets are taken out.
    """
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(config).items()}
    return redact_values(options | {"lr": config.learning_rate, "dry_run": False})


def resolved_yaml(config: TrainConfig) -> str:
    """`resolved_options` as YAML that `--config` accepts for the same run."""
    return yaml.safe_dump(resolved_options(config), sort_keys=False, allow_unicode=True)


def pairs(items: Iterable[str]) -> list[tuple[str, str]]:
    """["q_proj=8"] -> [("q_proj", "8")]; the value of what has no `=` is empty."""
    return [
        (name, value) for name, _, value in (item.rpartition("=") if "=" in item else (item, "", "") for item in items)
    ]


def check(config: TrainConfig) -> list[str]:
    """What is wrong with the values of the options and with their combination; needs no model or device."""
    errors = [
        f"--{name} must be {allowed}, but is {getattr(config, name)!r}."
        for name, (accepts, allowed) in _LIMITS.items()
        if not accepts(getattr(config, name))
    ]
    rule_sets = (
        _launch_conflicts,
        _model_conflicts,
        _adapter_conflicts,
        _optimizer_conflicts,
        _data_conflicts,
        _budget_conflicts,
        _profiling_conflicts,
    )
    for rules in rule_sets:
        errors.extend(rules(config))
    return errors


def quant_storage_error(quant_storage: str, compute_dtype: str) -> str | None:
    """Why packed weights cannot be sharded as `quant_storage` when the model computes in `compute_dtype`."""
    if quant_storage in ("auto", compute_dtype):
        return None
    return (
        f"--quant_storage is {quant_storage}, but the model computes in {compute_dtype}: FSDP would convert "
        f"the packed bytes to {compute_dtype} as if they were numbers. Leave it at auto."
    )


_Limit = tuple[Callable[[Any], bool], str]


def _at_least(low: int) -> _Limit:
    return lambda value: value >= low, f"{low} or more"


def _positive_or_all(value: int) -> bool:
    return value == -1 or value >= 1


_SHARE: _Limit = (lambda value: 0 <= value <= 1, "between 0 and 1")
_SHARE_BELOW_ONE: _Limit = (lambda value: 0 <= value < 1, "0 or more and below 1")
_NOT_EMPTY: _Limit = (lambda value: bool(value), "given")
_POSITIVE: _Limit = (lambda value: value is None or 0 < value < math.inf, "a finite number above 0")

_LIMITS: dict[str, _Limit] = {
    "world_size": (_positive_or_all, "-1 or a number of processes"),
    "nproc_per_node": (_positive_or_all, "-1 or a number of processes"),
    "master_addr": _NOT_EMPTY,
    "master_port": (lambda value: 0 <= value <= 65535, "between 0 and 65535"),
    "model_name": _NOT_EMPTY,
    "quant_cache": _NOT_EMPTY,
    "n_bits": (lambda value: value in (8, 4, 3, 2), "8, 4, 3 or 2"),
    "group_size": (lambda value: value >= 32 and value % 32 == 0, "a multiple of 32"),
    "int8_threshold": (lambda value: 0 <= value < math.inf, "a finite number, 0 or more"),
    "lora_rank": _at_least(1),
    "lora_alpha": _at_least(1),
    "lora_dropout": _SHARE_BELOW_ONE,
    "lora_target_modules": _NOT_EMPTY,
    "batch_size": _at_least(1),
    "loading_buffer_mib": _at_least(1),
    "context_length": _at_least(2),
    "gradient_accumulation_steps": _at_least(1),
    "num_epochs": _at_least(1),
    "max_steps": (_positive_or_all, "-1 (all epochs) or a number of optimizer steps"),
    "lr": _POSITIVE,
    "warmup_ratio": _SHARE,
    "warmup_steps": _at_least(-1),
    "loraplus_lr_ratio": _POSITIVE,
    "wd": (lambda value: 0 <= value < math.inf, "a finite number, 0 or more"),
    "grad_norm": _POSITIVE,
    "seed": (lambda value: 0 <= value < 2**32, "between 0 and 4294967295"),
    "dataset": _NOT_EMPTY,
    "dataset_samples": (lambda value: value is None or value >= 1, "1 or more"),
    "max_bad_rows": _SHARE,
    "eval_fraction": _SHARE_BELOW_ONE,
    "eval_steps": _at_least(0),
    "output_dir": _NOT_EMPTY,
    "log_to": _NOT_EMPTY,
    "resume": _NOT_EMPTY,
    "save_steps": _at_least(0),
    "save_minutes": _at_least(0),
    "save_total_limit": _at_least(1),
    "max_hours": _POSITIVE,
    "max_cost_usd": _POSITIVE,
    "price_per_hour": _POSITIVE,
    "hang_minutes": _at_least(0),
    "profiling_output": _NOT_EMPTY,
    "wait_steps": _at_least(0),
    "profiling_warmup_steps": _at_least(0),
    "active_steps": _at_least(1),
    "repeat": _at_least(0),
    "profiling_frequency": _at_least(1),
}


def _changed(config: TrainConfig, *names: str) -> list[str]:
    return [name for name in names if getattr(config, name) != getattr(DEFAULTS, name)]


def _launch_conflicts(c: TrainConfig) -> Iterator[str]:
    if c.world_size != c.nproc_per_node and -1 not in (c.world_size, c.nproc_per_node):
        yield (
            f"--world_size is {c.world_size} and --nproc_per_node is {c.nproc_per_node}, but both are the "
            "number of processes on this machine. Give one of them."
        )


def _model_conflicts(c: TrainConfig) -> Iterator[str]:
    kind = TRAIN_TYPES[c.train_type]
    quantization = _changed(c, "quant_storage", "allow_unquantized")
    if c.quant_cache not in ("auto", "off"):
        quantization.append("quant_cache")
    if quantization and kind.quantizer is None:
        yield (
            f"--train_type {c.train_type} does not quantize: leave out {_flags(quantization)}, "
            "or use --train_type qlora."
        )
    for quantizer, names in QUANTIZER_OPTIONS.items():
        given = _changed(c, *names)
        if given and kind.quantizer != quantizer:
            takers = [name for name, other in TRAIN_TYPES.items() if other.quantizer == quantizer]
            yield f"--train_type {c.train_type} does not know {_flags(given)}: that is for {', '.join(takers)}."
    if c.llama_pro_path is not None and not kind.trains_new_blocks:
        yield (
            f"--train_type {c.train_type} does not know --llama_pro_path: that is for bnb_llama_pro and hqq_llama_pro."
        )
    if kind.quantizer == "hqq" and importlib.util.find_spec("hqq") is None:
        yield f"--train_type {c.train_type} needs the package hqq: pip install hqq."
    # The name of a precision starts with its compute dtype. What auto comes to is known with the device.
    compute_dtype = c.precision.split("_")[0]
    if kind.quantizer is not None and compute_dtype != "auto":
        yield from filter(None, [quant_storage_error(c.quant_storage, compute_dtype)])
    if not c.apply_gradient_clipping and _changed(c, "grad_norm"):
        yield "--grad_norm says at which norm to clip: it needs --apply_gradient_clipping true."
    if c.use_activation_cpu_offload and not c.use_gradient_checkpointing:
        yield (
            "--use_activation_cpu_offload moves the activations that checkpointing keeps: it needs "
            "--use_gradient_checkpointing true."
        )


def _adapter_conflicts(c: TrainConfig) -> Iterator[str]:
    kind = TRAIN_TYPES[c.train_type]
    given = _changed(c, *_ADAPTER_OPTIONS)
    if given and not kind.has_adapter:
        yield (f"--train_type {c.train_type} has no adapter: leave out {_flags(given)}, or use --train_type lora.")
    if c.lora_target_parameters and c.lora_dropout:
        yield (
            f"--lora_dropout is {c.lora_dropout}, but --lora_target_parameters needs it to be 0: PEFT adapts experts "
            "without dropout."
        )
    if c.lora_target_parameters and kind.adapter == "dora":
        yield (
            f"--train_type {c.train_type} is DoRA, which PEFT has for linear layers only: leave out "
            "--lora_target_parameters."
        )
    yield from _init_errors(c)
    yield from _target_errors(c.lora_target_modules)
    yield from _pattern_errors("rank_pattern", c.rank_pattern, int, "a whole number of 1 or more")
    yield from _pattern_errors("alpha_pattern", c.alpha_pattern, float, "a number above 0")


_ADAPTER_OPTIONS = (
    "lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters", "modules_to_save",
    "use_rslora",
    "init_lora_weights", "rank_pattern", "alpha_pattern", "loraplus_lr_ratio",
)  # fmt: skip


def _init_errors(c: TrainConfig) -> Iterator[str]:
    kind, init = TRAIN_TYPES[c.train_type], c.init_lora_weights
    if init == "eva":
        yield (
            "--init_lora_weights eva would need the data to pass through the model before the adapter is made, which "
            "this program does not do. Take pissa_niter_16, which starts from the weights."
        )
    elif re.fullmatch(r"true|pissa|pissa_niter_[1-9]\d*|olora|loftq", init) is None:
        yield f"--init_lora_weights is {init!r}; choices: true, pissa, pissa_niter_N, olora, loftq."
    if init == "true":
        return
    if init == "loftq" and kind.has_adapter and kind.quantizer is None:
        yield f"--init_lora_weights loftq makes up for quantization, but --train_type {c.train_type} does not quantize."
    if kind.adapter == "dora":
        yield f"--train_type {c.train_type} starts from the base model's own rows: leave --init_lora_weights at true."
    if c.lora_target_parameters:
        yield f"--init_lora_weights {init} is for linear layers: leave out --lora_target_parameters."
    if init.startswith(("pissa", "olora")) and c.quant_cache not in ("auto", "off"):
        yield f"--init_lora_weights {init} changes the base, so its weights are not cached: leave out --quant_cache."


def _target_errors(targets: tuple[str, ...]) -> Iterator[str]:
    value = ",".join(targets)
    if len(targets) > 1:
        special = [name for name in targets if name in (*ALL, "default")]
        if special:
            yield (
                f"--lora_target_modules: {min(special)} cannot be combined with other names, but the value is {value}."
            )
        elif any(is_regex(name) for name in targets):
            yield (
                "--lora_target_modules: a regular expression is given alone and without commas, but the value is "
                f"{value}."
            )
    elif targets and is_regex(targets[0]) and (reason := _regex_error(targets[0])):
        yield f"--lora_target_modules: {value} is not a name, and as a regular expression it is wrong: {reason}."


def _pattern_errors(option: str, items: tuple[str, ...], number: type, allowed: str) -> Iterator[str]:
    for name, value in pairs(items):
        try:
            good = 0 < number(value) < math.inf
        except ValueError:
            good = False
        if not name or not good:
            yield f"--{option} needs name=number with {allowed}, but has {name + '=' * bool(value) + value!r}."
        elif reason := _regex_error(name):
            yield f"--{option}: {name} is wrong as a regular expression: {reason}."


def _regex_error(pattern: str) -> str | None:
    try:
        re.compile(pattern)
    except re.error as error:
        return str(error)
    return None


def _optimizer_conflicts(c: TrainConfig) -> Iterator[str]:
    kind = TRAIN_TYPES[c.train_type]
    others = _changed(c, "lora_target_parameters", "modules_to_save")
    if c.optimizer == "muon" and (kind.adapter != "lora" or others):
        yield (
            "--optimizer muon makes whole matrices orthogonal, which here are LoRA's A and B: it cannot be used with "
            + (_flags(others) if kind.adapter == "lora" else f"--train_type {c.train_type}")
            + "."
        )
    if c.optimizer == "schedule_free_adamw" and c.lr_scheduler != "constant":
        yield (
            f"--optimizer schedule_free_adamw takes the place of a schedule, but --lr_scheduler is {c.lr_scheduler}: "
            "give --lr_scheduler constant (the warm-up stays)."
        )
    if c.optimizer.startswith("paged_") and c.use_cpu_offload and (c.modules_to_save or not kind.has_adapter):
        yield (
            f"--optimizer {c.optimizer} pages from the GPU, where --use_cpu_offload leaves "
            f"{'not all that trains' if kind.has_adapter else 'nothing'}: use adamw_8bit."
        )


def _data_conflicts(c: TrainConfig) -> Iterator[str]:
    if c.eval_dataset is not None and c.eval_fraction > 0:
        yield "--eval_dataset and --eval_fraction both say which rows measure the held-out loss. Give one."
    if c.eval_steps > 0 and c.eval_dataset is None and c.eval_fraction == 0:
        yield "--eval_steps needs rows to measure on: give --eval_fraction (such as 0.05) or --eval_dataset."


def _budget_conflicts(c: TrainConfig) -> Iterator[str]:
    if (c.max_cost_usd is None) != (c.price_per_hour is None):
        yield "--max_cost_usd and --price_per_hour are needed together: the one is reached at the other."


def _profiling_conflicts(c: TrainConfig) -> Iterator[str]:
    steps = c.profiling_warmup_steps + c.active_steps
    if c.profile and c.repeat == 0 and c.profiling_frequency < steps:
        yield (
            f"--profiling_frequency is {c.profiling_frequency}, but a cycle of --profiling_warmup_steps and "
            f"--active_steps takes {steps} steps."
        )


_RULES = (
    _launch_conflicts,
    _model_conflicts,
    _adapter_conflicts,
    _optimizer_conflicts,
    _data_conflicts,
    _profiling_conflicts,
)


def _flags(names: list[str]) -> str:
    return ", ".join(f"--{name}" for name in names)
