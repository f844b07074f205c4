"""The runs and comparisons of same_bytes.sh, which says what they are for.

It knows of the code under test only what stays: train.py's options, the files that a run writes,
and the names of the train types. Each tree has a server process, which has imported the libraries
and forks the ranks.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from same_bytes_compare import Failed, Verdict, compare, file_hash

RANKS = (1, 2)
STEPS = 4
SAVE_STEPS = 2
TOLERANCE = 1e-5
# An activation at the edge between two of int8's 255 steps goes to the one or the other for the
# last bit of a sum: one such is 7e-5 of a tiny model's loss and 2e-3 of a gradient.
LOOSER = {"int8_lora": 500}
OPTIONS = {
    "batch_size": 1,
    "gradient_accumulation_steps": 2,
    "context_length": 256,
    "num_epochs": 2,
    "max_steps": STEPS,
    "lr": 1e-3,
    "eval_fraction": 0.1,
    "eval_steps": 3,
    "save_every": SAVE_STEPS,
    "log_to": "stdout",
    "quant_cache": "off",
}
ADAPTER_OPTIONS = {"lora_rank": 4, "lora_dropout": 0.1}  # random numbers count too
# Cases besides the train types: of each objective with rows of its own, in a file of its name.
OBJECTIVES: dict[str, dict[str, object]] = {
    "dpo": {"train_type": "qlora"},
    "grpo": {
        "train_type": "lora",
        "rewards": "length:8",
        "num_generations": 2,
        "max_completion_length": 8,
        "eval_fraction": 0,
        "eval_steps": 0,
    },
    "distill": {"train_type": "qlora", "top_k": 8},
}
CONTINUED = ("qlora", "bnb_dora", "full", "dpo", "grpo", "distill")
CACHED = ("qlora", "hqq_lora")
# Imported once per tree, since it takes most of a tiny run. Not the tree's own modules: they move.
LIBRARIES = (
    "torch.distributed.fsdp",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.utils.checkpoint",
    "transformers.models.llama.modeling_llama",
    "bitsandbytes",
    "peft",
    "datasets",
    "hqq.core.quantize",
)


# --- a tree's server: forks the ranks of one run after another ---


class Job(NamedTuple):
    """A run of train.py. Rank 0 is killed as soon as the folder `kill_at` is there, where one is
    named.
    """

    argv: list[str]
    ranks: int
    log: str
    kill_at: str = ""


def serve(tree: str) -> None:
    """Answer each job that comes on stdin, a line of JSON, with its ranks' exit statuses."""
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    spec = importlib.util.find_spec("fsdp_qlora")
    print(json.dumps(spec and spec.origin), flush=True)
    for line in sys.stdin:
        print(json.dumps(run_job(tree, Job(*json.loads(line)))), flush=True)


