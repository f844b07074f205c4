"""Optimizers over local shards, the learning rate of each step, and the global gradient norm."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

# name -> optimizer over a list of parameters, given lr and weight_decay.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adadelta": torch.optim.Adadelta,
    "fused_adamw": lambda parameters, **options: torch.optim.AdamW(parameters, fused=True, **options),
    "fused_adam": lambda parameters, **options: torch.optim.Adam(parameters, fused=True, **options),
}

# Float32 values of state per trainable parameter, for the estimate of memory.
OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "sgd": 0, "adadelta": 2, "fused_adamw": 2, "fused_adam": 2}

# name -> multiple of the peak learning rate at a progress in [0, 1] after the warm-up.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def learning_rate(step: int, *, peak: float, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 0: a linear warm-up, then the schedule to 0."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * SCHEDULES[schedule](progress)


class ShardedOptimizer:
    """A plain torch optimizer over each rank's own shards.

    It sees local tensors that share the shards' memory, so every element-wise optimizer works sharded, and
    no DTensor dispatch is paid for each of hundreds of small tensors.
    """

    def __init__(self, model: nn.Module, name: str, *, lr: float, weight_decay: float) -> None:
        with torch.no_grad():
            pairs = [
                (parameter, nn.Parameter(_local(parameter)))
                for parameter in model.parameters()
                if parameter.requires_grad and _local(parameter).numel() > 0
            ]
        self.sharded = [parameter for parameter, _ in pairs]
        self._local_of = {id(parameter): local for parameter, local in pairs}
        self.local = [local for _, local in pairs]
        # A rank may own no element of a small adapter; optimizers refuse an empty list.
        self.optimizer = OPTIMIZERS[name](self.local, lr=lr, weight_decay=weight_decay) if self.local else None

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Point the local parameters at the gradients that FSDP2 has reduced onto this rank."""
        for sharded, local in zip(self.sharded, self.local, strict=True):
            local.grad = None if sharded.grad is None else _local(sharded.grad)

    def squared_norm(self) -> float:
        """Sum of squares of this rank's gradients."""
        return sum(norm**2 for norm in _norms(local.grad for local in self.local if local.grad is not None))

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        gradients = [local.grad for local in self.local if local.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def step(self, lr: float) -> None:
        if self.optimizer is None:
            return
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def zero_grad(self) -> None:
        for parameter in (*self.sharded, *self.local):
            parameter.grad = None

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The optimizer's own values for one of the model's parameters, to read or to fill; empty before a step."""
        local = self._local_of.get(id(parameter))
        return {} if self.optimizer is None or local is None else self.optimizer.state[local]

    def group_values(self) -> list[dict[str, Any]]:
        """The plain numbers that the optimizer keeps for all parameters together, by parameter group."""
        groups = self.optimizer.param_groups if self.optimizer else []
        return [
            {name: value for name, value in group.items() if isinstance(value, (bool, int, float, str))}
            for group in groups
        ]

    def set_group_values(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Put back what `group_values` gave."""
        if self.optimizer is not None:
            for group, values in zip(self.optimizer.param_groups, groups, strict=True):
                group.update(values)

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank."""
        states: Iterable[dict[str, Any]] = self.optimizer.state.values() if self.optimizer else ()
        return sum(
            value.numel() * value.element_size()
            for state in states
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _norms(gradients: Iterable[torch.Tensor]) -> Sequence[float]:
    """Total L2 norm per device: offloaded gradients lie on the CPU, the others on the GPU."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    return [torch.nn.utils.get_total_norm(tensors).item() for tensors in by_device.values()]
