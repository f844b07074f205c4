"""Writes a merged model, or an adapter, as a GGUF file for llama.cpp, one tensor in memory at a time.

Keys and names of tensors come from the tables of the package gguf. FAMILIES says what llama.cpp stores in another way
than transformers; each row follows the family's class in llama.cpp's convert_hf_to_gguf.py.
"""

import ctypes
import json
import logging
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, LlamaFileType, SpecialVocab, TokenType
from tqdm import tqdm
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fsdp_qlora.export.merging import Changes, open_adapter
from fsdp_qlora.export.model_folder import build_plain_model
from fsdp_qlora.model.architecture.attention import head_size
from fsdp_qlora.model.architecture.models import decoder_path
from fsdp_qlora.sharding.loading.load_weights import match_tensors
from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import read_json, refusal_named, staged_file
from fsdp_qlora.utils.hub import public_name

ADVICE = "llama.cpp's own converter, convert_hf_to_gguf.py, knows more."


class Family(NamedTuple):
    """A type of model.

    has_interleaved_heads: rows of queries and keys are stored with the pairs of rotated dims side by side.
    has_norms_from_one: transformers stores the weights of norms as differences from 1, llama.cpp as they are.
    """

    arch: MODEL_ARCH
    has_interleaved_heads: bool = False
    has_norms_from_one: bool = False


# model_type of config.json -> its family.
FAMILIES = {
    "llama": Family(MODEL_ARCH.LLAMA, has_interleaved_heads=True),
    "mistral": Family(MODEL_ARCH.LLAMA, has_interleaved_heads=True),
    "qwen2": Family(MODEL_ARCH.QWEN2),
    "qwen3": Family(MODEL_ARCH.QWEN3),
    "gemma": Family(MODEL_ARCH.GEMMA, has_norms_from_one=True),
    "gemma2": Family(MODEL_ARCH.GEMMA2, has_norms_from_one=True),
    "gemma3_text": Family(MODEL_ARCH.GEMMA3, has_norms_from_one=True),
}
# Field of config.json -> what writes it.
_KEYS: dict[str, Callable[[GGUFWriter, Any], None]] = {
    "max_position_embeddings": GGUFWriter.add_context_length,
    "hidden_size": GGUFWriter.add_embedding_length,
    "num_hidden_layers": GGUFWriter.add_block_count,
    "intermediate_size": GGUFWriter.add_feed_forward_length,
    "num_attention_heads": GGUFWriter.add_head_count,
    "num_key_value_heads": GGUFWriter.add_head_count_kv,
    "rms_norm_eps": GGUFWriter.add_layer_norm_rms_eps,
    "attn_logit_softcapping": GGUFWriter.add_attn_logit_softcapping,
    "final_logit_softcapping": GGUFWriter.add_final_logit_softcapping,
}
TYPES = {
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
}


class _Tensor(NamedTuple):
    """shape: as in the model. read: its values in that shape, float32."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    read: Callable[[], np.ndarray]


class _Architecture:
    """How a model's tensors are named and stored. Raises UserError if it has something that is not known here."""

    def __init__(self, folder: Path) -> None:
        try:
            whole: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise UserError(f"{folder} is no model folder: {str(error).splitlines()[0]}") from error
        config = whole.get_text_config()
        if config.model_type not in FAMILIES:
            raise UserError(f"Models of type {config.model_type} are not converted here. {ADVICE}")
        self.model = build_plain_model(whole, torch.float32)
        self.config, self.family = config, FAMILIES[config.model_type]
        self._decoder = decoder_path(self.model)
        self.arch_name, self.head_dim = str(gguf.MODEL_ARCH_NAMES[self.family.arch]), head_size(config)
        rope = getattr(config, "rope_parameters", None) or {"rope_type": "default"}
        self.rope: Mapping[str, Any] = rope.get("full_attention", rope)
        kind = self.rope.get("rope_type", "default")
        if kind not in ("default", "linear", "llama3"):
            raise UserError(f"The model has rope type {kind}, which is not converted here. {ADVICE}")
        if getattr(config, "use_sliding_window", False):
            raise UserError(f"The model has a sliding window, which is not converted here. {ADVICE}")
        self._names = gguf.get_tensor_name_map(self.family.arch, config.num_hidden_layers)

    def is_of_text(self, name: str) -> bool:
        """Whether text passes a weight: in models of images too, llama.cpp has the rest in another file."""
        return name.startswith((f"{self._decoder}.", "lm_head."))

    def tensor_name(self, name: str) -> str:
        """llama.cpp's name of a weight."""
        plain = re.sub(rf"^{re.escape(self._decoder)}\.", "model.", name)
        found = self._names.get_name(plain, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise UserError(f"The model has a tensor {name} that llama.cpp's {self.arch_name} does not. {ADVICE}")
        return str(found)

    def convert(self, name: str, values: np.ndarray) -> np.ndarray:
        """A weight's values as llama.cpp stores them."""
        if self.family.has_norms_from_one and name.endswith("norm.weight"):
            return values + np.float32(1)
        heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}
        count = next((heads[part] for part in name.split(".") if part in heads), None)
        if not self.family.has_interleaved_heads or count is None:
            return values
        split = values.reshape(count, 2, values.shape[0] // count // 2, *values.shape[1:])
        return split.swapaxes(1, 2).reshape(values.shape)

    def add_keys(self, writer: GGUFWriter) -> None:
        for name, add in _KEYS.items():
            if getattr(self.config, name, None) is not None:
                add(writer, getattr(self.config, name))
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_rope_freq_base(float(self.rope.get("rope_theta", 10000.0)))
        if self.rope.get("rope_type") == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(float(self.rope["factor"]))
        if self.family.arch in (MODEL_ARCH.GEMMA2, MODEL_ARCH.GEMMA3):  # for others llama.cpp has no window
            writer.add_sliding_window(self.config.sliding_window)

    def rope_factors(self) -> dict[str, np.ndarray]:
        """llama3's scaling of each rotary frequency, which is a tensor."""
        if self.rope.get("rope_type") != "llama3":
            return {}
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](self.config, torch.device("cpu"))
        plain = float(self.rope["rope_theta"]) ** -(np.arange(0, self.head_dim, 2) / self.head_dim)
        return {"rope_freqs.weight": (plain / scaled.numpy()).astype(np.float32)}


