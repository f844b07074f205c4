"""Makes a model folder from another one, also in 4 bits.

One piece of a tensor is in memory at a time.
"""

import contextlib
import ctypes
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_qlora.config.train_types import QUANT_TYPES
from fsdp_qlora.model.architecture.config import load_config
from fsdp_qlora.model.architecture.meta_model import build_meta_model
from fsdp_qlora.model.experts import quantizable_weights, route_experts
from fsdp_qlora.model.formats.bitsandbytes import BitsandbytesFormat, bitsandbytes_config
from fsdp_qlora.model.formats.methods import WRITTEN, take_format
from fsdp_qlora.model.formats.settings import MODELOPT_FILE
from fsdp_qlora.model.formats.written import WrittenFormat
from fsdp_qlora.model.quantizers.base import packed_forms
from fsdp_qlora.model.quantizers.bnb_4bit import BITSANDBYTES, Bnb4bitWeight, quantize_blocks
from fsdp_qlora.model.quantizers.e2m1 import global_scale
from fsdp_qlora.model.quantizers.table import quantize_layers
from fsdp_qlora.sharding.loading.heads import settle_head, with_own_head
from fsdp_qlora.sharding.loading.load_weights import (
    check_finite,
    describe_left_out,
    match_tensors,
    quantized_layers,
)
from fsdp_qlora.sharding.loading.weight_files import TensorSlice, WeightFiles, Weights, read_ahead
from fsdp_qlora.utils import hub
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import read_json, refusal_named, staged_folder
from fsdp_qlora.utils.machine import free_disk
from fsdp_qlora.utils.safetensors_files import PackedFiles, TensorForm
from fsdp_qlora.utils.text import format_bytes

log = logging.getLogger("fsdp_qlora")

_CPU = torch.device("cpu")
# Bytes of a tensor in memory at a time: whole blocks of any quantizer in any dtype.
_PIECE_BYTES = 64 * 2**20


def return_freed_memory() -> None:
    """Make the C library return freed memory to the system.

    By default it keeps blocks of up to 32 MiB.

    Measured with a model of 1.4 GB: 0.6 GB instead of up to 1.2 GB at the peak of a merge.
    """
    # M_MMAP_THRESHOLD of glibc's malloc.h. A threshold that is set no longer grows with the blocks
    # that are freed.
    m_mmap_threshold = -3
    # Another C library has no mallopt().
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(m_mmap_threshold, 2**20)


def build_plain_model(
    config: PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model on the meta device, with plain layers and experts; its buffers are on the CPU."""
    model = build_meta_model(
        config,
        attn_implementation="auto",
        dtype=dtype,
        compute_dtype=dtype,
        device=_CPU,
        experts_implementation="eager",
        trust_remote_code=trust_remote_code,
    )
    route_experts(model, _CPU)
    return model


def check_is_new(out: Path) -> None:
    """Refuse a folder that is not empty, before any work."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} exists already and is not empty. Give another folder.")


@contextlib.contextmanager
def new_model_folder(out: Path, source: Path, config: Mapping[str, Any]) -> Iterator[Path]:
    """A folder with the small files of `source`, and its code if it has any.

    It becomes `out` at the end of the block.

    config.json with the content `config` is written last; after a failure nothing remains of `out`.
    It tells the format of the weights, so that modelopt's own file is left out.
    """
    with refusal_named("out", out), staged_folder(out) as partial:
        patterns = list(hub.SMALL_FILES)
        # auto_map names classes in the model's own code.
        if "auto_map" in config:
            patterns.append("*.py")
        for path in {path for pattern in patterns for path in source.glob(pattern)}:
            # The index of the source's weights names files that the new folder does not have.
            is_written = path.name in ("config.json", MODELOPT_FILE) or path.name.endswith(
                ".index.json"
            )
            if path.is_file() and not is_written:
                shutil.copyfile(path, partial / path.name)
        yield partial
        # Last, since a folder with a config.json counts as a model.
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in out.iterdir())
    log.info("Saved: %s (%s)", out, format_bytes(size))


