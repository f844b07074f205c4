"""Whole runs of train.py on the stand-in: what it chooses by the GPUs' memory, and each way through
the program.

With values, each way has the losses, gradient norms and weights of the same run on the CPU.
README.md has the command that makes its table.
"""

import json
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fsdp_qlora.sharding.optimizer import OPTIMIZERS
from stand_in.beside_cpu import Beside, Differences, run_both
from stand_in.environment import Rank, run
from tests.helpers.metrics import metrics_of
from tests.helpers.models import Models
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import ROOT, flags
from tests.parity.test_gemma import FORMS
from tests.parity.test_hybrids import HYBRIDS

FP32 = Differences(loss=1e-5, grad_norm=1e-5, weights=1e-4)
HALVES = Differences(loss=2e-3, grad_norm=2e-2, weights=5e-2)
# An activation next to the middle between two 8-bit values is rounded up on one device and down on
# the other.
INT8 = HALVES
# Adam turns a gradient of nearly 0 into a whole step either way, and 8-bit states are rounded after
# each step.
OPTIMIZED = Differences(loss=1e-5, grad_norm=1e-5, weights=1e-3)
# Advantages of 1 and -1 cancel to a loss of a hundredth: what is 1e-7 of a term is 1e-5 of their
# sum.
CANCELLED = FP32._replace(loss=1e-3)


class Case(NamedTuple):
    """A run of three steps on so many ranks, half of them on each of `machines`.

    model: family, and what differs from `SIZES`. then: options of a second run that continues
    it. on_cpu: options of the run on the CPU that differ. allowed: the differences from its
    numbers.
    """

    options: Mapping[str, object]
    ranks: int = 2
    machines: int = 1
    capability: int = 86
    model: tuple[str, Mapping[str, object]] = ("llama", {"num_hidden_layers": 4})
    then: Mapping[str, object] | None = None
    on_cpu: Mapping[str, object] = {}
    allowed: Differences = FP32


