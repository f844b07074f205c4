"""The command lines that everything.py runs on the stand-in for CUDA, and how each must end."""

import signal
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

NO_OPTIONS: Mapping[str, object] = MappingProxyType({})
# In the value of an option: the folder of the case's run, and that of the models, rows and prompts.
RUN, MODELS = "<run>", "<models>"
# What a case does not say itself; None leaves an option out. Blocks are recomputed unless the case is about that:
# `auto` would recompute none of models that small.
COMMON: Mapping[str, object] = {
    "dataset": f"{MODELS}/rows.jsonl", "output_dir": f"{RUN}/output", "train_type": "qlora", "num_epochs": 20,
    "max_steps": 3, "batch_size": 2, "context_length": 256, "log_to": "stdout", "quant_cache": "off",
    "recompute": "all",
}  # fmt: skip
SHARDED = "full_shard"  # on several ranks: `auto` would replicate models that small

QUANTIZED = ["qlora", "bnb_dora", "hqq_lora", "hqq_dora", "int8_lora"]
TRAIN = ["qlora", "lora", "custom_lora", "custom_qlora", "dora", *QUANTIZED[1:], "full"]
PRO = ["bnb_llama_pro", "hqq_llama_pro"]
STRATEGIES = ["shard_grad_op", "ddp", "hybrid_full_shard", "hybrid_shard_grad_op"]
PRECISIONS = ["fp32", "fp16", "fp16_autocast", "bf16_autocast", "bf16_buffers_autocast"]
OPTIMIZERS = ["adam", "sgd", "adadelta", "fused_adamw", "fused_adam", "adamw_8bit", "paged_adamw_8bit", "lion",
              "lion_8bit"]  # fmt: skip
