"""Optimizers over a rank's own shards."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import bitsandbytes
import torch
from torch import nn

from fsdp_qlora.distributed.shards import local_part, shard_bounds
from fsdp_qlora.utils.errors import UserError


def _adam(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Use the fused kernel for groups on a GPU: torch's default needs 4 more bytes per weight."""

    def build(groups: Any, **options: Any) -> torch.optim.Optimizer:
        for group in groups:
            group["fused"] = all(parameter.is_cuda for parameter in group["params"]) or None
        return kind(groups, **options)

    return build


class OptimizerKind(NamedTuple):
    """An optimizer that the option --optimizer names.

    build: makes it over parameter groups, each on one device, given lr and weight_decay. state:
    float32 values per trainable parameter of each tensor of its state. is_local: its state is
    packed by rank, so each rank saves its own. is_paged: its state is in managed memory, which
    CUDA moves between GPU and host.
    """

    build: Callable[..., torch.optim.Optimizer]
    state: tuple[float, ...]
    is_local: bool = False
    is_paged: bool = False


_IN_8_BITS = 65 / 256  # one byte, and a float32 per 256

OPTIMIZERS = {
    "adamw": OptimizerKind(_adam(torch.optim.AdamW), (1, 1)),
    "adam": OptimizerKind(_adam(torch.optim.Adam), (1, 1)),
    "sgd": OptimizerKind(torch.optim.SGD, ()),
    "adadelta": OptimizerKind(torch.optim.Adadelta, (1, 1)),
    "fused_adamw": OptimizerKind(partial(torch.optim.AdamW, fused=True), (1, 1)),
    "fused_adam": OptimizerKind(partial(torch.optim.Adam, fused=True), (1, 1)),
    "adamw_8bit": OptimizerKind(bitsandbytes.optim.AdamW8bit, 2 * (_IN_8_BITS,), is_local=True),
    "paged_adamw_8bit": OptimizerKind(
        bitsandbytes.optim.PagedAdamW8bit, 2 * (_IN_8_BITS,), is_local=True, is_paged=True
    ),
    "lion": OptimizerKind(bitsandbytes.optim.Lion, (1,)),
    "lion_8bit": OptimizerKind(bitsandbytes.optim.Lion8bit, (_IN_8_BITS,), is_local=True),
}

_PAGED_STATES = ("state1", "state2")  # of bitsandbytes' optimizers


def check_optimizer(name: str, device: torch.device) -> None:
    """Refuse an optimizer that cannot run here.

    Raises:
        UserError: it is paged and there is no GPU.
    """
    if OPTIMIZERS[name].is_paged and device.type != "cuda":
        raise UserError(
            f"optimizer {name} moves its state between GPU and host memory, and there is no GPU. "
            f"Use {name.removeprefix('paged_')}."
        )


def check_shard_sizes(name: str, model: nn.Module, num_shards: int) -> None:
    """Refuse a parameter whose shard is too large for the optimizer's kernels.

    Raises:
        UserError: bitsandbytes counts elements in int32.
    """
    build = OPTIMIZERS[name].build
    if not (
        isinstance(build, type) and issubclass(build, bitsandbytes.optim.optimizer.Optimizer8bit)
    ):
        return
    for path, parameter in model.named_parameters():
        _, rows = shard_bounds(parameter.shape[0], rank=0, size=num_shards)
        elements = rows * math.prod(parameter.shape[1:])
        if parameter.requires_grad and elements >= 2**31:
            raise UserError(
                f"optimizer {name} counts the elements of a tensor in 32 bits, and a rank's part "
                f"of {path} has {elements:,}. Use more ranks or --optimizer adamw."
            )


