"""How soon the program answers, beside an earlier commit: `python benchmarks/answers.py --before
33ae322`.

Help, wrong names, columns and options, and a dry run of 64 rows on a tiny model, each with it and
HEAD in turn, in processes of their own. CPU seconds of a process, user and system, which depend
less on other programs; medians of the rounds, and quartiles of the ratio to the other commit in the
same round.
"""

import argparse
import compileall
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# So that it runs from a clone that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks.common import describe_machine, write_results
from tests.helpers.models import make_model
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import ROOT

TRAIN = ("train", "--device", "cpu", "--dry_run", "true")
QUESTIONS: dict[str, tuple[str, ...]] = {
    "--help": ("--help",),
    "wrong command": ("trian",),
    "wrong option": (*TRAIN, "--lrr", "1"),
    "wrong name of a model": (*TRAIN, "--model_name", "owner/none", "--dataset", "rows.jsonl"),
    "wrong name of a dataset": (*TRAIN, "--model_name", "model", "--dataset", "alpaka"),
    "wrong columns": (*TRAIN, "--model_name", "model", "--dataset", "columns.jsonl"),
    "dry run": (*TRAIN, "--model_name", "model", "--dataset", "rows.jsonl"),
    "plan": ("plan", "--gpu", "RTX 3090", "--model_name", "qwen3-8b"),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", metavar="COMMIT", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--questions", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--output", default="answers.json")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        clones = [
            copy_of(commit, folder / name)
            for commit, name in ((options.before, "before"), ("HEAD", "after"))
        ]
        (folder / "model").mkdir()
        make_model(folder / "model")
        write_rows(folder / "rows.jsonl", make_rows(64))
        write_rows(folder / "columns.jsonl", [{"x": "1", "y": "2"}])
        answers = {}
        for name in options.questions:
            answers[name] = answer = ask(QUESTIONS[name], clones, folder, options.rounds)
            low, middle, high = answer["ratio_quartiles"]
            medians = " -> ".join(f"{np.median(answer[when]):.2f}" for when in ("before", "after"))
            print(f"{name:24} {medians} CPU s, {middle:.2f} ({low:.2f} to {high:.2f})", flush=True)
    command = f"python benchmarks/answers.py {' '.join(sys.argv[1:] if argv is None else argv)}"
    result = {
        "machine": describe_machine(torch.device("cpu")),
        "before": options.before,
        "answers": answers,
    }
    write_results(options.output, command, result)
    return 0


def copy_of(commit: str, folder: Path) -> Path:
    """A folder with the files of a commit, compiled."""
    folder.mkdir()
    archive = subprocess.run(
        ["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    compileall.compile_dir(folder / "fsdp_qlora", quiet=1)
    return folder


def ask(words: tuple[str, ...], clones: list[Path], folder: Path, rounds: int) -> dict[str, Any]:
    """CPU seconds of both clones in each round, and the ratios' quartiles."""
    seconds = [[cpu_seconds(words, clone, folder) for clone in clones] for _ in range(rounds)]
    ratios = [after[1] / earlier[1] for earlier, after in seconds]
    assert {earlier[0] for earlier, _ in seconds} == {after[0] for _, after in seconds}, (
        "the exit statuses differ"
    )
    return {
        "status": seconds[0][0][0],
        "before": [earlier[1] for earlier, _ in seconds],
        "after": [after[1] for _, after in seconds],
        "ratio_quartiles": list(np.quantile(ratios, [0.25, 0.5, 0.75])),
    }


def cpu_seconds(words: tuple[str, ...], clone: Path, folder: Path) -> tuple[int, float]:
    """The exit status of a command of a clone, and its CPU seconds."""
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(clone),
    }
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "fsdp_qlora", *words]
    status = subprocess.run(
        command, cwd=folder, env=os.environ | offline, capture_output=True
    ).returncode
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return status, end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


if __name__ == "__main__":
    sys.exit(main())