def write_model(folder: Path, out: Path, kind: str) -> None:
    """Write a model folder with its tokenizer as a GGUF file. kind: a key of TYPES."""
    architecture = _Architecture(folder)
    config, (wanted, file_type) = architecture.config, TYPES[kind]
    weights = match_tensors(architecture.model, WeightFiles(folder))
    tensors = {
        name: _Tensor(values.shape, GGMLQuantizationType.F32, partial(np.asarray, values))
        for name, values in architecture.rope_factors().items()
    }

    def read(name: str, source: str) -> np.ndarray:
        values = weights.files.read_rows(source, 0, weights.files.shape(source)[0])
        return architecture.convert(name, values.to(torch.float32).numpy())

    for name, source in weights.sources.items():
        if not architecture.is_of_text(name) or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        shape = tuple(weights.files.shape(source))
        tensors[architecture.tensor_name(name)] = _Tensor(shape, _kind_of(shape, wanted), partial(read, name, source))

    # A merged model has its base's name.
    known = read_json(folder / "training.json").get("base", {}).get("name") or public_name(str(folder))

    def add_keys(writer: GGUFWriter) -> None:
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(str(known).rpartition("/")[2])
        architecture.add_keys(writer)
        writer.add_file_type(file_type)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add_tokenizer(writer, folder, config.vocab_size)

    _write(out, architecture.arch_name, add_keys, tensors)


def write_quantized(folder: Path, out: Path, kind: str) -> None:
    """Write a model folder in one of llama.cpp's own types, such as q4_k_m, which its function makes of f16."""
    import llama_cpp

    file_type = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}", None)
    if file_type is None:
        raise UserError(f"--type {kind} is no type of llama.cpp. Give one such as q4_k_m, q5_k_m, q6_k or iq4_xs.")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = file_type
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".gguf_") as name, staged_file(out) as partial:
        half = Path(name) / "f16.gguf"
        write_model(folder, half, "f16")
        if llama_cpp.llama_model_quantize(os.fsencode(half), os.fsencode(partial), ctypes.byref(params)):
            raise UserError(f"llama.cpp could not make {kind} of {folder}: its own lines above say why.")


def write_adapter(folder: Path, base: Path, out: Path) -> None:
    """Write a LoRA adapter as a GGUF file that llama.cpp applies to a converted base (--lora).

    llama.cpp scales B A by alpha / rank with one alpha for all layers; other scales are multiplied into B. Of the base
    only config.json is read.
    """
    architecture, adapter = _Architecture(base), open_adapter(folder)
    changes = Changes(architecture.model, adapter)
    config, files = adapter.config, adapter.files
    others = [name for name in files.files if not name.endswith((".lora_A.weight", ".lora_B.weight"))]
    if others or config.use_dora or config.target_parameters:
        what = "DoRA" if config.use_dora else min(others, default="LoRA of experts")
        raise UserError(f"--adapter {folder} has {what}, which llama.cpp does not apply. Merge it: merge, then gguf.")

    def read(weight: str, which: str) -> np.ndarray:
        change = changes.low_rank(weight)
        assert change is not None
        if which == "A":
            return change.right[0].numpy()
        scale = np.float32(change.scaling * change.right.shape[1] / config.lora_alpha)
        return architecture.convert(weight, change.left[0].numpy() * scale)

    tensors: dict[str, _Tensor] = {}
    for weight, (path, _) in changes.layers.items():
        for which in "AB":
            shape, target = tuple(files.shape(f"{path}.lora_{which}.weight")), architecture.tensor_name(weight)
            kind = GGMLQuantizationType.F32
            tensors[f"{target}.lora_{which.lower()}"] = _Tensor(shape, kind, partial(read, weight, which))

    def add_keys(writer: GGUFWriter) -> None:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(config.lora_alpha))

    _write(out, architecture.arch_name, add_keys, tensors)


