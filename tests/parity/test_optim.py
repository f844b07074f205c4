"""Optimizers over shards, against the library's own on whole tensors and against each other's
splits.
"""

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fsdp_qlora.config.conflicts import check
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.sharding.optimizer import (
    OPTIMIZERS,
    ShardedOptimizer,
    check_optimizer,
    check_shard_sizes,
)
from fsdp_qlora.utils.errors import UserError
from tests.helpers.run import on_ranks

STEPS = 5
LR = 0.02
DECAY = 0.1
RATIO = 4.0
# 8-bit state has one scale for 256 consecutive elements of tensors of 4096 or more: parts are made
# of whole blocks.
SHAPES = {"lora_A": (6, 2048), "lora_B": (2048, 6)}


def first_values(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))


def gradients(shape: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(shape[1])
    sizes = torch.logspace(-3, 1, shape[0])[:, None] * torch.logspace(0, 2, shape[1])
    return [sizes * torch.randn(shape, generator=generator) for _ in range(STEPS)]


def steps_of_a_sharded_model(names: list[str], folder: Path) -> int:
    """Take the steps on every rank; rank 0 saves the whole results."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from fsdp_qlora.distributed.process_group import start_process_group, stop_process_group
    from fsdp_qlora.distributed.ranks import read_ranks
    from fsdp_qlora.distributed.shards import build_mesh, own_rows

    ranks = read_ranks()
    start_process_group(ranks)
    mesh = build_mesh(ranks, sharding_strategy="full_shard")
    results = {}
    for name in names:
        layers = OrderedDict(
            (key, nn.Linear(*reversed(shape), bias=False)) for key, shape in SHAPES.items()
        )
        for key, shape in SHAPES.items():
            layers[key].weight.data = first_values(shape)
        model = nn.Sequential(OrderedDict(layer=nn.Sequential(layers)))
        fully_shard(model, mesh=mesh)
        optimizer = ShardedOptimizer(model, name, lr=LR, weight_decay=DECAY, lr_ratio_B=RATIO)
        for step in range(STEPS):
            for key, parameter in model.named_parameters():
                whole = gradients(SHAPES[key.split(".")[1]])[step]
                first, last = own_rows(parameter, mesh)
                assert isinstance(parameter, DTensor)
                parameter.grad = DTensor.from_local(
                    whole[first:last].clone(),
                    parameter.device_mesh,
                    parameter.placements,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            optimizer.take_gradients()
            optimizer.step(LR)
            optimizer.zero_grad()
        for key, parameter in model.named_parameters():
            results[f"{name}.{key.split('.')[1]}"] = parameter.detach().full_tensor().clone()
    if ranks.is_rank_0:
        save_file(results, folder / f"{ranks.world_size}.safetensors")
    stop_process_group()
    return 0


def expected(name: str) -> dict[str, torch.Tensor]:
    """The same steps by the library's optimizer on whole tensors."""
    values = {key: nn.Parameter(first_values(shape)) for key, shape in SHAPES.items()}
    groups = [
        {"params": [value], "lr": LR * (RATIO if key == "lora_B" else 1.0)}
        for key, value in values.items()
    ]
    optimizer = OPTIMIZERS[name].build(groups, lr=LR, weight_decay=DECAY)
    for step in range(STEPS):
        for key, value in values.items():
            value.grad = gradients(SHAPES[key])[step]
        optimizer.step()
    return {key: value.detach() for key, value in values.items()}


NAMES = [name for name in OPTIMIZERS if not name.startswith(("fused", "paged"))]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, torch.Tensor]]:
    """World size -> all optimizers' results."""
    folder = tmp_path_factory.mktemp("optimizers")
    for world_size in (1, 2):
        statuses, output = on_ranks(
            world_size, steps_of_a_sharded_model, (NAMES, folder), folder / f"logs{world_size}"
        )
        assert statuses == [0] * world_size, output
    return {world_size: load_file(folder / f"{world_size}.safetensors") for world_size in (1, 2)}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_sharded_optimizer_takes_the_steps_of_the_librarys(name, world_size, results):
    for key, whole in expected(name).items():
        moved = whole - first_values(SHAPES[key])
        ours = results[world_size][f"{name}.{key}"]
        error = (ours - whole).norm() / moved.norm()
        assert error < 1e-5, (key, error)


def test_paged_optimizers_are_refused_without_a_gpu():
    with pytest.raises(UserError, match=r"there is no GPU\. Use adamw_8bit"):
        check_optimizer("paged_adamw_8bit", torch.device("cpu"))
    check_optimizer("paged_adamw_8bit", torch.device("cuda"))


def test_bitsandbytes_refuses_shards_that_it_cannot_count():
    model = nn.Linear(2**16, 2**16, bias=False, device="meta")
    with pytest.raises(UserError, match=r"has 2,147,483,648\. Use more ranks"):
        check_shard_sizes("adamw_8bit", model, 2)
    check_shard_sizes("adamw_8bit", model, 3)
    check_shard_sizes("adamw", model, 1)


def test_a_device_has_its_own_parameter_groups():
    model = nn.ModuleDict(
        {"lora_A": nn.Linear(4, 4, bias=False), "lora_B": nn.Linear(4, 4, bias=False)}
    )
    model["meta"] = nn.Linear(4, 4, bias=False, device="meta")
    wrapped = nn.ModuleDict({"layer": model})
    optimizer = ShardedOptimizer(wrapped, "adamw", lr=LR, weight_decay=DECAY, lr_ratio_B=RATIO)
    assert optimizer.optimizer is not None
    found = [
        (group["lr_scale"], [str(p.device) for p in group["params"]])
        for group in optimizer.optimizer.param_groups
    ]
    assert found == [(1.0, ["cpu"]), (1.0, ["meta"]), (RATIO, ["cpu"])]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer": "paged_adamw_8bit", "train_type": "full", "use_cpu_offload": True},
            "use adamw_8bit",
        ),
        (
            {
                "optimizer": "paged_adamw_8bit",
                "modules_to_save": ("lm_head",),
                "use_cpu_offload": True,
            },
            "leaves not all that trains: use adamw_8bit",
        ),
        ({"loraplus_lr_ratio": 4.0, "train_type": "full"}, "leave out --loraplus_lr_ratio"),
        ({"loraplus_lr_ratio": 0.0}, "--loraplus_lr_ratio must be a finite number above 0"),
    ],
)
def test_optimizers_that_cannot_do_what_is_asked_are_refused(options, message):
    (error,) = check(TrainConfig(**options))
    assert message in error
