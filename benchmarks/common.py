"""Shared by the benchmarks: our trainer, built as in train.py, random weights, and a description of
the machine.
"""

import contextlib
import ctypes
import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import bitsandbytes
import numpy as np
import peft
import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.rows import Lengths, TokenizedRows
from fsdp_qlora.data.batches.target_values import TargetValues
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.distributed.device import configure_kernels
from fsdp_qlora.distributed.process_group import release_cached_memory
from fsdp_qlora.distributed.ranks import Ranks, derive_seed
from fsdp_qlora.distributed.shards import shard_size
from fsdp_qlora.model import model_parts
from fsdp_qlora.model.formats.stored_tensors import StoredTensor
from fsdp_qlora.model.kernels.in_use import use_ways
from fsdp_qlora.planning.machine import Machine
from fsdp_qlora.planning.placement import place
from fsdp_qlora.planning.plan import build_plan
from fsdp_qlora.planning.run_plan import Plan
from fsdp_qlora.planning.run_rows import make_schedule
from fsdp_qlora.run import load_model
from fsdp_qlora.run.build_trainer import build_trainer
from fsdp_qlora.run.ways import TriedKernels
from fsdp_qlora.sharding.loading.load_weights import match_tensors
from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from fsdp_qlora.training.trainer import Trainer

_CHUNK = 2**24  # random weights generated at a time


class RandomWeights(WeightFiles):
    """Replaces a model's files: normally distributed weights generated on the device from name and
    seed.

    Like a file it returns any part of any tensor, so the package's loader works unchanged and the
    whole model is never in memory. Vectors (the scales of norms) are ones.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        std: float = 0.02,
        seed: int = 0,
    ) -> None:
        self.config = config
        self.made_dtype = dtype
        self.device = device
        self.std = std
        self.seed = seed
        super().__init__(Path("random weights"))

    def _index(self) -> dict[str, StoredTensor]:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config)
        return {
            name: StoredTensor(self.folder / name, self.made_dtype, parameter.shape, 0)
            for name, parameter in model.named_parameters()
        }

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the row-major flattened tensor, on the device."""
        values = torch.ones(stop - start, dtype=self.made_dtype, device=self.device)
        if len(self.shape(name)) == 1:
            return values
        for chunk in range(start // _CHUNK, -(-stop // _CHUNK)):
            first = chunk * _CHUNK
            made = self._chunk(name, chunk)
            low = max(start, first)
            high = min(stop, first + len(made))
            values[low - start : high - start] = made[low - first : high - first]
        return values

    def _chunk(self, name: str, chunk: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(
            derive_seed("random weights", self.seed, name, chunk)
        )
        size = min(_CHUNK, self.shape(name).numel() - chunk * _CHUNK)
        empty = torch.empty(size, dtype=self.made_dtype, device=self.device)
        return empty.normal_(0.0, self.std, generator=generator)


@dataclass(frozen=True)
class Run:
    """Our trainer, ready for its first step. counts: parameters; account: bytes by category."""

    config: TrainConfig
    plan: Plan
    trainer: Trainer
    counts: dict[str, int]
    account: dict[str, model_parts.CategoryBytes]
    attention: str


def build_run(
    config: TrainConfig,
    model_config: PretrainedConfig,
    weight_files: WeightFiles,
    data: TokenizedRows,
    ranks: Ranks,
    *,
    lengths: Sequence[int] | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
    target_values: TargetValues | None = None,
) -> Run:
    """Load a model and build its trainer as train.py does; all rows belong to one step.

    Args:
        lengths: tokens of the rows that memory is planned for; None for the maximum that the
        options allow. on_phase: called with a name after each phase. target_values: as of the
        collator.
    """
    configure_kernels()
    tokenizer: Any = SimpleNamespace(eos_token_id=0)
    machine = Machine.of(config, ranks)
    built = build_plan(config, machine, weight_files.folder, model_config, tokenizer)
    use_ways(TriedKernels.of(config, built).choose())
    placed = place(config, built, Lengths([*lengths]) if lengths else None)
    model = built.meta.model
    weights = match_tensors(model, weight_files)
    on_phase("planned")
    # The byte account is of sizes that ranks exchange, which is nothing where kernels compute
    # nothing.
    unchecked = (
        mock.patch.object(load_model, "check_byte_account")
        if is_stand_in()
        else contextlib.nullcontext()
    )
    with unchecked:
        mesh = load_model.load_model(config, placed, weights, ranks)
    release_cached_memory(ranks.device)
    on_phase("loaded and verified")
    rows = np.arange(len(data))
    run_data = RunData(data, rows)
    schedule = make_schedule(config, run_data, ranks.world_size)
    plan = Plan(placed, run_data, schedule, warmup_steps=0)
    account = model_parts.count_bytes(model_parts.kinds_of(model), shard_size(mesh))
    return Run(
        config,
        plan,
        build_trainer(config, plan, ranks, target_values=target_values),
        model_parts.count_parameters(model_parts.ModelParts(model)),
        account,
        built.documents or model.config._attn_implementation,
    )


def is_stand_in() -> bool:
    """Whether this runs on the stand-in for CUDA, whose kernels compute nothing."""
    return hasattr(ctypes.CDLL(None), "phantom_start")


def random_rows(
    num_rows: int, length: int, vocab_size: int, *, masked: int, seed: int
) -> TokenizedRows:
    """Rows of random tokens; the first `masked` of each are not learned, like a prompt."""
    return random_rows_of([length] * num_rows, vocab_size, masked=masked, seed=seed)


def random_rows_of(
    lengths: Sequence[int], vocab_size: int, *, masked: int, seed: int
) -> TokenizedRows:
    """The same of these lengths."""
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    ids = np.random.default_rng(seed).integers(vocab_size, size=int(offsets[-1]), dtype=np.int32)
    learned = np.concatenate([np.arange(length) >= masked for length in lengths])
    return TokenizedRows(ids, learned, offsets, np.arange(1, len(lengths) + 1))


def seconds_of(work: Callable[[], object]) -> tuple[float, float]:
    """Wall-clock seconds, and CPU seconds of this process, which depend less on other programs."""
    started = time.perf_counter()
    cpu_started = time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - cpu_started


def peak_bytes(work: Callable[[], object]) -> int:
    """Peak bytes of tensors alive at once during `work`, beyond those alive before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    alive = peak = 0
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Hardware and versions, to be stored with the results."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu
        )
    machine: dict[str, Any] = {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "bitsandbytes": bitsandbytes.__version__,
    }
    if device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(device)
        machine["gpu_memory_gib"] = round(
            torch.cuda.get_device_properties(device).total_memory / 2**30, 1
        )
        machine["cuda"] = torch.version.cuda
    return machine


def write_results(path: str, command: str, result: dict[str, Any]) -> None:
    """Write a result as JSON, with its command and date."""
    record = {"command": command, "date": time.strftime("%Y-%m-%d"), **result}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(record, indent=2) + "\n")
    print(f"Written: {path}")


def quiet_on_one_thread() -> None:
    """For what is timed side by side on a CPU: no words of the libraries, and one thread."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
