"""What a finished run leaves: a PEFT adapter, or a whole model that transformers reads."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from fsdp_qlora.adapters import adapter_parameters
from fsdp_qlora.errors import UserError
from fsdp_qlora.experts import expert_parameters
from fsdp_qlora.models import canonical_name

log = logging.getLogger("fsdp_qlora")

_MAX_FILE_BYTES = 5 * 10**9  # the size at which transformers splits checkpoints
# What a run leaves in its folder; --overwrite_output_dir removes these and touches nothing else.
_RUN_FILES = (
    "adapter_config.json", "adapter_model.safetensors", "config.json", "config.yaml", "generation_config.json",
    "metrics.jsonl", "model*.safetensors", "model.safetensors.index.json", ".saving",
)  # fmt: skip


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
    if output_dir.is_dir() and any(output_dir.iterdir()) and not overwrite:
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


def prepare_output_dir(output_dir: Path) -> None:
    """Make the folder and remove an earlier run's results from it. Rank 0 only."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output_dir {output_dir} cannot be made: {error}") from error
    for pattern in _RUN_FILES:
        for path in output_dir.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def publish(output_dir: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder, flush it to disk, then move its files into `output_dir`.

    A reader sees each file whole or not at all.
    """
    staging = output_dir / ".saving"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    write(staging)
    # Configurations last: they are what readers look for.
    for path in sorted(staging.iterdir(), key=lambda path: (path.suffix == ".json", path.name)):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        path.replace(output_dir / path.name)
    staging.rmdir()


def save_adapter(
    model: nn.Module, config: LoraConfig, tokenizer: PreTrainedTokenizerBase, output_dir: Path, *, is_rank_0: bool
) -> list[str]:
    """Gather the adapter and save it as PEFT does. Every rank calls it; rank 0 writes.

    Returns:
        The names of the main files.
    """
    state = {name: _gather(parameter) for name, parameter in adapter_parameters(model)}

    def write(folder: Path) -> None:
        save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))

    if is_rank_0:
        publish(output_dir, write)
    return ["adapter_config.json", "adapter_model.safetensors"]


def save_model(
    model: PreTrainedModel,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: Path,
    *,
    dtype: torch.dtype,
    is_rank_0: bool,
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> list[str]:
    """Gather the model tensor by tensor and save it as transformers does, in files of bounded size.

    Every rank calls it; rank 0 writes, and holds one file's tensors at most.
    """
    files = _split_into_files(model, dtype, max_file_bytes)
    names = [_file_name(index, len(files)) for index in range(len(files))]
    staging = output_dir / ".saving_weights"
    if is_rank_0:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for name, parameters in zip(names, files, strict=True):
        state = {key: _gather(parameter, dtype) for key, parameter in parameters}
        if is_rank_0:
            state = _as_in_checkpoints(model, state)
            weight_map |= dict.fromkeys(state, name)
            save_file(state, staging / name, metadata={"format": "pt"})

    def write(folder: Path) -> None:
        for name in names:
            (staging / name).replace(folder / name)
        staging.rmdir()
        if len(files) > 1:
            _write_index(folder, weight_map, sum(parameter.numel() for _, parameter in _state(model)) * dtype.itemsize)
        saved = type(config).from_dict({**config.to_dict(), "dtype": str(dtype).removeprefix("torch.")})
        saved.architectures = [type(model).__name__.removeprefix("FSDP")]
        saved.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(str(folder))

    if is_rank_0:
        publish(output_dir, write)
    return ["config.json", *names]


_Named = list[tuple[str, nn.Parameter]]


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


def _state(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name in a checkpoint, parameter), tied ones once."""
    for name, parameter in model.named_parameters():
        yield canonical_name(name), parameter


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


def _gather(parameter: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The whole tensor on the CPU of every rank."""
    whole = parameter.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    return whole.to("cpu", dtype).contiguous()
