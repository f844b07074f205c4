"""State of each optimizer, saved with some parameters on the host, loaded with others there; and a step from it."""

import torch
from torch import nn

from fsdp_qlora.optimizers.sharded import ShardedOptimizer

PLACES = [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cpu")]


def make(name: str, devices: tuple[str, str]) -> tuple[nn.ModuleList, ShardedOptimizer]:
    model = nn.ModuleList(nn.Linear(64, 128, device=device) for device in devices)
    return model, ShardedOptimizer(model, name, lr=0.1, weight_decay=0.0, lr_ratio_B=2.0)


def take_step(model: nn.Module, optimizer: ShardedOptimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.take_gradients()
    optimizer.step(0.1)
    optimizer.zero_grad()


def main() -> None:
    for name in ("adamw", "adam", "fused_adamw", "sgd", "adadelta", "adamw_8bit", "lion"):
        for before in PLACES:
            for after in PLACES:
                saved_model, saved = make(name, before)
                take_step(saved_model, saved)
                model, optimizer = make(name, after)
                for old, parameter in zip(saved_model.parameters(), model.parameters(), strict=True):
                    optimizer.set_state(parameter, saved.state_of(old))
                take_step(model, optimizer)  # torch refuses a count of steps that is on another device
                fresh_model, fresh = make(name, after)
                take_step(fresh_model, fresh)
                for parameter, other in zip(model.parameters(), fresh_model.parameters(), strict=True):
                    places = [
                        {key: value.device for key, value in state.items() if isinstance(value, torch.Tensor)}
                        for state in (optimizer.state_of(parameter), fresh.state_of(other))
                    ]
                    assert places[0] == places[1], (name, before, after, places)
                fused = [group.get("fused") for group in optimizer._groups]
                assert fused == [group.get("fused") for group in fresh._groups], (name, before, after)
        print(name)


if __name__ == "__main__":
    main()
