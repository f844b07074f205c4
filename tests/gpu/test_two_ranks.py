"""Two ranks on one card, which gloo connects: the losses of one rank, a rank without memory, and the end of a rank."""

import signal
import time

import pytest

from tests.gpu.cases import COMMON, read_reference
from tests.gpu.check import IS_STAND_IN, holds
from tests.gpu.runs import run, started, wait_for_step
from tests.tiny import flags, read_metrics

# NCCL refuses two ranks on one card, that of the stand-in does not; there gloo would read zeros from the card.
BACKEND = "" if IS_STAND_IN else "gloo"
PROGRAM = ["-m", "tests.gpu.programs.train", "--backend", BACKEND]
# In which all ranks must end once one has. The machines that the stand-in runs on may be busy.
SECONDS = 150 if IS_STAND_IN else 40


@pytest.mark.parametrize("how", ["full_shard", "shard_grad_op", "ddp", "offloaded", "experts", "bf16"])
def test_two_ranks_have_the_losses_of_one(how, inputs, tmp_path):
    # The same rows a step: two ranks of two rows for one rank of two micro-batches.
    own = {"offloaded": {"use_cpu_offload": True}, "bf16": {"precision": "bf16"}}
    strategy = how if how in ("shard_grad_op", "ddp") else "full_shard"  # auto would replicate models that small
    options: dict[str, object] = {"sharding_strategy": strategy, **own.get(how, {})}
    base = inputs("moe" if how == "experts" else "llama")
    same_as = "qlora, experts" if how == "experts" else "qlora"
    if how == "experts":
        options["lora_target_parameters"] = "mlp.experts.gate_up_proj,mlp.experts.down_proj"
    arguments = flags(
        **{**base, **COMMON, "gradient_accumulation_steps": 1, "train_type": "qlora", **options},
        output_dir=tmp_path / "out",
    )
    output = run([*PROGRAM, "--", *arguments], tmp_path / "logs", ranks=2)
    losses, expected = read_metrics(tmp_path / "out"), read_reference()["losses"][same_as]
    assert len(losses) == len(expected), output[-3000:]
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    holds(losses == pytest.approx(expected, rel=2e-2 if how == "bf16" else 1e-4), f"{losses}, one rank: {expected}")


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_patterns_of_16_bits_survive_a_gather(ranks, tmp_path):
    with started(["-m", "tests.gpu.programs.patterns", "--backend", BACKEND], tmp_path, ranks=ranks) as program:
        statuses, output = program.wait(300), program.output()
    assert "words changed" in output, output[-4000:]
    holds(statuses == [0] * ranks, output[-4000:])


def test_a_killed_rank_is_named_by_the_other_which_ends(inputs, tmp_path):
    options = {**inputs(), **COMMON, "train_type": "qlora", "output_dir": tmp_path / "out"}
    endless = flags(**{**options, "max_steps": 100000, "num_epochs": 100000, "gradient_accumulation_steps": 1})
    with started([*PROGRAM, "--", *endless], tmp_path / "logs", ranks=2) as program:
        wait_for_step(program, tmp_path / "out", 2)
        program.kill(1)
        statuses, output = program.wait(SECONDS), program.output()
    # A closed connection ends it at once; NCCL waits, and the watchdog says it after 30 s.
    assert statuses[0] in (1, 5) and statuses[1] == -signal.SIGKILL, (statuses, output[-4000:])
    assert "The connection to another rank was lost" in output or "Rank 1 has sent no heartbeat" in output


@pytest.mark.parametrize("ranks", [1, 2])
def test_out_of_memory_is_named_with_what_helps_and_ends_all_ranks(ranks, inputs, tmp_path):
    options = {**inputs(), **COMMON, "train_type": "qlora", "output_dir": tmp_path / "out"}
    # The weights take 1 MiB, the activations of 64 rows more than what is left.
    arguments = flags(**{**options, "batch_size": 8, "recompute": "none"})
    began = time.monotonic()
    program = [*PROGRAM, "--memory_mib", 24, "--", *arguments]
    with started(program, tmp_path / "logs", ranks=ranks) as start:
        statuses, output = start.wait(2 * SECONDS), start.output()
    assert all(status == 1 for status in statuses), (statuses, output[-4000:])
    assert "ran out of GPU memory" in output, output[-4000:]
    assert "What helps: a smaller --batch_size" in output
    assert time.monotonic() - began < 2 * SECONDS
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()
