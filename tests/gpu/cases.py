"""The runs whose losses on a GPU are compared with those on the CPU, which make_reference.py has
written down.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.helpers.models import make_model

REFERENCE = Path(__file__).parent / "reference.json"
MODEL = "llama"
MOE = "moe"
EXPANDED = "expanded"
STEPS = 4
# Two micro-batches a step, so that gradients are added up too.
COMMON: dict[str, Any] = {
    "precision": "fp32",
    "max_steps": STEPS,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "context_length": 256,
    "lr": 1e-3,
    "lr_scheduler": "constant",
    "warmup": 0,
    "seed": 0,
    "save_every": "none",
    "recompute": "all",  # on a GPU auto would recompute none of models that small
}
# Adam amplifies the order of fp32 sums over the steps. bf16 and fp16 keep 8 and 11 bits of each
# number.
FP32 = 1e-4
HALF = 2e-2
# An activation next to the middle between two 8-bit values is rounded up on one device and down on
# the other.
INT8 = 2e-3


@dataclass(frozen=True)
class Case:
    """One run. same_as: the case whose losses on the CPU it must have, itself if empty; tolerance:
    relative.
    """

    options: dict[str, Any] = field(default_factory=dict)
    model: str = MODEL
    same_as: str = ""
    tolerance: float = FP32


def _qlora(tolerance: float = FP32, same_as: str = "qlora", **options: Any) -> Case:
    return Case({"train_type": "qlora", **options}, same_as=same_as, tolerance=tolerance)


_TRAIN_TYPES: dict[str, Case] = {
    "full": Case({"train_type": "full", "lr": 1e-4}),
    "lora": Case({"train_type": "lora"}),
    "qlora": Case({"train_type": "qlora"}),
    "dora": Case({"train_type": "dora"}),
    "bnb_dora": Case({"train_type": "bnb_dora"}),
    "hqq_lora": Case({"train_type": "hqq_lora"}),
    "hqq_lora, 3 bits": Case({"train_type": "hqq_lora", "n_bits": 3}),
    "hqq_dora": Case({"train_type": "hqq_dora"}),
    "int8_lora": Case({"train_type": "int8_lora"}, tolerance=INT8),
    # Of the tiny model's activations none is above the default threshold of 6.
    "int8_lora, outliers": Case({"train_type": "int8_lora", "int8_threshold": 2.5}, tolerance=INT8),
    "bnb_llama_pro": Case({"train_type": "bnb_llama_pro"}, EXPANDED),
    "hqq_llama_pro": Case({"train_type": "hqq_llama_pro"}, EXPANDED),
    "qlora, experts": Case(
        {
            "train_type": "qlora",
            "lora_target_parameters": "mlp.experts.gate_up_proj,mlp.experts.down_proj",
        },
        MOE,
    ),
    "qlora, embeddings and head": Case(
        {"train_type": "qlora", "modules_to_save": "embed_tokens,lm_head"}
    ),
}
_MEMORY: dict[str, Case] = {
    "offloaded": _qlora(use_cpu_offload=True),
    "activations offloaded": _qlora(recompute="offload"),
    "recompute none": _qlora(recompute="none"),
    "ddp": _qlora(sharding_strategy="ddp"),
    "shard_grad_op": _qlora(sharding_strategy="shard_grad_op"),
    "full, offloaded": Case(
        {"train_type": "full", "lr": 1e-4, "use_cpu_offload": True}, same_as="full"
    ),
    "dora, offloaded": Case(
        {"train_type": "bnb_dora", "use_cpu_offload": True}, same_as="bnb_dora"
    ),
}
_NUMBERS: dict[str, Case] = {
    "fp4, absmax in fp32": Case(
        {"train_type": "qlora", "quant_type": "fp4", "double_quant": False}
    ),
    "mxfp4": Case({"train_type": "qlora", "quant_type": "mxfp4"}),
    "nvfp4, experts": Case({"train_type": "qlora", "quant_type": "nvfp4"}, MOE),
    "fp8, offloaded": Case({"train_type": "qlora", "quant_type": "fp8", "use_cpu_offload": True}),
    "eager attention": _qlora(attn_implementation="eager"),
    **{
        name: _qlora(HALF, precision=name)
        for name in ("bf16", "bf16_autocast", "fp16", "fp16_autocast", "bf16_buffers_autocast")
    },
    **{
        f"{train_type}, bf16": Case(
            {"train_type": train_type, "precision": "bf16"}, same_as=train_type, tolerance=HALF
        )
        for train_type in ("lora", "dora", "bnb_dora", "hqq_lora", "int8_lora")
    },
    "experts, bf16": Case(
        {**_TRAIN_TYPES["qlora, experts"].options, "precision": "bf16"}, MOE, "qlora, experts", HALF
    ),
}
# bitsandbytes keeps the state of tensors below 4096 values in 32 bits: all of the tiny adapter, but
# not these.
_IN_8_BITS = {"train_type": "qlora", "modules_to_save": "embed_tokens,lm_head"}
_OPTIMIZERS: dict[str, Case] = {
    **{
        name: Case({"train_type": "qlora", "optimizer": name})
        for name in ("adam", "sgd", "adadelta", "lion")
    },
    "fused_adamw": _qlora(optimizer="fused_adamw"),
    "fused_adam": _qlora(optimizer="fused_adam", same_as="adam"),
    # Rounded to 8 bits after each step, on each device in its own order of sums.
    **{
        name: Case({**_IN_8_BITS, "optimizer": name}, tolerance=1e-3)
        for name in ("adamw_8bit", "lion_8bit")
    },
    "paged_adamw_8bit": Case(
        {**_IN_8_BITS, "optimizer": "paged_adamw_8bit"}, same_as="adamw_8bit", tolerance=1e-3
    ),
}
CASES: dict[str, Case] = {**_TRAIN_TYPES, **_MEMORY, **_NUMBERS, **_OPTIMIZERS}


def make_models(folder: Path) -> dict[str, Path]:
    """The models of the cases: a llama, one with experts, and the llama with new blocks."""
    from fsdp_qlora.export.expand import expand_model

    llama = make_model(folder / MODEL)
    experts = make_model(
        folder / MOE,
        "qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    for made in (llama, experts):
        _draw_anew(made)
    expand_model(str(llama), folder / EXPANDED, expansion_rate=0.5)
    return {MODEL: llama, MOE: experts, EXPANDED: folder / EXPANDED}


def _draw_anew(folder: Path) -> None:
    """Draw a model's matrices by numpy: the numbers that torch draws depend on the processor's
    vector instructions.
    """
    path = folder / "model.safetensors"
    generator = np.random.default_rng(0)
    tensors = load_file(path)
    for name, values in tensors.items():
        if values.ndim > 1:
            tensors[name] = generator.normal(scale=0.1, size=values.shape).astype(np.float32)
    save_file(tensors, path, {"format": "pt"})


def fingerprint(folder: Path) -> str:
    """A hash of a model's weights, which both devices must have had."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def read_reference() -> dict[str, Any]:
    reference: dict[str, Any] = json.loads(REFERENCE.read_text())
    return reference