def _kind_of(shape: tuple[int, ...], wanted: GGMLQuantizationType) -> GGMLQuantizationType:
    """Vectors stay in float32, and rows that are no whole blocks of q8_0 in float16, as in llama.cpp."""
    if len(shape) < 2:
        return GGMLQuantizationType.F32
    is_odd = shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] != 0
    return GGMLQuantizationType.F16 if is_odd else wanted


def _encode(name: str, tensor: _Tensor) -> np.ndarray:
    with np.errstate(over="ignore"):
        encoded = gguf.quantize(tensor.read(), tensor.kind)
    if tensor.kind == GGMLQuantizationType.F16 and not np.isfinite(encoded).all():
        raise UserError(f"{name} has values that are too large for float16. Give --type f32 or q8_0.")
    return encoded


def _write(out: Path, arch: str, add_keys: Callable[[GGUFWriter], None], tensors: Mapping[str, _Tensor]) -> None:
    with refusal_named("out", out), staged_file(out) as partial:
        writer = GGUFWriter(str(partial), arch)
        add_keys(writer)
        for name, (shape, kind, _) in tensors.items():
            size = math.prod(gguf.quant_shape_to_byte_shape(shape, kind))
            writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in tqdm(tensors.items(), desc="Writing", unit=" tensors", disable=not sys.stderr.isatty()):
            writer.write_tensor_data(np.ascontiguousarray(_encode(name, tensor)))
        writer.close()


# --- the tokenizer: byte-level BPE, or BPE made of a SentencePiece model ---

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How a text is split into words before BPE (llama.cpp's llama-vocab.cpp) -> llama.cpp's name of it.
_REGEX_NAMES = {_WORDS % "{1,3}": "llama-bpe", _WORDS % "": "qwen2"}


def add_tokenizer(writer: GGUFWriter, folder: Path, size: int) -> None:
    """Write the keys of a model folder's tokenizer, with its special tokens and chat template.

    size: rows of the model's embeddings; ids without a token are filled up.
    """
    try:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--model {folder} has no tokenizer.json that can be read ({error}). {ADVICE}") from error
    model = content["model"]
    is_sentencepiece = bool(model.get("byte_fallback"))
    splits = "default" if is_sentencepiece else _splits(content.get("pre_tokenizer") or {})
    if model.get("type") != "BPE" or splits is None:
        raise UserError(f"--model {folder}: its tokenizer is no BPE of a kind known here. {ADVICE}")
    tokens = {index: token for token, index in model["vocab"].items()}
    types = {index: _type_of(token, model) for index, token in tokens.items()}
    for added in content.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        if types.get(added["id"]) != TokenType.UNKNOWN:
            types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    ids = range(max(size, *(index + 1 for index in tokens)))
    writer.add_vocab_size(len(ids))
    writer.add_tokenizer_model("llama" if is_sentencepiece else "gpt2")
    writer.add_tokenizer_pre(splits)
    writer.add_token_list([tokens.get(index, f"[PAD{index}]") for index in ids])
    writer.add_token_types([int(types.get(index, TokenType.UNUSED)) for index in ids])
    if is_sentencepiece:
        # SentencePiece merges the pair whose token has the highest score, BPE the pair of the lowest rank.
        ranks: dict[str, int] = {}
        for rank, pair in enumerate(merges):
            ranks.setdefault("".join(pair), rank)
        writer.add_token_scores([-float(ranks.get(tokens.get(index, ""), len(merges))) for index in ids])
        normalizer, splitter = content.get("normalizer") or {}, content.get("pre_tokenizer") or {}
        prepends = any(step.get("type") == "Prepend" for step in normalizer.get("normalizers", [normalizer]))
        writer.add_add_space_prefix(prepends or splitter.get("prepend_scheme") in ("first", "always"))
    logging.getLogger("gguf.vocab").setLevel(logging.ERROR)  # it warns of templates for pairs of texts
    special = SpecialVocab(folder, n_vocab=len(ids))
    special.merges = [] if is_sentencepiece else [" ".join(pair) for pair in merges]
    special.add_to_gguf(writer, quiet=True)


def _type_of(token: str, model: Mapping[str, Any]) -> TokenType:
    if token == model.get("unk_token"):
        return TokenType.UNKNOWN
    is_byte = model.get("byte_fallback") and re.fullmatch(r"<0x[0-9A-F]{2}>", token)
    return TokenType.BYTE if is_byte else TokenType.NORMAL


def _splits(pre_tokenizer: Mapping[str, Any]) -> str | None:
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [step.get("type") for step in steps]
    if not kinds or kinds[-1] != "ByteLevel":
        return None
    if kinds == ["ByteLevel"]:
        return "gpt-2" if steps[0].get("use_regex", True) else None
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        return _REGEX_NAMES.get(steps[0]["pattern"].get("Regex", ""))
    return None
