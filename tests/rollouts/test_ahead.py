"""Answers one generation ahead: which weights sample, what is learned of them, and runs that are
killed while a server answers.
"""

import re
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from fsdp_qlora.distributed.ranks import derive_seed
from fsdp_qlora.training.rl.ahead import Ahead, versions_of_checkpoints
from fsdp_qlora.training.rl.engine import PromptTokens
from fsdp_qlora.training.rl.server_engine import ServerEngine
from fsdp_qlora.utils.errors import RolloutError, RunStopped
from tests.chaos.harness import Job, adapter, ended, finish, numbers, wait_for
from tests.helpers.metrics import read_metrics
from tests.rollouts.lora_server import LoraServer, Sampler
from tests.rollouts.runs import rollouts_of
from tests.rollouts.server_runs import PROMPTS, asked, options_of, says_once
from tests.rollouts.test_runs import kill_at

LAST = 3
AHEAD = {"rollout_ahead": True}


def ahead_of(engine: ServerEngine, needed: set[int] | None = None) -> Ahead:
    """Of a run of LAST + 1 generations, each with the same prompts."""
    return Ahead(
        engine,
        lambda generation: PromptTokens.of(PROMPTS if generation <= LAST else [], None),
        lambda: needed or set(),
    )


def versions_asked(server: LoraServer) -> list[int]:
    """The version of each request for an answer, in the order of their generations."""
    names = [body["model"] for body in asked(server, "completions")]
    return [int(re.findall(r"-v(\d+)-", name)[0]) for name in names[:: len(PROMPTS)]]


# --- the engine alone ---


@pytest.mark.quick
def test_the_next_generation_is_asked_of_the_weights_of_now(engine, server):
    engine.server._patience = 60.0
    ahead = ahead_of(engine)
    versions = []
    for generation in range(LAST + 1):
        assert len(ahead.complete(PROMPTS, generation, 2 * generation)) == len(PROMPTS)
        versions.append(ahead.version)
        following = ahead.of_current_weights(2 * generation)
        assert (following is None) == (generation == LAST)
    assert versions == versions_asked(server) == [0, 0, 2, 4]
    seeds = {body["seed"] for body in asked(server, "completions")}
    places = [(g, place) for g in range(LAST + 1) for place in range(len(PROMPTS))]
    assert seeds == {derive_seed("rollouts", 5, *place) % 2**31 for place in places}


@pytest.mark.quick
def test_a_resumed_run_asks_the_adapter_that_its_checkpoint_names(engine, server, lines):
    engine.server._patience = 60.0
    ahead = ahead_of(engine, {1})
    ahead.complete(PROMPTS, 0, 0)
    ahead.complete(PROMPTS, 1, 1)
    # Of the checkpoint after step 2, and what the run learns of then.
    position = ahead.position()
    found = ahead.complete(PROMPTS, 2, 2)
    ahead.of_current_weights(2)
    resumed = ahead_of(engine, {1})
    resumed.resume(position)
    assert resumed.complete(PROMPTS, 2, 2) == found and resumed.version == 1
    assert not [line for line in lines if "is not in" in line]
    resumed.of_current_weights(2)
    # On another machine, or with other weights in the folder, the weights of now are taken.
    (engine.prefix.with_name("run-v1") / "adapter_model.safetensors").write_text("other")
    resumed = ahead_of(engine)
    resumed.resume(position)
    resumed.complete(PROMPTS, 2, 2)
    assert resumed.version == 2 and [line for line in lines if "weights of step 2" in line]


