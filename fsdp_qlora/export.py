"""What a finished run leaves: a PEFT adapter, or a whole model that transformers reads."""

import functools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from fsdp_qlora.adapters.first_values import saved_parameters
from fsdp_qlora.checkpointing.run_folder import CHECKPOINTS, FETCHED, LOCK, RUN, STATUS, write_atomically
from fsdp_qlora.checkpointing.saving import delete_oldest, is_full
from fsdp_qlora.errors import TrainingError, UserError
from fsdp_qlora.loading.weight_files import WeightFiles
from fsdp_qlora.metrics.sinks import METRICS_FILE
from fsdp_qlora.models import canonical_name, persistent_buffers
from fsdp_qlora.quantizers.experts import expert_parameters
from fsdp_qlora.storage.files import flush
from fsdp_qlora.storage.safetensors_files import Form, PackedFiles

log = logging.getLogger("fsdp_qlora")

_MAX_FILE_BYTES = 5 * 10**9  # the size at which transformers splits checkpoints
# What a run leaves in its folder; --overwrite_output_dir removes these and touches nothing else.
_RUN_FILES = (
    "adapter_config.json", "adapter_model.safetensors", "config.json", "config.yaml", "generation_config.json",
    "metrics.jsonl", "model*.safetensors", "model.safetensors.index.json", "rejected.jsonl",
    "additional_chat_templates", ".saving_weights", ".saving", "run.json", "status.json", "hang_rank_*",
    "checkpoints", FETCHED,
)  # fmt: skip
# What a start that was killed before it had written run.json may leave: nobody's results.
_LEFTOVERS = {LOCK, ".saving", FETCHED, f".{RUN}.partial"}


def check_output_dir(output_dir: Path, *, overwrite: bool) -> None:
    """Refuse a folder that holds something, before any work.

    Raises:
        UserError: the folder is not empty and may not be overwritten, or cannot be made.
    """
    existing = next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"output_dir {output_dir}: {existing} is a file. Give another folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"output_dir {output_dir}: {existing} is not writable. Give another folder.")
    names = {path.name for path in output_dir.iterdir()} if output_dir.is_dir() else set()
    # While a run is moved in from its mirror, these are copies of what is there.
    moving = {CHECKPOINTS, METRICS_FILE, STATUS} if FETCHED in names and RUN not in names else set()
    is_used = bool(names - _LEFTOVERS - moving)
    if is_used and not overwrite:
        raise UserError(
            f"output_dir {output_dir} is not empty: it may hold the results of another run. Give another folder, "
            "or --overwrite_output_dir true to replace them."
        )


def check_keeps_model(output_dir: Path, model_folder: Path) -> None:
    """Refuse to put the results where the model is: it would be overwritten by its own fine-tuned copy.

    Raises:
        UserError: the two folders are the same.
    """
    if output_dir.resolve() == model_folder.resolve():
        raise UserError(f"output_dir {output_dir} is the folder of the model itself. Give another folder.")


def prepare_output_dir(
    output_dir: Path, files: Mapping[str, str], *, about: Mapping[str, Any], keep_run: bool = False
) -> None:
    """Make the folder, remove an earlier run's results from it, and leave `files` (name -> text) in it. Rank 0 only.

    Args:
        about: what the run is, for run.json, which comes first: with it the folder is this run's.
        keep_run: nothing is removed, since the run in the folder goes on.

    Called when the model is loaded and verified: a run that cannot start takes nothing away.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output_dir {output_dir} cannot be made: {error}") from error
    for pattern in () if keep_run else _RUN_FILES:
        for path in output_dir.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    try:
        write_atomically(output_dir / RUN, about)
    except OSError as error:
        raise UserError(f"output_dir {output_dir} cannot be written: {error}") from error
    publish(output_dir, lambda folder: [(folder / name).write_text(text) for name, text in files.items()])


def publish(output_dir: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary folder, flush it to disk, then move its files into `output_dir`.

    A reader sees each file whole or not at all. Where the disk is full, the oldest checkpoints make room.

    Raises:
        TrainingError: it could not be written even so.
    """
    error = _write_with_room(output_dir, lambda: _publish(output_dir, write))
    if error:
        shutil.rmtree(output_dir / ".saving", ignore_errors=True)
        raise _cannot_save(output_dir, error) from error


