"""Every optimizer's state, saved and loaded: the steps after it are the same to the last bit, on other splits too."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_qlora import distributed
from fsdp_qlora.checkpointing import checkpoint, train_state
from fsdp_qlora.checkpointing.train_state import state_keys_error
from fsdp_qlora.errors import UserError
from fsdp_qlora.optimizers.sharded import OPTIMIZERS, ShardedOptimizer
from fsdp_qlora.storage.files import write_hashed_json
from fsdp_qlora.storage.safetensors_files import TensorForm, write_tensors
from tests.adapters import sharded_adapters
from tests.tiny import on_ranks

NAMES = [name for name in OPTIMIZERS if not name.startswith("paged_")]
if importlib.util.find_spec("schedulefree") is None:
    NAMES.remove("schedule_free_adamw")
IN_8_BITS = ("adamw_8bit", "lion_8bit")
ROUNDED = ("fused_adamw", "fused_adam")  # on a CPU the last elements of a tensor are rounded in another way
# A vector, a matrix of fewer rows than ranks, which are together large enough for states in 8 bits but not alone, and
# three that are, in blocks that are not full.
SHAPES = {"norm": (7,), "lora_A": (2, 4000), "lora_B": (130, 65), "lora_C": (201, 50), "lora_D": (251, 40)}


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, optimizer: ShardedOptimizer, index: int, unused: str = "") -> None:
    from torch.distributed.tensor import distribute_tensor

    for name, parameter in model.named_parameters():
        if name.split(".")[1] == unused:
            continue
        whole = values(SHAPES[name.split(".")[1]], seed=index)
        parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    optimizer.take_gradients()
    optimizer.step(0.01)
    optimizer.zero_grad()


def without_one(layout: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The stored entries of each parameter with one of its several states taken out."""
    for keys in layout.values():
        for state in sorted(keys.keys() - {"parameter"}) if len(keys) > 2 else ():
            yield {key: entry for key, entry in keys.items() if key != state}


def save(folder: Path) -> int:
    """Save after three steps and take two more. Shards in one buffer are saved as those in memory of their own are."""
    for mesh, ranks, name, is_large, place in cases(folder):
        saved = []
        for side_by_side in (False, True):
            model, optimizer = make_model(name, mesh, side_by_side=side_by_side)
            assert is_flat(optimizer) == (side_by_side and name not in ("muon", "adafactor")), f"{name} {side_by_side}"
            for index in range(3):
                step(model, optimizer, index)
            # Who goes on reads what was written from shards in memory of their own.
            written = place if not side_by_side else place.with_name(f"{place.name}_flat")
            if ranks.is_rank_0:
                written.mkdir()
            distributed.gather_texts("", ranks.device)
            state = train_state.TrainState(model, optimizer, mesh, ranks, is_large=is_large)
            files, description = state.write(written)
            for index in range(3, 5):
                step(model, optimizer, index)
            saved.append((files, description, result_of(model)))
        tolerance = 1e-6 if name in ROUNDED else 0
        torch.testing.assert_close(saved[0][2], saved[1][2], rtol=tolerance, atol=tolerance, msg=f"{name} {is_large}")
        assert saved[0][1] == saved[1][1] and (name in ROUNDED or saved[0][0] == saved[1][0]), f"{name} {is_large}"
        if ranks.is_rank_0:
            write_hashed_json(place / "description.json", saved[0][1])
            form = TensorForm(torch.float32, tuple(saved[0][2].shape))
            write_tensors(place / "result.safetensors", {"result": form}, [saved[0][2]], {})
    return 0


def pass_over(folder: Path) -> int:
    """In some steps a parameter has no gradient: it and its state stay as they are, also after a load."""
    mesh, ranks, *_ = next(cases(folder))
    results, place = [], folder / "pass_over"
    place.mkdir()
    for side_by_side in (False, True):
        model, optimizer = make_model("adamw", mesh, side_by_side=side_by_side)
        for index, unused in enumerate(("", "lora_C", "")):
            step(model, optimizer, index, unused)
        state = train_state.TrainState(model, optimizer, mesh, ranks, is_large=False)
        _, description = state.write(place)
        assert [int(optimizer.state_of(parameter)["step"]) for parameter in model.parameters()] == [3, 3, 3, 2, 3]
        model, optimizer = make_model("adamw", mesh, side_by_side=side_by_side)
        state = train_state.TrainState(model, optimizer, mesh, ranks, is_large=False)
        state.load(place, description)
        step(model, optimizer, 3)
        results.append(result_of(model))
    assert torch.equal(*results)
    return 0


