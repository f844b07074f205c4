"""Every optimizer's state, saved and loaded: the steps after it are the same to the last bit, on
other splits too.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fsdp_qlora.checkpoint import train_state
from fsdp_qlora.distributed.process_group import all_gather_strings, start_process_group
from fsdp_qlora.distributed.ranks import Ranks, read_ranks
from fsdp_qlora.distributed.shards import build_mesh
from fsdp_qlora.sharding.optimizer import OPTIMIZERS, ShardedOptimizer
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import write_hashed_json
from fsdp_qlora.utils.safetensors_files import TensorForm, write_tensors
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, on_ranks, run_ranks, train_ok

NAMES = [name for name in OPTIMIZERS if not name.startswith("paged_")]
IN_8_BITS = ("adamw_8bit", "lion_8bit")
# on a CPU the last elements of a tensor are rounded in another way
ROUNDED = ("fused_adamw", "fused_adam")
# A vector, a matrix of fewer rows than ranks, which are together large enough for states in 8 bits
# but not alone, and three that are, in blocks that are not full.
SHAPES = {
    "norm": (7,),
    "lora_A": (2, 4000),
    "lora_B": (130, 65),
    "lora_C": (201, 50),
    "lora_D": (251, 40),
}


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, optimizer: ShardedOptimizer, index: int, unused: str = "") -> None:
    from torch.distributed.tensor import distribute_tensor

    for name, parameter in model.named_parameters():
        if name.split(".")[1] == unused:
            continue
        whole = values(SHAPES[name.split(".")[1]], seed=index)
        parameter.grad = distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    optimizer.take_gradients()
    optimizer.step(0.01)
    optimizer.zero_grad()


def write(state: train_state.TrainState, place: Path) -> dict[str, Any]:
    contents, description = state.contents()
    state.write(place, contents)
    return description


def save(folder: Path) -> int:
    """Save after three steps and take two more."""
    for mesh, ranks, name, is_large, place in cases(folder):
        model, optimizer = make_model(name, mesh)
        for index in range(3):
            step(model, optimizer, index)
        if ranks.is_rank_0:
            place.mkdir()
        all_gather_strings("", ranks.device)
        description = write(
            train_state.TrainState(model, optimizer, mesh, ranks, is_large=is_large), place
        )
        for index in range(3, 5):
            step(model, optimizer, index)
        result = result_of(model)
        if ranks.is_rank_0:
            write_hashed_json(place / "description.json", description)
            form = TensorForm(torch.float32, tuple(result.shape))
            write_tensors(place / "result.safetensors", {"result": form}, [result])
    return 0


def pass_over(folder: Path) -> int:
    """In some steps a parameter has no gradient: it and its state stay as they are, also after a
    load.
    """
    mesh, ranks, *_ = next(cases(folder))
    place = folder / "pass_over"
    place.mkdir()
    model, optimizer = make_model("adamw", mesh)
    for index, unused in enumerate(("", "lora_C", "")):
        step(model, optimizer, index, unused)
    description = write(
        train_state.TrainState(model, optimizer, mesh, ranks, is_large=False), place
    )
    assert [int(optimizer.state_of(parameter)["step"]) for parameter in model.parameters()] == [
        3,
        3,
        3,
        2,
        3,
    ]
    loaded_model, loaded = make_model("adamw", mesh)
    train_state.TrainState(loaded_model, loaded, mesh, ranks, is_large=False).load(
        place, description
    )
    for each, its_optimizer in ((model, optimizer), (loaded_model, loaded)):
        step(each, its_optimizer, 3)
    assert torch.equal(result_of(model), result_of(loaded_model))
    return 0


def load(folder: Path) -> int:
    """Load what others saved, and take two steps from there."""
    for mesh, ranks, name, is_large, place in cases(folder):
        model, optimizer = make_model(name, mesh)
        state = train_state.TrainState(model, optimizer, mesh, ranks, is_large=is_large)
        description = json.loads((place / "description.json").read_text())
        try:
            state.check(place, description)
        except UserError as error:
            assert "can be resumed on 2 ranks only" in str(error) and name in IN_8_BITS
            assert ranks.world_size != 2
            continue
        assert ranks.world_size == 2 or name not in IN_8_BITS
        state.load(place, description)
        for index in range(3, 5):
            step(model, optimizer, index)
        expected = load_file(place / "result.safetensors")["result"]
        tolerance = 1e-6 if name in ROUNDED else 0
        torch.testing.assert_close(
            result_of(model), expected, rtol=tolerance, atol=tolerance, msg=f"{name} {is_large}"
        )
    return 0


def cases(folder: Path) -> Iterator[tuple[DeviceMesh, Ranks, str, bool, Path]]:
    ranks = read_ranks()
    start_process_group(ranks)
    mesh = build_mesh(ranks, sharding_strategy="full_shard")
    for name in NAMES:
        for is_large in (False, True):
            yield mesh, ranks, name, is_large, folder / f"{name}_{is_large}"


def make_model(name: str, mesh: DeviceMesh) -> tuple[nn.Module, ShardedOptimizer]:
    """A sharded model of one parameter for each of SHAPES, layer.NAME.weight."""
    model = nn.Module()
    model.layer = nn.Module()
    for key, shape in SHAPES.items():
        part = nn.Module()
        part.weight = nn.Parameter(values(shape, seed=len(shape)))
        model.layer.add_module(key, part)
    fully_shard(model, mesh=mesh)
    return model, ShardedOptimizer(
        model, name, lr=0.01, weight_decay=0.1, lr_ratio_B=1.0 if name in IN_8_BITS else 2.0
    )


def result_of(model: nn.Module) -> torch.Tensor:
    return torch.cat(
        [parameter.detach().full_tensor().flatten() for parameter in model.parameters()]
    )  # type: ignore[attr-defined]


def test_every_optimizer_resumes_bitwise_on_the_same_number_of_ranks(tmp_path):
    (tmp_path / "saved").mkdir()
    for ranks, program in ((2, save), (2, load), (1, load), (3, load), (1, pass_over)):
        logs = tmp_path / f"logs{ranks}{program.__name__}"
        statuses, output = on_ranks(ranks, program, (tmp_path / "saved",), logs)
        assert statuses == [0] * ranks, output


def test_paged_optimizers_load_state_into_paged_memory(monkeypatch):
    model = nn.Linear(8, 600, bias=False)
    optimizer = ShardedOptimizer(model, "paged_adamw_8bit", lr=0.01, weight_decay=0.1)
    paged = []

    def get_state_buffer(local: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        paged.append(torch.zeros_like(local, dtype=dtype))
        return paged[-1]

    # a real one needs a GPU
    monkeypatch.setattr(optimizer.optimizer, "get_state_buffer", get_state_buffer)
    state = train_state.TrainState(model, optimizer, None, None, is_large=False)  # type: ignore[arg-type]
    stored = {key: torch.randint(256, (600, 8)).to(torch.uint8) for key in ("state1", "state2")}
    stored["absmax1"] = torch.rand(19)
    with torch.no_grad():
        state._put(model.weight, {"parameter": model.weight + 1, **stored})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: synchronized.append(True))
    synchronized: list[bool] = []
    loaded = optimizer.state_of(model.weight)
    assert synchronized
    assert len(paged) == 2 and loaded["state1"] is paged[0] and loaded["state2"] is paged[1]
    assert all(
        torch.equal(loaded[key], value) and loaded[key] is not value
        for key, value in stored.items()
    )


def test_8bit_optimizer_state_requires_the_same_number_of_ranks(models, tmp_path):
    options = {
        "model_name": models(),
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(8)),
        "train_type": "lora",
        "lora_rank": 256,
        "batch_size": 1,
        "max_steps": 1,
    }
    train_ok(2, tmp_path / "two", **options, optimizer="adamw_8bit", gradient_accumulation_steps=1)
    train_ok(1, tmp_path / "one", **options, gradient_accumulation_steps=2)
    before = sorted(tmp_path.glob("one/**/*"))
    again = {**options, "optimizer": "adamw_8bit", "gradient_accumulation_steps": 2}
    argv = flags(**again, output_dir=tmp_path / "one", resume=f"{tmp_path / 'two'}:replace")
    statuses, output = run_ranks(1, argv, tmp_path / "logs")
    assert statuses == [2] and "can be resumed on 2 ranks only" in output, output
    # The log of the refusal may be new.
    assert (tmp_path / "one" / "adapter_model.safetensors") in before
    assert {path for path in before if not path.exists()} == set()
