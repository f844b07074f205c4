"""Saves a run's result: a PEFT adapter, or a whole model for transformers.

The values come from a model in training, gathered from all ranks, or from a checkpoint
(values.Values).
"""

import contextlib
import copy
import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fsdp_qlora.checkpoint import checkpoint
from fsdp_qlora.checkpoint.progress import Progress
from fsdp_qlora.checkpoint.result import publish_with_room
from fsdp_qlora.checkpoint.saving import best_step
from fsdp_qlora.checkpoint.train_state import StoredValues
from fsdp_qlora.config.train_types import TrainType
from fsdp_qlora.distributed.process_group import raise_on_all_ranks
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.export.card import BaseName, documents, training_record
from fsdp_qlora.export.gathering import as_stored, gather_all
from fsdp_qlora.export.values import LiveValues, Values, saved_parameters
from fsdp_qlora.export.whole_model import save_model
from fsdp_qlora.model.adapters.lora import ExpertsLora, LoraExperts
from fsdp_qlora.model.adapters.peft_folder import PREFIX, WEIGHTS
from fsdp_qlora.model.architecture.structure import canonical_name
from fsdp_qlora.model.architecture.tokenizer import generation_config_with
from fsdp_qlora.planning.plan import ModelPlan
from fsdp_qlora.sharding.loading.heads import with_own_head
from fsdp_qlora.sharding.loading.weight_files import WeightFiles, Weights
from fsdp_qlora.utils.errors import TrainingError
from fsdp_qlora.utils.files import read_json, staged_folder
from fsdp_qlora.utils.result_files import record_result
from fsdp_qlora.utils.run_files import BEST, CARD, CHECKPOINTS

log = logging.getLogger("fsdp_qlora")

# Files of a base that training leaves as they are, and that its weights are of no use without.
_OF_THE_BASE = (
    "config.json",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)


def write_sidecar(
    tokenizer: PreTrainedTokenizerBase,
    texts: Mapping[str, str],
    base_folder: Path | None,
    folder: Path,
) -> None:
    """Write the files that are saved with the weights.

    Args:
        texts: file name -> its text.
        base_folder: of the base, whose configuration and processor go with a whole model.
    """
    try:
        tokenizer.save_pretrained(str(folder))
    # The package tokenizers raises Exception itself, also for a full disk. As OSError it is one for
    # `write_with_room`, which makes room and tries again.
    except Exception as error:
        if "No space left" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise
    for name in _OF_THE_BASE:
        if base_folder and (base_folder / name).is_file():
            shutil.copyfile(base_folder / name, folder / name)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def save_adapter(
    model: PreTrainedModel,
    config: LoraConfig,
    output_dir: Path,
    *,
    values: Values,
    sidecar: Callable[[Path], object] = lambda folder: None,
    for_server: bool = False,
) -> None:
    """Gather the adapter and save it in PEFT's format.

    Every rank calls it; rank 0 holds and writes it.

    Args:
        sidecar: writes the files beside it into the folder.
        for_server: as vLLM reads the adapters of experts (`_as_served`).
    """
    # float32, as the adapter trains: a resumed or continued training loses nothing.
    state = gather_all(saved_parameters(model, values), torch.float32, keep=values.keeps)
    if for_server and values.keeps:
        state, config = _as_served(model, config, state)

    def write(folder: Path) -> None:
        save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
        _write_config(config, folder)
        sidecar(folder)
        record_result(folder)

    if values.keeps:
        publish_with_room(output_dir, write)


def copy_for_server(model: PreTrainedModel, source: Path, target: Path) -> None:
    """Copy a saved adapter as vLLM reads it, complete or not at all. For one process.

    Args:
        model: that the adapter is for.
        source: folder of the saved adapter, in PEFT's format.
    Raises:
        OSError or SafetensorError: it cannot be read or written.
    """
    state, config = _as_served(
        model, LoraConfig.from_pretrained(str(source)), load_file(source / WEIGHTS)
    )
    shutil.rmtree(target, ignore_errors=True)
    with staged_folder(target) as folder:
        save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
        _write_config(config, folder)


def _as_served(
    model: PreTrainedModel, config: LoraConfig, state: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], LoraConfig]:
    """Name the adapters of experts as the base's weight files do, for vLLM of August 2026.

    If the base's files hold each expert's matrices, vLLM ignores PEFT's 3-D adapters (vllm#41754).
    If they hold all experts in one tensor, it needs adapters of both tensors.
    """
    state = dict(state)
    config = copy.copy(config)
    for path, module in model.named_modules():
        if not isinstance(module, LoraExperts):
            continue
        prefix = canonical_name(path)
        is_fused = False
        # PEFT wraps one parameter after the other, so the last one is outermost in its file.
        for index, (name, lora) in enumerate(reversed([*module.lora.items()])):
            assert isinstance(lora, ExpertsLora)
            wrapper = f"{PREFIX}{prefix}{'.base_layer' * index}"
            keys = [f"{wrapper}.lora_{factor}.weight" for factor in "AB"]
            split = _split_experts(model, f"{prefix}.{name}", lora.num_experts, state, keys)
            if split is None:
                is_fused = True
                continue
            leaves = {path.rpartition(".")[2] for path in split}
            for key in keys:
                del state[key]
            for factor, of_factor in zip("AB", zip(*split.values(), strict=True), strict=True):
                for path_of_part, value in zip(split, of_factor, strict=True):
                    state[f"{PREFIX}{path_of_part}.lora_{factor}.weight"] = value
            config.target_modules = {*(config.target_modules or ()), *leaves}
            config.target_parameters = None
        if is_fused:
            _complete_pair(module, f"{PREFIX}{prefix}", state)
    return state, config