def _write_with_room(output_dir: Path, write: Callable[[], object]) -> Exception | None:
    """Call `write`, and again with each checkpoint that makes room on a full disk; returns what stops it even so."""
    while True:
        try:
            write()
            return None
        except (OSError, SafetensorError) as error:
            freed = delete_oldest(output_dir / CHECKPOINTS) if is_full(error) else None
            if freed is None:
                return error
            log.warning("The disk is full (%s). To make room for the result, %s was deleted.", error, freed)


def _cannot_save(output_dir: Path, error: Exception) -> TrainingError:
    return TrainingError(
        f"The result cannot be saved in {output_dir} ({error}). The last checkpoint holds all of it: make room there, "
        "and the same command saves it without training again."
    )


def _publish(output_dir: Path, write: Callable[[Path], object]) -> None:
    staging = output_dir / ".saving"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    write(staging)
    for path in staging.rglob("*"):
        if path.is_file():
            flush(path)
    # Configurations last: they are what readers look for.
    for path in sorted(staging.iterdir(), key=lambda path: (path.suffix == ".json", path.name)):
        target = output_dir / path.name
        if target.is_dir():  # a folder (of chat templates) cannot be replaced while it is there
            shutil.rmtree(target)
        path.replace(target)
    staging.rmdir()
    flush(output_dir)


class _LargeResult:
    """A result whose files rank 0 writes one after the other, while every rank takes part in gathering them.

    staging: where it is until it is published.

    A write that fails is told by `publish`, when all is gathered: until then the other ranks wait for this one.
    """

    def __init__(self, output_dir: Path, *, is_rank_0: bool) -> None:
        self.output_dir, self.staging = output_dir, output_dir / ".saving_weights"
        self.is_rank_0 = is_rank_0
        self.error: Exception | None = None
        self.write(self._begin)

    def _begin(self) -> None:
        shutil.rmtree(self.staging, ignore_errors=True)
        self.staging.mkdir(parents=True)

    @property
    def is_written(self) -> bool:
        """Whether this rank is to write more."""
        return self.is_rank_0 and self.error is None

    def write(self, write: Callable[[], object]) -> None:
        """Call `write`, which may be repeated, where this rank is to write."""
        if self.is_written:
            self.error = _write_with_room(self.output_dir, write)

    def publish(self, write: Callable[[Path], object]) -> None:
        """Publish what was staged, with what `write` puts beside it.

        Raises:
            TrainingError: it could not be written, on rank 0.
        """
        if self.error:
            shutil.rmtree(self.staging, ignore_errors=True)
            raise _cannot_save(self.output_dir, self.error) from self.error

        def write_all(folder: Path) -> None:
            write(folder)
            for path in self.staging.iterdir():  # last: what is moved is lost where there is no room for another file
                path.replace(folder / path.name)
            self.staging.rmdir()

        if self.is_rank_0:
            publish(self.output_dir, write_all)


def save_adapter(
    model: nn.Module, config: LoraConfig, tokenizer: PreTrainedTokenizerBase, output_dir: Path, *, is_rank_0: bool
) -> None:
    """Gather the adapter and save it as PEFT does. Every rank calls it; rank 0 holds and writes it."""
    state = _gather_all(saved_parameters(model), torch.float32, keep=is_rank_0)

    def write(folder: Path) -> None:
        save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))

    if is_rank_0:
        publish(output_dir, write)


