"""Optimizers over shards, against the library's own on whole tensors and against each other's splits."""

import importlib.util
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.optimization import Adafactor

from fsdp_qlora.config.conflicts import check
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.errors import UserError
from fsdp_qlora.optimizers import matrix
from fsdp_qlora.optimizers.sharded import OPTIMIZERS, ShardedOptimizer, check_optimizer, check_shard_sizes
from tests.reference import batch_loss, encode, load_adapter, load_base
from tests.tiny import make_rows, on_ranks, read_metrics, train_ok, write_rows

STEPS, LR, DECAY, RATIO = 5, 0.02, 0.1, 4.0
# 6 rows for 2 ranks and then some; sums over rows, which Adafactor exchanges, are rounded in another order.
SHAPES = {"lora_A": (6, 2048), "lora_B": (2048, 6)}


def first_values(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))


def gradients(shape: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(shape[1])
    # Of very different size in rows and columns, which factored statistics have to tell.
    sizes = torch.logspace(-3, 1, shape[0])[:, None] * torch.logspace(0, 2, shape[1])
    return [sizes * torch.randn(shape, generator=generator) for _ in range(STEPS)]


def steps_of_a_sharded_model(names: list[str], folder: Path) -> int:
    """Take the steps on every rank; rank 0 saves the whole results."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from fsdp_qlora.ranks import distributed

    ranks = distributed.read_ranks()
    distributed.start_process_group(ranks)
    mesh = distributed.build_mesh(ranks, sharding_strategy="full_shard")
    results = {}
    for name in names:
        layers = OrderedDict((key, nn.Linear(*reversed(shape), bias=False)) for key, shape in SHAPES.items())
        for key, shape in SHAPES.items():
            layers[key].weight.data = first_values(shape)
        model = nn.Sequential(OrderedDict(layer=nn.Sequential(layers)))
        fully_shard(model, mesh=mesh)
        optimizer = ShardedOptimizer(model, name, lr=LR, weight_decay=DECAY, lr_ratio_B=RATIO)
        for step in range(STEPS):
            for key, parameter in model.named_parameters():
                whole = gradients(SHAPES[key.split(".")[1]])[step]
                first, last = distributed.own_rows(parameter, mesh)
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
        with optimizer.averaged():
            for key, parameter in model.named_parameters():
                results[f"{name}.{key.split('.')[1]}"] = parameter.detach().full_tensor().clone()
    if ranks.is_rank_0:
        save_file(results, folder / f"{ranks.world_size}.safetensors")
    distributed.stop_process_group()
    return 0


def library_optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    if name == "adafactor":
        return lambda parameters, **options: Adafactor(
            parameters, scale_parameter=False, relative_step=False, warmup_init=False, **options
        )
    if name == "muon":
        return lambda parameters, **options: torch.optim.Muon(parameters, adjust_lr_fn="match_rms_adamw", **options)
    return OPTIMIZERS[name]


def expected(name: str) -> dict[str, torch.Tensor]:
    """The same steps by the library's optimizer on whole tensors."""
    values = {key: nn.Parameter(first_values(shape)) for key, shape in SHAPES.items()}
    groups = [{"params": [value], "lr": LR * (RATIO if key == "lora_B" else 1.0)} for key, value in values.items()]
    optimizer = library_optimizer(name)(groups, lr=LR, weight_decay=DECAY)
    if hasattr(optimizer, "train"):
        optimizer.train()
    for step in range(STEPS):
        for key, value in values.items():
            value.grad = gradients(SHAPES[key])[step]
        optimizer.step()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return {key: value.detach() for key, value in values.items()}


NAMES = [name for name in OPTIMIZERS if not name.startswith(("fused", "paged"))]
if importlib.util.find_spec("schedulefree") is None:
    NAMES.remove("schedule_free_adamw")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, torch.Tensor]]:
    """World size -> all optimizers' results."""
    folder = tmp_path_factory.mktemp("optimizers")
    for world_size in (1, 2):
        statuses, output = on_ranks(world_size, steps_of_a_sharded_model, (NAMES, folder), folder / f"logs{world_size}")
        assert statuses == [0] * world_size, output
    return {world_size: load_file(folder / f"{world_size}.safetensors") for world_size in (1, 2)}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_over_shards_takes_the_steps_of_the_librarys_on_whole_matrices(
    name: str, world_size: int, results: dict[int, dict[str, torch.Tensor]]
) -> None:
    # 8-bit state has one scale for 256 consecutive elements, of tensors of 4096 or more: where parts are made of such
    # blocks, as here, it is the whole's. Muon computes in bf16, and in the same order.
    for key, whole in expected(name).items():
        moved, ours = whole - first_values(SHAPES[key]), results[world_size][f"{name}.{key}"]
        error = (ours - whole).norm() / moved.norm()
        assert error < 1e-5, (key, error)


