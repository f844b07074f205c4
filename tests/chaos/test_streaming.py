"""A streamed run that is killed resumes in the middle of a block of rows, and ends with the same bytes."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.chaos.harness import OPTIONS, Job, adapter, ended, run
from tests.tiny import make_rows, read_metrics, write_rows


def die_after(step: int) -> None:
    """Let rank 0 be killed after a step, of which there is no checkpoint yet."""
    from fsdp_qlora.run.supervision import Recorder

    stepped = Recorder.stepped

    def fatal(self: Recorder, progress, record) -> None:  # type: ignore[no-untyped-def]
        stepped(self, progress, record)
        if progress.step == step and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    Recorder.stepped = fatal  # type: ignore[method-assign]


def test_a_killed_stream_goes_on_to_the_same_bytes(models: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    rows = make_rows(41)
    for name, part in (("a", rows[:25]), ("b", rows[25:])):
        write_rows(tmp_path / "rows" / f"{name}.jsonl", part)
    streamed = {**OPTIONS, "eval_fraction": 0, "eval_steps": 0, "streaming": True, "shuffle_buffer": 15}
    streamed |= {"max_steps": 22, "model_name": models(), "dataset": tmp_path / "rows"}
    run({**streamed, "output_dir": tmp_path / "whole"}, tmp_path / "logs")
    killed = {**streamed, "output_dir": tmp_path / "killed"}
    with ended(Job(killed, tmp_path / "logs0", fault=die_after, arguments=(8,))) as job:
        job.wait()
    assert "Resuming at step 6" in run(killed, tmp_path / "logs1")
    assert adapter(tmp_path / "killed") == adapter(tmp_path / "whole")
    assert read_metrics(tmp_path / "killed") == read_metrics(tmp_path / "whole")
    assert len(read_metrics(tmp_path / "whole")) == 22  # of 4 rows, so the second epoch begins in step 11
    assert "rows (streamed, format alpaca)" in (tmp_path / "whole" / "README.md").read_text()
