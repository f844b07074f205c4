"""Every optimizer's state, saved and loaded: the steps after it are the same to the last bit, on other splits too."""

import importlib.util
import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_qlora.checkpointing import checkpoint, train_state
from fsdp_qlora.errors import UserError
from fsdp_qlora.optimizers.sharded import OPTIMIZERS, ShardedOptimizer
from fsdp_qlora.storage.files import write_hashed_json
from fsdp_qlora.storage.safetensors_files import TensorForm, write_tensors
from tests.tiny import on_ranks

NAMES = [name for name in OPTIMIZERS if not name.startswith("paged_")]
if importlib.util.find_spec("schedulefree") is None:
    NAMES.remove("schedule_free_adamw")
IN_8_BITS = ("adamw_8bit", "lion_8bit")
# A vector, a matrix of fewer rows than ranks, and one large enough for states in 8 bits.
SHAPES = {"norm": (7,), "lora_A": (2, 40), "lora_B": (130, 64)}


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Layer(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(values(shape, seed=len(shape)))


def step(model: nn.Module, optimizer: ShardedOptimizer, index: int) -> None:
    from torch.distributed.tensor import distribute_tensor

    for name, parameter in model.named_parameters():
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


def save_and_load(folder: Path, start: bool) -> int:
    """Save after three steps and take two more; or load what others saved, and take these two from there."""
    from torch.distributed.fsdp import fully_shard

    from fsdp_qlora import distributed
    from fsdp_qlora.checkpointing.train_state import TrainState, contents_error, state_keys_error

    ranks = distributed.read_ranks()
    distributed.start_process_group(ranks)
    mesh = distributed.build_mesh(ranks, sharding_strategy="full_shard")
    for name in NAMES:
        for is_large in (False, True):
            layers = [(key, Layer(shape)) for key, shape in SHAPES.items() if name != "muon" or len(shape) == 2]
            model = nn.Sequential(OrderedDict(layer=nn.Sequential(OrderedDict(layers))))
            fully_shard(model, mesh=mesh)
            optimizer = ShardedOptimizer(model, name, lr=0.01, weight_decay=0.1)
            state = TrainState(model, optimizer, mesh, ranks, is_large=is_large)
            place = folder / f"{name}_{is_large}"
            if start:
                for index in range(3):
                    step(model, optimizer, index)
                if ranks.is_rank_0:
                    place.mkdir()
                distributed.gather_texts("", ranks.device)
                _, description = state.write(place)
                if ranks.is_rank_0:
                    write_hashed_json(place / "description.json", description)
            else:
                description = json.loads((place / "description.json").read_text())
                assert contents_error(place, description) is None
                assert state_keys_error(description["layout"], name, has_stepped=True) is None
                for keys in without_one(description["layout"]):
                    assert "lacks" in str(state_keys_error({"w": keys}, name, has_stepped=True)), (name, keys)
                bare = {"w": {"parameter": {}}}
                assert (state_keys_error(bare, name, has_stepped=True) is None) == (name == "sgd")
                try:
                    state.load(place, description)
                except UserError as error:
                    assert "can be resumed on 2 ranks only" in str(error) and name in IN_8_BITS
                    assert ranks.world_size != 2
                    continue
                assert ranks.world_size == 2 or name not in IN_8_BITS
            for index in range(3, 5):
                step(model, optimizer, index)
            result = torch.cat([parameter.full_tensor().flatten() for parameter in model.parameters()])  # type: ignore[attr-defined]
            if start and ranks.is_rank_0:
                write_tensors(
                    place / "result.safetensors",
                    {"result": TensorForm(result.dtype, tuple(result.shape))},
                    [result.detach()],
                    {},
                )
            if not start:
                expected = checkpoint.TensorReader(place / "result.safetensors").whole("result")
                # Muon and Adafactor add up over ranks, in another order.
                tolerance = 0 if ranks.world_size == 2 or name not in ("muon", "adafactor") else 1e-6
                torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance, msg=f"{name} {is_large}")
    return 0


def test_every_optimizer_goes_on_bit_by_bit_on_as_many_ranks_and_on_others_where_it_can(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    for ranks, start in ((2, True), (2, False), (1, False), (3, False)):
        statuses, output = on_ranks(ranks, save_and_load, (tmp_path / "saved", start), tmp_path / f"logs{ranks}{start}")
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
    for key, value in stored.items():
        state._put(model.weight, key, {"is_on_device": key == "absmax1"}, value)
    loaded = optimizer.state_of(model.weight)
    assert len(paged) == 2 and loaded["state1"] is paged[0] and loaded["state2"] is paged[1]
    assert all(torch.equal(loaded[key], value) and loaded[key] is not value for key, value in stored.items())
    plain = ShardedOptimizer(model, "adamw_8bit", lr=0.01, weight_decay=0.1)
    assert plain.paged_buffer(model.weight, "state1", torch.uint8) is None
