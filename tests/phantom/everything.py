"""Everything that train.py can do, from its command line to the saved result, on the stand-in for CUDA.

    python -m tests.phantom.everything [--only TEXT] [--ranks 2 1 4] [--seconds N]

Not among the tests: it takes half an hour on two cores. What has ended well is not run again; the table of
docs/gpu.md is printed at the end. Ranks are forked from one process that has imported torch and transformers
already, before CUDA is initialized: with that a run takes a few seconds.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from unittest import mock

import torch

# Whoever has asked CUDA for its devices can no longer be forked, and torch's compiler asks when it is imported.
with mock.patch.object(torch.cuda, "is_available", return_value=False):
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.optim
    import transformers.models.llama.modeling_llama
    import transformers.models.mixtral.modeling_mixtral  # noqa: F401

    from tests.phantom import environment
    from tests.tiny import ROOT, _free_port, flags, make_model, make_rows, write_rows

FOLDER = ROOT / ".phantom_everything"  # models, the ranks' output, and what has ended
MESSAGES = FOLDER / "messages"
TRAIN = [
    "qlora",
    "lora",
    "custom_lora",
    "custom_qlora",
    "dora",
    "bnb_dora",
    "hqq_lora",
    "hqq_dora",
    "int8_lora",
    "full",
]
PRO = ["bnb_llama_pro", "hqq_llama_pro"]
STRATEGIES = ["shard_grad_op", "ddp", "hybrid_full_shard", "hybrid_shard_grad_op"]
PRECISIONS = ["fp32", "fp16", "fp16_autocast", "bf16_autocast", "bf16_buffers_autocast"]
OPTIMIZERS = ["adam", "sgd", "adadelta", "fused_adamw", "fused_adam", "adamw_8bit", "paged_adamw_8bit", "lion",
              "lion_8bit", "adafactor", "muon", "schedule_free_adamw"]  # fmt: skip
NO_OPTIONS: Mapping[str, object] = MappingProxyType({})
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}


class Case(NamedTuple):
    """One command line. `ends`: the exit status of all ranks, or words of the message with which they fail."""

    name: str
    options: Mapping[str, object] = NO_OPTIONS
    model: str = "llama"
    settings: Mapping[str, object] = NO_OPTIONS
    settings_of_rank_1: Mapping[str, object] = NO_OPTIONS
    signal_to_rank_1: int = 0  # when the first step is done
    ends: str = ""
    first: Mapping[str, object] | None = None  # options of a run before it in the same folder, which need not end well
    says: str = ""  # words in rank 0's output
    only_ranks: tuple[int, ...] = (1, 2, 4)


def cases() -> list[Case]:
    endless = {"max_steps": 100000, "num_epochs": 100000}
    with_experts = {"lora_target_parameters": "mlp.experts.gate_up_proj,mlp.experts.down_proj"}
    return [
        *(Case(name, {"train_type": name}) for name in TRAIN),
        *(Case(name, {"train_type": name}, model="expanded") for name in PRO),
        *(Case(name, {"sharding_strategy": name}, only_ranks=(2, 4)) for name in STRATEGIES),
        Case("offload, qlora", {"use_cpu_offload": True}),
        Case("offload, ddp", {"use_cpu_offload": True, "sharding_strategy": "ddp"}, only_ranks=(2,)),
        Case("offload, hybrid", {"use_cpu_offload": True, "sharding_strategy": "hybrid_full_shard"}, only_ranks=(2, 4)),
        *(
            Case(f"offload, {name}", {"use_cpu_offload": True, "train_type": name})
            for name in TRAIN
            if name[:6] != "custom" and name != "qlora"
        ),
        *(Case(f"offload, {name}", {"use_cpu_offload": True, "train_type": name}, model="expanded") for name in PRO),
        Case("activation offload", {"use_activation_cpu_offload": True}),
        Case("both offloads", {"use_cpu_offload": True, "use_activation_cpu_offload": True}),
        Case("no checkpointing", {"use_gradient_checkpointing": False}),
        Case("stop at a budget, resume", first={"max_hours": 1e-7}, says="resum"),
        Case(
            "resume, offload",
            {"use_cpu_offload": True},
            first={"max_hours": 1e-7, "use_cpu_offload": True},
            says="resum",
        ),
        Case("resume, full", {"train_type": "full"}, first={"max_hours": 1e-7, "train_type": "full"}, says="resum"),
        Case(
            "quantized cache, written and read",
            {"quant_cache": "CACHE", "overwrite_output_dir": True, "resume": "off"},
            first={"quant_cache": "CACHE"},
            says="cache",
        ),
        Case("experts, qlora", model="mixtral"),
        Case("experts, adapters on them", with_experts, model="mixtral"),
        Case("experts, offload", {"use_cpu_offload": True}, model="mixtral"),
        Case("experts, hqq_lora", {"train_type": "hqq_lora"}, model="mixtral"),
        Case("gradient accumulation", {"gradient_accumulation_steps": 2}),
        Case("evaluation", {"eval_fraction": 0.25, "eval_steps": 1}),
        Case("embeddings and head trained", {"modules_to_save": "embed_tokens,lm_head"}),
        Case("deterministic, dropout", {"deterministic": True, "lora_dropout": 0.1}),
        Case(
            "out of memory on one rank",
            settings_of_rank_1={"PHANTOM_GIB": 0.004},
            ends="out of memory",
            only_ranks=(2,),
        ),
        Case("out of memory", settings={"PHANTOM_GIB": 0.01}, ends="out of memory", only_ranks=(1, 2)),
        Case("a rank is killed", endless, signal_to_rank_1=signal.SIGKILL, ends="Rank 1", only_ranks=(2, 4)),
        Case(
            "a rank is stopped",
            endless | {"hang_minutes": 0.1},
            signal_to_rank_1=signal.SIGSTOP,
            ends="Rank 1",
            only_ranks=(2, 4),
        ),
        Case(
            "a rank gets SIGTERM",
            endless,
            signal_to_rank_1=signal.SIGTERM,
            ends="Stopped after step",
            only_ranks=(2, 4),
        ),
        Case(
            "NCCL runs out of memory",
            endless,
            settings={"PHANTOM_NCCL_FAIL": 60},
            ends="out of memory",
            only_ranks=(2,),
        ),
        Case(
            "NCCL loses a connection",
            endless,
            settings={"PHANTOM_NCCL_FAIL": "60:6:socketProgressOpt: Call to recv failed : Connection reset by peer"},
            ends="lost",
            only_ranks=(2,),
        ),
        *(Case(f"precision {name}", {"precision": name}) for name in PRECISIONS),
        Case("precision auto on Turing (fp16)", settings={"PHANTOM_CC": 75}),
        Case("Hopper", settings={"PHANTOM_CC": 90}),
        *(Case(f"optimizer {name}", {"optimizer": name}) for name in OPTIMIZERS),
        *(
            Case(f"full, optimizer {name}", {"optimizer": name, "train_type": "full"})
            for name in OPTIMIZERS
            if name != "muon"
        ),
        Case(
            "full, offload, 8-bit optimizer", {"train_type": "full", "use_cpu_offload": True, "optimizer": "adamw_8bit"}
        ),
    ]


def make_models() -> None:
    """The tiny models and rows, made once."""
    models = FOLDER / "models"
    if not models.exists():
        making = FOLDER / "making"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        make_model(making / "llama")
        make_model(making / "mixtral", "mixtral", **MIXTURE)
        write_rows(making / "rows.jsonl", make_rows(32))
        command = ["scripts/block_expansion.py", "--model_name", making / "llama", "--out", making / "expanded"]
        variables = environment.variables(FOLDER, {"CUDA_VISIBLE_DEVICES": ""})
        subprocess.run(
            [sys.executable, *map(str, command), "--expansion_rate", "1"], cwd=ROOT, env=variables, check=True
        )
        making.rename(models)


def fork_rank(arguments: list[str], log: Path, variables: dict[str, str]) -> int:
    """The id of a new process that runs train.py and writes its output to a file."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ |= variables
        sys.argv = ["train.py", *arguments]
        import train

        status = train.main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_ranks(
    case: Case, num_ranks: int, options: Mapping[str, object], folder: Path, seconds: float
) -> tuple[list[int], list[str]]:
    """All ranks' exit statuses and outputs. The others are ended a while after one has ended badly."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(MESSAGES, ignore_errors=True)
    MESSAGES.mkdir()
    is_hybrid = "hybrid" in str(options.get("sharding_strategy"))
    shared = {"WORLD_SIZE": num_ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": num_ranks // 2 if is_hybrid else num_ranks}
    shared |= {"MASTER_ADDR": "localhost", "MASTER_PORT": _free_port(), "PHANTOM_DIR": MESSAGES} | case.settings
    logs, pids = [folder / f"rank{rank}.log" for rank in range(num_ranks)], []
    for rank, log in enumerate(logs):
        log.unlink(missing_ok=True)
        own = shared | {"RANK": rank, "GROUP_RANK": rank // int(shared["LOCAL_WORLD_SIZE"])}
        own |= case.settings_of_rank_1 if rank == 1 else {}
        pids.append(fork_rank(flags(**options), log, {name: str(value) for name, value in own.items()}))
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


def run_case(case: Case, num_ranks: int, models: Path, seconds: float) -> str:
    """ "ok", or what is wrong."""
    folder = FOLDER / "runs" / f"{case.name.replace(' ', '_').replace(',', '')}_{num_ranks}"
    shutil.rmtree(folder, ignore_errors=True)
    common = {"model_name": models / case.model, "dataset": models / "rows.jsonl", "output_dir": folder / "output"}
    common |= {"train_type": "qlora", "max_steps": 3, "batch_size": 2, "context_length": 256, "log_to": "stdout"}
    common |= {"quant_cache": "off"}

    def options(own: Mapping[str, object]) -> dict[str, object]:
        found = {name: folder / "cache" if value == "CACHE" else value for name, value in {**common, **own}.items()}
        if case.model == "expanded":
            found |= {"llama_pro_path": found.pop("model_name")}
        return found

    if case.first is not None:
        run_ranks(case, num_ranks, options(case.first), folder, seconds)
    statuses, outputs = run_ranks(case, num_ranks, options(case.options), folder, seconds)
    return _judge(case, statuses, outputs, folder)


def _judge(case: Case, statuses: list[int], outputs: list[str], folder: Path) -> str:
    last = [" ".join(output.splitlines()[-1:])[-300:] for output in outputs]
    if case.ends:
        others = [status for rank, status in enumerate(statuses) if not (case.signal_to_rank_1 and rank == 1)]
        if all(status > 0 for status in others) and case.ends in "".join(outputs):
            return "ok"
        return f"statuses {statuses}, {last}"
    if any(statuses):
        return f"statuses {statuses}, {last}"
    saved = list((folder / "output").glob("*.safetensors"))
    if not saved or (len(statuses) > 1 and "(NCCL)" not in outputs[0]) or case.says not in outputs[0].lower():
        return f"nothing saved, no NCCL or no word of {case.says!r}: {saved}"
    shutil.rmtree(folder)
    return "ok"


def print_table(results: dict[str, dict[str, str]]) -> None:
    columns = ("1", "2", "4")
    print(
        "| what | " + " | ".join(f"{ranks} rank{'s' * (ranks != '1')}" for ranks in columns) + " |\n|---|" + "---|" * 3
    )
    for name, by_ranks in results.items():
        found = ("failed" if by_ranks.get(ranks, "ok") != "ok" else by_ranks.get(ranks, "") for ranks in columns)
        print(f"| {name} | {' | '.join(found)} |")


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
        make_models()
        return subprocess.run(
            [str(environment.PYTHON), "-m", "tests.phantom.everything", *argv],
            cwd=ROOT,
            env=environment.variables(MESSAGES, {"OMP_NUM_THREADS": 1}),
        ).returncode
    record = FOLDER / "results.json"
    results: dict[str, dict[str, str]] = json.loads(record.read_text()) if record.exists() else {}
    for num_ranks in args.ranks:
        for case in cases():
            known = results.setdefault(case.name, {}).get(str(num_ranks))
            if (
                not re.search(args.only, case.name)
                or num_ranks not in case.only_ranks
                or (known and not (args.again and known != "ok"))
            ):
                continue
            started = time.monotonic()
            found = run_case(case, num_ranks, FOLDER / "models", args.seconds)
            results[case.name][str(num_ranks)] = found
            record.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{num_ranks} ranks, {case.name}: {found} ({time.monotonic() - started:.0f} s)", flush=True)
    print_table({name: found for name, found in results.items() if found})
    return 1 if any(found != "ok" for by_ranks in results.values() for found in by_ranks.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