class ShardedOptimizer:
    """A plain torch optimizer over each rank's own shards.

    It gets local tensors that share the shards' memory. So every element-wise optimizer works
    sharded, without the cost of DTensor dispatch. Each device has its own parameter groups: torch's
    optimizers update the tensors of a group in a few kernels only if all are on one GPU.

    Args:
        lr_ratio_B: LoRA+ (Hayou et al. 2024): the learning rate of B (and of vectors) is this many
            times A's.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        *,
        lr: float,
        weight_decay: float,
        lr_ratio_B: float = 1.0,
    ) -> None:
        self._kind = OPTIMIZERS[name]
        # the model's parameter -> this rank's part of it
        self._local: dict[nn.Parameter, nn.Parameter] = {}
        # Both learning rates have groups on every rank, also where it owns no A or no B.
        by_scale: dict[float, dict[torch.device, list[nn.Parameter]]] = {1.0: {}, lr_ratio_B: {}}
        for path, parameter in model.named_parameters():
            # Shares the shard's memory: the optimizer's update in place is the model's.
            local = local_part(parameter).detach()
            if parameter.requires_grad and local.numel():
                self._local[parameter] = nn.Parameter(local)
                scale = lr_ratio_B if ".lora_B." in path or parameter.dim() == 1 else 1.0
                by_scale[scale].setdefault(local.device, []).append(self._local[parameter])
        groups = []
        for scale, by_device in by_scale.items():
            for tensors in by_device.values() or [[]]:
                groups.append({"params": tensors, "lr_scale": scale})
        # A rank may own no element of a small adapter; optimizers refuse an empty list.
        self.optimizer = (
            self._kind.build(groups, lr=lr, weight_decay=weight_decay) if self._local else None
        )
        self._group_of = {local: group for group in self._groups for local in group["params"]}

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer else []

    # --- a step ---

    def take_gradients(self) -> None:
        """Take the gradients that FSDP2 has reduced onto this rank."""
        # FSDP2 reduces on a stream of its own, and makes the compute stream wait for it at the end
        # of the backward pass. So what is queued from here on sees the sums.
        for parameter, local in self._local.items():
            local.grad = None if parameter.grad is None else local_part(parameter.grad)

    def _gradients(self) -> list[torch.Tensor]:
        return [local.grad for local in self._local.values() if local.grad is not None]

    @torch.no_grad()
    def squared_norms(self) -> list[torch.Tensor]:
        """Sums of squares of this rank's gradients, float64 [], one for each device that has some.

        Offloaded gradients are on the CPU, the others on the GPU. Nothing waits for the GPU here.
        """
        # In float64, in which `gather_numbers` exchanges them for the sum over ranks.
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in self._gradients():
            by_device.setdefault(gradient.device, []).append(gradient)
        return [
            torch.nn.utils.get_total_norm(gradients).double().square()
            for gradients in by_device.values()
        ]

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        gradients = self._gradients()
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def step(self, lr: float, **options: Any) -> None:
        """Update the weights. options: of the parameter groups, such as betas, from now on."""
        if self.optimizer is None:
            return
        for group in self._groups:
            group.update(options, lr=lr * group["lr_scale"])
        self.optimizer.step()
        # Fused kernels and bitsandbytes' do not count their changes, and copies of weights are
        # made anew by that count.
        torch.autograd.graph.increment_version(self._local.values())

    def zero_grad(self) -> None:
        for parameter, local in self._local.items():
            parameter.grad = local.grad = None

    # --- state ---

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The optimizer's values for a parameter of the model, to read; empty before a step."""
        local = self._local.get(parameter)
        if self.optimizer is None or local is None or local not in self.optimizer.state:
            return {}
        if self._kind.is_paged:
            torch.cuda.synchronize()  # the host reads managed memory without regard to streams
        return dict(self.optimizer.state[local])

    def set_state(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Replace the values for a parameter of the model by copies of these, from any device."""
        local = self._local.get(parameter)
        if self.optimizer is not None and local is not None and state:
            self.optimizer.state[local] = {
                key: self._own_value(local, key, value) for key, value in state.items()
            }

    def _own_value(self, local: nn.Parameter, key: str, value: Any) -> Any:
        """A copy of a value where this optimizer would have made it, in this run."""
        if not isinstance(value, torch.Tensor):
            return value
        # CUDA may move a paged state between GPU and host at any time, so it must be in managed
        # memory, which only bitsandbytes allocates.
        if self._kind.is_paged and key in _PAGED_STATES:
            buffer: torch.Tensor = self.optimizer.get_state_buffer(local, dtype=value.dtype)  # type: ignore[union-attr]
            return buffer.copy_(value)
        # torch's optimizers count steps on the CPU, but for fused kernels.
        is_on_host = value.dim() == 0 and not self._group_of[local].get("fused")
        return value.to("cpu" if is_on_host else local.device, copy=True)

    def forget(self) -> None:
        """Drop the values of all parameters, as before the first step."""
        if self.optimizer is not None:
            self.optimizer.state.clear()

    def room_for_state(self) -> list[torch.Tensor]:
        """Memory like the state that the first step will allocate; nothing if there is state.

        Tensors of the state's own sizes: the allocator keeps those below 1 MiB apart. Nothing for
        paged optimizers, whose state is not in GPU memory alone.
        """
        if self.optimizer is None or self.optimizer.state or self._kind.is_paged:
            return []
        room = []
        for share in self._kind.state:
            for local in self._local.values():
                size = int(share * local.numel())
                if size:
                    room.append(torch.empty(size, dtype=torch.float32, device=local.device))
        return room
