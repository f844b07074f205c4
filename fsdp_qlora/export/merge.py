"""Merges an adapter into its base: a model folder that loads without PEFT.

It is computed and written a piece at a time.

Shapes: a weight is [.., rows, columns], where the first dims number the experts.
"""

import contextlib
import dataclasses
import logging
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.config.train_types import TRAIN_TYPES, TrainType
from fsdp_qlora.distributed.device import choose_device
from fsdp_qlora.distributed.process_group import process_group_closed, start_process_group
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.shards import build_mesh
from fsdp_qlora.export.card import BaseName, merged_documents
from fsdp_qlora.export.changes import Changes, LowRankUpdate, PeftFolder, open_adapter
from fsdp_qlora.export.effect import Effect, Piece, check_block
from fsdp_qlora.export.model_folder import build_plain_model, new_model_folder, new_weights
from fsdp_qlora.model.adapters import peft_folder
from fsdp_qlora.model.adapters.insert import LoraOptions
from fsdp_qlora.model.adapters.token_rows import NewTokens
from fsdp_qlora.model.architecture.config import load_config
from fsdp_qlora.model.architecture.precision import PRECISIONS, choose_precision
from fsdp_qlora.model.architecture.structure import has_tied_embeddings, persistent_buffers
from fsdp_qlora.model.build_model import LayerOptions, build_model
from fsdp_qlora.model.formats.bitsandbytes import BitsandbytesFormat
from fsdp_qlora.model.formats.methods import take_format
from fsdp_qlora.model.formats.published import PublishedFormat
from fsdp_qlora.model.formats.settings import KEYS, MODELOPT_FILE
from fsdp_qlora.planning.plan import quantizer_options
from fsdp_qlora.sharding.loading.heads import settle_head, with_own_head
from fsdp_qlora.sharding.loading.load_weights import (
    describe_left_out,
    load_quantized,
    match_tensors,
    quantized_layers,
)
from fsdp_qlora.sharding.loading.weight_files import TensorSlice, WeightFiles, Weights
from fsdp_qlora.utils import hub
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import read_json
from fsdp_qlora.utils.run_files import RECORD
from fsdp_qlora.utils.safetensors_files import TensorForm

log = logging.getLogger("fsdp_qlora")

# Weights changed at a time, in float32: 32 MiB.
_PIECE = 2**23