# The models beside the plain llama of two blocks: family and what differs from tests/tiny.py.
FAMILIES: Mapping[str, Mapping[str, object]] = {
    "llama": {},
    "deep": {"num_hidden_layers": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": {},
    "gemma2": {"sliding_window": 32, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 32, "query_pre_attn_scalar": 16},
}
STOPPED = {"max_hours": 1e-7}
ENDLESS = {"max_steps": 100000, "num_epochs": 100000}
SEVERAL = (2, 4)


class Case(NamedTuple):
    """One command line. `ends`: words of the message with which all ranks fail; empty if they must succeed."""

    name: str
    options: Mapping[str, object] = NO_OPTIONS
    model: str = "llama"
    settings: Mapping[str, object] = NO_OPTIONS
    settings_of_rank_1: Mapping[str, object] = NO_OPTIONS
    signal_to_rank_1: int = 0  # when the first step is done
    ends: str = ""
    first: Mapping[str, object] | None = None  # options of a run before it in the same folder, which need not end well
    first_ranks: int = 0  # of that run, if not as many
    says: str = ""  # words in rank 0's output, in lower case
    makes: str = "output/*.safetensors"  # in the run's folder
    program: str = "train"
    only_ranks: tuple[int, ...] = (1, 2, 4)


def cases() -> list[Case]:
    """In the order of the printed table."""
    return [
        *_train_types_and_sharding(),
        *_memory(),
        *_adapters(),
        *_data(),
        *_several_runs(),
        *_experts_and_families(),
        *_failures(),
        *_precisions_and_devices(),
        *_optimizers(),
    ]


def _train_types_and_sharding() -> Iterator[Case]:
    for name in TRAIN:
        yield Case(name, {"train_type": name})
    for name in PRO:
        yield Case(name, {"train_type": name}, model="expanded")
    yield Case("fp4, statistics in fp32", {"quant_type": "fp4", "double_quant": False})
    yield Case("hqq_lora, 3 bits", {"train_type": "hqq_lora", "n_bits": 3})
    yield Case("int8_lora, no outliers", {"train_type": "int8_lora", "int8_threshold": 0})
    yield Case("sharding left to auto", {"sharding_strategy": "auto"}, says="ddp", only_ranks=SEVERAL)
    for name in STRATEGIES:
        yield Case(name, {"sharding_strategy": name}, only_ranks=SEVERAL)


def _memory() -> Iterator[Case]:
    offload = {"use_cpu_offload": True}
    for name in TRAIN:
        if not name.startswith("custom"):
            yield Case(f"offload, {name}", {**offload, "train_type": name})
    for name in PRO:
        yield Case(f"offload, {name}", {**offload, "train_type": name}, model="expanded")
    yield Case("offload, ddp", {**offload, "sharding_strategy": "ddp"}, only_ranks=SEVERAL)
    yield Case("offload, hybrid", {**offload, "sharding_strategy": "hybrid_full_shard"}, only_ranks=SEVERAL)
    some = {"use_cpu_offload": 2}
    yield Case("offload of 2 blocks of 4", some, model="deep")
    yield Case("offload of 2 blocks of 4, ddp", {**some, "sharding_strategy": "ddp"}, model="deep", only_ranks=SEVERAL)
    yield Case("offload of 2 blocks of 4, full", {**some, "train_type": "full"}, model="deep")
    yield Case("activation offload", {"use_activation_cpu_offload": True})
    yield Case("both offloads", {**offload, "use_activation_cpu_offload": True})
    yield Case("recompute none", {"recompute": "none"})
    yield Case("recompute 1 block of 4", {"recompute": 1}, model="deep")
    yield Case(
        "recompute 1 block of 4, activation offload", {"recompute": 1, "use_activation_cpu_offload": True}, "deep"
    )
    yield Case("recompute none, offload", {"recompute": "none", **offload})
    yield Case("recompute left to auto", {"recompute": "auto"})
    yield Case("everything left to auto", {"recompute": None, "sharding_strategy": "auto"})
    yield Case("use_gradient_checkpointing false", {"recompute": None, "use_gradient_checkpointing": False})


def _adapters() -> Iterator[Case]:
    yield Case("embeddings and head trained", {"modules_to_save": "embed_tokens,lm_head"})
    yield Case(
        "embeddings and head trained, offload", {"modules_to_save": "embed_tokens,lm_head", "use_cpu_offload": True}
    )
    yield Case(
        "rsLoRA, LoRA+, ranks of layers", {"use_rslora": True, "loraplus_lr_ratio": 16, "rank_pattern": "down_proj=4"}
    )
    yield Case("LoRA+, 8-bit optimizer", {"loraplus_lr_ratio": 16, "optimizer": "adamw_8bit"})
    yield Case("rank 64, 8-bit optimizer", {"lora_rank": 64, "optimizer": "adamw_8bit"})
    yield Case("deterministic, dropout", {"deterministic": True, "lora_dropout": 0.1})
    continued = {"adapter": f"{RUN}/first"}
    for name in ("qlora", "bnb_dora", "hqq_lora", "int8_lora"):
        first = {"train_type": name, "output_dir": f"{RUN}/first"}
        yield Case(f"adapter continued, {name}", {**continued, "train_type": name}, first=first)
    offloaded = {**continued, "use_cpu_offload": True}
    yield Case("adapter continued, offload", offloaded, first={"output_dir": f"{RUN}/first"})


def _data() -> Iterator[Case]:
    yield Case("gradient accumulation", {"gradient_accumulation_steps": 2})
    yield Case("padding", {"padding": True})
    yield Case("packing", {"packing": True, "gradient_accumulation_steps": 4})
    yield Case("packing, offload", {"packing": True, "gradient_accumulation_steps": 4, "use_cpu_offload": True})
    yield Case("streaming", {"streaming": True})
    yield Case("datasets in shares", {"dataset": f"{MODELS}/rows.jsonl:0.7,{MODELS}/other_rows.jsonl:0.3"})
    evaluation = {"eval_fraction": 0.25, "eval_steps": 1}
    yield Case("evaluation", evaluation)
    yield Case("evaluation, best and early stop", {**evaluation, "early_stopping": 1, "max_steps": 6})
    sampled = {**evaluation, "eval_steps": 3, "sample_prompts": f"{MODELS}/prompts.txt"}
    yield Case("answers at evaluations", sampled, makes="output/samples.jsonl")
    yield Case("answers at evaluations, offload", {**sampled, "use_cpu_offload": True}, makes="output/samples.jsonl")


def _several_runs() -> Iterator[Case]:
    yield Case("stop at a budget, resume", first=STOPPED, says="resum")
    for name, options in {
        "resume, offload": {"use_cpu_offload": True},
        "resume, full": {"train_type": "full"},
        "resume, 8-bit optimizer": {"optimizer": "adamw_8bit"},
        "resume, streaming": {"streaming": True},
    }.items():
        yield Case(name, options, first={**STOPPED, **options}, says="resum")
    saved = {"modules_to_save": "embed_tokens,lm_head"}
    for name, options in {"full": {"train_type": "full"}, "embeddings and head trained": saved, "adapters": {}}.items():
        for before, after in ((False, 2), (2, False), (True, False), (False, True)):
            first = {**STOPPED, **options, "use_cpu_offload": before}
            case = f"resume, {name}, offload {before} and then {after}"
            yield Case(case, {**options, "use_cpu_offload": after}, model="deep", first=first, says="resum")
    for ranks in (1, 2):
        others = tuple(number for number in (1, 2, 4) if number != ranks)
        name = f"resume of a run of {ranks} rank{'s' * (ranks > 1)}"
        yield Case(name, first=STOPPED, first_ranks=ranks, says="resum", only_ranks=others)
    yield Case(
        "checkpoint at each step, mirror", {"save_steps": 1, "mirror": f"{RUN}/mirror"}, makes="mirror/**/*.safetensors"
    )
    for train_type in ("qlora", "hqq_lora", "int8_lora"):
        written = {"quant_cache": f"{RUN}/cache", "train_type": train_type}
        read = {**written, "overwrite_output_dir": True, "resume": "off"}
        name = "quantized cache, written and read" + f", {train_type}" * (train_type != "qlora")
        yield Case(name, read, first=written, says="cache")
    for name, options in {"generate": {}, "generate, offload": {"use_cpu_offload": True}}.items():
        asked = {"adapter": f"{RUN}/output", "prompts": f"{MODELS}/prompts.txt", "out": f"{RUN}/answers.jsonl"}
        yield Case(name, {**asked, "max_new_tokens": 4}, first=options, makes="answers.jsonl", program="generate")
    yield Case("dry run", {"dry_run": True}, says="memory", makes="")
    yield Case("profile", {"profile": True, "profiling_output": f"{RUN}/profiles"})
    yield Case("memory profile", {"profile_memory": True, "profiling_output": f"{RUN}/profiles"})


def _experts_and_families() -> Iterator[Case]:
    for name, options in {
        "experts, qlora": {},
        "experts, adapters on them": {"lora_target_parameters": "mlp.experts.gate_up_proj,mlp.experts.down_proj"},
        "experts, offload": {"use_cpu_offload": True},
        "experts, hqq_lora": {"train_type": "hqq_lora"},
        "experts, full": {"train_type": "full"},
    }.items():
        yield Case(name, options, model="mixtral")
    for family in ("qwen3", "gemma2", "gemma3_text"):
        yield Case(f"family {family}", model=family)
    for attention in ("sdpa", "eager"):
        yield Case(f"attention {attention}", {"attn_implementation": attention})


def _failures() -> Iterator[Case]:
    small = {"PHANTOM_GIB": 0.022}  # one large piece of the allocator; in a step there are two
    yield Case("out of memory on one rank", settings_of_rank_1=small, ends="out of memory", only_ranks=SEVERAL)
    yield Case("out of memory", settings={"PHANTOM_GIB": 0.01}, ends="out of memory")
    yield Case("a rank is killed", ENDLESS, signal_to_rank_1=signal.SIGKILL, ends="Rank 1", only_ranks=SEVERAL)
    hangs = {**ENDLESS, "hang_minutes": 0.3}
    yield Case("a rank is stopped", hangs, signal_to_rank_1=signal.SIGSTOP, ends="Rank 1", only_ranks=SEVERAL)
    stopped = "Stopped after step"
    yield Case("a rank gets SIGTERM", ENDLESS, signal_to_rank_1=signal.SIGTERM, ends=stopped, only_ranks=SEVERAL)
    nccl = {"PHANTOM_NCCL_FAIL": 60}
    yield Case("NCCL runs out of memory", ENDLESS, settings=nccl, ends="out of memory", only_ranks=SEVERAL)
    lost = {"PHANTOM_NCCL_FAIL": "60:6:socketProgressOpt: Call to recv failed : Connection reset by peer"}
    yield Case("NCCL loses a connection", ENDLESS, settings=lost, ends="lost", only_ranks=SEVERAL)


def _precisions_and_devices() -> Iterator[Case]:
    for name in PRECISIONS:
        yield Case(f"precision {name}", {"precision": name})
    yield Case("Turing, precision auto (fp16)", settings={"PHANTOM_CC": 75})
    yield Case("Ada", settings={"PHANTOM_CC": 89})
    yield Case("Hopper", settings={"PHANTOM_CC": 90})
    yield Case("Blackwell", settings={"PHANTOM_CC": 120})


def _optimizers() -> Iterator[Case]:
    for train_type in ("qlora", "full"):
        for name in OPTIMIZERS:
            options = {"optimizer": name, "train_type": train_type}
            yield Case(f"{'full, ' * (train_type == 'full')}optimizer {name}", options)
    eight_bits = {"train_type": "full", "use_cpu_offload": True, "optimizer": "adamw_8bit"}
    yield Case("full, offload, 8-bit optimizer", eight_bits)
