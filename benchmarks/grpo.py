"""A GRPO step whose answers the training model writes, beside TRL's and an earlier commit's:
`python benchmarks/grpo.py --model_name demo/model --before 517823c`.

On one CPU core: a 4-bit base with LoRA of rank 16 on all linear layers, fp32, recomputing all
blocks; 8 answers to each of 2 prompts, of 64 tokens each. Each round runs every side once, in a
process of its own, and takes the median of its steps after the first. The figures are medians and
quartiles of the ratios to the other side in the same round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# So that it runs from a clone that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks.answers import copy_of
from benchmarks.common import describe_machine, write_results

ANSWERS_TO_A_PROMPT = 8
ANSWERS = 16
PROMPT_WORDS = 80
REWARD = """
def variety(completions, **_):
    return [len(set(text)) / 10 for text in completions]
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_name", required=True, help="a folder")
    parser.add_argument("--before", metavar="COMMIT", help="an earlier commit to compare with")
    parser.add_argument("--no_trl", action="store_true", help="leave out TRL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--trl", metavar="FOLDER", help="run TRL's side alone, for this program")
    parser.add_argument("--output", default="", help="JSON file to write")
    options = parser.parse_args(argv)
    if options.trl:
        run_trl(options, Path(options.trl))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        rounds = measure(options, Path(temporary))
    ratios = ratios_to_ours(rounds)
    for name, (low, middle, high) in ratios.items():
        print(f"ours / {name}: {middle:.2f} ({low:.2f} to {high:.2f})")
    result = {
        "machine": describe_machine(torch.device("cpu")),
        "seconds_of_a_step": rounds,
        "ratio_quartiles": ratios,
    }
    if options.output:
        command = f"python benchmarks/grpo.py {' '.join(sys.argv[1:] if argv is None else argv)}"
        write_results(options.output, command, result)
    return 0


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """Seconds of a step by side, of each round."""
    write_inputs(folder, options.steps)
    clones = {"ours": copy_of("HEAD", folder / "ours")}
    if options.before:
        clones[options.before] = copy_of(options.before, folder / "before")
    rounds = []
    for number in range(options.rounds):
        seconds = {}
        for name, clone in clones.items():
            seconds[name] = seconds_of_ours(options, clone, folder)
        if not options.no_trl:
            seconds["TRL"] = seconds_of_trl(options, folder)
        rounds.append(seconds)
        shown = ", ".join(f"{name} {each:.2f} s" for name, each in seconds.items())
        print(f"round {number + 1}: {shown}", flush=True)
    return rounds


def ratios_to_ours(rounds: list[dict[str, float]]) -> dict[str, list[float]]:
    """Quartiles of our seconds divided by each other side's in the same round."""
    others = [name for name in rounds[0] if name != "ours"]
    return {
        name: np.quantile(
            [seconds["ours"] / seconds[name] for seconds in rounds], [0.25, 0.5, 0.75]
        ).tolist()
        for name in others
    }


def write_inputs(folder: Path, steps: int) -> None:
    """Prompts of one length, and the reward function."""
    drawn = np.random.default_rng(0)
    words = ["river", "stone", "red", "seven", "walks", "under", "a", "quiet", "lamp", "north"]
    rows = []
    for _ in range(steps * ANSWERS // ANSWERS_TO_A_PROMPT):
        text = " ".join(drawn.choice(words, PROMPT_WORDS))
        rows.append(json.dumps({"prompt": text}) + "\n")
    (folder / "rows.jsonl").write_text("".join(rows))
    (folder / "rewards.py").write_text(REWARD)


def environment(clone: Path) -> dict[str, str]:
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    path = os.pathsep.join(filter(None, [str(clone), os.environ.get("PYTHONPATH", "")]))
    return os.environ | own | {"PYTHONPATH": path}


def seconds_of_ours(options: argparse.Namespace, clone: Path, folder: Path) -> float:
    """The median of a run's steps, with their answers."""
    output = folder / "run"
    arguments = {
        "objective": "grpo",
        "train_type": "qlora",
        "lora_rank": 16,
        "precision": "fp32",
        "num_generations": ANSWERS_TO_A_PROMPT,
        "batch_size": ANSWERS,
        "gradient_accumulation_steps": 1,
        "max_completion_length": options.tokens,
        "context_length": 512,
        "recompute": "all",
        "quant_cache": "off",
        "save_every": "none",
        "model_name": Path(options.model_name).resolve(),
        "dataset": folder / "rows.jsonl",
        "rewards": f"{folder / 'rewards.py'}:variety",
        "num_epochs": 1,
        "max_steps": options.steps,
        "device": "cpu",
        "log_to": "jsonl",
        "output_dir": output,
        "resume": "auto:replace",
    }
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    subprocess.run(["rm", "-rf", str(output)], check=True)
    command = [sys.executable, "-m", "fsdp_qlora", "train", *words]
    run_quietly(command, clone, folder)
    lines = (output / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    # A step's own seconds are without those of its answers.
    steps = [
        record["generation_seconds"] + record["step_seconds"]
        for record in records
        if "step_seconds" in record and "generation_seconds" in record
    ]
    assert len(steps) == options.steps, lines
    return statistics.median(steps[1:])


def seconds_of_trl(options: argparse.Namespace, folder: Path) -> float:
    program = [sys.executable, str(Path(__file__).resolve()), "--trl", str(folder)]
    words = ["--model_name", str(Path(options.model_name).resolve())]
    words += ["--steps", str(options.steps), "--tokens", str(options.tokens)]
    run_quietly([*program, *words], Path(__file__).resolve().parent.parent, folder)
    steps: list[float] = json.loads((folder / "trl.json").read_text())
    return statistics.median(steps[1:])


def run_quietly(command: list[str], clone: Path, folder: Path) -> None:
    """Run a side. Shows its output if it fails."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(clone),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(done.stdout[-4000:])


def run_trl(options: argparse.Namespace, folder: Path) -> None:
    """Train by TRL, and write the seconds of each step to trl.json."""
    import peft
    from datasets import load_dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        BitsAndBytesConfig,
        TrainerCallback,
    )
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        options.model_name,
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        ),
    )
    started: list[float] = []
    ended: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]  # the library has no types
        """Notes when steps end. A step begins with its answers, where the one before has ended."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            started.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended.append(time.perf_counter())

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=ANSWERS,
        gradient_accumulation_steps=1,
        num_generations=ANSWERS_TO_A_PROMPT,
        max_completion_length=options.tokens,
        max_steps=options.steps,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
    )
    scope: dict[str, Any] = {}
    exec(REWARD, scope)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=scope["variety"],
        args=config,
        train_dataset=load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.model_name),
        peft_config=peft.LoraConfig(
            r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[Clock()],
    )
    trainer.train()
    steps = np.diff([started[0], *ended]).tolist()
    (folder / "trl.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    sys.exit(main())
