"""Full disks, numbers that are none, ranks that hang or lose their way, too little memory."""

import errno
import os
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_qlora.checkpointing import checkpoint, train_state
from fsdp_qlora.checkpointing.progress import spike
from fsdp_qlora.control import presence, watchdog
from fsdp_qlora.control.clock import Heartbeat
from fsdp_qlora.ranks.distributed import Ranks
from tests.chaos.conftest import Reference
from tests.chaos.harness import Job, adapter, ended, numbers, run, status, wait_for

Same = Callable[[Path], None]


def on(rank: int) -> bool:
    return os.environ["RANK"] == str(rank)


# --- the disk ---


def fill_disk(folder: str, most: int) -> None:
    """Let the checkpoints' folder have room for `most` tensor files."""
    original = train_state.write_tensors

    def write_tensors(path: Path, *args: object) -> object:
        if len(list(Path(folder).glob("*/state_*.safetensors"))) >= most:
            for _ in args[1]:  # type: ignore[attr-defined]
                pass
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return original(path, *args)  # type: ignore[arg-type]

    train_state.write_tensors = write_tensors  # type: ignore[assignment]


def test_on_a_full_disk_the_oldest_checkpoint_makes_room(
    reference: Reference, assert_same: Same, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    text = run(
        reference.same_but(output), tmp_path / "logs", fault=fill_disk, arguments=(str(output / "checkpoints"), 2)
    )
    assert "No space left on device. To make room, step_000003 was deleted." in text
    assert_same(output)
    left = checkpoint.published(output / "checkpoints")
    assert list(left)[-1] == 20 and len(left) == 2
    checkpoint.verify(left[20])


def limit_file_size(num_bytes: int) -> None:
    if on(0):
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def test_training_goes_on_when_no_checkpoint_fits_and_the_last_good_one_stays(
    reference: Reference, assert_same: Same, tmp_path: Path
) -> None:
    options = reference.same_but(tmp_path / "out")
    # Too little for a checkpoint's tensors, enough for the adapter itself.
    limit = (reference.output_dir / "adapter_model.safetensors").stat().st_size + 4000
    text = run(options, tmp_path / "logs", fault=limit_file_size, arguments=(limit,))
    assert "Step 3: no checkpoint was saved: " in text and "File too large" in text and "there is none yet" in text
    assert checkpoint.published(tmp_path / "out" / "checkpoints") == {}
    assert_same(tmp_path / "out")


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/proc/mounts").exists(), reason="mounting needs root")
def test_on_a_disk_that_is_really_full_the_newest_checkpoint_is_kept(reference: Reference, tmp_path: Path) -> None:
    import subprocess

    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(path.stat().st_size for path in (reference.output_dir / "checkpoints" / "step_000020").iterdir())
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={2 * size + 100_000}", "tmpfs", str(disk)])
    if mounted.returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        text = run(reference.same_but(disk / "out"), tmp_path / "logs")
        assert "No space left on device" in text and adapter(disk / "out") == adapter(reference.output_dir)
        newest = list(checkpoint.published(disk / "out" / "checkpoints").values())[-1]
        checkpoint.verify(newest)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --- numbers ---


def lose_numbers(rank: int, steps: tuple[int, ...]) -> None:
    """Let one rank's loss be NaN in some steps."""
    from fsdp_qlora.training.trainer import Trainer

    original = Trainer._loss

    def loss(self: Trainer, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
        value = original(self, micro_batch)
        bad = on(rank) and self.model.training and self.heartbeat.step in steps
        return value * float("nan") if bad else value

    Trainer._loss = loss  # type: ignore[method-assign]


def test_nan_on_one_rank_halts_all_with_the_samples_and_the_state_before_it(
    reference: Reference, assert_same: Same, tmp_path: Path
) -> None:
    options = reference.same_but(tmp_path / "out", save_steps=0)
    with ended(Job(options, tmp_path / "logs0", fault=lose_numbers, arguments=(1, (5,)))) as job:
        assert job.wait() == [1, 1], job.output()
    for log in job.logs:
        assert "error: Step 6: the loss is not finite" in log.read_text()
        assert "Traceback" not in log.read_text()
    assert status(tmp_path / "out")["state"] == "failed" and status(tmp_path / "out")["saved_step"] == 5
    run(options, tmp_path / "logs1")  # the cause is gone
    assert_same(tmp_path / "out")


def test_nan_on_one_rank_is_skipped_by_all_together_and_only_so_often(reference: Reference, tmp_path: Path) -> None:
    options = reference.same_but(tmp_path / "out", on_nonfinite="skip")
    text = run(options, tmp_path / "logs0", fault=lose_numbers, arguments=(1, (5,)))
    assert text.count("It is skipped.") == 1 and "with samples" in text
    skipped = [record for record in numbers(tmp_path / "out") if record.get("skipped")]
    assert [record["step"] for record in skipped] == [6] and skipped[0]["loss"] is None
    expected = [record["loss"] for record in numbers(reference.output_dir) if "loss" in record]
    losses = [record["loss"] for record in numbers(tmp_path / "out") if "loss" in record]
    assert losses[:5] == expected[:5] and None not in losses[6:]
    options = reference.same_but(tmp_path / "always", on_nonfinite="skip")
    with ended(Job(options, tmp_path / "logs1", fault=lose_numbers, arguments=(1, tuple(range(20))))) as job:
        assert job.wait() == [1, 1], job.output()
    assert "11 steps were skipped because their loss or gradient was not finite" in job.output()


def spoil_parameter() -> None:
    """Let the optimizer make a parameter infinite in the third step."""
    from fsdp_qlora.optimizers.sharded import ShardedOptimizer

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


def test_an_adapter_that_is_not_finite_is_never_saved(reference: Reference, tmp_path: Path) -> None:
    options = reference.same_but(tmp_path / "out", save_steps=1, max_steps=3)
    with ended(Job(options, tmp_path / "logs", fault=spoil_parameter)) as job:
        assert job.wait() == [1, 1], job.output()
    assert "has values that are not finite, so nothing is saved" in job.output()
    assert list(checkpoint.published(tmp_path / "out" / "checkpoints")) == [1, 2]
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_a_loss_that_stands_out_is_noticed_and_noise_is_not() -> None:
    noise = torch.randn(50, generator=torch.Generator().manual_seed(0)).mul(0.1).add(2).tolist()
    assert spike(noise, 2.3) is None and spike(noise[:5], 9.0) is None
    assert spike(noise, 3.5) == pytest.approx(2.0, abs=0.1)
    assert spike([*noise[:40], *[9.0] * 10], 9.5) is not None  # earlier spikes do not hide a new one


# --- ranks that go wrong ---


def hang_in_rows(rank: int) -> None:
    """Let a rank hang when it makes the batches of the fourth step."""
    from fsdp_qlora.training.trainer import Trainer

    original = Trainer._micro_batches

    def micro_batches(self: Trainer, *args: object) -> object:
        while self.heartbeat.step == 3 and on(rank):
            time.sleep(0.1)
        return original(self, *args)  # type: ignore[arg-type]

    Trainer._micro_batches = micro_batches  # type: ignore[method-assign, assignment]


def test_a_rank_that_hangs_is_named_and_all_end_with_their_stacks(
    reference: Reference, assert_same: Same, tmp_path: Path
) -> None:
    options = reference.same_but(tmp_path / "out", hang_minutes=0.25)
    with ended(Job(options, tmp_path / "logs0", fault=hang_in_rows, arguments=(1,))) as job:
        assert job.wait() == [5, 5], job.output()
    assert job.output().count("error: ") == 1
    assert "error: No rank has made progress for 0.25 minutes. The others wait for rank 1: " in job.output()
    assert "rank 1 at step 3, rows, in training/trainer.py" in job.output()
    assert "test_faults.py" in (tmp_path / "out" / "hang_rank_1.txt").read_text()
    assert status(tmp_path / "out")["state"] == "hung"
    run({**options, "hang_minutes": 15}, tmp_path / "logs1")
    assert_same(tmp_path / "out")


def skip_exchange() -> None:
    """Let a rank leave out one step's exchange of numbers."""
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


def test_a_rank_that_skips_a_collective_does_not_train_on(reference: Reference, tmp_path: Path) -> None:
    options = reference.same_but(tmp_path / "out", hang_minutes=0.05, save_steps=1, eval_fraction=0, eval_steps=0)
    with ended(Job(options, tmp_path / "logs", fault=skip_exchange)) as job:
        statuses = job.wait()
    assert 0 not in statuses and "error: " in job.output(), job.output()
    steps = list(checkpoint.published(tmp_path / "out" / "checkpoints"))
    assert steps[-1] <= 7 and not (tmp_path / "out" / "adapter_model.safetensors").exists()


def in_the_third_step(happens: Callable[[], None], *ranks: int) -> None:
    from fsdp_qlora.training.trainer import Trainer

    original = Trainer._loss

    def loss(self: Trainer, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if any(map(on, ranks)) and self.heartbeat.step == 2 and self.model.training:
            happens()
        return original(self, micro_batch)

    Trainer._loss = loss  # type: ignore[method-assign]


def lose_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")


@pytest.mark.parametrize("bad", [(1,), (0, 1)])
def test_out_of_memory_on_a_rank_ends_all_with_one_message_that_helps(
    bad: tuple[int, ...], reference: Reference, tmp_path: Path
) -> None:
    options = reference.same_but(tmp_path / "out", recompute=1)
    with ended(Job(options, tmp_path / "logs", fault=in_the_third_step, arguments=(lose_memory, *bad))) as job:
        assert job.wait() == [1, 1], job.output()
    assert job.output().count("error: ") == 1 and "Traceback" not in job.output()
    message = job.output()
    assert "error: Rank" in message
    assert status(tmp_path / "out")["state"] == "out_of_memory"
    assert "GPU memory" in status(tmp_path / "out")["reason"]
    assert "ran out of GPU memory in step 3 (compute): CUDA out of memory. Tried to" in message
    assert "--context_length" in message and "--use_cpu_offload true" in message and "--recompute all" in message


class Roomy:
    """Stands for the memory of a GPU that seems to have room for all activations."""

    def __init__(self, device: torch.device) -> None:
        self.start = lambda: None
        self.room = lambda: 2**40
        self.most_in_steps = lambda: 1e9


def lose_memory_with_few_recomputing() -> None:
    """From the fourth step on rank 1 lacks memory unless a block recomputes."""
    import fsdp_qlora.run.run
    from fsdp_qlora.training import trainer as trainers
    from fsdp_qlora.training.trainer import Trainer

    train, original = fsdp_qlora.run.run.train, Trainer._loss

    def train_after_probes(trainer: Trainer, data: Any, progress: Any, recorder: Any) -> None:
        trainer.fit_recompute(data.train_rows, block_bytes=1, too_few=recorder.guard.start.too_few)
        train(trainer, data, progress, recorder)

    def loss(self: Trainer, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if on(1) and self.heartbeat.step >= 3 and self.memory_watch and self.memory_watch.number == 0:
            lose_memory()
        return original(self, micro_batch)

    trainers.GpuMeter = Roomy  # type: ignore[assignment, misc]
    fsdp_qlora.run.run.train, Trainer._loss = train_after_probes, loss  # type: ignore[method-assign]


def test_restart_after_out_of_memory_recomputes_more(reference: Reference, assert_same: Same, tmp_path: Path) -> None:
    options = reference.same_but(tmp_path / "out")
    with ended(Job(options, tmp_path / "logs", fault=lose_memory_with_few_recomputing)) as job:
        assert job.wait() == [1, 1], job.output()
    assert "Recompute: 0 of 2 blocks" in job.output() and "ran out of GPU memory in step 4" in job.output()
    found = status(tmp_path / "out")
    assert (found["state"], found["exit_code"], found["saved_step"], found["recompute"]) == ("out_of_memory", 1, 3, 0)
    # The same place is passed, with the same numbers.
    output = run(options, tmp_path / "logs_again", fault=lose_memory_with_few_recomputing)
    assert "Resuming at step 3" in output and "Recompute: 1 of 2 blocks" in output
    assert status(tmp_path / "out")["too_few"] == 0
    assert_same(tmp_path / "out")


def crash() -> None:
    signal.raise_signal(signal.SIGSEGV)


def test_a_library_that_crashes_shows_where_it_was_called(reference: Reference, tmp_path: Path) -> None:
    options = reference.same_but(tmp_path / "out")
    with ended(Job(options, tmp_path / "logs", fault=in_the_third_step, arguments=(crash, 1))) as job:
        assert job.wait() == [1, -signal.SIGSEGV], job.output()
    said = job.logs[1].read_text()
    assert "Fatal Python error: Segmentation fault" in said
    assert re.search(r"loop\.py\S+ line \d+ in train\b", said), said
    assert "error: The connection to another rank was lost in step 3" in job.logs[0].read_text()


def fail_while_the_mirror_is_slow(error: str, mirror_seconds: float) -> None:
    """Let rank 0 fail in the third step, while a copy for the mirror takes longer than its neighbour waits."""
    from fsdp_qlora.checkpointing.mirror import Store
    from fsdp_qlora.training.trainer import Trainer

    be_impatient()
    original = Trainer._loss
    Store.update = lambda self, output_dir: time.sleep(mirror_seconds)  # type: ignore[method-assign]

    def loss(self: Trainer, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if on(0) and self.heartbeat.step == 2 and self.model.training:
            raise torch.OutOfMemoryError(error) if "memory" in error else KeyError(error)
        return original(self, micro_batch)

    Trainer._loss = loss  # type: ignore[method-assign]


@pytest.mark.parametrize("error", ["CUDA out of memory.", "nobody foresaw this"])
def test_a_rank_that_fails_says_why_before_it_waits_for_the_mirror(
    error: str, reference: Reference, tmp_path: Path
) -> None:
    options = reference.same_but(tmp_path / "out", save_steps=1, mirror=tmp_path / "mirror")
    arguments = (error, 8.0)
    with ended(Job(options, tmp_path / "logs", fault=fail_while_the_mirror_is_slow, arguments=arguments)) as job:
        assert job.wait() == [1, 1], job.output()
    assert job.output().count("error: ") == 1 and f"{error}" in job.output().partition("error: ")[2]
    assert "no sign of life" not in job.output() and error in status(tmp_path / "out")["reason"]


def be_impatient() -> None:
    from fsdp_qlora.control import presence

    presence._SILENT_SECONDS, presence._PULSE_SECONDS = 3.0, 0.5


@pytest.mark.parametrize(
    ("stopped", "says"),
    [
        (1, "error: Rank 1 has given no sign of life for 3 s"),
        (0, "error: The store of all ranks has not answered for 3 s: rank 0, or"),  # its process hosts the store
    ],
)
def test_a_rank_that_is_stopped_is_missed_by_its_neighbour(
    stopped: int, says: str, reference: Reference, tmp_path: Path
) -> None:
    with ended(Job(reference.same_but(tmp_path / "out"), tmp_path / "logs", fault=be_impatient)) as job:
        wait_for(lambda: (tmp_path / "out" / "metrics.jsonl").exists())
        job.kill(stopped, signal.SIGSTOP)
        job.processes[1 - stopped].join(600)
        assert job.processes[1 - stopped].exitcode == 1
    assert says in job.output()


def try_longest() -> None:
    from fsdp_qlora.run import run as module

    original = module.train

    def train(trainer: object, data: object, *args: object) -> None:
        trainer.try_longest(data.train_rows)  # type: ignore[attr-defined]
        original(trainer, data, *args)  # type: ignore[arg-type]

    module.train = train


def test_silence_counts_between_announcement_and_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("POLL_SECONDS", 0.01), ("_PULSE_SECONDS", 0.02), ("_SILENT_SECONDS", 0.2)):
        monkeypatch.setattr(presence, name, seconds)
    alone: list[int] = []
    monkeypatch.setattr(presence.Presence, "_exit_for_silence", lambda self: alone.append(self.ranks.rank))

    def both() -> list[watchdog.Watchdog]:
        store = torch.distributed.HashStore()
        ranks = [Ranks(rank, rank, 2, 2, torch.device("cpu")) for rank in range(2)]
        signs = [presence.Presence(store, rank, hang_minutes=0.01) for rank in ranks]
        return [watchdog.Watchdog(Heartbeat(), sign, hang_minutes=0, output_dir=tmp_path) for sign in signs]

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


def test_trying_the_longest_rows_first_changes_nothing(reference: Reference, assert_same: Same, tmp_path: Path) -> None:
    run(reference.same_but(tmp_path / "out"), tmp_path / "logs", fault=try_longest)
    assert_same(tmp_path / "out")