@dataclass(frozen=True)
class MergedModel:
    """A base with an adapter's changes."""

    weights: Weights
    """The base's."""
    changes: Changes
    parameters: Mapping[str, torch.Size]
    """The model's parameters, with the base's shapes."""
    names: list[str]
    """The tensors of the base's files that belong to the merged model."""
    dtype: torch.dtype | None
    """Dtype of the merged parameters; None for the dtype of each in the base's files."""
    copies: Mapping[str, str]
    """A parameter that the base does not have -> the one it is made from: a head that shared the
    embeddings."""
    dequantize: Callable[[str], torch.Tensor | None] | None = None
    """Weight -> its values after the run's quantizer, flat on the CPU, or None if it is not
    quantized; without it, all are as in the base's files."""
    effect: Effect = dataclasses.field(default_factory=Effect)
    """Compares what has been computed so far."""
    # Whether its files are in the base's format; no field, since it belongs to the class.
    keeps_format = False

    def forms(self) -> dict[str, TensorForm]:
        """Every tensor of the merged model's files, in the base's order."""
        forms = {}
        files = self.weights.files
        for name in self._order():
            source = self._source(name)
            dtype = self.dtype
            if dtype is None:
                stored = files.dtype(source)
                # Codes of weights that are quantized already are integers.
                dtype = stored if stored.is_floating_point else torch.bfloat16
            for part, _, _ in self._parts(name):
                # A parameter that is one tensor may be resized; parts of one keep their shapes.
                shape = self.shape(name) if part in (name, source) else files.shape(part)
                forms[part] = TensorForm(dtype, tuple(shape))
        # Tensors of the files that no parameter is made of are copied.
        rest = {name: files.form(name) for name in self.names if name not in forms}
        return {name: forms[name] for name in [*self.names, *forms] if name in forms} | rest

    def pieces(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """All tensors in pieces.

        A piece is (tensor of the files, element at which it starts, values in the tensor's dtype).
        """
        forms = self.forms()
        done = set()
        for name in self._order():
            for part, start, values, base in self._changed(name):
                done.add(part)
                # The effect is that of the values as rounded to the files' dtype.
                written = values.to(forms[part].dtype)
                if base is not None:
                    self.effect.add(base, values, written)
                yield part, start, written
        for name in forms.keys() - done:
            for start, stop in spans(forms[name].num_bytes // forms[name].dtype.itemsize, 1):
                yield name, start, self.weights.files.read_flat(name, start, stop)

    def _order(self) -> list[str]:
        """The parameters that are computed, in the order of the base's files."""
        files = self.weights.files
        computed = [
            name for name in self.parameters if name in self.weights.sources or name in self.copies
        ]
        # By file, so that one file after another is read.
        return sorted(computed, key=lambda name: str(files.files[self._source(name)]))

    def _source(self, name: str) -> str:
        return self.weights.sources[self.copies.get(name, name)]

    def shape(self, name: str) -> torch.Size:
        """The shape of a merged parameter: embeddings may have been resized."""
        change = self.changes.replaced.get(name)
        return self.changes.adapter.files.shape(change.name) if change else self.parameters[name]

    def _parts(self, name: str) -> list[TensorSlice]:
        """The tensors of the merged files that make up a parameter."""
        source = self._source(name)
        # The base's files may have a tensor that embeddings and head share under the head's name.
        is_split = name in self.copies or name in self.copies.values()
        is_replaced = name in self.changes.replaced or name in self.changes.new_rows
        if is_split or self.weights.packed or is_replaced:
            new_name = name if name in self.copies else source
            return [TensorSlice(new_name, 0, self.shape(name).numel())]
        return self.weights.files.parts(source)

    def warn(self, folder: Path) -> None:
        """Say how much of the adapter's update the weights of this folder have, and check a block.

        They are complete. Raises UserError if they are not the base with the adapter.
        """
        dtypes = {form.dtype for form in self.forms().values() if form.dtype.is_floating_point}
        lowest = min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
        form = str(lowest).removeprefix("torch.")
        added = self.changes.layers.keys() - self.changes.new_rows
        updated = [name for name in self._order() if name in added]
        check_block(WeightFiles(folder), updated, self._changed)
        log.info("%s", self.effect.describe(form))
        self.effect.warn(
            form,
            advice="Give --dtype fp32, or load the adapter beside it",
        )

    def _changed(self, name: str, dtype: torch.dtype = torch.float32) -> Iterator[Piece]:
        """The pieces of one parameter. dtype: in which the update is added."""
        change = self.changes.update(name)
        if isinstance(change, LowRankUpdate):
            change = change.to(dtype)
        replaced = self.changes.replaced.get(name)
        whole = None
        if self.dequantize and not replaced:
            whole = self.dequantize(self.copies.get(name, name))

        def read(start: int, stop: int) -> torch.Tensor:
            if replaced:
                return self.changes.adapter.files.read_flat(replaced.name, start, stop)
            if whole is None:
                return self.weights.files.read_flat(self._source(name), start, stop)
            return whole[start:stop]

        columns = self.parameters[name][-1] if self.parameters[name] else 1
        # Elements of the parameter in the tensors before this one.
        before = 0
        for part, first, last in self._parts(name):
            # Whole rows for the update, and whole blocks of a format that shares scales.
            for start, stop in spans(last - first, math.lcm(columns, self._unit(part))):
                values = read(before + start, before + stop)
                base = values if isinstance(change, LowRankUpdate) else None
                if change:
                    # Rounded once at the end. A copy, since `write_into` works in place and `base`
                    # is compared with the result.
                    rows = values.to(dtype, copy=True).view(-1, columns)
                    values = change.write_into(rows, (before + start) // columns).flatten()
                yield part, first + start, values, base
            before += last - first

    def _unit(self, part: str) -> int:
        """The number of elements of a tensor of the files that are changed together."""
        return 1


def spans(count: int, columns: int) -> Iterator[tuple[int, int]]:
    """The pieces [start, stop) of `count` elements, each of whole rows of `columns`."""
    size = max(1, _PIECE // columns) * columns
    return ((start, min(start + size, count)) for start in range(0, count, size))


def split_ends(model: PreTrainedModel, changes: Changes) -> dict[str, str]:
    """The head -> the embeddings, if they share a tensor in the base and no longer do.

    The adapter then changes one of these two.
    """
    if not has_tied_embeddings(model):
        return {}
    ends = {id(model.get_input_embeddings()): "", id(model.get_output_embeddings()): ""}
    for path, module in model.named_modules():
        if id(module) in ends:
            ends[id(module)] = f"{path}.weight"
    embeddings, head = ends.values()
    # A copy of one of the two is no longer the other's tensor; nor is a low-rank update of one.
    replaced = [changes.replaced[name] for name in (embeddings, head) if name in changes.replaced]
    is_copied = any(change.is_copy for change in replaced)
    if is_copied or changes.layers.keys() - changes.new_rows & {embeddings, head}:
        return {head: embeddings}
    return {}


# Files of the tokenizer, which are in the adapter's folder as the run used them, and
# generation_config.json, which has the run's end tokens.
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


@dataclasses.dataclass(frozen=True)
class Merge:
    """An adapter and its base, before anything is computed. run: the options of its training."""

    run: TrainConfig
    folder: Path
    adapter: PeftFolder
    original: MergedModel
    config: PretrainedConfig
    layers: Mapping[str, Any]
    stored: PublishedFormat | None

    def on(
        self, base: str, ranks: Ranks, mesh: DeviceMesh, dtype: torch.dtype | None
    ) -> MergedModel:
        """The merged model.

        Args:
            base: original or dequantized.
            dtype: None for the dtype of the base's files.
            mesh: of this one process.
        """
        if base == "original" or not self.layers:
            return dataclasses.replace(self.original, dtype=dtype)
        weights = self.original.weights
        device = ranks.device

        def dequantize(name: str) -> torch.Tensor | None:
            if name not in self.layers:
                return None
            # Memory for one weight at a time. What a run computes with are the values after its
            # quantizer, made by the same code with a mesh of one rank.
            layer = self.layers[name]
            layer.to_empty(device=device)
            load_quantized(name, layer, weights, mesh, device)
            whole: torch.Tensor = layer.dequantize().cpu().flatten()
            layer.to("meta")
            return whole

        return dataclasses.replace(self.original, dtype=dtype, dequantize=dequantize)


def open_merge(adapter_path: Path, run: TrainConfig) -> Merge:
    """Read an adapter's configuration, and match it with its base as the run's options store it."""
    adapter = open_adapter(adapter_path)
    name = run.model_name
    with_code = run.trust_remote_code
    folder = hub.find_model_folder(name, with_weights=True, with_code=with_code)
    config = load_config(folder, name, trust_remote_code=with_code)
    # bitsandbytes' codes are loaded into layers (`packed`); other formats are decoded as they are
    # read (`stored`).
    in_files = take_format(config, name, folder)
    packed = stored = None
    if isinstance(in_files, BitsandbytesFormat):
        packed = in_files
    else:
        stored = in_files
    settle_head(config, folder, stored, packed=packed, trust_remote_code=with_code)
    ids = peft_folder.token_ids(adapter_path, adapter.config.to_dict())
    if ids:
        NewTokens(ids).grow(config)
    # PEFT changes the model that it loads an adapter into, so it gets one of its own.
    changes = Changes(
        build_plain_model(config, torch.float32, trust_remote_code=with_code), adapter
    )
    model = build_plain_model(config, torch.float32, trust_remote_code=with_code)
    # Weights that the run has kept are decoded to the same values.
    is_kept = stored is not None and stored.is_kept(
        TRAIN_TYPES[run.train_type].quantizer, run.quant_type
    )
    quantized = None
    if run.kind.quantizer and not is_kept:
        quantized = quantized_model(config, run, packed)
    if packed and quantized is None:
        raise UserError(
            f"model_name {name} is quantized to 4 bits: give --train_type qlora, or "
            "the original model."
        )
    files = WeightFiles(folder, stored)
    # Before the match, which adds the names of converted tensors.
    names = list(files.files)
    built = quantized if packed and quantized is not None else model
    weights = match_tensors(built, files, packed=packed is not None, grown=changes.new_rows)
    line = describe_left_out(weights, built, in_result="The merged model has them as they are.")
    if line:
        log.warning("%s", line)
    shapes = {
        name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    merged = MergedModel(
        weights,
        changes,
        shapes,
        _tensors_to_merge(names, model, weights, changes),
        None,
        split_ends(model, changes),
    )
    layers = quantized_layers(quantized) if quantized is not None else {}
    return Merge(run, folder, adapter, merged, config, layers, in_files)


def _tensors_to_merge(
    names: list[str], model: PreTrainedModel, weights: Weights, changes: Changes
) -> list[str]:
    """The tensors, of these in the base's files, that belong to the merged model."""
    # Copies of a tensor in the files would keep the values before the change.
    if changes.changes_any(weights.copies.values()):
        names = [name for name in names if name not in weights.copies]
    plain_names = {name for name, _ in (*model.named_parameters(), *persistent_buffers(model))}
    # Statistics of packed weights belong to no parameter of a plain model.
    statistics = {source for name, source in weights.sources.items() if name not in plain_names}
    return [name for name in names if name not in statistics]


def quantized_model(
    config: PretrainedConfig, run: TrainConfig, packed: PublishedFormat | None
) -> PreTrainedModel:
    """The base of the run on the meta device, with quantized layers and without an adapter."""
    quantizer = run.kind.quantizer
    frozen = TrainType(adapter=None, quantizer=quantizer, trains="adapter")
    layers = LayerOptions(
        lora=LoraOptions(), quantizer=quantizer_options(run, quantizer), prequantized=packed
    )
    precision = PRECISIONS[choose_precision(run.precision, choose_device(run.device, 0))]
    return build_model(
        config,
        frozen,
        precision,
        torch.device("cpu"),
        layers,
        attn_implementation="auto",
        trust_remote_code=run.trust_remote_code,
    ).model


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
            f"model_name {merge.run.model_name} has 4-bit weights only. Give --base dequantized, "
            "or the model with 16-bit weights in --model_name."
        )
    if base == "dequantized" and not merge.layers:
        raise UserError(
            f"--base dequantized: {merge.adapter.path} was not trained on a quantized base, or "
            "nothing says how it was quantized. Give --base original, or the run's --train_type "
            "(and --quant_type and the like)."
        )


def write_merged(merge: Merge, merged: MergedModel, out: Path) -> None:
    """Write a new folder that transformers and vLLM load. It gets its name when it is complete."""
    # Made first: an error in them must not cost the computation.
    texts = _documents(merge, merged)
    with new_model_folder(out, merge.folder, _config_of(merge, merged)) as partial:
        # Over the base's files, which `new_model_folder` has copied; all of them, or none.
        adapter = merge.adapter.path
        if (adapter / "tokenizer_config.json").is_file():
            for name in _TOKENIZER:
                if (adapter / name).is_file():
                    shutil.copyfile(adapter / name, partial / name)
        modelopt = merge.folder / MODELOPT_FILE
        if merged.keeps_format and modelopt.is_file():
            shutil.copyfile(modelopt, partial / MODELOPT_FILE)
        _write_weights(merged, partial)
        merged.warn(partial)
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")


def _documents(merge: Merge, merged: MergedModel) -> dict[str, str]:
    """The card and training.json, name -> text."""
    config = merge.adapter.config
    path = merge.adapter.path
    targets = config.target_modules
    if isinstance(targets, set):
        # The order of a set may differ between runs.
        targets = sorted(targets)
    kind = "dora" if config.use_dora else "lora"
    settings = {
        "train_type": kind,
        "lora_rank": config.r,
        "lora_alpha": config.lora_alpha,
        "use_rslora": config.use_rslora,
        "lora_target_modules": targets,
    }
    merged_from = {
        "adapter": path.resolve().name,
        "kind": kind,
        "into": "dequantized" if merged.dequantize else "original",
    }
    base = BaseName.of(merge.run.model_name)
    return merged_documents(read_json(path / RECORD), base, settings, merged_from)


def _write_weights(merged: MergedModel, folder: Path) -> None:
    forms = merged.forms()
    total = sum(form.num_bytes for form in forms.values())
    files = new_weights(folder, forms)
    hidden = not sys.stderr.isatty()
    with tqdm(total=total, unit="B", unit_scale=True, desc="Merging", disable=hidden) as bar:
        for name, start, values in merged.pieces():
            # fp16 ends at 65,504. Bytes of a quantized format are integers here.
            if values.is_floating_point() and not values.isfinite().all():
                dtype = str(forms[name].dtype).removeprefix("torch.")
                raise UserError(
                    f"The merged {name} has values that are not finite in {dtype}. Give "
                    "--dtype bf16 or fp32, or check the adapter."
                )
            files.write(name, start * values.element_size(), values)
            bar.update(values.nbytes)


def _config_of(merge: Merge, merged: MergedModel) -> dict[str, Any]:
    """The base's config.json as the merged model needs it."""
    content = with_own_head(read_json(merge.folder / "config.json"), merge.config)
    text = content.get("text_config", content)
    is_decoded = merge.stored is not None and not merged.keeps_format
    if is_decoded:
        for key in KEYS:
            content.pop(key, None)
            text.pop(key, None)
    if merged.dtype or is_decoded:
        for part in (content, text):
            # The key's old name, which would contradict.
            part.pop("torch_dtype", None)
            part["dtype"] = str(merged.dtype or torch.bfloat16).removeprefix("torch.")
    if merged.copies:
        content["tie_word_embeddings"] = text["tie_word_embeddings"] = False
    grown = {name for name, shape in merged.parameters.items() if merged.shape(name) != shape}
    grown = grown | merged.changes.new_rows
    # Embeddings were resized.
    if grown:
        text["vocab_size"] = max(merged.shape(name)[0] for name in grown)
    return content
