"""How much a rank reads and holds while it loads, and what the others say when it cannot."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from tests.helpers.models import SIZES
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, on_ranks, run_ranks
from tests.helpers.tokenizers import make_tokenizer

MIB = 2**20


def make_big_model(folder: Path, *, layers: int) -> int:
    """A bf16 llama of 25 MiB a layer in as many files; returns the bytes of its quantized
    load_weights.
    """
    sizes = {
        **SIZES,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "head_dim": 64,
    }
    config = AutoConfig.for_model(
        "llama", **{**sizes, "num_key_value_heads": 16, "num_hidden_layers": layers}
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.save_pretrained(folder)
    make_tokenizer(folder)
    generator = torch.Generator().manual_seed(0)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in model.state_dict().items():
        file = f"model-{name.split('.')[2] if '.layers.' in name else 'rest'}.safetensors"
        value = torch.randn(parameter.shape, generator=generator).mul_(0.02).bfloat16()
        files.setdefault(file, {})[name] = value
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(p.numel() * 2 for name, p in model.state_dict().items() if "_proj" in name)


def _peak_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def _load(folder: Path, result: Path) -> int:
    """Build, shard and load as train.py does, and note what it took."""
    from fsdp_qlora.config.train_types import TRAIN_TYPES
    from fsdp_qlora.distributed.process_group import start_process_group, stop_process_group
    from fsdp_qlora.distributed.ranks import read_ranks
    from fsdp_qlora.distributed.shards import build_mesh
    from fsdp_qlora.model import model_parts
    from fsdp_qlora.model.adapters.insert import LoraOptions
    from fsdp_qlora.model.architecture.config import load_config
    from fsdp_qlora.model.architecture.precision import PRECISIONS
    from fsdp_qlora.model.build_model import LayerOptions, build_model
    from fsdp_qlora.sharding import parallelize
    from fsdp_qlora.sharding.loading import load_weights

    ranks = read_ranks()
    precision = PRECISIONS["bf16"]
    meta = build_model(
        load_config(folder, "big"),
        TRAIN_TYPES["qlora"],
        precision,
        ranks.device,
        LayerOptions(
            lora=LoraOptions(rank=4, alpha=4), quantizer={"quant_type": "nf4", "double_quant": True}
        ),
        attn_implementation="auto",
    )
    weight_files = WeightFiles(folder)
    weights = load_weights.match_tensors(meta.model, weight_files)
    start_process_group(ranks)
    mesh = build_mesh(ranks, sharding_strategy="full_shard")
    model = meta.model
    parts = model_parts.ModelParts(model)
    parallelize.shard_model(parts, mesh, sharding_strategy="full_shard", precision=precision)
    counts = model_parts.count_bytes(model_parts.kinds_of(model), ranks.world_size)
    shard = sum(part.largest_shard for part in counts.values())
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _peak_kib()
    parallelize.materialize(parts, ranks.device)
    load_weights.load_weights(
        model, weights, mesh, ranks.device, max_bytes_in_flight=64 * MIB, show_progress=False
    )
    measured = {
        "bytes_read": weight_files.bytes_read,
        "shard_bytes": shard,
        "growth_bytes": (_peak_kib() - before) * 1024,
    }
    (result / f"{os.environ['RANK']}.json").write_text(json.dumps(measured))
    stop_process_group()
    return 0


def test_a_rank_reads_only_its_part_within_the_memory_bound(tmp_path):
    quantized_bytes = make_big_model(tmp_path, layers=24)
    statuses, output = on_ranks(2, _load, (tmp_path, tmp_path), tmp_path / "logs")
    assert statuses == [0, 0], output
    file_bytes = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    for rank in range(2):
        measured = json.loads((tmp_path / f"{rank}.json").read_text())
        rest = file_bytes - quantized_bytes
        assert measured["bytes_read"] <= (quantized_bytes / 2) * 1.02 + rest
        # 64 MiB in flight, and some of temporary values and of what the allocator keeps, which do
        # not grow with the model. Half of the 588 MiB of weights in memory would break this.
        assert measured["growth_bytes"] <= measured["shard_bytes"] + (64 + 64) * MIB, measured


@pytest.mark.parametrize("train_type", ["qlora", "hqq_lora"])
def test_nan_in_one_ranks_part_is_reported_by_every_rank(train_type, models, tmp_path):
    name = "model.layers.0.mlp.down_proj.weight"
    state = load_file(models() / "model.safetensors")
    state[name][-1, -1] = torch.nan
    folder = Path(shutil.copytree(models(), tmp_path / "model"))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    options = {"model_name": folder, "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(4))}
    argv = flags(
        **options,
        train_type=train_type,
        output_dir=tmp_path / "out",
        quant_cache=tmp_path / "cache",
    )
    statuses, output = run_ranks(2, argv, tmp_path / "logs")
    assert statuses == [2, 2] and "Traceback" not in output, output
    assert f"[rank 1] error: Weight {name} has values that are not finite" in output
    assert f"[rank 0] Ended because of rank 1: Weight {name}" in output
    assert not [path for path in tmp_path.glob("cache/*") if path.suffix != ".lock"]


def test_float64_weights_are_read_as_float32(models, tmp_path):
    singles = load_file(models() / "model.safetensors")
    save_file(
        {name: value.double() for name, value in singles.items()}, tmp_path / "model.safetensors"
    )
    weight_files = WeightFiles(tmp_path)
    for name, value in singles.items():
        assert weight_files.dtype(name) == torch.float32
        assert torch.equal(weight_files.read_rows(name, 1, len(value)), value[1:])