def new_weights(folder: Path, forms: Mapping[str, TensorForm]) -> PackedFiles:
    """Create safetensors files of zeros in a model folder.

    Raises UserError if they do not fit on the disk.
    """
    files = PackedFiles(folder, forms)
    free = free_disk(folder)
    if free < files.num_bytes:
        raise UserError(
            f"{folder.parent} has {format_bytes(free)} free, "
            f"{format_bytes(files.num_bytes)} are needed."
        )
    files.create()
    return files


def read_pieces(
    weight_files: WeightFiles,
    sources: Mapping[str, str],
    title: str,
    unit: Callable[[str], int] = lambda name: 1,
) -> Iterator[tuple[str, TensorSlice, torch.Tensor]]:
    """Yield tensors in pieces of bounded size, read ahead, with a progress bar on a terminal.

    sources: name of a new tensor -> name of its source in `weight_files`. unit: elements of a new
    tensor that come together.
    """
    jobs = []
    for name, source in sources.items():
        count = weight_files.shape(source).numel()
        size = _PIECE_BYTES // weight_files.dtype(source).itemsize
        # Whole units, so that no block of a quantizer is in two pieces.
        size = max(1, size // unit(name)) * unit(name)
        for start in range(0, count, size):
            jobs.append((name, TensorSlice(source, start, min(start + size, count))))
    total = sum(
        (part.stop - part.start) * weight_files.dtype(part.name).itemsize for _, part in jobs
    )
    with tqdm(
        total=total, unit="B", unit_scale=True, desc=title, disable=not sys.stderr.isatty()
    ) as bar:
        # The next piece is read while one is computed: two in memory.
        contents = read_ahead(weight_files, [part for _, part in jobs], max_bytes=2 * _PIECE_BYTES)
        for (name, part), content in zip(jobs, contents, strict=True):
            yield name, part, content
            bar.update(content.nbytes)


def quantize_model(
    model_name: str,
    out: Path,
    *,
    quant_type: str,
    double_quant: bool,
    trust_remote_code: bool = False,
) -> None:
    """Write a model folder with the weights quantized that a qlora run would quantize."""
    check_is_new(out)
    folder = hub.find_model_folder(model_name, with_weights=True, with_code=trust_remote_code)
    config = load_config(folder, model_name, trust_remote_code=trust_remote_code)
    stored = take_format(config, model_name, folder)
    if isinstance(stored, BitsandbytesFormat):
        raise UserError(
            f"model_name {model_name} is quantized to 4 bits already; training can "
            "load it as it is."
        )
    if stored:
        log.info(stored.describe_decoding(quantizes=True))
    settle_head(config, folder, stored, trust_remote_code=trust_remote_code)
    weight_files = WeightFiles(folder, stored)
    names = list(weight_files.files)
    model = build_plain_model(config, torch.bfloat16, trust_remote_code=trust_remote_code)
    linears, experts = quantizable_weights(model)
    quantizer = QUANT_TYPES[quant_type]
    options: dict[str, Any] = {}
    # Tensors that the model does not use: bitsandbytes' folder is written by the model's names, the
    # others by those of the files.
    in_result = "The result has them as they are."
    if quantizer == BITSANDBYTES:
        options = {"quant_type": quant_type, "double_quant": double_quant}
        in_result = "The result lacks them."
    weights = match_tensors(model, weight_files)
    line = describe_left_out(weights, model, in_result=in_result)
    if line:
        log.warning("%s", line)
    has_experts = quantize_layers(
        model, linears, experts, quantizer, compute_dtype=torch.bfloat16, **options
    )
    # What is still a linear layer was not quantized: routers, a head.
    plain = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    content = with_own_head(read_json(folder / "config.json"), config)
    if quantizer != BITSANDBYTES:
        written = WRITTEN[quant_type]
        content["quantization_config"] = written.config(plain)
        with new_model_folder(out, folder, content) as partial:
            _write_published(partial, weights, names, [*quantized_layers(model)], written, content)
        return
    if has_experts:
        log.info(
            "The experts are in 4 bits too, for which bitsandbytes has no format: training can "
            "load the saved model, transformers cannot."
        )
    content["quantization_config"] = bitsandbytes_config(plain, **options, has_experts=has_experts)
    with new_model_folder(out, folder, content) as partial:
        _write_weights(partial, model, weights)


def _write_published(
    folder: Path,
    weights: Weights,
    names: Sequence[str],
    quantized: Sequence[str],
    written: WrittenFormat,
    content: Any,
) -> None:
    """Write weights in a format of compressed-tensors.

    names: of the tensors in the model's files. quantized: of the model's weights. content: of
    config.json.
    """
    files = weights.files
    forms = {name: weights.files.form(name) for name in names}
    chosen = {
        part.name: part.name for name in quantized for part in files.parts(weights.sources[name])
    }
    for name in chosen:
        forms |= written.forms(name, forms.pop(name).shape)
    target = new_weights(folder, forms)
    # Read as the configuration that was just made says: writing and reading share one definition.
    new = WeightFiles(folder, take_format(PretrainedConfig(**content), ""))
    # Codes of NVFP4 depend on the largest magnitude of the whole weight, so all weights are read
    # once before.
    if written.has_global_scale:
        largest = dict.fromkeys(chosen, torch.zeros(()))
        for name, _, values in read_pieces(files, chosen, "Measuring"):
            largest[name] = torch.maximum(largest[name], values.abs().max().float())
        for name, value in largest.items():
            target.write(written.global_scale_of(name), 0, global_scale(value))
    everything = dict(zip(names, names, strict=True))
    for name, part, values in read_pieces(files, everything, "Quantizing", new.unit):
        check_finite(values, name)
        for tensor, start, encoded in new.encode(name, part.start, values):
            target.write(tensor, start * encoded.element_size(), encoded)


def _write_weights(folder: Path, model: PreTrainedModel, weights: Weights) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = {
        name: layer
        for name, layer in quantized_layers(model).items()
        if isinstance(layer, Bnb4bitWeight)
    }
    forms: dict[str, TensorForm] = {}
    for name, source in weights.sources.items():
        if name in layers:
            forms |= packed_forms(name, layers[name])
        else:
            forms[name] = weights.files.form(source)
    # Of the pieces of the weight so far: double quantization needs the mean of all of them.
    absmax: list[torch.Tensor] = []
    files = new_weights(folder, forms)
    for name, part, content in read_pieces(weights.files, weights.sources, "Quantizing"):
        if name not in layers:
            files.write(name, part.start * content.element_size(), content)
            continue
        check_finite(content, name)
        codes, absmax_of_piece = quantize_blocks(content.to(device), layers[name].quant_type)
        # Two codes per byte; pieces start at whole blocks.
        files.write(name, part.start // 2, codes.cpu())
        absmax.append(absmax_of_piece)
        if part.stop == weights.files.shape(part.name).numel():
            _write_statistics(files, name, layers[name], torch.cat(absmax), content.dtype)
            absmax.clear()


def _write_statistics(
    files: PackedFiles, weight: str, layer: Bnb4bitWeight, absmax: torch.Tensor, dtype: torch.dtype
) -> None:
    """Write the parts of a quantized weight other than its codes.

    dtype: of the unquantized weight.
    """
    contents = {"absmax": absmax}
    if layer.double_quant:
        contents["absmax"], contents["nested_absmax"] = layer.quantize_absmax(absmax)
    for name, values in contents.items():
        files.write(f"{weight}.{name}", 0, values.cpu())
    # Only now does the state have the mean of absmax.
    for suffix, whole in layer.stored_whole(dtype).items():
        files.write(weight + suffix, 0, whole)