def _complete_pair(module: LoraExperts, wrapper: str, state: dict[str, torch.Tensor]) -> None:
    """Add a zero adapter where only one of two parameters of experts has an adapter.

    In vLLM the inner adapter belongs to gate and up, and the outer one to down. It fails without
    either of them.

    wrapper: the outer adapter's name in `state`.
    """
    pair = ("gate_up_proj", "down_proj")
    missing = [name for name in pair if name not in module.lora]
    if len(missing) != 1 or not all(hasattr(module.base_layer, name) for name in pair):
        return
    (given,) = module.lora.values()
    assert isinstance(given, ExpertsLora)
    zero = module.new_adapter(missing[0], given.lora_A.out_features // given.num_experts)
    inner = f"{wrapper}.base_layer"
    place = inner if missing[0] == pair[0] else wrapper
    for factor in "AB":
        outer_key = f"{wrapper}.lora_{factor}.weight"
        if place == wrapper:
            state[f"{inner}.lora_{factor}.weight"] = state.pop(outer_key)
        shape = getattr(zero, f"lora_{factor}").weight.shape
        dtype = next(iter(state.values())).dtype
        state[f"{place}.lora_{factor}.weight"] = torch.zeros(shape, dtype=dtype)


def _split_experts(
    model: PreTrainedModel,
    parameter: str,
    num_experts: int,
    state: Mapping[str, torch.Tensor],
    keys: Sequence[str],
) -> dict[str, tuple[torch.Tensor, torch.Tensor]] | None:
    """Path of each matrix in the base's files -> its A and B; None if the files fuse all experts.

    Args:
        keys: the names of A and B in `state`.
    """
    lora_A, lora_B = (state[key] for key in keys)
    # PEFT's file: A [experts * rank, in], B [out, rank * experts].
    all_B = lora_B.view(len(lora_B), -1, num_experts).permute(2, 0, 1).contiguous()
    parts_B = as_stored(model, parameter, all_B)
    # The files hold all experts in one tensor, and vLLM reads PEFT's adapters of both.
    if len(parts_B) == 1:
        return None
    # A parameter may fuse matrices, such as gate and up: each has its own rows of B and all of A.
    all_A = lora_A.view(num_experts, -1, lora_A.shape[1])
    all_A = all_A.repeat(1, len(parts_B) // num_experts, 1)
    parts_A = as_stored(model, parameter, all_A)
    return {
        part.removesuffix(".weight"): (parts_A[part], value_B) for part, value_B in parts_B.items()
    }


def _write_config(config: LoraConfig, folder: Path) -> None:
    """Write adapter_config.json as PEFT does, but with its sets in order, and patterns in theirs.

    So the same adapter has the same file: Python's order of a set of texts differs by process. PEFT
    sorts patterns, of which the first match counts when it reads them.
    """
    config.save_pretrained(str(folder))
    path = folder / "adapter_config.json"
    content = read_json(path)
    for name, value in vars(config).items():
        if isinstance(value, set):
            content[name] = sorted(value)
    content |= {"rank_pattern": config.rank_pattern, "alpha_pattern": config.alpha_pattern}
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


@dataclass(frozen=True)
class ResultForm:
    """The form of a run's results at any step: an adapter or a whole model.

    adapter: the adapter's configuration; None for a whole model.
    open_base: opens the base's weights, for what does not train.
    is_merge_aware: whether the adapter was trained as it will be merged.
    for_server: write an adapter as vLLM reads it.
    """

    plan: ModelPlan
    base: BaseName
    kind: TrainType
    adapter: LoraConfig | None
    open_base: Callable[[], Weights]
    is_merge_aware: bool = False
    for_server: bool = False

    def save(
        self,
        values: Values,
        output_dir: Path,
        *,
        about: Mapping[str, Any],
        progress: Mapping[str, Any],
    ) -> None:
        """Save the adapter, or the whole model if its blocks or all weights were trained.

        Called on every rank.

        Args:
            about, progress: as in a checkpoint of the step.
        Raises:
            TrainingError: it could not be written, on rank 0.
        """
        plan = self.plan
        model = self.plan.meta.model
        record = training_record(about, progress, self.base, self.kind)
        texts = documents(record, kind=self.kind.adapter)
        prompt = record["prompt"] or {}
        # The template that was trained with: a chat that another one writes is another text.
        if prompt.get("chat_template"):
            plan.tokenizer.chat_template = prompt["chat_template"]
        if prompt.get("ends"):
            texts["generation_config.json"] = generation_config_with(
                plan.folder, plan.tokenizer, prompt["ends"]
            )
        if self.kind.trains_new_blocks:
            base_config = read_json(plan.folder / "config.json")
            content = with_own_head(base_config, plan.config)
            if content != base_config:
                texts["config.json"] = json.dumps(content, indent=2) + "\n"
        # A whole model needs the base's configuration; an adapter's folder has PEFT's own.
        base_folder = None if self.adapter is not None else plan.folder
        sidecar = partial(write_sidecar, plan.tokenizer, texts, base_folder)
        if self.adapter is not None:
            save_adapter(
                model,
                self.adapter,
                output_dir,
                values=values,
                sidecar=sidecar,
                for_server=self.for_server,
            )
            return
        base = WeightFiles(plan.folder) if self.kind.trains_new_blocks else None
        dtype = plan.precision.compute_dtype
        save_model(model, plan.config, sidecar, output_dir, base=base, dtype=dtype, values=values)

    def save_checkpoint(self, folder: Path, state: Mapping[str, Any], output_dir: Path) -> None:
        """Save the result of a checkpoint.

        For one process: the values are read from files, and nothing is gathered.

        Args:
            state: its state.json.
        Raises:
            UserError: the checkpoint is of another model.
            TrainingError: the result could not be written.
            DamagedCheckpoint: the checkpoint cannot be read.
        """
        model = self.plan.meta.model

        def read_frozen(name: str) -> torch.Tensor:
            return self.open_base().read_whole(name)

        with contextlib.closing(
            StoredValues(model, folder, state["tensors"], read_frozen)
        ) as values:
            self.save(values, output_dir, about=state["about"], progress=state["progress"])

    def leave_adapters(self, output_dir: Path, *, newest: bool) -> None:
        """Save the newest checkpoint's adapter in the run's folder, and the best one's in best/.

        For rank 0. A failure is only logged, because the checkpoints contain everything.
        """
        folders = checkpoint.published(output_dir / CHECKPOINTS)
        steps = {
            output_dir: max(folders, default=None) if newest else None,
            output_dir / BEST: best_step(folders),
        }
        for target, step in steps.items():
            if step is None:
                continue
            is_best = target != output_dir
            try:
                # The newest one has just been written; the best may have been there for days, so
                # its files are hashed again.
                if is_best:
                    state = checkpoint.verify(folders[step])
                else:
                    state = read_json(folders[step] / checkpoint.STATE)
                self.save_checkpoint(folders[step], state, target)
            except (OSError, KeyError, ValueError, TrainingError) as error:
                log.warning("The result of step %d was not saved in %s: %s", step, target, error)
            else:
                reason = f", {_why_best(state['progress'])}" if is_best else ""
                log.info(
                    "%s of step %d%s: %s",
                    "Adapter" if self.adapter else "Model",
                    step,
                    reason,
                    target,
                )

    def log_how_to_load(self, output_dir: Path) -> None:
        """Name the card, which says how to load an adapter whose base is a local folder."""
        if self.is_merge_aware:
            log.info("The adapter is of use merged only: fsdp-qlora merge %s --out DIR", output_dir)
        elif self.adapter is not None and not self.base.is_on_hub:
            log.info("How to load the adapter and its base, a local folder: %s", output_dir / CARD)


def _why_best(progress: Mapping[str, Any]) -> str:
    """The measure that has chosen a checkpoint, with its value."""
    by = progress.get("best_by", "loss")
    if by == "loss":
        return f"the lowest held-out loss ({progress['eval_loss']:.4f})"
    return f"the highest held-out score of {by} ({progress['eval_score']:.4f})"


def save_result(
    form: ResultForm,
    ranks: Ranks,
    output_dir: Path,
    *,
    about: Mapping[str, Any],
    progress: Progress,
) -> None:
    """Save the adapter, or the whole model if its blocks or all weights were trained.

    Called on every rank.

    Raises:
        TrainingError: it could not be written; the same on every rank.
    """
    values = LiveValues(keeps=ranks.is_rank_0)
    with raise_on_all_ranks(TrainingError, ranks.device):
        form.save(values, output_dir, about=about, progress=progress.to_dict())
        if ranks.is_rank_0:
            form.leave_adapters(output_dir, newest=False)
            form.log_how_to_load(output_dir)


def leave_result(form: ResultForm, output_dir: Path, ranks: Ranks) -> None:
    """Save the adapters of the newest and the best checkpoint when the run ends early.

    Called on every rank. The other ranks wait for rank 0, because torchrun ends all of them when
    one has ended.
    """
    with raise_on_all_ranks(TrainingError, ranks.device):
        if ranks.is_rank_0 and form.adapter is None:
            log.info(
                "To export the newest checkpoint as a model: fsdp-qlora export %s --out DIR",
                output_dir,
            )
        elif ranks.is_rank_0:
            form.leave_adapters(output_dir, newest=True)
            form.log_how_to_load(output_dir)