@pytest.mark.quick
def test_adapters_that_checkpoints_name_are_kept(engine, tmp_path):
    engine.server._patience = 60.0
    for step in ("step_000003", ".step_000006.writing"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
    assert versions_of_checkpoints(tmp_path / "checkpoints", 1) == {2, 5}
    assert versions_of_checkpoints(tmp_path / "checkpoints", 2) == {2, 4}
    assert versions_of_checkpoints(tmp_path / "none", 2) == set()
    ahead = ahead_of(engine, {1})
    for generation in range(LAST + 1):
        ahead.complete(PROMPTS, generation, generation)
    kept = sorted(path.name for path in engine.prefix.parent.iterdir())
    # Behind the last generation none is asked.
    assert kept == ["run-v1", "run-v2"]


@pytest.mark.quick
def test_what_fails_during_training_is_raised_at_the_next_generation(engine, server):
    ahead = ahead_of(engine)
    ahead.complete(PROMPTS, 0, 0)
    ahead.of_current_weights(0)
    server.faults.append(says_once("completions", 400, "too long"))
    ahead.complete(PROMPTS, 1, 1)
    with pytest.raises(RolloutError, match="too long"):
        ahead.complete(PROMPTS, 2, 2)
    assert engine.server.is_closed


@pytest.mark.quick
def test_a_run_that_waits_for_answers_ahead_can_be_stopped(engine, server):
    ahead = ahead_of(engine)
    ahead.complete(PROMPTS, 0, 0)

    def stop(path: str, body: dict[str, Any]) -> None:
        if "prompt" in body:
            engine.control.signals.requested = 4
            time.sleep(0.2)

    ahead.of_current_weights(0)
    server.faults.append(stop)
    ahead.complete(PROMPTS, 1, 1)
    with pytest.raises(RunStopped, match=r"step 3 waited for answers"):
        ahead.complete(PROMPTS, 2, 2)
    assert engine.server.is_closed


# --- whole runs ---


class Keeping(Sampler):
    """Keeps the adapters of all versions."""

    def __init__(self, folder: str, kept: Path) -> None:
        super().__init__(folder)
        self.kept = kept

    def __call__(self, adapter: str, request: dict[str, Any]) -> tuple[list[int], list[float]]:
        version = Path(adapter).name.rpartition("-v")[2]
        if not (self.kept / version).exists():
            shutil.copytree(adapter, self.kept / version)
        return super().__call__(adapter, request)


@torch.no_grad()
def under(model: Any, record: dict[str, Any]) -> list[float]:
    """Log-probabilities of a completion's tokens, in plain transformers."""
    ids = torch.tensor([record["prompt_ids"] + record["token_ids"]])
    logps = model(input_ids=ids).logits[0, len(record["prompt_ids"]) - 1 : -1].log_softmax(-1)
    found: list[float] = logps[torch.arange(len(record["token_ids"])), record["token_ids"]].tolist()
    return found


@pytest.mark.parametrize(("ranks", "iterations"), [(1, 1), (2, 2)])
def test_a_step_learns_of_the_weights_one_generation_before(ranks, iterations, models, tmp_path):
    sampler = Keeping(str(models()), tmp_path / "versions")
    split = {"gradient_accumulation_steps": 4 // ranks, "num_iterations": iterations}
    with LoraServer("tiny", sampler, sampler.end) as server:
        options = options_of(server, models(), tmp_path, "out", **split, **AHEAD)
        output = finish(options, tmp_path / "logs", ranks=ranks).output()
    assert output.count("The server uses the adapter: ") == 1
    records = rollouts_of(tmp_path / "out")
    steps = range(0, 8 * iterations, iterations)
    assert [record["step"] - 1 for record in records[::8]] == [*steps]
    assert [record["version"] for record in records[::8]] == [0, *steps[:-1]]
    of_versions = {}
    for version in steps[:-1]:
        base = AutoModelForCausalLM.from_pretrained(models())
        of_versions[version] = PeftModel.from_pretrained(base, tmp_path / "versions" / str(version))
    losses = read_metrics(tmp_path / "out", "loss")[::iterations]
    for start, loss in zip(steps[:-1], losses, strict=False):
        terms = []
        for record in (record for record in records if record["step"] == start + 1):
            sampled = under(of_versions[record["version"]], record)
            assert record["sampled_logps"] == pytest.approx(sampled, abs=1e-4)
            # Those of the step's own weights.
            now = under(of_versions[start], record)
            assert record["old_logps"] == pytest.approx(now, abs=1e-4)
            weights = (torch.tensor(now) - torch.tensor(sampled)).exp().clamp(max=3.0)
            terms += (-record["advantage"] * weights).tolist()
        assert loss == pytest.approx(sum(terms) / len(terms), abs=1e-4)


def kill_in(where: str, number: int) -> None:
    """Kill this rank before its call of this number: of a request, or in writing answers."""
    from fsdp_qlora.training.rl import source
    from fsdp_qlora.training.rl.client import Server

    left = iter(range(number, 0, -1))

    def before(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if next(left, 0) == 1:
            signal.raise_signal(signal.SIGKILL)
        return original(*args, **named)

    def after(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        original(*args, **named)
        before(lambda: None)

    if where == "asking":
        ask = Server.ask
        Server.ask = lambda *args, **named: before(ask, *args, **named)  # type: ignore[method-assign]
    else:
        wrapper = before if where == "before writing" else after
        source.append_rollouts = partial(wrapper, source.append_rollouts)  # type: ignore[assignment]


# Of rank 0 alone where it asks or writes, and of each rank otherwise.
MOMENTS: list[tuple[Callable[..., None], str, int]] = [
    (kill_in, "asking", 38),
    (kill_in, "after writing", 3),
    (kill_at, "compute", 14),
    (kill_in, "before writing", 2),
    (kill_at, "save", 30),
    (kill_at, "update", 2),
    (kill_in, "asking", 15),
    (kill_at, "exchange", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "iterations"), [(1, 1), (2, 2)])
def test_killed_with_answers_under_way_a_run_gives_the_same_bytes(
    ranks, iterations, lora_server, models, tmp_path
):
    split = {"gradient_accumulation_steps": 4 // ranks, "num_iterations": iterations}
    # With two iterations also in the middle of a generation.
    split["save_every"] = 1 + iterations
    whole = options_of(lora_server, models(), tmp_path, "whole", **split, **AHEAD)
    finish(whole, tmp_path / "logs", ranks=ranks)
    out = tmp_path / "out"
    said = ""
    for number, (fault, *arguments) in enumerate(MOMENTS):
        logs = tmp_path / f"logs_{number}"
        options = {**whole, "output_dir": out}
        with ended(Job(options, logs, ranks=ranks, fault=fault, arguments=tuple(arguments))) as job:
            wait_for(lambda job=job: not job.is_alive())
            # The other rank waits for it.
            for process in job.processes:
                process.kill()
            job.wait()
            assert "Finished in" not in job.output()
        said += job.output()
    said += finish({**whole, "output_dir": out}, tmp_path / "last", ranks=ranks).output()
    resumed = {int(step) for step in re.findall(r"Resuming at step (\d+)", said)}
    assert len(resumed) > 1 and (iterations == 1 or any(step % 2 for step in resumed))
    assert "is not in" not in said
    assert (out / "rollouts.jsonl").read_bytes() == (
        tmp_path / "whole" / "rollouts.jsonl"
    ).read_bytes()
    assert adapter(out) == adapter(tmp_path / "whole")
    assert numbers(out) == numbers(tmp_path / "whole")
