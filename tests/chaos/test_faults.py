"""Full disks, numbers that are none, ranks that fail, hang or lose their way, too little memory."""

import os
import re
import resource
import signal
import subprocess
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from fsdp_qlora.checkpoint import checkpoint
from fsdp_qlora.checkpoint.progress import spike
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision import presence, watchdog
from fsdp_qlora.distributed.supervision.clock import Heartbeat
from fsdp_qlora.utils.errors import UserError
from tests.chaos.harness import (
    KILLED,
    Fault,
    Job,
    adapter,
    at_step,
    be_impatient,
    ended,
    fill_disk,
    finish,
    hang,
    numbers,
    on,
    run,
    status,
    together,
    wait_for,
    write_slowly,
)

pytestmark = pytest.mark.slow

# --- the disk ---


@pytest.mark.parametrize("more", [pytest.param((), marks=pytest.mark.nightly), (write_slowly,)])
def test_on_a_full_disk_the_oldest_checkpoint_makes_room(more, reference, assert_same, tmp_path):
    root = tmp_path / "out" / "checkpoints"
    fault = partial(together, partial(fill_disk, root, 2), *more)
    text = run(reference.same_but(tmp_path / "out"), tmp_path / "logs", fault=fault)
    assert "No space left on device. step_000003 was deleted to make room." in text
    assert_same(tmp_path / "out")
    left = checkpoint.published(root)
    assert list(left)[-1] == 10 and len(left) == 2
    checkpoint.verify(left[10])


def limit_file_size(num_bytes: int) -> None:
    if on(0):
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def test_training_goes_on_when_no_checkpoint_fits(reference, assert_same, tmp_path):
    # Too little for a checkpoint's tensors, enough for the adapter itself.
    limit = (reference.output_dir / "adapter_model.safetensors").stat().st_size + 4000
    text = run(
        reference.same_but(tmp_path / "out"),
        tmp_path / "logs",
        fault=partial(limit_file_size, limit),
    )
    assert (
        "Step 3: no checkpoint was saved: " in text
        and ("File too large") in text
        and ("there is none yet") in text
    )
    assert checkpoint.published(tmp_path / "out" / "checkpoints") == {}
    assert_same(tmp_path / "out")


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/proc/mounts").exists(), reason="mounting needs root"
)
def test_a_full_disk_never_costs_the_newest_checkpoint(reference, tmp_path):
    (disk := tmp_path / "disk").mkdir()
    size = sum(
        path.stat().st_size
        for path in (reference.output_dir / "checkpoints" / "step_000010").iterdir()
    )
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={2 * size + 100_000}", "tmpfs", str(disk)]
    ).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        text = run(reference.same_but(disk / "out"), tmp_path / "logs")
        assert ("No space left on device") in text and adapter(disk / "out") == adapter(
            reference.output_dir
        )
        checkpoint.verify(list(checkpoint.published(disk / "out" / "checkpoints").values())[-1])
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --- numbers ---


def lose_numbers(*steps: int) -> None:
    """Let rank 1's loss be NaN in some steps."""
    from fsdp_qlora.training.trainer import Trainer

    original = Trainer._loss

    def loss(self: Trainer, *args: Any) -> torch.Tensor:
        is_bad = on(1) and self.model.training and self.heartbeat.step in steps
        return original(self, *args) * (float("nan") if is_bad else 1)

    Trainer._loss = loss  # type: ignore[method-assign]


def test_nan_on_one_rank_stops_all_before_the_update(reference, assert_same, tmp_path):
    options = reference.same_but(tmp_path / "out", save_every="none")
    for log in finish(options, tmp_path / "logs0", [1, 1], fault=partial(lose_numbers, 5)).logs:
        assert (
            "error: Step 6: the loss is not finite"
        ) in log.read_text() and "Traceback" not in log.read_text()
    assert (
        status(tmp_path / "out")["state"] == "failed"
        and status(tmp_path / "out")["saved_step"] == 5
    )
    run(options, tmp_path / "logs1")  # the cause is gone
    assert_same(tmp_path / "out")


