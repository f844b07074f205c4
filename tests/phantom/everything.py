"""Everything that train.py can do, from its command line to the saved result, on the stand-in for CUDA.

    python -m tests.phantom.everything [--only TEXT] [--ranks 2 1 4] [--seconds N]

Not among the tests: it takes an hour on two cores. What has ended is not run again (--again: what has ended badly
is); the table of docs/gpu.md is printed at the end. Ranks are forked from one process that has imported torch and
transformers already, before CUDA is initialized: with that a run takes a few seconds.
"""

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.phantom.forks import become  # first: it imports what ranks need without initializing CUDA

# isort: split
from fsdp_qlora.cli.main import main as run_program
from tests.phantom import environment
from tests.phantom.cases import COMMON, FAMILIES, MODELS, RUN, SHARDED, Case, cases
from tests.tiny import ROOT, _free_port, flags, make_model, make_rows, write_rows

FOLDER = ROOT / ".phantom_everything"  # models, the ranks' output, and what has ended


def make_models() -> None:
    """The tiny models, rows and prompts, made once."""
    models = FOLDER / "models"
    if not models.exists():
        making = FOLDER / "making"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        for name, overrides in FAMILIES.items():
            make_model(making / name, "llama" if name == "deep" else name, **overrides)
        write_rows(making / "rows.jsonl", make_rows(64))
        write_rows(making / "other_rows.jsonl", make_rows(64, seed=1))
        (making / "prompts.txt").write_text("sort the list\nname a river\nwrite a number\n")
        command = ["scripts/block_expansion.py", "--model_name", making / "llama", "--out", making / "expanded"]
        variables = environment.variables(FOLDER, {"CUDA_VISIBLE_DEVICES": ""})
        subprocess.run(
            [sys.executable, *map(str, command), "--expansion_rate", "1"], cwd=ROOT, env=variables, check=True
        )
        making.rename(models)


def fork_rank(program: str, arguments: list[str], log: Path, variables: dict[str, str]) -> int:
    """The id of a new process that runs `fsdp-qlora PROGRAM` and writes its output to a file."""
    if pid := os.fork():
        return pid
    environment_of_rank = {**os.environ, **variables}
    become(lambda: run_program([program, *arguments]), [program, *arguments], environment_of_rank, str(log))