def load(folder: Path) -> int:
    """Load what others saved, and take two steps from there."""
    for mesh, ranks, name, is_large, place in cases(folder):
        model, optimizer = make_model(name, mesh, side_by_side=True)
        state = train_state.TrainState(model, optimizer, mesh, ranks, is_large=is_large)
        description = json.loads((place / "description.json").read_text())
        assert train_state.contents_error(place, description) is None
        assert state_keys_error(description["layout"], name, has_stepped=True) is None
        for keys in without_one(description["layout"]):
            assert "lacks" in str(state_keys_error({"w": keys}, name, has_stepped=True)), (name, keys)
        bare = {"w": {"parameter": {}}}
        assert (state_keys_error(bare, name, has_stepped=True) is None) == (name == "sgd")
        try:
            state.check(place, description)
        except UserError as error:
            assert "can be resumed on 2 ranks only" in str(error) and name in IN_8_BITS
            assert ranks.world_size != 2
            continue
        assert ranks.world_size == 2 or name not in IN_8_BITS
        state.load(place, description)
        assert is_flat(optimizer) == (name not in ("muon", "adafactor"))
        for index in range(3, 5):
            step(model, optimizer, index)
        expected = checkpoint.TensorReader(place / "result.safetensors").whole("result")
        # Muon and Adafactor add up over ranks, in another order.
        is_exact = name not in ROUNDED and (ranks.world_size == 2 or name not in ("muon", "adafactor"))
        tolerance = 0 if is_exact else 1e-6
        torch.testing.assert_close(result_of(model), expected, rtol=tolerance, atol=tolerance, msg=f"{name} {is_large}")
    return 0


def cases(folder: Path) -> Iterator[tuple[DeviceMesh, distributed.Ranks, str, bool, Path]]:
    ranks = distributed.read_ranks()
    distributed.start_process_group(ranks)
    mesh = distributed.build_mesh(ranks, sharding_strategy="full_shard")
    for name in NAMES:
        for is_large in (False, True):
            yield mesh, ranks, name, is_large, folder / f"{name}_{is_large}"


def make_model(name: str, mesh: DeviceMesh, *, side_by_side: bool) -> tuple[nn.Module, ShardedOptimizer]:
    shapes = {key: shape for key, shape in SHAPES.items() if name != "muon" or len(shape) == 2}
    first = {key: values(shape, seed=len(shape)) for key, shape in shapes.items()}
    model = sharded_adapters(first, mesh, side_by_side=side_by_side)
    return model, ShardedOptimizer(model, name, lr=0.01, weight_decay=0.1, lr_ratio_B=1.0 if name in IN_8_BITS else 2.0)


def is_flat(optimizer: ShardedOptimizer) -> bool:
    return any(piece.is_flat for piece in optimizer.pieces)


def result_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().full_tensor().flatten() for parameter in model.parameters()])  # type: ignore[attr-defined]


def test_every_optimizer_goes_on_bit_by_bit_on_as_many_ranks_and_on_others_where_it_can(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    for ranks, program in ((2, save), (2, load), (1, load), (3, load), (1, pass_over)):
        logs = tmp_path / f"logs{ranks}{program.__name__}"
        statuses, output = on_ranks(ranks, program, (tmp_path / "saved",), logs)
        assert statuses == [0] * ranks, output


def test_what_a_paged_optimizer_loads_lies_in_memory_that_it_can_page(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(8, 600, bias=False)
    optimizer = ShardedOptimizer(model, "paged_adamw_8bit", lr=0.01, weight_decay=0.1)
    paged = []

    def get_state_buffer(local: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        paged.append(torch.zeros_like(local, dtype=dtype))
        return paged[-1]

    monkeypatch.setattr(optimizer.optimizer, "get_state_buffer", get_state_buffer)  # a real one needs a GPU
    state = train_state.TrainState(model, optimizer, None, None, is_large=False)  # type: ignore[arg-type]
    stored = {key: torch.randint(256, (600, 8)).to(torch.uint8) for key in ("state1", "state2")}
    stored["absmax1"] = torch.rand(19)
    entries = {key: {"is_on_device": key == "absmax1"} for key in stored}
    with torch.no_grad():
        state._put(model.weight, entries, {"parameter": model.weight + 1, **stored})
    loaded = optimizer.state_of(model.weight)
    assert len(paged) == 2 and loaded["state1"] is paged[0] and loaded["state2"] is paged[1]
    assert all(torch.equal(loaded[key], value) and loaded[key] is not value for key, value in stored.items())