def test_all_ranks_skip_a_nan_step_a_limited_number_of_times(reference, tmp_path):
    options = reference.same_but(tmp_path / "out", on_nonfinite="skip")
    text = run(options, tmp_path / "logs0", fault=partial(lose_numbers, 5))
    assert text.count("It is skipped.") == 1 and "with samples" in text
    records, expected = (
        [r for r in numbers(out) if "loss" in r] for out in (tmp_path / "out", reference.output_dir)
    )
    assert [(record["step"], record["loss"]) for record in records if record.get("skipped")] == [
        (6, None)
    ]
    losses = [record["loss"] for record in records]
    assert losses[:5] == [record["loss"] for record in expected[:5]] and None not in losses[6:]
    options = reference.same_but(tmp_path / "always", on_nonfinite="skip", num_epochs=3)
    text = run(options, tmp_path / "logs1", [1, 1], fault=partial(lose_numbers, *range(15)))
    assert "11 steps were skipped because their loss or gradient was not finite" in text


def spoil_parameter() -> None:
    """Let rank 1's optimizer make a parameter infinite in the third step."""
    from fsdp_qlora.sharding.optimizer import ShardedOptimizer

    original = ShardedOptimizer.step
    count = 0

    def step(self: ShardedOptimizer, lr: float) -> None:
        nonlocal count
        original(self, lr)
        count += 1
        if count == 3 and on(1):
            with torch.no_grad():
                next(iter(self._local.values())).view(-1)[0] = float("inf")

    ShardedOptimizer.step = step  # type: ignore[method-assign]


def test_an_adapter_that_is_not_finite_is_never_saved(reference, tmp_path):
    options = reference.same_but(tmp_path / "out", save_every=1, max_steps=3)
    text = run(options, tmp_path / "logs", [1, 1], fault=spoil_parameter)
    assert "has values that are not finite, so nothing is saved" in text
    assert list(checkpoint.published(tmp_path / "out" / "checkpoints")) == [1, 2]
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_loss_spikes_are_reported_and_noise_is_not():
    noise = torch.randn(50, generator=torch.Generator().manual_seed(0)).mul(0.1).add(2).tolist()
    assert spike(noise, 2.3) is None and spike(noise[:5], 9.0) is None
    assert spike(noise, 3.5) == pytest.approx(2.0, abs=0.1)
    # earlier spikes do not hide a new one
    assert spike([*noise[:40], *[9.0] * 10], 9.5) is not None


# --- ranks that go wrong ---


def fail(error: type[Exception] = OSError, words: str = "its disk is gone") -> None:
    raise error(words)


lose_memory = partial(
    fail, torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"
)


def while_loading(happens: Fault, rank: int) -> None:
    """Let this happen to a rank that has loaded its model; the others wait then as in NCCL, which
    would not notice.
    """
    from fsdp_qlora.run import train as module

    be_impatient()

    def build_trainer(*_: object) -> None:
        if not on(rank):
            time.sleep(100)
        happens()

    module.build_trainer = build_trainer  # type: ignore[assignment]


def while_the_mirror_is_slow(error: type[Exception], words: str) -> None:
    """Let rank 0 fail in the third step, while a copy for the mirror takes longer than its
    neighbour waits.
    """
    from fsdp_qlora.checkpoint.mirror import Store

    be_impatient()
    Store.update = lambda self, output_dir: time.sleep(8)  # type: ignore[method-assign]
    at_step(2, partial(fail, error, words), 0, during="_loss")


def never_come(rank: int) -> None:
    if on(rank):
        os._exit(3)


@dataclass(frozen=True)
class End:
    """How all ranks end after a fault. says: rank -> what its output has. state: of status.json, if
    there is one.
    """

    fault: Fault
    statuses: list[Any]
    says: dict[int, str]
    state: str | None = None
    options: dict[str, object] = field(default_factory=dict)


