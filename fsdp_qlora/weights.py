"""Stream a safetensors checkpoint into sharded parameters: each rank reads the slice that it will own."""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from fsdp_qlora.adapters import adapter_parameters, first_adapter_value
from fsdp_qlora.distributed import shard_bounds, shard_rank, shard_size
from fsdp_qlora.errors import UserError
from fsdp_qlora.hub import ask_hub, first_line, hub_reason
from fsdp_qlora.models import canonical_name
from fsdp_qlora.quantize import QuantizedLinear

log = logging.getLogger("fsdp_qlora")

_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_DOWNLOAD_AGAIN = "Download it again; a git clone without git-lfs holds only pointers to the weights."


def find_model_folder(model_name: str, *, with_weights: bool) -> Path:
    """The local folder of a model: the given one, or the hub's snapshot, downloaded when it is not there.

    Raises:
        UserError: there is no such model, it needs a licence click, or the hub is out of reach.
    """
    folder = Path(model_name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"model_name {model_name} is a file. Give the model's folder.")
    if model_name.startswith((".", "/", "~")) or model_name.count("/") > 1:
        raise UserError(f"model_name {model_name}: there is no such folder. Check the path, or give a name on the hub.")
    refusal = ask_hub(model_name, "model")
    if refusal is not None:
        log.info("%s is looked for among the copies on this machine: %s.", model_name, hub_reason(refusal))
    patterns = [*_SMALL_FILES, *(["*.safetensors"] if with_weights else [])]
    try:
        return Path(snapshot_download(model_name, allow_patterns=patterns, local_files_only=refusal is not None))
    except Exception as error:  # of the HTTP library, the hub's client or the file system
        reason = hub_reason(refusal) if refusal else f"its download failed ({first_line(error)})"
        raise UserError(
            f"model_name {model_name}: there is no such local folder, and {reason}. Without the hub, give the "
            "path of a model folder, or make one with `python scripts/demo_model.py --output_dir demo/model`."
        ) from error


