"""Whole runs of train.py on the stand-in: what it chooses by the GPUs' memory, and each way through the program."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fsdp_qlora.sharding.optimizer import OPTIMIZERS
from tests.phantom.environment import Rank, run
from tests.tiny import flags, make_rows, write_rows


class Case(NamedTuple):
    """A run of three steps that ends well on so many ranks, half of them on each of `machines`.

    model: family, and what differs from tests/tiny.py. then: options of a second run that continues it.
    """

    options: Mapping[str, object]
    ranks: int = 2
    machines: int = 1
    capability: int = 86
    model: tuple[str, Mapping[str, object]] = ("llama", {"num_hidden_layers": 4})
    then: Mapping[str, object] | None = None


OFFLOAD = {"use_cpu_offload": True}
MIXTURE = ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2})
EXPERTS = {"lora_target_parameters": "mlp.experts.gate_up_proj,mlp.experts.down_proj"}
EVALUATED = {"eval_fraction": 0.25, "eval_steps": 1}
STOPPED = {"max_hours": 1e-7}
# tests/gpu/test_values.py has every train type, precision and optimizer on one rank.
CASES: dict[str, Case] = {
    **{
        f"{name}, {'offload' if offload else 'resident'}": Case({"train_type": name, "use_cpu_offload": offload})
        for name in ("full", "lora", "qlora", "dora", "bnb_dora", "hqq_lora", "hqq_dora", "int8_lora")
        for offload in (False, True)
    },
    **{name: Case({"sharding_strategy": name}) for name in ("shard_grad_op", "ddp", "auto")},
    "hybrid": Case({"sharding_strategy": "hybrid_full_shard"}, ranks=4, machines=2),
    "hybrid, offload": Case({"sharding_strategy": "hybrid_shard_grad_op", **OFFLOAD}, ranks=4, machines=2),
    "ddp, offload": Case({"sharding_strategy": "ddp", **OFFLOAD}),
    "2 blocks of 4 offloaded, full": Case({"use_cpu_offload": 2, "train_type": "full"}),
    "both offloads": Case({**OFFLOAD, "recompute": "offload"}),
    "everything left to auto": Case({"recompute": "auto", "sharding_strategy": "auto"}),
    "embeddings and head trained": Case({"modules_to_save": "embed_tokens,lm_head", **OFFLOAD}),
    "dropout, LoRA+": Case({"deterministic": True, "lora_dropout": 0.1, "loraplus_lr_ratio": 16}),
    "answers of the model itself": Case(
        {
            "objective": "grpo",
            "rewards": "length:4",
            "num_generations": 2,
            "max_completion_length": 8,
            "num_iterations": 2,
        }
    ),
    "packing": Case({"batching": "packed", "gradient_accumulation_steps": 4}),
    "padding": Case({"batching": "padded", "gradient_accumulation_steps": 2}),
    "streaming, resumed": Case({"streaming": True, **STOPPED}, then={"streaming": True}),
    "evaluation, best and early stop": Case({**EVALUATED, "early_stopping": 1}),
    "resumed on the host": Case(STOPPED, then=OFFLOAD),
    "full, resumed on the GPU": Case({"train_type": "full", **OFFLOAD, **STOPPED}, then={"train_type": "full"}),
    "long rows": Case({"context_parallel_size": 2}),
    "long rows, offload, evaluation": Case({"context_parallel_size": 2, **OFFLOAD, **EVALUATED}, ranks=4),
    "long rows, hybrid": Case(
        {"context_parallel_size": 2, "sharding_strategy": "hybrid_full_shard"}, ranks=4, machines=2
    ),
    "experts": Case(EXPERTS, model=MIXTURE),
    "experts, offload": Case({**EXPERTS, **OFFLOAD}, model=MIXTURE),
    "soft caps": Case({}, model=("gemma2", {"sliding_window": 32, "query_pre_attn_scalar": 16})),
    "Turing": Case({}, capability=75),
    "Hopper": Case({}, capability=90),
    **{f"{name}, full": Case({"optimizer": name, "train_type": "full"}) for name in OPTIMIZERS},
}


@pytest.fixture
def train(models, tmp_path):
    """train(case) -> the ranks as they ended, and whether there is a result."""

    def start(case: Case, settings: Mapping[str, object] = {}, **others: Any) -> tuple[list[Rank], bool]:
        options: dict[str, object] = {"train_type": "qlora", "max_steps": 3, "batch_size": 2, "context_length": 256}
        options |= {"dataset": write_rows(tmp_path / "rows.jsonl", make_rows(64)), "quant_cache": "off"}
        options |= {"model_name": models(case.model[0], **case.model[1]), "output_dir": tmp_path / "output"}
        words = flags(**{**options, "log_to": "stdout", "verbose": True, **case.options})
        ended = run(
            ["train.py", *words],
            tmp_path,
            ranks=case.ranks,
            settings={"LOCAL_WORLD_SIZE": case.ranks // case.machines, "PHANTOM_CC": case.capability, **settings},
            **others,
        )
        return ended, any((tmp_path / "output").glob("*model.safetensors"))

    return start


@pytest.mark.slow
def test_auto_replicates_what_fits_and_keeps_the_activations(train: Callable[..., Any], tmp_path: Path) -> None:
    ended, is_saved = train(Case({}, model=("llama", {})))
    assert [rank.status for rank in ended] == [0, 0] and is_saved, ended[0].output[-4000:]
    assert "Placement: ddp. With a margin ddp needs 0.5 GiB" in ended[0].output
    assert "each rank holds a whole copy" in ended[0].output
    assert "Recompute: 0 of 2 blocks, found by probing." in ended[0].output
    measured = json.loads((tmp_path / "output" / "facts.json").read_text())["measured"]
    assert measured["recompute"] == 0 and measured["tokens_per_second"] > 0
    # On two RTX 3090: the host takes 7 ms to launch the two passes of two tiny blocks.
    assert 1e4 < measured["planned_tokens_per_second"] < 1e5
    assert measured["measured_gib"]["reserved"] == pytest.approx(measured["planned_gib"]["reserved"], abs=0.25)


@pytest.mark.slow
def test_all_ranks_do_what_the_smallest_card_needs(train: Callable[..., Any]) -> None:
    ended, is_saved = train(Case({}, model=("llama", {})), settings_of_rank={1: {"PHANTOM_GIB": 0.5}})
    assert [rank.status for rank in ended] == [0, 0] and is_saved, ended[0].output[-4000:]
    assert "Placement: full_shard with the base in host memory. With a margin ddp needs 0.5" in ended[0].output
    assert "Recompute: 2 of 2 blocks, found by probing." in ended[0].output


@pytest.mark.slow
def test_settings_of_auto_are_alike_on_all_ranks_and_kept_on_resume(train: Callable[..., Any], tmp_path: Path) -> None:
    options = {"auto": True, "gradient_accumulation_steps": 4}
    ended, _ = train(Case({**options, **STOPPED}, model=("llama", {})), settings_of_rank={1: {"PHANTOM_GIB": 2}})
    assert [rank.status for rank in ended] == [3, 3], ended[0].output[-4000:]
    chosen = "batch_size 8, gradient_accumulation_steps 1"
    chosen += ", sharding_strategy ddp, use_cpu_offload false"
    assert f"Settings of --auto: {chosen}." in ended[0].output
    assert "batch_size: 8" in (tmp_path / "output" / "config.yaml").read_text()
    # With a card that is too small for them a new run would choose others.
    ended, is_saved = train(Case(options, model=("llama", {})), {"PHANTOM_GIB": 0.5})
    assert f"Settings of --auto: {chosen}." in ended[0].output and "Resuming at step 1" in ended[0].output
    assert [rank.status for rank in ended] == [0, 0] and is_saved, ended[0].output[-4000:]


@pytest.mark.parametrize(
    ("ranks", "settings", "message"),
    [
        (1, {"PHANTOM_GIB": 0.02}, "out of memory"),
        pytest.param(2, {"PHANTOM_NCCL_FAIL": 60}, "out of memory", marks=pytest.mark.slow),
        pytest.param(
            2,
            {"PHANTOM_NCCL_FAIL": "60:6:socketProgressOpt: Call to recv failed : Connection reset by peer"},
            "connection to another rank was lost",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_failing_card_or_link_ends_all_ranks_with_its_name(
    ranks: int, settings: dict[str, object], message: str, train: Callable[..., Any]
) -> None:
    options = {"max_steps": 10000, "num_epochs": 10000, "sharding_strategy": "full_shard"}
    ended, is_saved = train(Case(options, ranks), settings)
    assert all(rank.status not in (0, 2) for rank in ended) and not is_saved, ended[0].output[-4000:]
    said = "".join(rank.output for rank in ended)
    assert message in said.lower() and "Traceback" not in said, said[-4000:]


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_every_way_through_the_program_ends_well_on_several_ranks(
    name: str, train: Callable[..., Any], tmp_path: Path
) -> None:
    case = CASES[name]
    plain = {"sharding_strategy": "full_shard", "recompute": "all"}  # auto replicates models that small
    machine = {rank: {"GROUP_RANK": rank * case.machines // case.ranks} for rank in range(case.ranks)}
    ended, is_saved = train(case._replace(options=plain | dict(case.options)), settings_of_rank=machine)
    if case.then is not None:
        assert [rank.status for rank in ended] == [3] * case.ranks, ended[0].output[-4000:]
        ended, is_saved = train(case._replace(options=plain | dict(case.then)))
        assert "Resuming at step 1" in ended[0].output
    assert [rank.status for rank in ended] == [0] * case.ranks and is_saved, ended[0].output[-4000:]
    assert f"{case.ranks} ranks on " in ended[0].output and "on the CPU" not in ended[0].output