OUT_OF_MEMORY = (
    r"error: Rank \d ran out of GPU memory in step 3 \(compute\): CUDA out of memory. Tried to "
    r".*--context_length.*"
    "--recompute all.*--use_cpu_offload true"
)
ENDS = {
    "one fails while loading": End(
        partial(while_loading, fail, 1),
        [1, ANY],
        {0: r"\[rank 0\] Ended because of rank 1: its disk is gone"},
    ),
    "rank 0 refuses while loading": End(
        partial(while_loading, partial(fail, UserError), 0),
        [ANY, 2],
        {1: "Ended because of rank 0: its disk is gone"},
    ),
    "one is killed while loading": End(
        partial(while_loading, KILLED, 1),
        [1, ANY],
        {0: "error: Rank 1 has sent no heartbeat for 3 s, before"},
    ),
    "rank 0 is killed while loading": End(
        partial(while_loading, KILLED, 0),
        [ANY, 1],
        {1: "error: The store of all ranks has not answered for 3 s"},
    ),
    "one never comes": End(
        partial(never_come, 1),
        [1, 3, 1],
        {
            0: r"\[rank 0\] error: Rank 1 did not connect within 0.2 minutes: not started, ended",
            2: r"\[rank 2\] Ended because of rank 0: Rank 1 did not connect",
        },
        options={"hang_minutes": 0.2},
    ),
    "one hangs": End(
        partial(at_step, 3, hang, 1, during="_prepare"),
        [5, 5],
        {
            0: r"error: No rank has made progress for 0.25 minutes. The others wait for rank 1: .*"
            r"rank 1 at step 3, rows, in training/trainer\.py"
        },
        "hung",
        {"hang_minutes": 0.25},
    ),
    "one lacks memory": End(
        partial(at_step, 2, lose_memory, 1, during="_loss"),
        [1, 1],
        {1: OUT_OF_MEMORY},
        "out_of_memory",
        {"recompute": 1},
    ),
    "both lack memory": End(
        partial(at_step, 2, lose_memory, during="_loss"),
        [1, 1],
        {},
        "out_of_memory",
        {"recompute": 1},
    ),
    "memory, and a slow mirror": End(
        partial(while_the_mirror_is_slow, torch.OutOfMemoryError, "CUDA out of memory."),
        [1, 1],
        {0: "error: .*CUDA out of memory"},
        "out_of_memory",
        {"save_every": 1},
    ),
    "a bug, and a slow mirror": End(
        partial(while_the_mirror_is_slow, KeyError, "nobody foresaw this"),
        [1, 1],
        {0: r"(?s)Traceback.*error: .*nobody foresaw this"},
        "failed",
        {"save_every": 1},
    ),
    "a library crashes": End(
        partial(at_step, 2, partial(signal.raise_signal, signal.SIGSEGV), 1, during="_loss"),
        [1, -signal.SIGSEGV],
        {
            0: "error: The connection to another rank was lost in step 3",
            1: r"(?s)Fatal Python error: Segmentation fault.*loop\.py\S+ line \d+ in train\b",
        },
        "failed",
    ),
}


# With another fault of the same end beside it.
ALIKE = ("rank 0 refuses while loading", "both lack memory", "a bug, and a slow mirror")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.nightly] * (case in ALIKE)) for case in ENDS]
)
def test_a_failing_rank_ends_all_ranks_with_its_reason(case, reference, tmp_path):
    end = ENDS[case]
    out = tmp_path / "out"
    options = reference.same_but(
        out, **{"hang_minutes": 0.05, **end.options} if "loading" in case else end.options
    )
    if "mirror" in case:
        options["mirror"] = tmp_path / "mirror"
    job = finish(options, tmp_path / "logs", end.statuses, fault=end.fault, ranks=len(end.statuses))
    assert len(re.findall(r"^(?:\[rank \d\] )?error: ", job.output(), re.MULTILINE)) <= 1, (
        job.output()
    )
    for rank, words in end.says.items():
        assert re.search(words, job.logs[rank].read_text()), job.output()
    assert (status(out)["state"] if (out / "status.json").exists() else None) == end.state
    if case == "one hangs":
        assert "harness.py" in (out / "hang_rank_1.txt").read_text()


def skip_exchange() -> None:
    """Let rank 1 leave out one step's exchange of numbers."""
    from fsdp_qlora.training import trainer

    original = trainer.gather_numbers
    count = 0

    def gather_numbers(values: list[float | torch.Tensor], device: torch.device) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == 8 and on(1):
            return torch.tensor([values, values], dtype=torch.float64)
        return original(values, device)

    trainer.gather_numbers = gather_numbers  # type: ignore[assignment]


def test_a_rank_that_skips_a_collective_does_not_train_on(reference, tmp_path):
    options = reference.same_but(
        tmp_path / "out", hang_minutes=0.05, save_every=1, eval_fraction=0, eval_steps=0
    )
    with ended(Job(options, tmp_path / "logs", fault=skip_exchange)) as job:
        assert 0 not in job.wait() and "error: " in job.output(), job.output()
    steps = list(checkpoint.published(tmp_path / "out" / "checkpoints"))
    assert steps[-1] <= 7 and not (tmp_path / "out" / "adapter_model.safetensors").exists()