def save_model(
    model: PreTrainedModel,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: Path,
    *,
    base_folder: Path,
    dtype: torch.dtype,
    is_rank_0: bool,
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
    """Gather the model tensor by tensor and save it as transformers does, in files of bounded size.

    Every rank calls it; rank 0 writes, and holds one file's tensors at most.

    Args:
        base_folder: the model that was trained, whose generation_config.json goes with the result.
    """
    files = _split_into_files(model, dtype, max_file_bytes)
    names = [_file_name(index, len(files)) for index in range(len(files))]
    result = _LargeResult(output_dir, is_rank_0=is_rank_0)
    weight_map: dict[str, str] = {}
    for name, parameters in zip(names, files, strict=True):
        state = _gather_all(parameters, dtype, keep=result.is_written)
        if result.is_written:
            state = _as_in_checkpoints(model, state)
            weight_map |= dict.fromkeys(state, name)
            result.write(functools.partial(_save_flushed, state, result.staging / name))

    def write(folder: Path) -> None:
        if len(files) > 1:
            _write_index(folder, weight_map, sum(parameter.numel() for _, parameter in _state(model)) * dtype.itemsize)
        saved = type(config).from_dict({**config.to_dict(), "dtype": str(dtype).removeprefix("torch.")})
        saved.architectures = [type(model).__name__.removeprefix("FSDP")]
        saved.save_pretrained(folder)
        if (base_folder / "generation_config.json").is_file():
            shutil.copyfile(base_folder / "generation_config.json", folder / "generation_config.json")
        tokenizer.save_pretrained(str(folder))

    result.publish(write)


def _save_flushed(state: dict[str, torch.Tensor], path: Path) -> None:
    save_file(state, path, metadata={"format": "pt"})
    flush(path)


def save_new_blocks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: Path,
    *,
    base: WeightFiles,
    dtype: torch.dtype,
    is_rank_0: bool,
) -> None:
    """Save the model that was trained in some blocks: these in `dtype`, everything else as it is in `base`.

    Every rank calls it; rank 0 writes, one tensor at a time.
    """
    trained = [(name, parameter) for name, parameter in _state(model) if parameter.requires_grad]
    result = _LargeResult(output_dir, is_rank_0=is_rank_0)
    names = {part for name, parameter in trained for part in _names_in_checkpoints(model, name, parameter)}
    forms = {name: Form(dtype if name in names else base.dtype(name), tuple(base.shape(name))) for name in base.files}
    assert names <= forms.keys(), names - forms.keys()
    files = PackedFiles(result.staging, forms)
    result.write(files.create)
    for name in forms.keys() - names:
        if result.is_written:
            values = base.read_flat(name, 0, base.shape(name).numel())
            result.write(functools.partial(files.write, name, 0, values))
    for name, parameter in trained:
        state = _gather_all([(name, parameter)], dtype, keep=result.is_written)
        if result.is_written:
            for part, value in _as_in_checkpoints(model, state).items():
                result.write(functools.partial(files.write, part, 0, value))
    result.write(files.sync)
    files.close()

    def write(folder: Path) -> None:
        for name in ("config.json", "generation_config.json"):
            if (base.folder / name).is_file():
                shutil.copyfile(base.folder / name, folder / name)
        tokenizer.save_pretrained(str(folder))

    result.publish(write)


def _names_in_checkpoints(model: PreTrainedModel, name: str, parameter: torch.Tensor) -> list[str]:
    """What a parameter is called in weight files; several names where experts are apart there."""
    return list(_as_in_checkpoints(model, {name: torch.empty(parameter.shape, device="meta")}))


_Named = list[tuple[str, torch.Tensor]]


def _split_into_files(model: nn.Module, dtype: torch.dtype, max_bytes: int) -> list[_Named]:
    files: list[_Named] = [[]]
    size = 0
    for name, parameter in _state(model):
        count = parameter.numel() * dtype.itemsize
        if files[-1] and size + count > max_bytes:
            files.append([])
            size = 0
        files[-1].append((name, parameter))
        size += count
    return files


def _state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the weight files, parameter or persistent buffer), tied ones once."""
    for name, tensor in (*model.named_parameters(), *persistent_buffers(model)):
        yield canonical_name(name), tensor


def _file_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _as_in_checkpoints(model: PreTrainedModel, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Take the merged parameters of experts apart under their published names, as transformers does on saving."""
    if not expert_parameters(model):
        return state
    parts = revert_weight_conversion(model, state)
    return {name: tensor.contiguous() for name, tensor in parts.items()}


def _write_index(folder: Path, weight_map: dict[str, str], total_size: int) -> None:
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _gather_all(
    named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, *, keep: bool
) -> dict[str, torch.Tensor]:
    """Gather sharded tensors one at a time; a rank that does not `keep` them frees each at once."""
    state = {}
    for name, tensor in named:
        whole = tensor.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        if keep:
            state[name] = whole.to("cpu", dtype if whole.is_floating_point() else whole.dtype).contiguous()
    return state
