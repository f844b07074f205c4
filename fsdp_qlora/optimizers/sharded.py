"""Optimizers over local shards, the learning rate of each step, and the global gradient norm."""

import contextlib
import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import bitsandbytes
import torch
from torch import nn

from fsdp_qlora.distributed import local_part
from fsdp_qlora.errors import UserError
from fsdp_qlora.optimizers.matrix import Adafactor, MatrixOptimizer, Muon


def _schedule_free(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    import schedulefree  # optional

    return schedulefree.AdamWScheduleFree(parameters, **options)


def _adam(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Use the fused kernel if all parameters are on a GPU: torch's default needs 4 more bytes per weight."""

    def build(parameters: Any, **options: Any) -> torch.optim.Optimizer:
        groups = [group["params"] if isinstance(group, dict) else [group] for group in parameters]
        fused = all(parameter.is_cuda for group in groups for parameter in group)
        return kind(parameters, fused=fused or None, **options)  # type: ignore[call-arg]

    return build


# name -> optimizer over a list of parameters (or groups of them), given lr and weight_decay.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": _adam(torch.optim.AdamW),
    "adam": _adam(torch.optim.Adam),
    "sgd": torch.optim.SGD,
    "adadelta": torch.optim.Adadelta,
    "fused_adamw": lambda parameters, **options: torch.optim.AdamW(parameters, fused=True, **options),
    "fused_adam": lambda parameters, **options: torch.optim.Adam(parameters, fused=True, **options),
    "adamw_8bit": bitsandbytes.optim.AdamW8bit,
    "paged_adamw_8bit": bitsandbytes.optim.PagedAdamW8bit,
    "lion": bitsandbytes.optim.Lion,
    "lion_8bit": bitsandbytes.optim.Lion8bit,
    "adafactor": Adafactor,
    "muon": Muon,
    "schedule_free_adamw": _schedule_free,
}

# Float32 values of state per trainable parameter, to estimate memory. 8-bit: one byte, and a float32 per 256.
OPTIMIZER_STATES: dict[str, float] = {
    **{"adamw": 2, "adam": 2, "sgd": 0, "adadelta": 2, "fused_adamw": 2, "fused_adam": 2},
    **{"adamw_8bit": 2 * 65 / 256, "paged_adamw_8bit": 2 * 65 / 256, "lion": 1, "lion_8bit": 65 / 256},
    **{"adafactor": 0, "muon": 1, "schedule_free_adamw": 2},
}

_ADAM = {"step", "exp_avg", "exp_avg_sq"}
_8BIT_1, _8BIT_2 = {"state1", "absmax1", "qmap1"}, {"state2", "absmax2", "qmap2"}
_ADAM_8BIT = ({"step", "state1", "state2"}, {"step", *_8BIT_1, *_8BIT_2})  # of small and of large parameters

# name -> the keys of a parameter's state after a step: one of these sets.
STATE_KEYS: dict[str, Sequence[set[str]]] = {
    **dict.fromkeys(("adamw", "adam", "fused_adamw", "fused_adam"), (_ADAM,)),
    **dict.fromkeys(("adamw_8bit", "paged_adamw_8bit"), _ADAM_8BIT),
    "sgd": (set(),),
    "adadelta": ({"step", "square_avg", "acc_delta"},),
    "lion": ({"step", "state1"},),
    "lion_8bit": ({"step", "state1"}, {"step", *_8BIT_1}),
    "adafactor": ({"step", "var"}, {"step", "row_var", "col_var"}),
    "muon": ({"momentum_buffer"},),
    "schedule_free_adamw": ({"z", "exp_avg_sq"},),
}

_PAGED_STATES = ("state1", "state2")  # of bitsandbytes' optimizers

# name -> multiple of the peak learning rate at a progress in [0, 1] after the warm-up.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def learning_rate(step: int, *, peak: float, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 0: linear warm-up, then the schedule."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * SCHEDULES[schedule](progress)


def check_optimizer(name: str, device: torch.device) -> None:
    """Refuse an optimizer that cannot run here.

    Raises:
        UserError: it is paged and there is no GPU, or its package is not installed.
    """
    if name.startswith("paged_") and device.type != "cuda":
        raise UserError(
            f"optimizer {name} moves its state between GPU and host memory, and there is no GPU. Use "
            f"{name.removeprefix('paged_')}."
        )
    if name == "schedule_free_adamw" and importlib.util.find_spec("schedulefree") is None:
        raise UserError(f"optimizer {name} needs the package schedulefree: pip install schedulefree.")


class ShardedOptimizer:
    """A plain torch optimizer over each rank's own shards.

    It gets local tensors that share the shards' memory. So every element-wise optimizer works sharded, without
    the cost of DTensor dispatch for hundreds of small tensors. Optimizers over whole matrices know which part of
    the matrix a local tensor is (matrix.py).

    Args:
        lr_ratio_B: LoRA+ (Hayou et al. 2024): the learning rate of B (and of vectors) is this many times A's.
    """

    def __init__(self, model: nn.Module, name: str, *, lr: float, weight_decay: float, lr_ratio_B: float = 1.0) -> None:
        self.name, build = name, OPTIMIZERS[name]
        # Its steps are collective, so every rank must take part, also without rows.
        keep_empty = isinstance(build, type) and issubclass(build, MatrixOptimizer)
        with torch.no_grad():
            trained = {
                path: (parameter, nn.Parameter(local_part(parameter)))
                for path, parameter in model.named_parameters()
                if parameter.requires_grad and (keep_empty or local_part(parameter).numel() > 0)
            }
        self.sharded = [parameter for parameter, _ in trained.values()]
        self.local = [local for _, local in trained.values()]
        groups: list[Any] = self.local
        if lr_ratio_B != 1.0:
            is_B = {path: ".lora_B." in path or parameter.dim() == 1 for path, (parameter, _) in trained.items()}
            groups = [
                {"params": [local for path, (_, local) in trained.items() if is_B[path] == second], "lr_scale": scale}
                for second, scale in ((False, 1.0), (True, lr_ratio_B))
            ]
        self._local_of = {id(parameter): local for parameter, local in trained.values()}
        # A rank may own no element of a small adapter; optimizers refuse an empty list.
        self.optimizer = build(groups, lr=lr, weight_decay=weight_decay) if self.local else None
        if isinstance(self.optimizer, MatrixOptimizer):
            self.optimizer.whole = dict(zip(self.local, self.sharded, strict=True))
        if self._is_schedule_free:
            self.optimizer.train()  # type: ignore[union-attr]

    @property
    def _is_schedule_free(self) -> bool:
        return hasattr(self.optimizer, "eval")

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """In this block the weights are those to evaluate and save: for schedule-free optimizers the average."""
        if not self._is_schedule_free:
            yield
            return
        self.optimizer.eval()  # type: ignore[union-attr]
        try:
            yield
        finally:
            self.optimizer.train()  # type: ignore[union-attr]

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Point the local parameters at the gradients that FSDP2 has reduced onto this rank."""
        for sharded, local in zip(self.sharded, self.local, strict=True):
            local.grad = None if sharded.grad is None else local_part(sharded.grad)

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
            group["lr"] = lr * group.get("lr_scale", 1.0)
        self.optimizer.step()

    def zero_grad(self) -> None:
        for parameter in (*self.sharded, *self.local):
            parameter.grad = None

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The optimizer's own values for one of the model's parameters, to read or to fill; empty before a step."""
        local = self._local_of.get(id(parameter))
        return {} if self.optimizer is None or local is None else self.optimizer.state[local]

    def room_for_state(self) -> list[torch.Tensor]:
        """Memory of the size of the state that the first step will allocate; nothing if there is state already.

        Nothing for paged optimizers, whose state is not in GPU memory alone.
        """
        if self.optimizer is None or self.optimizer.state or self.name.startswith("paged_"):
            return []
        sizes = [int(OPTIMIZER_STATES[self.name] * local.numel()) for local in self.local]
        return [
            torch.empty(size, dtype=torch.float32, device=local.device)
            for size, local in zip(sizes, self.local, strict=True)
            if size
        ]

    def paged_buffer(self, parameter: nn.Parameter, key: str, dtype: torch.dtype) -> torch.Tensor | None:
        """New memory for one of a paged optimizer's states, of the local shape; None if that state is not paged.

        It may move between GPU and host at any time, and counts as CPU memory.
        """
        if key not in _PAGED_STATES or not getattr(self.optimizer, "is_paged", False):
            return None
        buffer: torch.Tensor = self.optimizer.get_state_buffer(self._local_of[id(parameter)], dtype=dtype)  # type: ignore[union-attr]
        return buffer

    @property
    def stored_as(self) -> dict[str, str]:
        """State key -> kind of train_state.py, where the shape alone does not determine it."""
        return self.optimizer.stored_as if isinstance(self.optimizer, MatrixOptimizer) else {}

    def group_values(self) -> list[dict[str, Any]]:
        """The optimizer's values that are not per parameter, by parameter group."""
        groups = self.optimizer.param_groups if self.optimizer else []
        return [
            {name: value for name, value in group.items() if isinstance(value, (bool, int, float, str))}
            for group in groups
        ]

    def set_group_values(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Restore the result of `group_values`."""
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


def averaged_value(name: str, value: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """The value to evaluate and save of a parameter as it is in training: for schedule-free optimizers the average.

    Args:
        z: the optimizer's state of that name for the parameter.
    """
    if OPTIMIZERS[name] is not _schedule_free:
        return value
    parameter = nn.Parameter(value)
    optimizer = _schedule_free([parameter], lr=1.0)
    optimizer.train()  # type: ignore[attr-defined]
    optimizer.state[parameter]["z"] = z
    optimizer.eval()  # type: ignore[attr-defined]
    return parameter.detach()


def _norms(gradients: Iterable[torch.Tensor]) -> Sequence[float]:
    """Total L2 norm per device: offloaded gradients are on the CPU, the others on the GPU."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    return [torch.nn.utils.get_total_norm(tensors).item() for tensors in by_device.values()]
