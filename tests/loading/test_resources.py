"""A run that cannot fit is refused before anything is read."""

import itertools
import os
import resource
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from fsdp_qlora.config.train_types import TRAIN_TYPES
from fsdp_qlora.distributed.device import free_gpu_memory
from fsdp_qlora.distributed.layout import Layout
from fsdp_qlora.model.adapters.insert import LoraOptions
from fsdp_qlora.model.architecture.precision import PRECISIONS
from fsdp_qlora.model.build_model import LayerOptions, MetaModel, build_model
from fsdp_qlora.model.model_parts import Offload
from fsdp_qlora.planning import placement
from fsdp_qlora.planning.blocks import BlockBytes
from fsdp_qlora.planning.estimate import estimate_memory
from fsdp_qlora.planning.fit import Placement
from fsdp_qlora.planning.memory import Memory, Step
from fsdp_qlora.planning.report import PlanReport
from fsdp_qlora.planning.workspaces import WORKSPACE
from fsdp_qlora.sharding.loading.weight_files import BUFFER
from fsdp_qlora.utils import machine
from fsdp_qlora.utils.errors import OutOfMemory, UserError
from fsdp_qlora.utils.text import GIB
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, on_ranks

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
NOTHING = Offload()
ALL = Offload(4, embeddings=True)


def _meta(train_type: str, in_full: tuple[str, ...] = ()) -> MetaModel:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "vocab_size": 1000,
        **heads,
    }
    lora = LoraOptions(rank=8, alpha=8, modules_to_save=in_full)
    layers = LayerOptions(lora=lora, quantizer={"quant_type": "nf4", "double_quant": False})
    config = AutoConfig.for_model("llama", **sizes)
    bf16 = PRECISIONS["bf16"]
    return build_model(
        config, TRAIN_TYPES[train_type], bf16, CPU, layers, attn_implementation="auto"
    )


def _memory(
    train_type: str,
    *,
    on_gpu: bool = True,
    offload: Offload = NOTHING,
    in_full: tuple[str, ...] = (),
) -> Memory:
    step = Step(
        precision=PRECISIONS["bf16"],
        optimizer="adamw",
        layout=Layout(2, 2, "full_shard"),
        placement=Placement("full_shard", offload),
        num_tokens=1,
        recomputing=4,
        buffer_bytes=7,
        workspace=WORKSPACE if on_gpu else 0,
    )
    return estimate_memory(_meta(train_type, in_full).parts, [BlockBytes(0, 0, 0, 0)] * 4, step)


def _needs(train_type: str, **options: Any) -> tuple[int, int]:
    """Bytes of weights, gradients and state on the device, and those on the host."""
    memory = _memory(train_type, **options)
    on_device = {
        **memory.resident,
        **memory.phases["optimizer"],
        "workspaces": 0,
        "gathered blocks": 0,
    }
    return sum(on_device.values()), sum(memory.host.values())


def test_a_dry_run_reports_the_memory_needed_of_the_visible_gpu():
    memory = _memory("qlora")

    def first_line(gpu_bytes: int | None, *, on_gpu: bool = True) -> str:
        machine = SimpleNamespace(device=torch.device("cuda" if on_gpu else "cpu"), world_size=2)
        placed: Any = SimpleNamespace(
            model=SimpleNamespace(machine=machine), memory=memory, placement=Placement("ddp")
        )
        return next(PlanReport(placed, gpu_bytes).lines())

    line = first_line(24 * 2**30)
    assert line.startswith(
        "Memory: each rank needs 0.0 of 24 GiB of the GPU, 7 B of the host; 2 ranks on GPUs "
    )
    assert "each rank needs about " in first_line(None) and "GPU" not in first_line(1, on_gpu=False)


