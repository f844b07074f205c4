"""Optimizers that are not element-wise (Adafactor, Muon), over each rank's rows of every matrix.

Shapes: a local tensor is [rows, columns] of a matrix [R, columns], or [rows] of a vector [R].
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_qlora.ranks.distributed import as_shard_of, own_rows


class MatrixOptimizer(Optimizer):
    """Base class. Every rank calls `step` with the same parameters, also where it owns no row of some.

    whole: local parameter -> the sharded parameter that it is a part of; parameters not in it are not sharded.
    stored_as: state key -> kind of train_state.py, where the shape alone does not determine it.
    """

    stored_as: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self.whole: dict[torch.Tensor, torch.Tensor] = {}

    def _shape(self, local: torch.Tensor) -> torch.Size:
        return self.whole.get(local, local).shape

    def _sum_over_ranks(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Sum each of `values` over the ranks that share the matrices, with one all-reduce per device.

        Offloaded parameters are on the CPU, adapters on the GPU, in the same order on every rank.
        """
        sharded = next((whole for whole in self.whole.values() if isinstance(whole, DTensor)), None)
        if sharded is None or not values:
            return values
        parts: dict[torch.device, Iterator[torch.Tensor]] = {}
        for device in dict.fromkeys(value.device for value in values):
            here = [value for value in values if value.device == device]
            flat = torch.cat([value.flatten() for value in here])
            dist.all_reduce(flat, group=sharded.device_mesh["shard"].get_group())
            parts[device] = iter(flat.split([value.numel() for value in here]))
        return [next(parts[value.device]).view(value.shape) for value in values]


class Adafactor(MatrixOptimizer):
    """Adafactor (Shazeer and Stern 2018) with a given learning rate and no momentum, as in transformers' Trainer.

    State: row_var [rows] and col_var [columns] for a matrix, var [rows] for a vector; step.
    """

    stored_as = {"row_var": "rows", "col_var": "once"}  # noqa: RUF012

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        weight_decay: float = 0.0,
        decay_rate: float = 0.8,
        clip_threshold: float = 1.0,
        eps: float = 1e-30,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "decay_rate": decay_rate}
        super().__init__(params, {**defaults, "clip_threshold": clip_threshold, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        trained = [(group, local) for group in self.param_groups for local in group["params"] if local.grad is not None]
        # All matrices in one all-reduce.
        sums = self._sum_over_ranks([part for group, local in trained for part in self._accumulate(group, local)])
        parts = iter(sums)
        updates = [
            self._scaled_gradient(group, local, *([next(parts), next(parts)] if local.dim() == 2 else []))
            for group, local in trained
        ]
        squares = self._sum_over_ranks([update.square().sum() for update in updates])
        for (group, local), update, square in zip(trained, updates, squares, strict=True):
            rms = math.sqrt(square.item() / self._shape(local).numel())
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(update, alpha=-group["lr"] / max(1.0, rms / group["clip_threshold"]))

    def _accumulate(self, group: dict[str, Any], local: torch.Tensor) -> list[torch.Tensor]:
        """Update the statistics of this rank's rows; returns a matrix's column sums of squares and sum of row_var."""
        state, squares = self.state[local], local.grad.square() + group["eps"]  # type: ignore[union-attr]
        if not state:
            state["step"] = torch.zeros(())
            if local.dim() == 2:
                state["row_var"] = local.new_zeros(local.shape[0])
                state["col_var"] = local.new_zeros(local.shape[1])
            else:
                state["var"] = torch.zeros_like(local)
        state["step"] += 1
        if local.dim() != 2:
            state["var"].lerp_(squares, self._weight(group, local))
            return []
        state["row_var"].lerp_(squares.mean(dim=1), self._weight(group, local))
        return [squares.sum(dim=0), state["row_var"].sum()]

    def _weight(self, group: dict[str, Any], local: torch.Tensor) -> float:
        """The weight of this step in the running means."""
        return float(self.state[local]["step"].item() ** -group["decay_rate"])

    def _scaled_gradient(self, group: dict[str, Any], local: torch.Tensor, *sums: torch.Tensor) -> torch.Tensor:
        state, gradient = self.state[local], local.grad
        assert gradient is not None
        if not sums:
            return gradient * state["var"].rsqrt()
        column_squares, row_var_sum = sums
        num_rows = self._shape(local)[0]
        state["col_var"].lerp_(column_squares / num_rows, self._weight(group, local))
        rows = (state["row_var"] / (row_var_sum / num_rows)).rsqrt()
        return gradient * rows[:, None] * state["col_var"].rsqrt()


class Muon(MatrixOptimizer):
    """Muon (Jordan et al. 2024): orthogonalized momentum, for matrices only.

    As torch.optim.Muon with Nesterov momentum and adjust_lr_fn "match_rms_adamw" (Liu et al. 2025), so AdamW's
    learning rates apply. Each matrix is gathered for its step; LoRA's are small.

    State: momentum_buffer, of the local shape.
    """

    def __init__(self, params: Any, *, lr: float, weight_decay: float = 0.0, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for local in group["params"]:
                if local.grad is not None:
                    self._update(group, local, local.grad)

    def _update(self, group: dict[str, Any], local: torch.Tensor, gradient: torch.Tensor) -> None:
        state = self.state[local]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(local)
        state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(state["momentum_buffer"], group["momentum"])
        sharded = self.whole.get(local)
        if isinstance(sharded, DTensor):
            first, last = own_rows(sharded, sharded.device_mesh)
            update = orthogonal(as_shard_of(direction, sharded).full_tensor())[first:last]
        else:
            update = orthogonal(direction)
        local.mul_(1 - group["lr"] * group["weight_decay"])
        local.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(self._shape(local))))


def orthogonal(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Approximately U V^T of the singular value decomposition U S V^T, in bf16, by Newton-Schulz iteration.

    The quintic's coefficients are Jordan's: fast rather than exact, singular values end between 0.7 and 1.2.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrix.bfloat16()
    is_tall = wide.shape[0] > wide.shape[1]
    wide = wide.T if is_tall else wide
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if is_tall else wide
