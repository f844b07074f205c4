"""Makes a model folder in bitsandbytes' 4-bit format, with one piece of a tensor in memory at a time."""

import json
import logging
from pathlib import Path

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from fsdp_qlora.export.model_folder import build_plain_model, check_is_new, new_model_folder, new_weights, read_pieces
from fsdp_qlora.model.architecture import models
from fsdp_qlora.model.quantizers.base import packed_forms
from fsdp_qlora.model.quantizers.bnb_4bit import EXPERTS_KEY, Bnb4bitWeight, quantize_blocks, take_packed
from fsdp_qlora.model.quantizers.routed import quantizable_weights
from fsdp_qlora.model.quantizers.table import quantize_layers
from fsdp_qlora.sharding.loading.decoded import take_format
from fsdp_qlora.sharding.loading.load_weights import check_finite, match_tensors, quantized_layers
from fsdp_qlora.sharding.loading.weight_files import WeightFiles, Weights
from fsdp_qlora.utils import hub
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.safetensors_files import PackedFiles, TensorForm

log = logging.getLogger("fsdp_qlora")


def quantize_model(
    model_name: str, out: Path, *, quant_type: str, double_quant: bool, trust_remote_code: bool = False
) -> None:
    """Write a model folder in 4 bits, with the weights quantized that a qlora run would quantize."""
    check_is_new(out)
    folder = hub.find_model_folder(model_name, with_weights=True, with_code=trust_remote_code)
    config = models.load_config(folder, model_name, trust_remote_code=trust_remote_code)
    stored = take_format(config)
    if stored:
        log.info(stored.describe_use(quantizes=True))
    weight_files = WeightFiles(folder, stored)
    if take_packed(config, model_name):
        raise UserError(f"model_name {model_name} is quantized to 4 bits already; training can load it as it is.")
    model = build_plain_model(config, torch.bfloat16, trust_remote_code=trust_remote_code)
    linears, experts = quantizable_weights(model)
    options = {"quant_type": quant_type, "double_quant": double_quant, "compute_dtype": torch.bfloat16}
    has_experts = quantize_layers(model, linears, experts, "bnb_4bit", **options)
    if has_experts:
        log.info(
            "The experts are in 4 bits too, for which bitsandbytes has no format: training can load the saved model, "
            "transformers cannot."
        )
    weights = match_tensors(model, weight_files)
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=[name for name, module in model.named_modules() if isinstance(module, nn.Linear)],
    )
    content["quantization_config"] = quantization.to_dict() | ({EXPERTS_KEY: True} if has_experts else {})
    with new_model_folder(out, folder, content) as partial:
        _write_weights(partial, model, weights)


def _write_weights(folder: Path, model: PreTrainedModel, weights: Weights) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = {name: layer for name, layer in quantized_layers(model).items() if isinstance(layer, Bnb4bitWeight)}
    forms: dict[str, TensorForm] = {}
    for name, source in weights.sources.items():
        forms |= packed_forms(name, layers[name]) if name in layers else {name: weights.files.form(source)}
    absmax: list[torch.Tensor] = []  # of the pieces of the weight so far
    files = new_weights(folder, forms)
    for name, part, content in read_pieces(weights.files, weights.sources, "Quantizing"):
        if name not in layers:
            files.write(name, part.start * content.element_size(), content)
            continue
        check_finite(content, name)
        codes, of_blocks = quantize_blocks(content.to(device), layers[name].quant_type)
        files.write(name, part.start // 2, codes.cpu())
        absmax.append(of_blocks)
        if part.stop == weights.files.shape(part.name).numel():
            _write_statistics(files, name, layers[name], torch.cat(absmax), content.dtype)
            absmax.clear()


def _write_statistics(
    files: PackedFiles, weight: str, layer: Bnb4bitWeight, absmax: torch.Tensor, dtype: torch.dtype
) -> None:
    """Write the parts of a quantized weight other than its codes. dtype: of the unquantized weight."""
    contents = {"absmax": absmax}
    if layer.double_quant:
        contents["absmax"], contents["nested_absmax"] = layer.quantize_absmax(absmax)
    for suffix, stored in layer.stored_parameters().items():
        if stored.parameter in contents:
            files.write(weight + suffix, 0, contents[stored.parameter].cpu())
    for suffix, whole in layer.stored_whole(dtype).items():
        files.write(weight + suffix, 0, whole)
