"""The terminal during a run and after its end."""

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from fsdp_qlora.distributed.supervision.launch import is_from_an_agent
from fsdp_qlora.utils.text import fit_line
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import ROOT, flags, train_ok

PYTHON = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
BAR = re.compile(
    r"[\w' ]*:? *\d+%\|[^|]*\| +\S+/\S+ ?(loss +\S+ lr \S+ +[\d,]+ tokens/s )?\[[\d:]+<[\d:?]+.*\]"
)


class Screen:
    """As much of a terminal as a progress bar needs: all rows that ever were, and where the cursor
    is.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows = [""]
        self.row = 0
        self.column = 0

    def write(self, text: str) -> None:
        for token in re.findall(r"\x1b\[[\d;]*[A-Za-z]|[\s\S]", text):
            if token == "\n":
                self.row += 1
            elif token == "\r":
                self.column = 0
            elif token == "\x1b[A":
                self.row = max(0, self.row - 1)
            elif token == "\x1b[K":
                self.rows[self.row] = self.rows[self.row][: self.column]
            elif token.isprintable():
                self.put(token)
            self.rows += [""] * (self.row + 1 - len(self.rows))

    def put(self, letter: str) -> None:
        if self.column == self.width:  # a terminal wraps when the next letter comes
            self.row = self.row + 1
            self.column = 0
            self.rows += [""] * (self.row + 1 - len(self.rows))
        line = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = line[: self.column] + letter + line[self.column + 1 :]
        self.column += 1


def on_terminal(command: list[str], *, width: int, cwd: Path) -> tuple[int, list[str]]:
    """Run a command on a terminal of that width; its exit status and all rows that it left."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=clean_environment(), cwd=cwd
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            output += os.read(ours, 65536)
        except OSError:  # nobody has the other side any more
            break
    os.close(ours)
    screen = Screen(width)
    screen.write(output.decode(errors="replace"))
    return process.wait(60), [row.rstrip() for row in screen.rows]


def into_pipe(command: list[str], *, width: int, cwd: Path) -> tuple[int, list[str]]:
    """Run a command whose output is a pipe; its exit status and all lines."""
    environment = clean_environment() | {"COLUMNS": str(width)}
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=cwd,
    )
    assert "\x1b" not in done.stdout
    return done.returncode, [row.rstrip() for row in re.split(r"[\r\n]+", done.stdout)]


def clean_environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not is_from_an_agent(name)}
    return clean | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TERM": "xterm"}


# Of each two of: launcher, ranks, width, success and output, every combination occurs.
CASES = {
    "python 80": (PYTHON, 1, 80, False, on_terminal),
    "two ranks that fail 120": (PYTHON, 2, 120, True, on_terminal),
    "two ranks of torchrun 120": (TORCHRUN, 2, 120, False, on_terminal),
    "torchrun that fails 80, pipe": (TORCHRUN, 2, 80, True, into_pipe),
    "torchrun 120, pipe": (TORCHRUN, 1, 120, False, into_pipe),
    "python that fails 80, pipe": (PYTHON, 1, 80, True, into_pipe),
}


OFTEN = ("python 80", "two ranks that fail 120", "torchrun 120, pipe")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in OFTEN else pytest.mark.nightly) for case in CASES],
)
def test_failure_reason_is_the_last_text_below_the_progress_bar(case, models, tmp_path):
    launcher, ranks, width, fails, show = CASES[case]
    argv = flags(
        model_name=models(),
        dataset=write_rows(tmp_path / "rows.jsonl", make_rows(12)),
        output_dir=tmp_path / "out",
        max_steps=6,
        num_epochs=3,
        save_every=2,
        quant_cache="off",
        lr=1e30 if fails else 1e-4,  # the loss is not finite soon
        warmup=0,
    )
    count = flags(nproc_per_node=ranks)
    words = (
        [str(ROOT / "train.py"), *argv, *count]
        if launcher is PYTHON
        else [*count, str(ROOT / "train.py"), *argv]
    )
    status, rows = show([*launcher, *words], width=width, cwd=tmp_path)
    text = "\n".join(rows)
    bars = [row for row in rows if "%|" in row]
    assert bars and all(BAR.fullmatch(row) for row in bars), text
    assert "gemm_4bit_forward" not in text
    assert bool(status) == fails, text
    if not fails:
        assert re.search(r"loss +\S+ lr \S+ +[\d,]+ tokens/s", bars[-1]), text
        assert sum(row.startswith("Checkpoint of step") for row in rows) == 3, text
    else:
        reason = re.compile(r"not finite")
        assert any(reason.search(row) for row in rows[-24:]), text
        said = [row for row in rows if re.match(r"(\[rank \d\] )?error: ", row)]
        assert 1 <= len(said) <= ranks, text


def test_startup_output_is_eight_lines_of_100_columns(models, tmp_path):
    folder = tmp_path / ("a_long_name_" * 12)
    shutil.copytree(models(), folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    rows = write_rows(folder / "rows.jsonl", make_rows(12))
    said = train_ok(
        1,
        folder / "out",
        model_name=folder / "model",
        dataset=rows,
        max_steps=1,
        context_length=128,
    )
    start = [
        line
        for line in said.partition("step 1/1")[0].splitlines()
        if line and "rows/s]" not in line
    ]
    kinds = [re.split("[:,]", line)[0] for line in start]
    assert kinds == ["Model", "Rows", "Prompts", "Sample", "Steps", "Memory", "Output", "Proof"], (
        said
    )
    assert max(map(len, start)) <= 100
    assert start[1].startswith("Rows: 12 of 12 rows, ") and start[1].endswith(
        "_long_name_/rows.jsonl"
    )
    assert "the chat template" in start[2] and start[6].endswith("_/out")


def test_long_lines_are_shortened_in_the_middle():
    assert fit_line("Output: ", "runs/1") == "Output: runs/1"
    assert fit_line("Output: ", "a" * 95 + "/run") == "Output: ..." + "a" * 85 + "/run"
    assert fit_line("a" * 60 + "b" * 60) == "a" * 45 + " ... " + "b" * 50