# On the CPU by the plain ways.
KERNELS = {
    "1 rank": Case(
        {"gradient_accumulation_steps": 2, "batch_size": 1}, 1, on_cpu={"kernels": "plain"}
    ),
    "2 ranks, Hopper": Case(
        {"precision": "bf16", "gradient_accumulation_steps": 2, "batch_size": 1},
        capability=90,
        on_cpu={"kernels": "plain"},
        allowed=HALVES,
    ),
    **{
        f"answers, {ranks} ranks": Case(
            {
                "objective": "grpo",
                "rewards": "length:4",
                "num_generations": 2,
                "max_completion_length": 24,
            },
            ranks,
            on_cpu={"kernels": "plain"},
            allowed=CANCELLED,
        )
        for ranks in (1, 2)
    },
}
# Of stand_in/programs/with_faults.py.
FAULTS = ("wrong_shard", "gather_in_bf16", "scale_twice")
OFFLOAD = {"use_cpu_offload": True}
MIXTURE = ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2})
LINEAR = ("qwen3_5_text", HYBRIDS["qwen3_5_text"].shape)
EXPERTS = {"lora_target_parameters": "mlp.experts.gate_up_proj,mlp.experts.down_proj"}
EVALUATED = {"eval_fraction": 0.25, "eval_steps": 1}
STOPPED = {"max_hours": 1e-7}
WIDE = {"num_hidden_layers": 4, "intermediate_size": 2048, "hidden_size": 512}
HOPPER = {"precision": "bf16", "gradient_accumulation_steps": 2, "batch_size": 1}
# Attention's output is kept: of the flash kernel, and of the memory-efficient one. On the CPU
# attention is computed again.
KEPT = {
    "bf16, Hopper": Case({**HOPPER, "recompute": "all"}, capability=90, allowed=HALVES),
    "fp32, on the host": Case({"recompute": "offload", **OFFLOAD}),
}
# tests/gpu/test_values.py has every train type, precision and optimizer on one rank.
CASES: dict[str, Case] = {
    **{
        f"{name}, {'offload' if offload else 'resident'}": Case(
            {"train_type": name, "use_cpu_offload": offload},
            allowed=INT8 if name == "int8_lora" else FP32,
        )
        for name in (
            "full",
            "lora",
            "qlora",
            "dora",
            "bnb_dora",
            "hqq_lora",
            "hqq_dora",
            "int8_lora",
        )
        for offload in (False, True)
    },
    **{name: Case({"sharding_strategy": name}) for name in ("shard_grad_op", "ddp", "auto")},
    "hybrid": Case({"sharding_strategy": "hybrid_full_shard"}, ranks=4, machines=2),
    "hybrid, offload": Case(
        {"sharding_strategy": "hybrid_shard_grad_op", **OFFLOAD}, ranks=4, machines=2
    ),
    "ddp, offload": Case({"sharding_strategy": "ddp", **OFFLOAD}),
    "2 blocks of 4 offloaded, full": Case({"use_cpu_offload": 2, "train_type": "full"}),
    "both offloads": Case({**OFFLOAD, "recompute": "offload"}),
    # wide enough that gates and queries go to the host; on the CPU all blocks keep their own
    "activations on the host, bf16": Case(
        {**HOPPER, "recompute": "host"},
        capability=90,
        model=("llama", WIDE),
        on_cpu={"kernels": "plain", "recompute": "none"},
        # as for a run on the stand-in that keeps them
        allowed=HALVES._replace(weights=0.1),
    ),
    "activations and weights on the host": Case(
        {**OFFLOAD, "recompute": "host", "gradient_accumulation_steps": 2, "batch_size": 1},
        model=("llama", WIDE),
        on_cpu={"recompute": "none"},
    ),
    "everything left to auto": Case({"recompute": "auto", "sharding_strategy": "auto"}),
    "new tokens": Case({"add_tokens": "<new>,sort", **OFFLOAD}),
    "new tokens, hybrid": Case(
        {"add_tokens": "<new>,sort", "sharding_strategy": "hybrid_full_shard"}, 4, machines=2
    ),
    "new tokens, ddp, tied": Case(
        {"add_tokens": "<new>,sort", "sharding_strategy": "ddp", **OFFLOAD},
        model=("llama", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    ),
    "embeddings and head trained": Case({"modules_to_save": "embed_tokens,lm_head", **OFFLOAD}),
    "dropout, LoRA+": Case({"deterministic": True, "lora_dropout": 0.1, "loraplus_lr_ratio": 16}),
    "answers of the model itself": Case(
        {
            "objective": "grpo",
            "rewards": "length:4",
            "num_generations": 2,
            "max_completion_length": 8,
            "num_iterations": 2,
        },
        allowed=CANCELLED,
    ),
    "taught by the base": Case({"objective": "distill", "beta": 0.5}),
    "taught by another": Case({"objective": "distill", "teacher": 3, **OFFLOAD}),
    "taught by another, Hopper": Case(
        {"objective": "distill", "teacher": 3, **HOPPER}, capability=90, allowed=HALVES
    ),
    "taught on own answers": Case(
        {"objective": "distill_on_policy", "max_completion_length": 8, "beta": 1}
    ),
    "preferences, Hopper": Case(
        {"objective": "dpo", **HOPPER}, capability=90, allowed=HALVES._replace(loss=1e-2)
    ),
    "packing": Case({"batching": "packed", "gradient_accumulation_steps": 4}),
    "padding": Case({"batching": "padded", "gradient_accumulation_steps": 2}),
    "evaluation, best and early stop": Case({**EVALUATED, "early_stopping": 1}),
    "scores of answers choose the best": Case(
        {
            **EVALUATED,
            "eval_rewards": "length:4",
            "max_completion_length": 24,
            "best_by": "reward",
        }
    ),
    "resumed on the host": Case(STOPPED, then=OFFLOAD),
    "full, resumed on the GPU": Case(
        {"train_type": "full", **OFFLOAD, **STOPPED}, then={"train_type": "full"}
    ),
    "long rows": Case({"context_parallel_size": 2}),
    "long rows, offload, evaluation": Case(
        {"context_parallel_size": 2, **OFFLOAD, **EVALUATED}, ranks=4
    ),
    "long rows, hybrid": Case(
        {"context_parallel_size": 2, "sharding_strategy": "hybrid_full_shard"}, ranks=4, machines=2
    ),
    "long rows, linear attention": Case(
        {"context_parallel_size": 2, "allow_unquantized": True}, model=LINEAR
    ),
    "experts": Case(EXPERTS, model=MIXTURE),
    "experts, offload": Case({**EXPERTS, **OFFLOAD}, model=MIXTURE),
    "experts, Hopper": Case(
        {**EXPERTS, **HOPPER},
        model=MIXTURE,
        capability=90,
        allowed=HALVES,
    ),
    "soft caps": Case({}, model=("gemma2", {"sliding_window": 32, "query_pre_attn_scalar": 16})),
    **{
        f"shared keys, per-layer embeddings{', offload' if offload else ''}": Case(
            {"recompute": 2, **(OFFLOAD if offload else {})}, model=FORMS["e4b"]
        )
        for offload in (False, True)
    },
    "Turing": Case({"precision": "fp16_autocast"}, capability=75, allowed=HALVES),
    "Hopper": Case({"precision": "bf16"}, capability=90, allowed=HALVES),
    **{
        f"{name}, full": Case(
            {"optimizer": name, "train_type": "full", "lr": 1e-3},
            on_cpu={"optimizer": name.removeprefix("paged_")},
            allowed=OPTIMIZED,
        )
        for name in OPTIMIZERS
    },
}


def command(case: Case, models: Models, folder: Path, **others: object) -> list[str]:
    """train.py with the options of a case and with others, its output in the folder."""
    options: dict[str, object] = {
        "train_type": "qlora",
        "max_steps": 3,
        "batch_size": 2,
        "context_length": 256,
    }
    options |= {
        "model_name": models(case.model[0], **case.model[1]),
        "output_dir": folder / "output",
    }
    options |= {"quant_cache": "off", "log_to": "stdout", "verbose": True}
    rows = []
    for row in make_rows(64):
        prompt = f"{row['instruction']} {row['input']}"
        pair = {"prompt": prompt, "chosen": row["output"], "rejected": row["output"][::-1]}
        taught = {**row, "teacher_prompt": f"{row['instruction']}: {row['output']}"}
        rows.append(pair if case.options.get("objective") == "dpo" else taught)
    options["dataset"] = write_rows(folder / "rows.jsonl", rows)
    return ["train.py", *flags(**{**options, **others, **case.options})]


@pytest.fixture
def train(models, tmp_path):
    """train(case) -> the ranks as they ended, and whether there is a result."""

    def start(
        case: Case, settings: Mapping[str, object] = {}, **others: Any
    ) -> tuple[list[Rank], bool]:
        settings = {
            "LOCAL_WORLD_SIZE": case.ranks // case.machines,
            "PHANTOM_CC": case.capability,
            **settings,
        }
        ended = run(
            command(case, models, tmp_path), tmp_path, ranks=case.ranks, settings=settings, **others
        )
        return ended, any((tmp_path / "output").glob("*model.safetensors"))

    return start


@pytest.mark.slow
def test_auto_replicates_what_fits_and_keeps_the_activations(train, tmp_path):
    ended, is_saved = train(Case({}, model=("llama", {})))
    assert [rank.status for rank in ended] == [0, 0] and is_saved, ended[0].output[-4000:]
    assert "Placement: ddp. On each GPU, with a margin, ddp needs 0.5 GiB" in ended[0].output
    assert "each rank holds a whole copy" in ended[0].output
    assert "Recompute: 0 of 2 blocks, found by probing." in ended[0].output
    measured = json.loads((tmp_path / "output" / "facts.json").read_text())["measured"]
    assert measured["recompute"] == 0 and measured["tokens_per_second"] > 0
    # On two RTX 3090: the host takes 7 ms to launch the two passes of two tiny blocks.
    assert 1e4 < measured["planned_tokens_per_second"] < 1e5
    assert measured["measured_gib"]["reserved"] == pytest.approx(
        measured["planned_gib"]["reserved"], abs=0.25
    )


@pytest.mark.slow
def test_all_ranks_do_what_the_smallest_card_needs(train):
    ended, is_saved = train(
        Case({}, model=("llama", {})), settings_of_rank={1: {"PHANTOM_GIB": 0.5}}
    )
    assert [rank.status for rank in ended] == [0, 0] and is_saved, ended[0].output[-4000:]
    assert (
        "Placement: full_shard with the base in host memory. "
        "On each GPU, with a margin, ddp needs 0.5"
    ) in ended[0].output
    assert "Recompute: 2 of 2 blocks, found by probing." in ended[0].output


@pytest.mark.slow
def test_settings_of_auto_are_alike_on_all_ranks_and_kept_on_resume(train, tmp_path):
    options = {"auto": True, "gradient_accumulation_steps": 4}
    ended, _ = train(
        Case({**options, **STOPPED}, model=("llama", {})), settings_of_rank={1: {"PHANTOM_GIB": 2}}
    )
    assert [rank.status for rank in ended] == [3, 3], ended[0].output[-4000:]
    chosen = "batch_size 8, gradient_accumulation_steps 1"
    chosen += ", sharding_strategy ddp, use_cpu_offload false"
    assert f"Settings of --auto: {chosen}." in ended[0].output
    assert "batch_size: 8" in (tmp_path / "output" / "config.yaml").read_text()
    # With a card that is too small for them a new run would choose others.
    ended, is_saved = train(Case(options, model=("llama", {})), {"PHANTOM_GIB": 0.5})
    assert (f"Settings of --auto: {chosen}.") in ended[0].output and (
        "Resuming at step 1"
    ) in ended[0].output
    assert [rank.status for rank in ended] == [0, 0] and is_saved, ended[0].output[-4000:]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_memory_of_answers_is_not_a_steps(ranks, train, tmp_path):
    options = {
        "objective": "grpo",
        "rewards": "length:4",
        "max_completion_length": 8,
        "num_generations": 128,
    }
    options |= {"gradient_accumulation_steps": 16, "batch_size": 8, "recompute": "auto"}
    options |= {
        "sharding_strategy": "full_shard",
        "use_cpu_offload": True,
        "max_steps": 2,
        "save_every": "none",
        "log_to": "jsonl",
    }
    # Logits of 128 answers at a time, of which a step has those of few tokens.
    case = Case(options, ranks, model=("llama", {"num_hidden_layers": 4, "vocab_size": 200_000}))
    ended, is_saved = train(case, {"PHANTOM_GIB": 8}, summary=True)
    assert [rank.status for rank in ended] == [0] * ranks and is_saved, ended[0].output[-4000:]
    # Tokens are drawn on the GPU, though the embeddings are on the host: no logits are copied
    # there.
    assert (
        max(
            copy["bytes"] for copy in ended[0].summary["copies"] if copy["kind"] == "device_to_host"
        )
        < 2**20
    )
    assert ("of 128 on a rank 128 at a time") in ended[0].output and ("s per generation") in ended[
        0
    ].output
    records = metrics_of(tmp_path / "output")
    steps = [record for record in records if "generation_memory_gib" in record]
    for record in steps:
        assert record["generation_memory_gib"] > max(record["memory_gib"]["reserved"]) + 0.3
    assert len(steps) == 2 and {record["recompute"] for record in steps} == {0}
    assert "Please report it" not in ended[0].output


@pytest.mark.parametrize(
    ("ranks", "settings", "message"),
    [
        (1, {"PHANTOM_GIB": 0.02}, "out of memory"),
        pytest.param(2, {"PHANTOM_NCCL_FAIL": 60}, "out of memory", marks=pytest.mark.slow),
        pytest.param(
            2,
            {
                "PHANTOM_NCCL_FAIL": "60:6:socketProgressOpt: Call to recv failed : Connection "
                "reset by peer"
            },
            "connection to another rank was lost",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_failing_card_or_link_ends_all_ranks_with_its_name(ranks, settings, message, train):
    options = {"max_steps": 10000, "num_epochs": 10000, "sharding_strategy": "full_shard"}
    ended, is_saved = train(Case(options, ranks), settings)
    assert all(rank.status not in (0, 2) for rank in ended) and not is_saved, ended[0].output[
        -4000:
    ]
    said = "".join(rank.output for rank in ended)
    assert message in said.lower() and "Traceback" not in said, said[-4000:]


# Plain gradients: Adam's steps hardly depend on their size. auto would replicate models that small.
PLAIN = {
    "optimizer": "sgd",
    "lr": 0.1,
    "precision": "fp32",
    "sharding_strategy": "full_shard",
    "recompute": "all",
}
STATUS_OF_A_STOP = 3
# Run in continuous integration; the others are nightly.
OFTEN = {
    "qlora, resident",
    "both offloads",
    "Hopper",
    "preferences, Hopper",
    "experts, offload",
    "answers of the model itself",
    "resumed on the host",
    "long rows",
}


@pytest.fixture
def beside_cpu(models, tmp_path):
    """beside_cpu(case) -> how its run differs from that on the CPU. program: what runs instead on
    the stand-in.
    """

    def compare(case: Case, program: Sequence[object] = ("train.py",), **options: object) -> Beside:
        machine = {
            rank: {"GROUP_RANK": rank * case.machines // case.ranks} for rank in range(case.ranks)
        }
        if layers := case.options.get("teacher"):  # made once, and not by two threads
            case = case._replace(
                options={**case.options, "teacher": models("llama", num_hidden_layers=layers)}
            )
        parts = [case.options] if case.then is None else [case.options, case.then]

        def start(folder: Path, settings: dict[str, object]) -> list[Rank]:
            folder.mkdir()
            settings |= {
                "LOCAL_WORLD_SIZE": case.ranks // case.machines,
                "PHANTOM_CC": case.capability,
            }
            settings |= {"FSDP_QLORA_CACHE": folder / "cache"}  # a teacher's pass is compared, too
            is_device = "PHANTOM_VALUES" in settings
            for part in parts:
                given = {**part, **({} if is_device else case.on_cpu)}
                words: list[object] = [
                    *command(case._replace(options=given), models, folder, **{**PLAIN, **options})
                ]
                if is_device:
                    words[:1] = program
                ended = run(
                    words, folder, ranks=case.ranks, settings=settings, settings_of_rank=machine
                )
                status = 0 if part is parts[-1] else STATUS_OF_A_STOP
                assert [rank.status for rank in ended] == [status] * case.ranks, said_by(ended)
            return ended

        return run_both(start, tmp_path, models(case.model[0], **case.model[1]))

    return compare


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in OFTEN else pytest.mark.nightly)
        for name in CASES
    ],
)
def test_numbers_on_several_ranks_are_those_of_the_cpu(name, beside_cpu):
    case = CASES[name]
    beside = beside_cpu(case)
    print(f"| {name} | {numbers(beside.differences)} | {beside.noted or ''} |")
    assert beside.strays == {}
    assert all(map(operator.le, beside.differences, case.allowed)), beside.differences
    said = beside.on_device[0].output
    assert f"{case.ranks} ranks on " in said and "on the CPU" not in said
    assert case.then is None or "Resuming at step 1" in said


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["all", "none"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_and_layers_computed_together_have_the_numbers_of_the_cpu(
    name, recompute, beside_cpu
):
    case = KERNELS[name]
    program = [ROOT / "stand_in/programs/with_kernels.py", "train"]
    beside = beside_cpu(case, program, recompute=recompute)
    print(f"| kernels, {name} | {numbers(beside.differences)} |")
    assert beside.strays == {}
    assert all(map(operator.le, beside.differences, case.allowed)), beside.differences


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_attention_that_is_kept_has_the_numbers_of_the_cpu(name, beside_cpu):
    case = KEPT[name]
    program = [ROOT / "stand_in/programs/with_long_documents.py", "train"]
    beside = beside_cpu(case, program)
    print(f"| attention kept, {name} | {numbers(beside.differences)} |")
    assert "attention is not computed again: its output is kept" in beside.on_device[0].output
    assert beside.strays == {}
    assert all(map(operator.le, beside.differences, case.allowed)), beside.differences


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_gpu_alone_changes_the_numbers(fault, optimizer, beside_cpu):
    case = CASES["both offloads"]
    rate = {"sgd": 0.1, "adamw": 1e-3}[optimizer]
    faulty = [ROOT / "stand_in/programs/with_faults.py", fault, "train"]
    differences = beside_cpu(case, faulty, optimizer=optimizer, lr=rate).differences
    print(f"| {fault}, {optimizer} | {numbers(differences)} |")
    # Adam turns a gradient of nearly 0 into a whole step either way, so its weights differ without
    # a fault, too.
    assert (
        differences.loss > case.allowed.loss and differences.grad_norm > case.allowed.grad_norm
    ), differences


def said_by(ranks: Sequence[Rank]) -> str:
    return "\n".join(rank.output[-4000:] for rank in ranks)


def numbers(differences: Differences) -> str:
    return " | ".join(f"{difference:.1e}" for difference in differences)