def test_estimated_memory_is_shards_plus_training_overhead():
    block = 4 * 512 * 512 + 3 * 512 * 1024
    linears = 4 * block
    rest = 2 * 1000 * 512 + 9 * 512
    lora = 4 * 8 * (4 * (512 + 512) + 3 * (512 + 1024))
    # NF4 without double quantization: half a byte a weight, and a float32 for each 64.
    base = linears / 2 + linears / 64 * 4 + rest * 2
    assert _needs("qlora") == (int(base + lora * 16) // 2, 7)
    on_device, on_host = _needs("qlora", offload=ALL)
    assert (on_device, on_host) == (lora * 16 // 2, base // 2 + 7)
    # What trains in full beside the adapter is offloaded with its gradients and optimizer state,
    # all in float32.
    in_full = (base + 2 * 1000 * 512 * (16 - 2)) // 2 + 7
    assert _needs("qlora", offload=ALL, in_full=("embed_tokens", "lm_head")) == (on_device, in_full)
    assert _needs("qlora", on_gpu=False) == (0, int(base + lora * 16) // 2 + 7)
    assert _needs("full", offload=ALL) == (0, (linears + rest) * 16 // 2 + 7)


def _make_gpu(monkeypatch, *, is_integrated):
    """A GPU of 24 GiB, 5 of which its driver takes for free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * GIB, 24 * GIB))
    properties = SimpleNamespace(is_integrated=is_integrated)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_the_page_cache_counts_as_free_where_the_gpu_has_the_hosts_memory(monkeypatch):
    available = SimpleNamespace(available=20 * GIB, total=24 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    _make_gpu(monkeypatch, is_integrated=False)
    assert free_gpu_memory(CUDA) == (5 * GIB, 24 * GIB)
    _make_gpu(monkeypatch, is_integrated=True)
    assert free_gpu_memory(CUDA) == (20 * GIB, 24 * GIB)
    memory = replace(_memory("qlora"), resident={"weights": 15 * GIB}, host={"buffers": GIB})
    check = partial(placement.check_memory, device=CUDA, ranks_on_host=1, can_offload=True)
    check(memory)
    with pytest.raises(OutOfMemory, match=r"need 21.0 GiB .* and 20.0 of 24.0 GiB are free"):
        check(replace(memory, resident={"weights": 20 * GIB}))


def test_too_little_gpu_memory_is_refused_with_the_numbers(monkeypatch):
    _make_gpu(monkeypatch, is_integrated=False)
    needs = partial(replace, _memory("qlora"), phases={"optimizer": {}})
    placement.check_memory(
        needs(resident={"weights": 4 * GIB}), CUDA, ranks_on_host=1, can_offload=True
    )
    # What another program holds, such as a rank that was killed just now, a later start may have.
    for size, error in ((6, OutOfMemory), (30, UserError)):
        words = rf"need {size}.0 GiB of GPU memory, and 5.0 of 24.0 .*--use_cpu_offload true"
        with pytest.raises(error, match=words):
            placement.check_memory(
                needs(resident={"weights": size * GIB}), CUDA, ranks_on_host=1, can_offload=True
            )
    memory = SimpleNamespace(available=2 * GIB, total=8 * GIB)
    monkeypatch.setattr(placement.psutil, "virtual_memory", lambda: memory)
    for size, error in ((3, OutOfMemory), (5, UserError)):
        with pytest.raises(
            error, match=f"needs {size}.0 GiB of host memory .* and 1.0 GiB are free"
        ):
            placement.check_memory(
                needs(host={"weights": size * GIB}), CPU, ranks_on_host=2, can_offload=True
            )


@pytest.mark.parametrize("train_type", ["qlora", "full", "bnb_llama_pro"])
def test_a_result_without_room_on_disk_is_refused_with_the_numbers(
    train_type, models, tmp_path, monkeypatch
):
    config = AutoConfig.from_pretrained(models())
    layers = LayerOptions(**LAYERS, new_blocks=[1] if train_type == "bnb_llama_pro" else [])
    meta = build_model(
        config, TRAIN_TYPES[train_type], PRECISIONS["bf16"], CPU, layers, attn_implementation="auto"
    )
    size = placement.result_bytes(meta.model, dtype=torch.bfloat16)
    if train_type == "qlora":
        adapters = sum(p.numel() for p in meta.model.parameters() if p.requires_grad)
        assert size == 4 * adapters
    else:  # whole, and in 16 bits though most of it may be held in 4
        tensors = load_file(models() / "model.safetensors").values()
        assert size == 2 * sum(tensor.numel() for tensor in tensors)
    monkeypatch.setattr(placement, "free_disk", lambda folder: size)
    placement.check_disk(tmp_path / "out", size)
    with pytest.raises(
        UserError,
        match=r"needs 0.01 GiB, .* has 0.00 GiB free.*--output_dir on a larger",
    ):
        placement.check_disk(tmp_path / "out", size + 10 * 2**20)


def test_free_memory_respects_the_containers_limit(tmp_path):
    assert machine._cgroup_free(tmp_path) is None
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 2000\ninactive_file 500\nactive_file 1500\n")
    assert machine._cgroup_free(tmp_path) == 3000  # cached files are given back
    (tmp_path / "memory.max").write_text("max\n")
    assert machine._cgroup_free(tmp_path) is None


def _train_within(argv: list[str], extra_bytes: int) -> int:
    import psutil

    import train

    # here: the server that forks the ranks keeps the environment that it started with
    os.environ[BUFFER] = "4096"
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + extra_bytes, resource.RLIM_INFINITY))
    return train.main(argv)


def test_too_little_host_memory_ends_every_rank_with_the_numbers(models, tmp_path):
    argv = flags(
        model_name=models(),
        dataset=write_rows(tmp_path / "rows.jsonl", make_rows(4)),
        output_dir=tmp_path / "out",
    )
    statuses, output = on_ranks(2, _train_within, (argv, 2 * 2**30), tmp_path / "logs")
    assert statuses == [2, 2], output
    assert output.count("needs 4.0 GiB of host memory") == 2 and "Traceback" not in output
    assert not (tmp_path / "out").exists()


def _shards(folder: Path) -> int:
    """Lay out a model's offloaded shards."""
    from fsdp_qlora.distributed.process_group import start_process_group, stop_process_group
    from fsdp_qlora.distributed.ranks import read_ranks
    from fsdp_qlora.distributed.shards import build_mesh, local_part
    from fsdp_qlora.model.architecture.config import load_config
    from fsdp_qlora.sharding import groups, parallelize

    ranks = read_ranks()
    start_process_group(ranks)
    mesh = build_mesh(ranks, sharding_strategy="full_shard")
    for train_type in ("qlora", "full"):
        config = load_config(folder, "tiny")
        bf16 = PRECISIONS["bf16"]
        layers = LayerOptions(**LAYERS)
        meta = build_model(
            config, TRAIN_TYPES[train_type], bf16, CPU, layers, attn_implementation="auto"
        )
        host = [meta.model]
        parallelize.shard_model(
            meta.parts, mesh, sharding_strategy="full_shard", precision=bf16, on_host=host
        )
        parallelize.materialize(meta.parts, CPU, on_host=host)
        based = [
            parameter for name, parameter in meta.model.named_parameters() if "lora_" not in name
        ]
        shards = [local_part(parameter.detach()).fill_(1) for parameter in based]
        assert len({shard.untyped_storage().data_ptr() for shard in shards}) == 1
        spans = sorted((shard.data_ptr(), shard.data_ptr() + shard.nbytes) for shard in shards)
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
        rows = [-(-parameter.shape[0] // ranks.world_size) for parameter in based]
        padded = sum(
            number * each.shape[1:].numel() * each.itemsize
            for number, each in zip(rows, based, strict=True)
        )
        assert padded <= shards[0].untyped_storage().nbytes() < padded + 64 * len(spans)
        # FSDP2 gathers from the arena: what was written above
        for module in groups.fsdp_modules(meta.model):
            module.unshard()
        named = meta.model.named_parameters()
        assert all((local_part(each) == 1).all() for name, each in named if "lora_" not in name)
    stop_process_group()
    return 0


LAYERS = {
    "quantizer": {"quant_type": "nf4", "double_quant": True},
    "lora": LoraOptions(rank=4, alpha=4),
}


def test_offloaded_shards_share_one_padded_allocation(models, tmp_path):
    uneven = {"intermediate_size": 100, "hidden_size": 60, "head_dim": 10, "num_attention_heads": 6}
    statuses, output = on_ranks(3, _shards, (models("llama", **uneven),), tmp_path / "logs")
    assert statuses == [0] * 3, output