def lose_memory_with_few_recomputing() -> None:
    """From the fourth step on rank 1 lacks memory unless a block recomputes."""
    import fsdp_qlora.run.train
    from fsdp_qlora.data.longest_rows import longest_of_table
    from fsdp_qlora.planning import fit
    from fsdp_qlora.sharding.recompute import recomputed_blocks
    from fsdp_qlora.training.trainer import Trainer

    train = fsdp_qlora.run.train.train
    original = Trainer._loss

    def train_after_probes(
        trainer: Trainer, data: Any, source: Any, progress: Any, recorder: Any, scores: Any
    ) -> None:
        longest = longest_of_table(source, trainer.collator)
        fit.fit_on_gpu(trainer, longest, block_bytes=1, too_few=recorder.supervisor.start.too_few)
        train(trainer, data, source, progress, recorder, scores)

    def loss(self: Trainer, *args: Any) -> torch.Tensor:
        keeps_all = not any(block.is_on for block in recomputed_blocks(self.model))
        if on(1) and self.heartbeat.step >= 3 and self.watch_memory and keeps_all:
            lose_memory()
        return original(self, *args)

    torch.cuda.mem_get_info = lambda device: (2**50, 2**50)  # room for all activations
    # type: ignore[method-assign]
    fsdp_qlora.run.train.train = train_after_probes
    Trainer._loss = loss


def test_restart_after_out_of_memory_recomputes_more(reference, assert_same, tmp_path):
    options = reference.same_but(tmp_path / "out", verbose=True)
    text = run(options, tmp_path / "logs", [1, 1], fault=lose_memory_with_few_recomputing)
    assert "Recompute: 0 of 2 blocks" in text and "ran out of GPU memory in step 4" in text
    found = status(tmp_path / "out")
    assert (found["state"], found["exit_code"], found["saved_step"], found["recompute"]) == (
        "out_of_memory",
        1,
        3,
        0,
    )
    # The same place is passed, with the same numbers.
    text = run(options, tmp_path / "logs_again", fault=lose_memory_with_few_recomputing)
    assert "Resuming at step 3" in text and "Recompute: 1 of 2 blocks" in text
    assert status(tmp_path / "out")["too_few"] == 0
    assert_same(tmp_path / "out")


@pytest.mark.parametrize(
    ("stopped", "says"),
    [
        (1, "error: Rank 1 has sent no heartbeat for 3 s"),
        # its process hosts the store
        (0, "error: The store of all ranks has not answered for 3 s: rank 0, or"),
    ],
)
def test_a_stopped_rank_is_reported_by_its_neighbour(stopped, says, reference, tmp_path):
    with ended(
        Job(reference.same_but(tmp_path / "out"), tmp_path / "logs", fault=be_impatient)
    ) as job:
        wait_for(lambda: (tmp_path / "out" / "metrics.jsonl").exists())
        job.kill(stopped, signal.SIGSTOP)
        job.processes[1 - stopped].join(600)
        assert job.processes[1 - stopped].exitcode == 1
    assert says in job.output()


def test_missing_heartbeats_count_only_while_a_rank_is_active(tmp_path, monkeypatch):
    for name, seconds in (
        ("POLL_SECONDS", 0.01),
        ("_PULSE_SECONDS", 0.02),
        ("_SILENT_SECONDS", 0.2),
    ):
        monkeypatch.setattr(presence, name, seconds)
    alone: list[int] = []
    monkeypatch.setattr(
        presence.Presence, "_exit_for_silence", lambda self: alone.append(self.ranks.rank)
    )

    def both() -> list[watchdog.Watchdog]:
        store = torch.distributed.HashStore()
        ranks = [Ranks(rank, rank, 2, 2, torch.device("cpu")) for rank in range(2)]
        signs = [presence.Presence(store, rank, hang_minutes=0.01) for rank in ranks]
        return [
            watchdog.Watchdog(Heartbeat(), sign, hang_minutes=0, output_dir=tmp_path)
            for sign in signs
        ]

    first, second = both()
    second.presence._announce()
    with first.watching():
        time.sleep(0.4)  # the other still reads a checkpoint, and its Python stands still
        with second.watching():
            time.sleep(0.3)
        time.sleep(0.3)  # and has ended before
    assert not alone
    first, second = both()
    with first.watching():
        with pytest.raises(KeyError), second.watching():
            raise KeyError
        wait_for(lambda: alone)
    assert set(alone) == {0}