def run_ranks(
    case: Case, num_ranks: int, program: str, options: Mapping[str, object], folder: Path, seconds: float
) -> tuple[list[int], list[str]]:
    """All ranks' exit statuses and outputs. The others are ended a while after one has ended badly."""
    folder.mkdir(parents=True, exist_ok=True)
    messages = folder / "messages"
    shutil.rmtree(messages, ignore_errors=True)
    messages.mkdir()
    is_hybrid = "hybrid" in str(options.get("sharding_strategy"))
    shared = {"WORLD_SIZE": num_ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": num_ranks // 2 if is_hybrid else num_ranks}
    shared |= {"MASTER_ADDR": "localhost", "MASTER_PORT": _free_port(), "PHANTOM_DIR": messages} | case.settings
    logs, pids = [folder / f"rank{rank}.log" for rank in range(num_ranks)], []
    for rank, log in enumerate(logs):
        log.unlink(missing_ok=True)
        own = shared | {"RANK": rank, "GROUP_RANK": rank // int(shared["LOCAL_WORLD_SIZE"])}
        own |= case.settings_of_rank_1 if rank == 1 else {}
        words = flags(**{name: value for name, value in options.items() if value is not None})
        pids.append(fork_rank(program, words, log, {name: str(value) for name, value in own.items()}))
    statuses = _wait(pids, seconds, lambda: _signal_when_stepping(case, pids, folder))
    return statuses, [log.read_text(errors="replace") for log in logs]


def _signal_when_stepping(case: Case, pids: list[int], folder: Path) -> bool:
    """Send the case's signal to rank 1 once a step is done; whether there is nothing (more) to send."""
    metrics = folder / "output" / "metrics.jsonl"
    if case.signal_to_rank_1 and metrics.exists() and metrics.stat().st_size:
        os.kill(pids[1], case.signal_to_rank_1)
        return True
    return not case.signal_to_rank_1


def _wait(pids: list[int], seconds: float, send: Callable[[], bool]) -> list[int]:
    ended: dict[int, int] = {}
    end, is_sent = time.monotonic() + seconds, False
    while len(ended) < len(pids) and time.monotonic() < end:
        time.sleep(0.05)
        is_sent = is_sent or send()
        for pid in set(pids) - set(ended):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended[pid] = os.waitstatus_to_exitcode(status)
                if ended[pid]:
                    end = min(end, time.monotonic() + 60)
    for pid in set(pids) - set(ended):
        os.kill(pid, signal.SIGKILL)
        ended[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [ended[pid] for pid in pids]


def run_case(case: Case, num_ranks: int, seconds: float) -> str:
    """ "ok", or what is wrong."""
    folder = FOLDER / "runs" / f"{case.name.replace(' ', '_').replace(',', '')}_{num_ranks}"
    shutil.rmtree(folder, ignore_errors=True)

    def options(own: Mapping[str, object]) -> dict[str, object]:
        model = "llama_pro_path" if case.model == "expanded" else "model_name"
        found = {model: f"{MODELS}/{case.model}", **COMMON}
        return in_folders(found | ({"sharding_strategy": SHARDED} if num_ranks > 1 else {}) | dict(own))

    def in_folders(found: Mapping[str, object]) -> dict[str, object]:
        places = {RUN: str(folder), MODELS: str(FOLDER / "models")}
        return {
            name: re.sub("<[a-z]+>", lambda found: places[found[0]], value) if isinstance(value, str) else value
            for name, value in found.items()
        }

    if case.first is not None:
        run_ranks(case, case.first_ranks or num_ranks, "train", options(case.first), folder, seconds)
    own = options(case.options) if case.program == "train" else in_folders(case.options)
    statuses, outputs = run_ranks(case, num_ranks, case.program, own, folder, seconds)
    return _judge(case, statuses, outputs, folder)


def _judge(case: Case, statuses: list[int], outputs: list[str], folder: Path) -> str:
    last = [" ".join(output.splitlines()[-1:])[-300:] for output in outputs]
    if case.ends:
        others = [status for rank, status in enumerate(statuses) if not (case.signal_to_rank_1 and rank == 1)]
        if not all(status > 0 for status in others) or case.ends not in "".join(outputs):
            return f"statuses {statuses}, {last}"
    elif any(statuses):
        return f"statuses {statuses}, {last}"
    elif case.makes and not any(folder.glob(case.makes)):
        return f"{case.makes} is not there"
    elif case.program == "train" and len(statuses) > 1 and "(NCCL)" not in outputs[0]:
        return "no word of NCCL"
    elif case.says not in outputs[0].lower():
        return f"no word of {case.says!r}"
    shutil.rmtree(folder)
    return "ok"


def print_table() -> None:
    columns = ("1", "2", "4")
    results = {ranks: read_results(int(ranks)) for ranks in columns}
    print(
        "| what | " + " | ".join(f"{ranks} rank{'s' * (ranks != '1')}" for ranks in columns) + " |\n|---|" + "---|" * 3
    )
    for case in cases():
        found = [_cell(case, int(ranks), results[ranks].get(case.name, "")) for ranks in columns]
        if set(found) <= {"", "-"}:
            continue
        print(f"| {case.name} | {' | '.join(found)} |")


def _cell(case: Case, num_ranks: int, result: str) -> str:
    if num_ranks not in case.only_ranks:
        return "-"
    return result if result in ("ok", "") else "failed"


def record_of(num_ranks: int) -> Path:
    return FOLDER / f"results_{num_ranks}.json"


def read_results(num_ranks: int) -> dict[str, str]:
    """How each case that has been run has ended: "ok", or what is wrong."""
    path = record_of(num_ranks)
    found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return {case.name: found[case.name] for case in cases() if case.name in found}


def run_cases(num_ranks: int, only: str, seconds: float, *, again: bool) -> bool:
    """Run what has not been run, or with `again` not ended well; whether all are well."""
    results = read_results(num_ranks)
    for case in cases():
        known = results.get(case.name)
        if (
            num_ranks not in case.only_ranks
            or not re.search(only, case.name)
            or (known and not (again and known != "ok"))
        ):
            continue
        started = time.monotonic()
        results[case.name] = found = run_case(case, num_ranks, seconds)
        record_of(num_ranks).write_text(json.dumps(results, indent=1) + "\n")
        print(f"{num_ranks} ranks, {case.name}: {found} ({time.monotonic() - started:.0f} s)", flush=True)
    return all(found == "ok" for found in results.values())


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Two at once would make the same models and the same folders of runs."""
    FOLDER.mkdir(exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"{FOLDER} is in use by another run of this program.")
        yield


def in_the_environment() -> bool:
    return "libphantom" in os.environ.get("LD_PRELOAD", "")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this regular expression")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 1, 4], help="numbers of ranks, in this order")
    parser.add_argument("--seconds", type=float, default=240, help="the longest that a run may take")
    parser.add_argument("--again", action="store_true", help="run what has failed again")
    args = parser.parse_args(argv)
    if reason := environment.why_not():
        sys.exit(reason)
    if not in_the_environment():
        with _alone():
            make_models()
            return subprocess.run(
                [str(environment.PYTHON), "-m", "tests.phantom.everything", *argv],
                cwd=ROOT,
                env=environment.variables(FOLDER, {"OMP_NUM_THREADS": 1}),
            ).returncode
    all_well = [run_cases(num_ranks, args.only, args.seconds, again=args.again) for num_ranks in args.ranks]
    print_table()
    return 0 if all(all_well) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
