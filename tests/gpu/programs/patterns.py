"""Every pattern of 16 bits, sharded over the ranks and gathered again.

    python -m tests.gpu.programs.patterns [--backend gloo]

For each quantizer, 16-bit precision and placement a decoder block's packed parameters are filled
with the numbers 0 to 65,535 and gathered by FSDP2 as in training. Prints what comes back changed;
exits with 1 if anything does.
"""

import argparse
import itertools
import sys

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig

from fsdp_qlora.config.train_types import TRAIN_TYPES
from fsdp_qlora.distributed.process_group import start_process_group, stop_process_group
from fsdp_qlora.distributed.ranks import Ranks, read_ranks
from fsdp_qlora.distributed.shards import build_mesh, own_rows
from fsdp_qlora.model.adapters.insert import LoraOptions
from fsdp_qlora.model.architecture.precision import PRECISIONS
from fsdp_qlora.model.build_model import LayerOptions, build_model
from fsdp_qlora.model.model_parts import Offload
from fsdp_qlora.model.module_state import whole_weights
from fsdp_qlora.model.quantizers.base import QuantizedWeight
from fsdp_qlora.model.quantizers.stored import write_bytes
from fsdp_qlora.sharding.parallelize import materialize, shard_model

# A query projection of 512 x 512 weights has 65,536 words of 16 bits at 4 bits a weight.
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 1,
}
QUANTIZERS = {
    "qlora": {"quant_type": "nf4", "double_quant": True},
    "bnb_dora": {"quant_type": "fp4", "double_quant": False},
    "hqq_lora": {"n_bits": 4, "group_size": 64},
    "int8_lora": {"int8_threshold": 6.0},
}
PLACEMENTS = [
    ("full_shard", False),
    ("full_shard", True),
    ("shard_grad_op", False),
    ("shard_grad_op", 1),
]


def words(parameter: torch.Tensor) -> torch.Tensor:
    """0 to 65,535 again and again, as many 16-bit words as a parameter has,
    one row of it in a row.
    """
    count = parameter.numel() * parameter.element_size() // 2
    return (
        (torch.arange(count, dtype=torch.int32) % 2**16)
        .to(torch.int16)
        .view(parameter.shape[0], -1)
    )


def fill(layer: QuantizedWeight, mesh: DeviceMesh) -> None:
    for parameter in (layer.weight, *(getattr(layer, name) for name in layer.statistics)):
        first, last = own_rows(parameter, mesh)
        write_bytes(parameter, words(parameter)[first:last])


def changed(
    train_type: str, precision: str, strategy: str, offload: bool | int, ranks: Ranks
) -> int:
    """How many words of a block come back from a gather other than they were stored."""
    mesh = build_mesh(ranks, sharding_strategy=strategy)
    config = AutoConfig.for_model("llama", vocab_size=320, **SIZES)
    layers = LayerOptions(lora=LoraOptions(rank=4), quantizer=QUANTIZERS[train_type])
    kind = TRAIN_TYPES[train_type]
    parts = build_model(
        config, kind, PRECISIONS[precision], ranks.device, layers, attn_implementation="eager"
    ).parts
    on_host = parts.on_host(Offload(int(offload), embeddings=offload is True))
    shard_model(
        parts, mesh, sharding_strategy=strategy, precision=PRECISIONS[precision], on_host=on_host
    )
    materialize(parts, ranks.device, on_host=on_host)
    (block,) = parts.blocks
    quantized = [module for module in block.modules() if isinstance(module, QuantizedWeight)]
    for layer in quantized:
        fill(layer, mesh)
    differ = 0
    with whole_weights(block):  # type: ignore[arg-type]  # FSDP2's
        for layer in quantized:
            for gathered in (layer.weight, *(getattr(layer, name) for name in layer.statistics)):
                found = gathered.detach().view(torch.int16).cpu()
                differ += int((found != words(gathered)).sum())
    return differ


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="")
    args = parser.parse_args(argv)
    ranks = read_ranks()
    start_process_group(ranks, backend=args.backend)
    found = {}
    for train_type, precision, (strategy, offload) in itertools.product(
        QUANTIZERS, ("bf16", "fp16"), PLACEMENTS
    ):
        found[f"{train_type}, {precision}, {strategy}, offload {offload}"] = changed(
            train_type, precision, strategy, offload, ranks
        )
    stop_process_group()
    for case, differ in found.items():
        print(f"{case}: {differ} words changed", flush=True)
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
