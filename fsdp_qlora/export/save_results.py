"""Saves the result of a run: a PEFT adapter, or a whole model for transformers.

The values come from a model in training, gathered from all ranks, or from a checkpoint (first_values.Values).
"""

import errno
import functools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from fsdp_qlora.checkpoint.result import cannot_save, publish_files, record_result, write_with_room
from fsdp_qlora.model.adapters.first_values import Values, saved_parameters
from fsdp_qlora.model.architecture.models import canonical_name, persistent_buffers
from fsdp_qlora.model.quantizers.routed import expert_parameters
from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from fsdp_qlora.utils.safetensors_files import PackedFiles, TensorForm

log = logging.getLogger("fsdp_qlora")


@dataclass(frozen=True)
class SidecarFiles:
    """The files that are saved with the weights.

    texts: file name -> its text. base_folder: of the base, whose configuration goes with a whole model.
    """

    tokenizer: PreTrainedTokenizerBase
    texts: Mapping[str, str] = field(default_factory=dict)
    base_folder: Path | None = None

    def write(self, folder: Path) -> None:
        try:
            self.tokenizer.save_pretrained(str(folder))
        except Exception as error:  # the package tokenizers raises Exception itself
            if "No space left" in str(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise
        for name, text in self.texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        for name in ("config.json", "generation_config.json"):
            if self.base_folder and (self.base_folder / name).is_file():
                shutil.copyfile(self.base_folder / name, folder / name)


class _Writer:
    """Writes on rank 0 while every rank takes part in gathering: a failure waits until all has been gathered."""

    def __init__(self, output_dir: Path, *, is_rank_0: bool) -> None:
        self.staging = output_dir / ".saving_weights"
        self._output_dir, self._is_rank_0 = output_dir, is_rank_0
        self._error: Exception | None = None
        self.write(self._begin)

    def _begin(self) -> None:
        shutil.rmtree(self.staging, ignore_errors=True)
        self.staging.mkdir(parents=True)

    @property
    def writes(self) -> bool:
        """Whether this rank is to write more."""
        return self._is_rank_0 and self._error is None

    def write(self, write: Callable[[], object]) -> None:
        """Call `write`, possibly several times, if this rank is to write."""
        if self.writes:
            self._error = write_with_room(self._output_dir, write)

    def check(self) -> None:
        """Raise TrainingError, on rank 0, if something could not be written."""
        if self._error:
            shutil.rmtree(self.staging, ignore_errors=True)
            raise cannot_save(self._output_dir, self._error) from self._error


def save_adapter(
    model: nn.Module, config: LoraConfig, sidecar: SidecarFiles | None, output_dir: Path, *, values: Values
) -> None:
    """Gather the adapter and save it in PEFT's format. Called on every rank; rank 0 holds and writes it."""
    state = _gather_all(saved_parameters(model, values), torch.float32, keep=values.keeps)

    def write(folder: Path) -> None:
        save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        _write_config(config, folder)
        if sidecar:
            sidecar.write(folder)
        record_result(folder)

    if values.keeps:
        publish_files(output_dir, write)


def _write_config(config: LoraConfig, folder: Path) -> None:
    """adapter_config.json as PEFT writes it, but with its sets in order: the same file for the same adapter."""
    config.save_pretrained(str(folder))
    path = folder / "adapter_config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    for name, value in vars(config).items():
        if isinstance(value, set):
            content[name] = sorted(value)
    path.write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")


def save_model(
    model: PreTrainedModel,
    config: PretrainedConfig,
    sidecar: SidecarFiles,
    output_dir: Path,
    *,
    base: WeightFiles | None,
    dtype: torch.dtype,
    values: Values,
) -> None:
    """Gather the model and save it in transformers' format, in files of bounded size.

    Every rank calls it; rank 0 writes, one tensor at a time.

    Args:
        base: the model that was trained, from which what was not trained is taken as it is, and its configuration;
            None saves all of the model, and `config`. dtype: of the model's floats.
    Raises:
        TrainingError: it could not be written, on rank 0.
    """
    tensors = (*model.named_parameters(), *persistent_buffers(model))  # tied ones once
    gathered = [(canonical_name(name), tensor) for name, tensor in tensors if tensor.requires_grad or base is None]
    forms: dict[str, TensorForm] = {}
    for name, tensor in gathered:
        stored = _as_stored(model, name, torch.empty(tensor.shape, dtype=_dtype_of(tensor, dtype), device="meta"))
        forms |= {part: TensorForm(value.dtype, tuple(value.shape)) for part, value in stored.items()}
    assert base is None or forms.keys() <= base.files.keys()
    kept = {name: base.form(name) for name in base.files if name not in forms} if base else {}
    result = _Writer(output_dir, is_rank_0=values.keeps)
    files = PackedFiles(result.staging, forms | kept)
    result.write(files.create)
    for name in kept:
        if base and result.writes:
            original = base.read_flat(name, 0, base.shape(name).numel())
            result.write(functools.partial(files.write, name, 0, original))
    for name, tensor in gathered:
        whole = _gather_all([(name, values.whole(tensor))], dtype, keep=result.writes)
        for part, value in _as_stored(model, name, whole[name]).items() if result.writes else ():
            result.write(functools.partial(files.write, part, 0, value))
    result.write(files.sync)
    result.check()

    def write(folder: Path) -> None:
        sidecar.write(folder)
        if base is None:
            saved = type(config).from_dict({**config.to_dict(), "dtype": str(dtype).removeprefix("torch.")})
            saved.architectures = [type(model).__name__.removeprefix("FSDP")]
            saved.save_pretrained(folder)
        record_result(folder, result.staging.iterdir())
        for path in result.staging.iterdir():  # last: what is moved is lost where there is no room for another file
            path.replace(folder / path.name)
        result.staging.rmdir()

    if values.keeps:
        publish_files(output_dir, write)


def _dtype_of(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype


def _as_stored(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor under its published name; merged parameters of experts are split, as transformers does on saving."""
    if not expert_parameters(model):
        return {name: tensor}
    return {part: value.contiguous() for part, value in revert_weight_conversion(model, {name: tensor}).items()}


def _gather_all(
    named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, *, keep: bool
) -> dict[str, torch.Tensor]:
    """Take whole tensors one at a time, floats in `dtype` on the CPU; without `keep` each is freed at once."""
    state = {}
    for name, whole in named:
        if keep:
            state[name] = whole.to("cpu", _dtype_of(whole, dtype)).contiguous()
    return state