def run_job(tree: str, job: Job) -> list[int]:
    """Fork the ranks and wait for them; when one fails the others are killed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = int(free.getsockname()[1])
    running: dict[int, int] = {}  # process id -> rank
    statuses = [0] * job.ranks
    try:
        for rank in range(job.ranks):
            if (pid := os.fork()) == 0:
                be_rank(tree, job, rank, port)
            running[pid] = rank
        while running:
            pid, status = os.wait()
            statuses[running.pop(pid)] = os.waitstatus_to_exitcode(status)
            if status:
                kill_all(running)
    finally:
        kill_all(running)
    return statuses


def kill_all(pids: dict[int, int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def be_rank(tree: str, job: Job, rank: int, port: int) -> None:
    """Become one rank, as torchrun would start it; does not return."""
    status: int | str | None = 1
    try:
        log = os.open(f"{job.log}.rank{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        local = {"RANK": rank, "WORLD_SIZE": job.ranks}
        os.environ |= {
            **{f"{scope}{name}": str(n) for scope in ("", "LOCAL_") for name, n in local.items()}
        }
        os.environ |= {
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
        if job.kill_at and rank == 0:
            die_once_there_is(job.kill_at)
        sys.argv = [f"{tree}/train.py", *job.argv]
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


def die_once_there_is(folder: str) -> None:
    """Kill this process at the first thing it does after it renamed something to `folder`: always
    the same moment.
    """
    was_renamed = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal was_renamed
        if was_renamed and event != "os.kill" and os.path.isdir(folder):
            os.kill(os.getpid(), signal.SIGKILL)
        was_renamed = was_renamed or (event == "os.rename" and str(arguments[1]) == folder)

    sys.addaudithook(hook)


class Server:
    """The server process of a tree, as its user sees it."""

    def __init__(self, tree: Path, cache: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(tree)],
            env={**os.environ, "PYTHONPATH": str(tree), "FSDP_QLORA_CACHE": str(cache)},
            cwd=tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        origin = self._answer()
        assert origin and Path(origin).is_relative_to(tree), (
            f"{origin} would be run instead of {tree}"
        )
        print(f"code under test: {origin}", flush=True)

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "a server process ended"
        return json.loads(line)

    def run(self, job: Job) -> list[int]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        statuses: list[int] = self._answer()
        return statuses

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


# --- the runs ---


class CacheFile(NamedTuple):
    """A file of the cache: `written` differs when it was written again, `touched` is its time."""

    written: tuple[int, str]
    touched: int


def cache_files(cache: Path) -> dict[str, CacheFile]:
    """Every file but locks, which have no content."""
    files = [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {
        str(path.relative_to(cache)): CacheFile(
            (path.stat().st_ino, file_hash(path)), path.stat().st_mtime_ns
        )
        for path in files
    }


class Runs:
    """The runs of both trees, in folders below `folder`.

    alike: by which both do the same. tolerance: of what the working tree does like the commit; what
    it does like itself must be the same bytes.
    """

    def __init__(
        self, folder: Path, servers: dict[str, Server], alike: "Alike", tolerance: float
    ) -> None:
        self.folder = folder
        self.servers = servers
        self.alike = alike
        self.tolerance = tolerance

    def run(
        self,
        tree: str,
        out: str,
        train_type: str,
        ranks: int,
        *,
        status: int = 0,
        **options: object,
    ) -> Path:
        """Run train.py of a tree; `status` is the one of rank 0, or -signal for a kill."""
        model = self.folder / ("expanded" if train_type.endswith("llama_pro") else "model")
        output_dir = self.folder / out
        rows = "rows"
        objective = dict[str, object](train_type=train_type)
        if train_type in OBJECTIVES:
            rows = train_type
            objective = {"objective": train_type, **OBJECTIVES[train_type]}
        train_type = str(objective["train_type"])
        given: dict[str, object] = {
            **OPTIONS,
            "model_name": model,
            "dataset": self.folder / f"{rows}.jsonl",
            **objective,
        }
        if train_type.endswith(("lora", "dora")):
            given |= ADAPTER_OPTIONS | ({} if self.alike.dropout else {"lora_dropout": 0})
        if given.get("objective") == "distill":
            given["teacher"] = self.folder / "teacher"
        if self.alike.plain[tree]:
            given["kernels"] = "plain"  # the only ones of the tree of before
        if self.alike.pads[tree]:
            given["padding"] = "true"  # what --batching padded was called in the tree of before
        given |= {"output_dir": output_dir, **options}
        argv = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        kill_at = str(output_dir / "checkpoints" / f"step_{SAVE_STEPS:06d}") if status else ""
        log = self.log(tree, out)
        log.parent.mkdir(parents=True, exist_ok=True)
        statuses = self.servers[tree].run(Job(argv, ranks, str(log), kill_at))
        if statuses[0] != status or (status == 0 and any(statuses)):
            tail = "\n".join(self.output(tree, out).splitlines()[-15:])
            raise Failed(
                f"exit statuses {statuses} with the {tree}'s code; the end of the output:\n{tail}"
            )
        return output_dir

    def log(self, tree: str, out: str) -> Path:
        return self.folder / "logs" / tree / out.replace("/", "-")

    def output(self, tree: str, out: str) -> str:
        log = self.log(tree, out)
        return "\n".join(path.read_text() for path in sorted(log.parent.glob(f"{log.name}.rank*")))

    def allowed(self, train_type: str) -> float:
        return self.tolerance * LOOSER.get(train_type, 1)

    # Each takes a train type and a number of ranks, with one part for each tree: the first of them
    # can be done while the other tree is busy with its own.

    def whole(self, tree: str, train_type: str, ranks: int) -> Path:
        return self.run(tree, f"{tree}/{train_type}-{ranks}", train_type, ranks)

    def stop(self, tree: str, train_type: str, ranks: int) -> Path:
        return self.run(
            tree, f"stopped-{tree}/{train_type}-{ranks}", train_type, ranks, status=-signal.SIGKILL
        )

    def continue_stopped(self, by: str, train_type: str, ranks: int) -> Verdict:
        """Continue by the working tree's code what was begun by a tree's, and compare with that
        tree's whole run.
        """
        out = f"stopped-{by}/{train_type}-{ranks}"
        log = self.folder / out / "metrics.jsonl"
        before = [
            line for line in log.read_text().splitlines() if json.loads(line)["step"] <= SAVE_STEPS
        ]
        if len(before) < SAVE_STEPS:
            raise Failed(f"the run to continue has logged only {before}")
        tolerance = self.allowed(train_type) if by == "rev" else 0.0
        whole = self.folder / f"{by}/{train_type}-{ranks}"
        verdict = compare(whole, self.run("tree", out, train_type, ranks), tolerance)
        # A run that began again gives the same bytes too, but not the same times.
        if log.read_text().splitlines()[: len(before)] != before:
            verdict.differences.append(
                "the run began again, or wrote other lines for the steps before"
            )
        return verdict

    def write_cache(self, train_type: str, ranks: int) -> dict[str, CacheFile]:
        cache = self.folder / f"cache-{train_type}-{ranks}"
        self.run("rev", f"cache-rev/{train_type}-{ranks}", train_type, ranks, quant_cache=cache)
        return cache_files(cache)

    def use_cache(self, train_type: str, ranks: int, before: dict[str, CacheFile]) -> Verdict:
        cache = self.folder / f"cache-{train_type}-{ranks}"
        out = self.run(
            "tree", f"cache-tree/{train_type}-{ranks}", train_type, ranks, quant_cache=cache
        )
        verdict = compare(self.folder / f"tree/{train_type}-{ranks}", out, 0.0)
        after = cache_files(cache)
        verdict.differences.extend(
            f"{name} of the cache was written or deleted"
            for name in sorted(before.keys() | after.keys())
            if name not in before
            or name not in after
            or before[name].written != after[name].written
        )
        # A start that takes its weights from an entry leaves the time there, so that old ones can
        # be deleted.
        if not any(
            name in after and after[name].touched > file.touched for name, file in before.items()
        ):
            verdict.differences.append("the cache was not used")
        return verdict


def make_inputs(folder: Path) -> None:
    from tests.helpers.models import make_model
    from tests.helpers.rows import make_rows, write_rows

    make_model(folder / "model")
    make_model(folder / "teacher", num_hidden_layers=3)
    # As block_expansion.py records it; that new blocks begin as zeros does not matter here.
    make_model(folder / "expanded", num_hidden_layers=3, new_blocks=[1])
    rows = make_rows(20)
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "distill.jsonl", rows)
    asked = [{"prompt": f"Count to {number} " * (1 + number % 3)} for number in range(20)]
    write_rows(folder / "grpo.jsonl", asked)
    said = [
        {"chosen": "one " * (2 + number % 5), "rejected": "two " * (1 + number % 4)}
        for number in range(20)
    ]
    write_rows(
        folder / "dpo.jsonl", [row | answers for row, answers in zip(asked, said, strict=True)]
    )


class Alike(NamedTuple):
    """How both trees are made to do the same. pads: which of them must be told to pad; plain: which
    to take plain kernels; dropout: whether it is used.
    """

    pads: dict[str, bool]
    plain: dict[str, bool]
    dropout: bool


def make_alike(trees: dict[str, Path]) -> Alike:
    """Rows were always padded before --padding, kernels were plain before --kernels, and what is
    dropped was drawn otherwise before Dropout.
    """
    options = {name: [*(tree / "fsdp_qlora/config").glob("*.py")] for name, tree in trees.items()}
    texts = {name: "".join(path.read_text() for path in options[name]) for name in trees}
    knows = {
        name: "\n    padding: " in text or "\n    batching: " in text
        for name, text in texts.items()
    }
    chooses = {name: "\n    kernels: " in text for name, text in texts.items()}
    sources = {name: [*(tree / "fsdp_qlora").rglob("lora*.py")] for name, tree in trees.items()}
    draws = {
        any("class Dropout" in path.read_text() for path in paths) for paths in sources.values()
    }
    return Alike(
        {name: knows[name] and not all(knows.values()) for name in trees},
        {name: chooses[name] and not all(chooses.values()) for name in trees},
        dropout=len(draws) == 1,
    )


def checks(runs: Runs, train_types: list[str]) -> Iterator[tuple[str, Verdict | Failed]]:
    """Every comparison by its name. The trees' servers work side by side."""

    def attempt(action: Any, *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except Failed as error:
            return error

    splits = [(train_type, ranks) for train_type in train_types for ranks in RANKS]
    continued = [(train_type, 2) for train_type in train_types if train_type in CONTINUED]
    cached = [(train_type, 2) for train_type in train_types if train_type in CACHED]
    with ThreadPoolExecutor(1) as rev, ThreadPoolExecutor(1) as tree:
        old = {split: rev.submit(attempt, runs.whole, "rev", *split) for split in splits}
        stopped = {
            ("rev", *split): rev.submit(attempt, runs.stop, "rev", *split) for split in continued
        }
        caches = {split: rev.submit(attempt, runs.write_cache, *split) for split in cached}
        new = {split: tree.submit(attempt, runs.whole, "tree", *split) for split in splits}
        stopped |= {
            ("tree", *split): tree.submit(attempt, runs.stop, "tree", *split) for split in continued
        }

        def in_turn(action: Any, *arguments: Any) -> Any:
            """By the working tree's server, which does one run at a time."""
            return tree.submit(attempt, action, *arguments).result()

        for split in splits:
            made = old[split].result(), new[split].result()
            failed = next((one for one in made if isinstance(one, Failed)), None)
            yield (
                ("{} on {}").format(*split),
                failed or attempt(compare, *made, runs.allowed(split[0])),
            )
        for (by, train_type, ranks), begun in stopped.items():
            before = begun.result()
            verdict = (
                before
                if isinstance(before, Failed)
                else in_turn(runs.continue_stopped, by, train_type, ranks)
            )
            name = (
                "continued"
                if by == "rev"
                else ("stopped and continued by the working tree's own code")
            )
            yield f"{train_type} on {ranks}, {name}", verdict
        for split in cached:
            before = caches[split].result()
            verdict = (
                before if isinstance(before, Failed) else in_turn(runs.use_cache, *split, before)
            )
            yield "{} on {}, from the cache".format(*split), verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rev", type=Path, help="the commit's tree")
    parser.add_argument("tree", type=Path, help="the working tree")
    parser.add_argument("folder", type=Path, help="folder for all output")
    parser.add_argument("train_types", nargs="*")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help="maximum relative difference; 0 demands the same bytes",
    )
    arguments = parser.parse_args()
    from fsdp_qlora.config.train_types import TRAIN_TYPES

    cases = [*TRAIN_TYPES, *OBJECTIVES]
    if unknown := {*arguments.train_types} - {*cases}:
        parser.error(
            f"no train type is named {', '.join(sorted(unknown))}; there are {', '.join(cases)}"
        )
    begin = time.monotonic()
    different = 0
    folder = arguments.folder
    with ThreadPoolExecutor(2) as pool:
        trees = {"rev": arguments.rev, "tree": arguments.tree}
        opened = {
            name: pool.submit(Server, tree, folder / f"data-{name}") for name, tree in trees.items()
        }
        make_inputs(folder)
        servers = {name: future.result() for name, future in opened.items()}
    runs = Runs(folder, servers, make_alike(trees), arguments.tolerance)
    for name, verdict in checks(runs, arguments.train_types or cases):
        is_equal = isinstance(verdict, Verdict) and not verdict.differences
        different += not is_equal
        print(
            f"{name}: {verdict if isinstance(verdict, Verdict) else f'FAILED: {verdict}'}",
            flush=True,
        )
    for server in servers.values():
        server.close()
    how = f" to {arguments.tolerance:.0e}" if arguments.tolerance else ""
    print(
        f"{f'{different} different' if different else f'all equal{how}'}, "
        f"{time.monotonic() - begin:.0f} s"
    )
    return different > 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        sys.exit(main())
