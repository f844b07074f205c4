"""Saves a whole model in transformers' format, a tensor at a time."""

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_qlora.checkpoint.result import cannot_save, publish_with_room, write_with_room
from fsdp_qlora.export.gathering import as_stored, dtype_of, gather_all
from fsdp_qlora.export.values import Values
from fsdp_qlora.model.architecture.structure import canonical_name, persistent_buffers
from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from fsdp_qlora.utils.result_files import record_result
from fsdp_qlora.utils.safetensors_files import PackedFiles, TensorForm


class _Writer:
    """Writes on rank 0 while every rank takes part in gathering.

    A failure is raised when all has been gathered: a rank that left earlier would let the others
    wait in a collective.

    writes: whether this rank is to write more.
    """

    def __init__(self, output_dir: Path, *, is_rank_0: bool) -> None:
        self.staging = output_dir / ".saving_weights"
        self.writes = is_rank_0
        self._output_dir = output_dir
        self._error: Exception | None = None
        if is_rank_0:
            shutil.rmtree(self.staging, ignore_errors=True)
        self.write(partial(self.staging.mkdir, parents=True))

    def write(self, write: Callable[[], object]) -> None:
        """Call `write`, possibly several times, if this rank is to write."""
        if self.writes:
            self._error = write_with_room(self._output_dir, write)
            self.writes = self._error is None

    def check(self) -> None:
        """Raise TrainingError, on rank 0, if something could not be written."""
        if self._error:
            shutil.rmtree(self.staging, ignore_errors=True)
            raise cannot_save(self._output_dir, self._error) from self._error


def save_model(
    model: PreTrainedModel,
    config: PretrainedConfig,
    sidecar: Callable[[Path], object],
    output_dir: Path,
    *,
    base: WeightFiles | None,
    dtype: torch.dtype,
    values: Values,
) -> None:
    """Gather the model and save it in transformers' format, in files of bounded size.

    Every rank calls it; rank 0 writes, one tensor at a time.

    Args:
        base: gives what was not trained, and its configuration; None saves all, and `config`.
        dtype: of the model's floats.
        sidecar: as for `save_adapter`.
    Raises:
        TrainingError: it could not be written, on rank 0.
    """
    # named_parameters gives tied ones once, and all ranks the same order: the gathering needs it.
    tensors = (*model.named_parameters(), *persistent_buffers(model))
    gathered = [
        (canonical_name(name), tensor)
        for name, tensor in tensors
        if tensor.requires_grad or base is None
    ]
    forms, fused = _layout(model, gathered, dtype)
    assert base is None or forms.keys() <= base.files.keys()
    unchanged = {name: base.form(name) for name in base.files if name not in forms} if base else {}
    result = _Writer(output_dir, is_rank_0=values.keeps)
    files = PackedFiles(result.staging, forms | unchanged)
    result.write(files.create)
    for name in unchanged:
        if base and result.writes:
            original = base.read_flat(name, 0, base.shape(name).numel())
            result.write(partial(files.write, name, 0, original))
    for name, tensor in gathered:
        whole = gather_all([(name, values.whole(tensor))], dtype, keep=result.writes)
        if not whole:
            continue
        parts = whole if name in fused else as_stored(model, name, whole[name])
        for part, value in parts.items():
            result.write(partial(files.write, part, 0, value))
    result.write(files.sync)
    result.check()

    def write(folder: Path) -> None:
        sidecar(folder)
        if base is None:
            _save_config(model, config, dtype, folder)
        record_result(folder, result.staging.iterdir())
        # Last: this may be called again where there was no room; what was moved is lost then.
        for path in result.staging.iterdir():
            path.replace(folder / path.name)
        result.staging.rmdir()

    if values.keeps:
        publish_with_room(output_dir, write)


def _layout(
    model: PreTrainedModel, gathered: Sequence[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> tuple[dict[str, TensorForm], set[str]]:
    """The tensors of the files, and the parameters that are written as they are.

    It is computed with meta tensors, so that each value can be written to its place as soon as it
    is gathered, and rank 0 never holds more than one.
    """
    empty = {
        name: torch.empty(tensor.shape, dtype=dtype_of(tensor, dtype), device="meta")
        for name, tensor in gathered
    }
    stored = {name: as_stored(model, name, tensor) for name, tensor in empty.items()}
    counts = Counter(part for parts in stored.values() for part in parts)
    # A tensor of the files that fuses several parameters would need them all at once; transformers
    # reads these too.
    fused = {name for name, parts in stored.items() if any(counts[part] > 1 for part in parts)}
    stored |= {name: {name: empty[name]} for name in fused}
    forms = {
        part: TensorForm(value.dtype, tuple(value.shape))
        for parts in stored.values()
        for part, value in parts.items()
    }
    return forms, fused


def _save_config(
    model: PreTrainedModel, config: PretrainedConfig, dtype: torch.dtype, folder: Path
) -> None:
    dtype_name = str(dtype).removeprefix("torch.")
    saved = type(config).from_dict(config.to_dict() | {"dtype": dtype_name})
    # fully_shard gives the model a class of its own, such as FSDPLlamaForCausalLM.
    saved.architectures = [type(model).__name__.removeprefix("FSDP")]
    saved.save_pretrained(folder)
