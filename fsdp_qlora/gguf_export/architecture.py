"""llama and qwen2 as llama.cpp reads them from a GGUF file: keys, names of tensors and the order of their rows."""

import math
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from gguf import GGUFWriter
from transformers import PretrainedConfig

from fsdp_qlora.errors import UserError
from fsdp_qlora.gguf_export.tokenizer import ADVICE

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}


class Architecture:
    """How a model's tensors are called and stored.

    Raises:
        UserError: it is not one of ARCHITECTURES, or has something that is not known here.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        if config.model_type not in ARCHITECTURES:
            raise UserError(f"Models of type {config.model_type} are not converted here. {ADVICE}")
        self.config, self.name = config, config.model_type
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {"rope_type": "default"}
        kind = self.rope.get("rope_type", "default")
        if kind not in ("default", "linear", "llama3") or getattr(config, "use_sliding_window", False):
            what = "a sliding window" if kind in ("default", "linear", "llama3") else f"rope type {kind}"
            raise UserError(f"The model has {what}, which is not converted here. {ADVICE}")
        self._names = gguf.get_tensor_name_map(ARCHITECTURES[self.name], config.num_hidden_layers)

    def tensor_name(self, name: str) -> str:
        """llama.cpp's name of a weight."""
        found = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise UserError(f"The model has a tensor {name} that llama.cpp's {self.name} does not. {ADVICE}")
        return str(found)

    def reordered(self, name: str, values: np.ndarray) -> np.ndarray:
        """Rows of queries and keys in llama.cpp's order for llama, pairs of rotated dims side by side."""
        heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}
        count = next((heads[part] for part in name.split(".") if part in heads), None)
        if self.name != "llama" or count is None:
            return values
        split = values.reshape(count, 2, values.shape[0] // count // 2, *values.shape[1:])
        return split.swapaxes(1, 2).reshape(values.shape)

    def add_keys(self, writer: GGUFWriter, *, vocab_size: int, file_type: int) -> None:
        """Write the model's sizes."""
        config = self.config
        writer.add_vocab_size(vocab_size)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(float(self.rope.get("rope_theta", 10000.0)))
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        if self.rope.get("rope_type") == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(float(self.rope["factor"]))
        writer.add_file_type(file_type)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    def more_tensors(self) -> dict[str, np.ndarray]:
        """Tensors that stand for settings: llama3's scaling of each rotary frequency."""
        if self.rope.get("rope_type") != "llama3":
            return {}
        base, factor = float(self.rope["rope_theta"]), float(self.rope["factor"])
        low, high = float(self.rope["low_freq_factor"]), float(self.rope["high_freq_factor"])
        length = float(self.rope["original_max_position_embeddings"])
        lengths = 2 * math.pi * base ** (np.arange(0, self.head_dim, 2) / self.head_dim)
        smooth = np.clip((length / lengths - low) / (high - low), 0.0, 1.0)
        return {"rope_freqs.weight": (1.0 / ((1 - smooth) / factor + smooth)).astype(np.float32)}
