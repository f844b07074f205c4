"""Views of a quantized weight are made once, and follow the memory of its parameters."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_qlora.distributed.process_group import start_process_group, stop_process_group
from fsdp_qlora.distributed.ranks import read_ranks
from fsdp_qlora.distributed.shards import build_mesh
from fsdp_qlora.model.model_parts import ModelParts
from fsdp_qlora.model.quantizers.base import QuantizedLinear
from fsdp_qlora.model.quantizers.table import QUANTIZERS
from fsdp_qlora.sharding import weight_stream
from tests.helpers.models import PROBE
from tests.helpers.run import on_ranks
from tests.layers.shards import weight_of
from tests.layers.test_offload import put_into_arena
from tests.layers.test_routed import build

SHAPE = (300, 130)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "nf4": ("bnb_4bit", {"quant_type": "nf4", "double_quant": True}),
    "nf4, absmax in fp32": ("bnb_4bit", {"quant_type": "nf4", "double_quant": False}),
}


def _make(kind: str) -> QuantizedLinear:
    quantizer, options = KINDS[kind]
    linear = nn.Linear(SHAPE[1], SHAPE[0], bias=False, device="meta")
    return QUANTIZERS[quantizer].linear(linear, compute_dtype=torch.bfloat16, **options)


def _gather_and_decode() -> int:
    from torch.distributed.fsdp import fully_shard

    ranks = read_ranks()
    start_process_group(ranks)
    mesh = build_mesh(ranks, sharding_strategy="full_shard")
    for kind in KINDS:
        layer: Any = _make(kind)
        fully_shard(layer, mesh=mesh)
        layer.to_empty(device="cpu")
        start, stop = layer.shard_range(mesh)
        blockers = []
        addresses = set()
        made = set()
        # The last weight is another one, as after a reload.
        for factor in (1, 1, -3):
            weight = factor * weight_of(SHAPE).bfloat16()
            layer.load_shard(weight.flatten()[start:stop], mesh)
            layer.unshard()
            assert torch.equal(layer.dequantize(), layer.quantize_whole(weight))
            views = layer.views(layer.whole, layer.tensors())
            made.add(id(views))
            addresses.add(views.codes.data_ptr())
            layer.reshard()
            assert not any(each.untyped_storage().nbytes() for each in views if each is not None)
            # Takes what was freed, so that the next gather gets other memory.
            blockers += [
                torch.full((views.codes.numel(),), 255, dtype=torch.uint8) for _ in range(9)
            ]
        assert len(made) == 1 and len(addresses) > 1
    stop_process_group()
    return 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_views_follow_what_fsdp_frees_and_gathers_again(world_size, tmp_path):
    statuses, output = on_ranks(world_size, _gather_and_decode, (), tmp_path)
    assert statuses == [0] * world_size, output


def test_views_keep_no_streamed_memory(monkeypatch):
    model, _ = build("qwen3_moe", "qlora", adapted=True)
    modules = ModelParts(model).in_order
    trained = [each for each in model.parameters() if each.requires_grad]

    def gradients() -> list[torch.Tensor]:
        return list(torch.autograd.grad(model(input_ids=PROBE).logits.sum(), trained))

    expected = gradients()
    for module in modules:
        put_into_arena([each for each in module.parameters() if not each.requires_grad])
    weight_stream.stream_weights(model, modules, torch.device("cpu"))
    copies = []
    empty_like = torch.empty_like

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        memory = empty_like(*args, **options)
        if "device" in options:
            copies.append(StorageWeakRef(memory.untyped_storage()))
        return memory

    monkeypatch.setattr(torch, "empty_like", noted)
    for _ in range(3):
        assert all(map(torch.equal, gradients(), expected))
        assert sum(not copy.expired() for copy in copies) <= 2
    assert len(copies) > 2 * len(modules)
