"""Everything that train.py can do, from its command line to the saved result, on the stand-in for CUDA.

    python -m tests.phantom.everything [--only TEXT] [--ranks 2 1 4] [--seconds N]

Not among the tests: it takes an hour on two cores. What has ended is not run again (--again: what has ended badly
is); a table of all cases is printed at the end.
"""

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.phantom.cases import COMMON, FAMILIES, MODELS, RUN, SHARDED, Case, cases
from tests.phantom.environment import Process, Rank, run, why_not
from tests.tiny import ROOT, flags, make_model, make_rows, write_rows

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
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [sys.executable, *map(str, command), "--expansion_rate", "1"], cwd=ROOT, env=variables, check=True
        )
        making.rename(models)


def run_ranks(
    case: Case, num_ranks: int, program: str, options: Mapping[str, object], folder: Path, seconds: float
) -> list[Rank]:
    per_machine = num_ranks // 2 if "hybrid" in str(options.get("sharding_strategy")) else num_ranks
    of_rank: dict[int, dict[str, object]] = {rank: {"GROUP_RANK": rank // per_machine} for rank in range(num_ranks)}
    of_rank.setdefault(1, {}).update(case.settings_of_rank_1)
    metrics, is_sent = folder.parent / "output" / "metrics.jsonl", not case.signal_to_rank_1

    def send_signal(processes: Sequence[Process]) -> None:
        """To rank 1, once a step is done."""
        nonlocal is_sent
        if not is_sent and metrics.exists() and metrics.stat().st_size:
            processes[1].send_signal(case.signal_to_rank_1)
            is_sent = True

    return run(
        ["-m", "fsdp_qlora", program, *flags(**{name: value for name, value in options.items() if value is not None})],
        folder,
        ranks=num_ranks,
        settings={"LOCAL_WORLD_SIZE": per_machine, **case.settings},
        settings_of_rank=of_rank,
        timeout_seconds=seconds,
        while_running=send_signal,
    )


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
        run_ranks(case, case.first_ranks or num_ranks, "train", options(case.first), folder / "first_run", seconds)
    own = options(case.options) if case.program == "train" else in_folders(case.options)
    try:
        ended = run_ranks(case, num_ranks, case.program, own, folder / "run", seconds)
    except TimeoutError:
        return f"still running after {seconds:.0f} s"
    return _judge(case, [rank.status for rank in ended], [rank.output for rank in ended], folder)


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


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this regular expression")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 1, 4], help="numbers of ranks, in this order")
    parser.add_argument("--seconds", type=float, default=240, help="the longest that a run may take")
    parser.add_argument("--again", action="store_true", help="run what has failed again")
    args = parser.parse_args(argv)
    if reason := why_not():
        sys.exit(reason)
    with _alone():
        make_models()
        all_well = [run_cases(num_ranks, args.only, args.seconds, again=args.again) for num_ranks in args.ranks]
    print_table()
    return 0 if all(all_well) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
