"""Bytes that a rank gives to each gather, modulo 16: `python benchmarks/aligned_gathers.py`.

NCCL copies 16 bytes at a time if this is 0, else one (pytorch#195450). Every model that the plan
knows, with qlora on 2 to 8 ranks: its FSDP2 groups as they are, and without what fills them up. No
weight is read, nothing is communicated.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# So that it runs from a clone that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.shards import build_mesh
from fsdp_qlora.planning.known_models import KNOWN_MODELS
from fsdp_qlora.planning.machine import Machine
from fsdp_qlora.planning.offers.find_model import known_config
from fsdp_qlora.planning.plan import build_plan
from fsdp_qlora.sharding.groups import fsdp_modules
from fsdp_qlora.sharding.parallelize import shard_model
from fsdp_qlora.sharding.recompute import wrap_blocks

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "aligned_gathers.json"
NUM_RANKS = range(2, 9)
_GROUPS = ["root", "block", "adapters"]  # as `parts_of_gathers` finds them in a model of one block


def sharded_model(
    config: PretrainedConfig, num_ranks: int, **options: Any
) -> tuple[PreTrainedModel, list[str]]:
    """A model in FSDP2's groups on the meta device, and the names of its parameters before."""
    settings = TrainConfig(precision="bf16", device="cpu", **options)
    ranks = Ranks(0, 0, num_ranks, num_ranks, torch.device("cpu"))
    tokenizer: Any = SimpleNamespace(eos_token_id=0)
    plan = build_plan(settings, Machine.of(settings, ranks), Path("no weights"), config, tokenizer)
    model = plan.meta.model
    strategy = "full_shard"
    wrap_blocks(model, offload=False)
    names = [name for name, _ in model.named_parameters()]
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        mesh = build_mesh(ranks, sharding_strategy=strategy)
        shard_model(plan.meta.parts, mesh, sharding_strategy=strategy, precision=plan.precision)
    finally:
        dist.destroy_process_group()
    return model, names


def parts_of_gathers(model: PreTrainedModel) -> Iterator[tuple[int, int]]:
    """For each group the bytes that a rank gives to its gather, as FSDP2 has it, and those of the
    model's own.
    """
    own = {*model.modules()}
    for module in fsdp_modules(model):
        state: Any = module._get_fsdp_state()
        # before torch 2.13
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in filter(None, groups):
            dtype = group.mp_policy.param_dtype
            sizes = [
                (
                    math.prod(each.padded_sharded_param_size)
                    * (dtype or each.sharded_param.dtype).itemsize,
                    each._module_info.module in own,
                )
                for each in group.fsdp_params
            ]
            yield sum(size for size, _ in sizes), sum(size for size, is_own in sizes if is_own)


def main() -> int:
    rows: dict[str, dict[str, list[Any]]] = {}
    for name, sizes in KNOWN_MODELS.items():
        if "model_type" not in sizes:
            continue  # has the sizes of one that is counted
        config = known_config(name)
        assert config is not None
        config.num_hidden_layers = 1  # all blocks have the same sizes
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:1]
        found = [[*parts_of_gathers(sharded_model(config, number)[0])] for number in NUM_RANKS]
        rows[name] = {
            "before": [[own % 16 for _, own in groups] for groups in found],
            "after": [[part % 16 for part, _ in groups] for groups in found],
        }
    lines = [f'  "{name}": {json.dumps(row)}' for name, row in rows.items()]
    head = {
        "command": "python benchmarks/aligned_gathers.py",
        "ranks": [*NUM_RANKS],
        "groups": _GROUPS,
    }
    RESULTS.write_text(
        json.dumps(head)[:-1] + ',\n "models": {\n' + ",\n".join(lines) + "\n }\n}\n"
    )
    print("\n".join(table(rows)))
    return int(any(sum(map(sum, row["after"])) for row in rows.values()))


def table(rows: dict[str, dict[str, list[Any]]]) -> list[str]:
    """The rows as a Markdown table: of a block's base before, and of all groups after."""
    lines = [
        f"| model | {' | '.join(map(str, NUM_RANKS))} | filled up |",
        "|---" * (len(NUM_RANKS) + 2) + "|",
    ]
    for name, row in rows.items():
        before = [str(groups[_GROUPS.index("block")]) for groups in row["before"]]
        lines.append(f"| {name} | {' | '.join(before)} | {max(map(max, row['after']))} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
