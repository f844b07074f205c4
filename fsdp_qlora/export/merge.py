"""Merges an adapter into its base: a model folder that loads without PEFT, written a piece of a tensor at a time."""

import contextlib
import dataclasses
import json
import logging
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.config.train_types import TrainType
from fsdp_qlora.distributed.device import choose_device
from fsdp_qlora.distributed.process_group import process_group_closed, start_process_group
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.shards import build_mesh
from fsdp_qlora.export.card import Base, merged_documents
from fsdp_qlora.export.merging import Changes, MergedModel, PeftFolder, open_adapter, split_ends
from fsdp_qlora.export.model_folder import build_plain_model, check_is_new, new_model_folder, new_weights
from fsdp_qlora.model.adapters.insert import LoraOptions, reduces_base
from fsdp_qlora.model.architecture import models
from fsdp_qlora.model.architecture.precision import PRECISIONS, choose_precision
from fsdp_qlora.model.build_model import LayerOptions, build_model
from fsdp_qlora.model.quantizers.bnb_4bit import PackedFormat, take_packed
from fsdp_qlora.planning.plan import quantizer_options
from fsdp_qlora.sharding.loading.decoded import take_format
from fsdp_qlora.sharding.loading.load_weights import load_quantized, match_tensors, quantized_layers
from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from fsdp_qlora.utils import hub
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import read_json
from fsdp_qlora.utils.run_files import RECORD

log = logging.getLogger("fsdp_qlora")

# Files of the tokenizer, which are in the adapter's folder as the run used them.
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Merge:
    """An adapter and its base, before anything is computed. run: the options of its training."""

    run: TrainConfig
    folder: Path
    config: PretrainedConfig
    adapter: PeftFolder
    original: MergedModel
    layers: Mapping[str, Any]
    is_decoded: bool

    def on(self, base: str, ranks: Ranks, mesh: DeviceMesh | None, dtype: torch.dtype | None) -> MergedModel:
        """The merged model.

        Args:
            base: original or dequantized. dtype: None for that of the base's files.
            mesh: of this one process; needed for `dequantized`.
        """
        if base == "original" or not self.layers:
            return dataclasses.replace(self.original, dtype=dtype)
        assert mesh is not None
        is_reduced = reduces_base(self.run.init_lora_weights)
        weights, changes, device = self.original.weights, self.original.changes, ranks.device

        def dequantize(name: str) -> torch.Tensor | None:
            if name not in self.layers:
                return None
            layer, change = self.layers[name], changes.low_rank(name) if is_reduced else None
            layer.to_empty(device=device)
            load_quantized(name, layer, weights, mesh, device, change.reduced if change else None)
            whole: torch.Tensor = layer.dequantize().cpu().flatten()
            layer.to("meta")
            return whole

        return dataclasses.replace(self.original, dtype=dtype, dequantize=dequantize, is_reduced=is_reduced)


def open_merge(adapter_path: Path, run: TrainConfig) -> Merge:
    """Read an adapter's configuration and match it with its base, stored as the run's options say."""
    adapter = open_adapter(adapter_path)
    name, with_code = run.model_name, run.trust_remote_code
    folder = hub.find_model_folder(name, with_weights=True, with_code=with_code)
    config = models.load_config(folder, name, trust_remote_code=with_code)
    stored = take_format(config)
    packed = take_packed(config, name)
    changes = Changes(build_plain_model(config, torch.float32, trust_remote_code=with_code), adapter)
    model = build_plain_model(config, torch.float32, trust_remote_code=with_code)
    quantized = _quantized_model(config, run, packed) if run.kind.quantizer else None
    if packed and quantized is None:
        raise UserError(f"model_name {name} is quantized to 4 bits: give --train_type qlora, or the original model.")
    files = WeightFiles(folder, stored)
    names = list(files.files)
    weights = match_tensors(quantized if packed and quantized is not None else model, files, packed=packed is not None)
    kept = {name for name, _ in (*model.named_parameters(), *models.persistent_buffers(model))}
    parts = {source for name, source in weights.sources.items() if name not in kept}  # statistics of packed weights
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    merged = MergedModel(
        weights, adapter, changes, shapes, [name for name in names if name not in parts],
        None, split_ends(model, changes),
    )  # fmt: skip
    layers = quantized_layers(quantized) if quantized is not None else {}
    return Merge(run, folder, config, adapter, merged, layers, is_decoded=bool(stored or packed))