def test_sums_over_ranks_are_exchanged_device_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sharded:
        device_mesh = {"shard": SimpleNamespace(get_group=lambda: "group")}  # noqa: RUF012

    exchanged = []

    def all_reduce(values: torch.Tensor, group: str) -> None:
        exchanged.append((values.device.type, len(values), group))
        values.mul_(2)

    monkeypatch.setattr(matrix, "DTensor", Sharded)
    monkeypatch.setattr(matrix.dist, "all_reduce", all_reduce)
    optimizer = matrix.Adafactor([nn.Parameter(torch.zeros(2, 2))], lr=0.1)
    optimizer.whole = {torch.zeros(1): Sharded()}  # type: ignore[dict-item]
    values = [torch.ones(2, 3), torch.ones(4, device="meta"), torch.tensor(5.0), torch.ones(1, 1, device="meta")]
    sums = optimizer._sum_over_ranks(values)
    assert exchanged == [("cpu", 7, "group"), ("meta", 5, "group")]
    assert [(part.shape, part.device) for part in sums] == [(value.shape, value.device) for value in values]
    assert torch.equal(sums[0], torch.full((2, 3), 2.0)) and sums[2].item() == 10


def test_paged_optimizers_are_refused_without_a_gpu_and_schedule_free_without_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UserError, match=r"there is no GPU\. Use adamw_8bit"):
        check_optimizer("paged_adamw_8bit", torch.device("cpu"))
    check_optimizer("paged_adamw_8bit", torch.device("cuda"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install schedulefree"):
        check_optimizer("schedule_free_adamw", torch.device("cpu"))


def test_bitsandbytes_refuses_shards_that_it_cannot_count() -> None:
    model = nn.Linear(2**16, 2**16, bias=False, device="meta")
    with pytest.raises(UserError, match=r"has 2,147,483,648\. Use more ranks"):
        check_shard_sizes("adamw_8bit", model, 2)
    check_shard_sizes("adamw_8bit", model, 3)
    check_shard_sizes("adamw", model, 1)


def test_a_device_has_its_own_parameter_groups() -> None:
    model = nn.ModuleDict({"lora_A": nn.Linear(4, 4, bias=False), "lora_B": nn.Linear(4, 4, bias=False)})
    model["meta"] = nn.Linear(4, 4, bias=False, device="meta")
    wrapped = nn.ModuleDict({"layer": model})
    optimizer = ShardedOptimizer(wrapped, "adamw", lr=LR, weight_decay=DECAY, lr_ratio_B=RATIO)
    assert optimizer.optimizer is not None
    found = [
        (group["lr_scale"], [str(p.device) for p in group["params"]]) for group in optimizer.optimizer.param_groups
    ]
    assert found == [(1.0, ["cpu"]), (1.0, ["meta"]), (RATIO, ["cpu"])]
    assert [values["lr_scale"] for values in optimizer.group_values()] == [1.0, RATIO]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "muon", "train_type": "full"}, "cannot be used with --train_type full"),
        ({"optimizer": "muon", "train_type": "dora"}, "cannot be used with --train_type dora"),
        ({"optimizer": "schedule_free_adamw"}, "--lr_scheduler is cosine: give --lr_scheduler constant"),
        ({"optimizer": "paged_adamw_8bit", "train_type": "full", "use_cpu_offload": True}, "use adamw_8bit"),
        (
            {"optimizer": "paged_adamw_8bit", "modules_to_save": ("lm_head",), "use_cpu_offload": True},
            "leaves not all that trains: use adamw_8bit",
        ),
        ({"loraplus_lr_ratio": 4.0, "train_type": "full"}, "leave out --loraplus_lr_ratio"),
        ({"loraplus_lr_ratio": 0.0}, "--loraplus_lr_ratio must be a finite number above 0"),
    ],
)
def test_optimizers_that_cannot_do_what_is_asked_are_refused(options: dict[str, object], message: str) -> None:
    (error,) = check(TrainConfig(**options))
    assert message in error


def test_schedule_free_evaluates_and_saves_the_average(models: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")
    folder, held_out = models(), make_rows(3, seed=2)
    train_ok(
        2,
        tmp_path / "out",
        model_name=folder,
        dataset=write_rows(tmp_path / "rows.jsonl", make_rows(8)),
        eval_dataset=write_rows(tmp_path / "held_out.jsonl", held_out),
        train_type="lora",
        optimizer="schedule_free_adamw",
        lr_scheduler="constant",
        lr=1e-2,
        precision="fp32",
    )
    with torch.no_grad():
        saved = load_adapter(load_base(folder, four_bit=False), tmp_path / "out")
        loss = batch_loss(saved, encode(folder, held_out)).item()
    before, after = read_metrics(tmp_path / "out", "eval_loss")
    assert loss == pytest.approx(after, rel=1e-5) and after < before - 0.1