class Checkpoint:
    """The safetensors files of a model folder, single or indexed, opened as they are needed.

    Attributes:
        files: tensor name -> file that holds it.
    Raises:
        UserError: there are no safetensors files, one is absent, or one is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = self._index()
        self._open: dict[Path, safe_open] = {}

    def _index(self) -> dict[str, Path]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            try:
                weight_map: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
            except (ValueError, KeyError) as error:
                raise UserError(f"{index} is not a safetensors index: {error!r}.") from error
            absent = sorted({name for name in weight_map.values() if not (self.folder / name).is_file()})
            if absent:
                raise UserError(f"{index} names files that are not there: {', '.join(absent)}. Download them.")
            return {tensor: self.folder / name for tensor, name in weight_map.items()}
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise UserError(f"{self.folder} has no .safetensors file. {self._other_weights()}")
        return {tensor: path for path in files for tensor in self._read_header(path)}

    def _other_weights(self) -> str:
        pickled = sorted(path.name for path in self.folder.glob("*.bin"))
        if not pickled:
            return "Download the model's weights into it."
        return (
            f"It has {', '.join(pickled[:3])}, but pickled weights are not read, since they can run code. If you "
            "trust them, convert them with AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) of "
            "transformers."
        )

    @staticmethod
    def _read_header(path: Path) -> list[str]:
        try:
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is not a readable safetensors file ({error}). {_DOWNLOAD_AGAIN}") from error

    def _slice(self, name: str):  # type: ignore[no-untyped-def]  # safetensors' slice type is not exported
        path = self.files[name]
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt", device="cpu")
            return self._open[path].get_slice(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: tensor {name} cannot be read ({error}). {_DOWNLOAD_AGAIN}") from error

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._slice(name).get_shape())

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of dim 0, on the CPU, in the file's dtype."""
        part = self._slice(name)
        return part[start:stop] if part.get_shape() else part[...]

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the row-major flattened tensor: reads the rows they lie in."""
        row = math.prod(self.shape(name)[1:])
        first, last = start // row, -(-stop // row)
        return self.read_rows(name, first, last).reshape(-1)[start - first * row : stop - first * row]


def load_weights(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    sources: Mapping[str, str],
    mesh: DeviceMesh,
    device: torch.device,
    *,
    seed: int,
    show_progress: bool,
) -> None:
    """Fill every parameter of the sharded model: the base from the checkpoint, adapters with first values.

    A rank holds its shards and the slice of one tensor, nothing more.

    Args:
        sources: what `match_tensors` gives.
    """
    targets = _targets(model)
    in_file_order = sorted(targets, key=lambda name: str(checkpoint.files[sources[name]]))
    total = sum(shape.numel() for shape, _ in targets.values())
    started = time.perf_counter()
    hidden = not show_progress or not sys.stderr.isatty()
    with tqdm(total=total, unit=" weights", unit_scale=True, desc="Loading", disable=hidden) as bar:
        for name in in_file_order:
            shape, load = targets[name]
            load(checkpoint, sources[name], mesh, device)
            bar.update(shape.numel())
    log.info("Loaded %s in %.1f s.", checkpoint.folder, time.perf_counter() - started)
    for name, parameter in adapter_parameters(model):
        _load_rows(parameter, first_adapter_value(name, parameter.shape, seed=seed), mesh)


_Load = Callable[[Checkpoint, str, DeviceMesh, torch.device], None]


def _targets(model: nn.Module) -> dict[str, tuple[torch.Size, _Load]]:
    """Name in the checkpoint -> (shape there, how to load it), for everything that a checkpoint holds."""
    targets: dict[str, tuple[torch.Size, _Load]] = {}
    own = {id(parameter) for _, parameter in adapter_parameters(model)}
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            own.update(id(parameter) for name, parameter in module.named_parameters() if name != "bias")
            targets[canonical_name(f"{path}.weight")] = (torch.Size(module.shape), _quantized_loader(module))
    for path, parameter in model.named_parameters():
        if id(parameter) not in own:
            targets[canonical_name(path)] = (parameter.shape, _parameter_loader(parameter))
    for path, buffer in _persistent_buffers(model):
        targets[canonical_name(path)] = (buffer.shape, _buffer_loader(buffer))
    return targets


def _persistent_buffers(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _quantized_loader(module: QuantizedLinear) -> _Load:
    def load(checkpoint: Checkpoint, name: str, mesh: DeviceMesh, device: torch.device) -> None:
        module.load_shard(lambda start, stop: checkpoint.read_flat(name, start, stop).to(device), mesh)

    return load


def _parameter_loader(parameter: nn.Parameter) -> _Load:
    def load(checkpoint: Checkpoint, name: str, mesh: DeviceMesh, device: torch.device) -> None:
        first, last = shard_bounds(parameter.shape[0], rank=shard_rank(mesh), size=shard_size(mesh))
        with torch.no_grad():
            _local(parameter).copy_(checkpoint.read_rows(name, first, last))

    return load


def _buffer_loader(buffer: torch.Tensor) -> _Load:
    def load(checkpoint: Checkpoint, name: str, mesh: DeviceMesh, device: torch.device) -> None:
        buffer.copy_(checkpoint.read_rows(name, 0, buffer.shape[0] if buffer.ndim else 0))

    return load


def _local(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


@torch.no_grad()
def _load_rows(parameter: torch.Tensor, whole: torch.Tensor, mesh: DeviceMesh) -> None:
    first, last = shard_bounds(whole.shape[0], rank=shard_rank(mesh), size=shard_size(mesh))
    _local(parameter).copy_(whole[first:last])


def match_tensors(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, str]:
    """The checkpoint's name of every tensor that the model needs.

    Raises:
        UserError: tensors are missing, left over or wrongly shaped; each is named with its file.
    """
    expected = {name: shape for name, (shape, _) in _targets(model).items()}
    renamings = [step for step in get_model_conversion_mapping(model) if isinstance(step, WeightRenaming)]
    names = dict.fromkeys(expected)
    sources: dict[str, str] = {}
    extra: list[str] = []
    for source in checkpoint.files:
        name = source
        if name not in expected:
            name, _ = rename_source_key(source, renamings, [], model.base_model_prefix, names)  # type: ignore[arg-type]
        if name in expected:
            sources[name] = source
        elif not _may_be_left_over(model, name):
            extra.append(source)
    problems = [f"missing: {name} {list(expected[name])}" for name in expected if name not in sources]
    problems += [f"not in this architecture: {name} (in {checkpoint.files[name].name})" for name in extra]
    problems += [
        f"wrong shape: {source} in {checkpoint.files[source].name} is {list(checkpoint.shape(source))}, "
        f"the model's is {list(expected[name])}"
        for name, source in sources.items()
        if checkpoint.shape(source) != expected[name]
    ]
    if problems:
        shown = "\n  ".join(problems[:8] + [f"... and {len(problems) - 8} more"] * (len(problems) > 8))
        raise UserError(
            f"The weights in {checkpoint.folder} are not those of the {type(model).__name__} that its config.json "
            f"describes:\n  {shown}\nDownload the model again, or give another folder."
        )
    return sources


def _may_be_left_over(model: PreTrainedModel, name: str) -> bool:
    """Tensors that old or tied checkpoints hold and no model needs: tied heads and rotary tables."""
    tied = set(model._tied_weights_keys or {}) if model.config.get_text_config().tie_word_embeddings else set()
    return name in tied or name.endswith(("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias"))
