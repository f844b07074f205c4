"""Writes a merged model, or an adapter, as a GGUF file, one tensor in memory at a time."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tqdm import tqdm
from transformers import AutoConfig, PretrainedConfig

from fsdp_qlora.errors import UserError
from fsdp_qlora.gguf_export.architecture import ARCHITECTURES, Architecture
from fsdp_qlora.gguf_export.tokenizer import add_tokenizer, read_vocabulary
from fsdp_qlora.loading.weight_files import WeightFiles
from fsdp_qlora.merging.peft_folder import PeftFolder, open_adapter
from fsdp_qlora.storage.files import staged_file

TYPES = {
    "f16": (GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "f32": (GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
}
_PIECE = 2**24  # elements quantized at a time


class _Tensor(NamedTuple):
    """shape: as in the model. read: its values in that shape, float32."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    read: Callable[[], np.ndarray]


def write_model(folder: Path, out: Path, kind: str) -> None:
    """Write a model folder as a GGUF file with its tokenizer.

    Args:
        kind: a key of TYPES.
    Raises:
        UserError: the model cannot be converted, or the file cannot be written.
    """
    config = _read_config(folder)
    architecture, files = Architecture(config), WeightFiles(folder)
    wanted, file_type = TYPES[kind]
    vocabulary = read_vocabulary(folder, config.vocab_size)
    tensors = {
        name: _Tensor(values.shape, GGMLQuantizationType.F32, lambda values=values: values)  # type: ignore[misc]
        for name, values in architecture.more_tensors().items()
    }
    for name in files.files:
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        shape = tuple(files.shape(name))
        tensors[architecture.tensor_name(name)] = _Tensor(
            shape,
            _kind_of(shape, wanted),
            lambda name=name: _read(files, architecture, name),  # type: ignore[misc]
        )

    def add_keys(writer: GGUFWriter) -> None:
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(folder.resolve().name)
        architecture.add_keys(writer, vocab_size=len(vocabulary.tokens), file_type=file_type)
        add_tokenizer(writer, folder, vocabulary)

    _write(out, architecture.name, add_keys, tensors)


def write_adapter(folder: Path, base: Path, out: Path) -> None:
    """Write a LoRA adapter as a GGUF file that llama.cpp applies to a converted base (--lora).

    llama.cpp scales B A by alpha / rank with one alpha for all layers; other scales are multiplied into B.

    Args:
        base: the base's folder; only its config.json is read.
    Raises:
        UserError: the adapter is not plain LoRA on linear layers, or the file cannot be written.
    """
    adapter, architecture = open_adapter(folder), Architecture(_read_config(base))
    names = [name for name in adapter.files.files if name.endswith(".lora_A.weight")]
    pairs = {name: name.replace(".lora_A.", ".lora_B.") for name in names}
    others = adapter.files.files.keys() - pairs.keys() - set(pairs.values())
    if others or adapter.config.use_dora or adapter.config.target_parameters:
        what = "DoRA" if adapter.config.use_dora else next(iter(sorted(others)), "LoRA of experts")
        raise UserError(f"--adapter {folder} has {what}, which llama.cpp does not apply. Merge it: merge, then gguf.")
    tensors: dict[str, _Tensor] = {}
    for name_A, name_B in pairs.items():
        path = name_A.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        target = architecture.tensor_name(f"{path}.weight")
        scale = _scaling(adapter, path, adapter.files.shape(name_A)[0])

        def read_B(name: str = name_B, path: str = path, scale: float = scale) -> np.ndarray:
            return architecture.reordered(path, adapter.read(name).numpy() * np.float32(scale))

        kind = GGMLQuantizationType.F32
        tensors[f"{target}.lora_a"] = _Tensor(
            tuple(adapter.files.shape(name_A)),
            kind,
            lambda name=name_A: adapter.read(name).numpy(),  # type: ignore[misc]
        )
        tensors[f"{target}.lora_b"] = _Tensor(tuple(adapter.files.shape(name_B)), kind, read_B)

    def add_keys(writer: GGUFWriter) -> None:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(adapter.config.lora_alpha))

    _write(out, architecture.name, add_keys, tensors)


def _scaling(adapter: PeftFolder, path: str, rank: int) -> float:
    """What B is multiplied by, so that alpha / rank is the adapter's own scale."""
    from fsdp_qlora.adapters.targets import find_pattern

    config = adapter.config
    key = find_pattern(config.alpha_pattern or {}, path)
    alpha = config.lora_alpha if key is None else config.alpha_pattern[key]
    own = alpha / (rank**0.5 if config.use_rslora else rank)
    return float(own * rank / config.lora_alpha)


def _read_config(folder: Path) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is no model folder: {str(error).splitlines()[0]}") from error


def _kind_of(shape: tuple[int, ...], wanted: GGMLQuantizationType) -> GGMLQuantizationType:
    """Vectors stay in float32, and rows that are no whole blocks of q8_0 in float16, as in llama.cpp."""
    if len(shape) < 2:
        return GGMLQuantizationType.F32
    is_odd = shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] != 0
    return GGMLQuantizationType.F16 if is_odd else wanted


def _read(files: WeightFiles, architecture: Architecture, name: str) -> np.ndarray:
    values = files.read_rows(name, 0, files.shape(name)[0])
    return architecture.reordered(name, values.to(torch.float32).numpy())


def _encoded(name: str, tensor: _Tensor) -> np.ndarray:
    values = tensor.read()
    if tensor.kind == GGMLQuantizationType.F32:
        return values
    rows = max(1, _PIECE // values.shape[-1])
    with np.errstate(over="ignore"):
        parts = [gguf.quantize(values[start : start + rows], tensor.kind) for start in range(0, len(values), rows)]
    encoded = np.concatenate(parts)
    if tensor.kind == GGMLQuantizationType.F16 and not np.isfinite(encoded).all():
        raise UserError(f"{name} has values that are too large for float16. Give --type f32 or q8_0.")
    return encoded


def _write(
    out: Path, architecture: str, add_keys: Callable[[GGUFWriter], None], tensors: Mapping[str, _Tensor]
) -> None:
    try:
        with staged_file(out) as partial:
            writer = GGUFWriter(str(partial), gguf.MODEL_ARCH_NAMES[ARCHITECTURES[architecture]])
            add_keys(writer)
            for name, tensor in tensors.items():
                shape = tensor.shape
                if tensor.kind == GGMLQuantizationType.Q8_0:
                    shape = gguf.quant_shape_to_byte_shape(shape, tensor.kind)
                dtype = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
                kind = np.dtype(dtype.get(tensor.kind, np.uint8))
                writer.add_tensor_info(name, shape, kind, int(np.prod(shape)) * kind.itemsize, raw_dtype=tensor.kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, tensor in tqdm(tensors.items(), desc="Writing", unit=" tensors", disable=not sys.stderr.isatty()):
                writer.write_tensor_data(np.ascontiguousarray(_encoded(name, tensor)))
            writer.close()
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror or error}).") from error