def _quantized_model(config: PretrainedConfig, run: TrainConfig, packed: PackedFormat | None) -> PreTrainedModel:
    quantizer = run.kind.quantizer
    frozen = TrainType(adapter=None, quantizer=quantizer, trains="adapter")
    layers = LayerOptions(lora=LoraOptions(), quantizer=quantizer_options(run, quantizer), prequantized=packed)
    precision = PRECISIONS[choose_precision(run.precision, choose_device(run.device, 0))]
    return build_model(
        config, frozen, precision, torch.device("cpu"), layers, attn_implementation="auto",
        trust_remote_code=run.trust_remote_code,
    ).model  # fmt: skip


@contextlib.contextmanager
def one_process(ranks: Ranks) -> Iterator[DeviceMesh]:
    """A process group and mesh of this process only."""
    with process_group_closed():
        start_process_group(ranks)
        yield build_mesh(ranks, sharding_strategy="full_shard")


def check_base(merge: Merge, base: str) -> None:
    """Refuse a base that is not available. Raises UserError."""
    if base == "original" and merge.original.weights.packed:
        raise UserError(
            f"model_name {merge.run.model_name} has 4-bit weights only. Give --base dequantized, or the model "
            "with 16-bit weights in --model_name."
        )
    if base == "dequantized" and not merge.layers:
        raise UserError(
            f"--base dequantized: {merge.adapter.path} was not trained on a quantized base, or nothing says how it was "
            "quantized. Give --base original, or the run's --train_type (and --quant_type and the like)."
        )


def write_merged(merge: Merge, merged: MergedModel, out: Path) -> None:
    """Write a folder that transformers and vLLM load. It gets its name when it is complete."""
    check_is_new(out)
    texts = _documents(merge, merged)
    with new_model_folder(out, merge.folder, _config_of(merge, merged)) as partial:
        for name in _TOKENIZER:
            if (merge.adapter.path / "tokenizer_config.json").is_file() and (merge.adapter.path / name).is_file():
                shutil.copyfile(merge.adapter.path / name, partial / name)
        _write_weights(merged, partial)
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")


def _documents(merge: Merge, merged: MergedModel) -> dict[str, str]:
    """The card and training.json, name -> text."""
    config, path = merge.adapter.config, merge.adapter.path
    targets = sorted(config.target_modules) if isinstance(config.target_modules, set) else config.target_modules
    settings = {"train_type": "dora" if config.use_dora else "lora", "lora_rank": config.r}
    settings |= {"lora_alpha": config.lora_alpha, "use_rslora": config.use_rslora, "lora_target_modules": targets}
    into = "dequantized" if merged.dequantize else "original"
    about = {"adapter": path.resolve().name, "kind": "dora" if config.use_dora else "lora", "into": into}
    return merged_documents(read_json(path / RECORD), Base.of(merge.run.model_name), settings, about)


def _write_weights(merged: MergedModel, folder: Path) -> None:
    forms = merged.forms()
    total = sum(form.num_bytes for form in forms.values())
    files, hidden = new_weights(folder, forms), not sys.stderr.isatty()
    with tqdm(total=total, unit="B", unit_scale=True, desc="Merging", disable=hidden) as bar:
        for name, start, values in merged.pieces():
            if values.is_floating_point() and not values.isfinite().all():
                raise UserError(
                    f"The merged {name} has values that are not finite in {str(forms[name].dtype)[6:]}. Give "
                    "--dtype bf16 or fp32, or check the adapter."
                )
            files.write(name, start * values.element_size(), values)
            bar.update(values.nbytes)


def _config_of(merge: Merge, merged: MergedModel) -> dict[str, Any]:
    """The base's config.json as the merged model needs it."""
    content: dict[str, Any] = json.loads((merge.folder / "config.json").read_text(encoding="utf-8"))
    text = content.get("text_config", content)
    if merge.is_decoded:
        content.pop("quantization_config", None)
    if merged.dtype or merge.is_decoded:
        for part in (content, text):
            part.pop("torch_dtype", None)
            part["dtype"] = str(merged.dtype or torch.bfloat16).removeprefix("torch.")
    if merged.copies:
        content["tie_word_embeddings"] = text["tie_word_embeddings"] = False
    sizes = [merged.shape(name)[0] for name, shape in merged.parameters.items() if merged.shape(name) != shape]
    if sizes:  # embeddings were resized
        text["vocab_size"] = max(sizes)
    return content
