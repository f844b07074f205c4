"""Prefetches frozen weights from host memory, one module ahead of the computation, if a rank holds them all.

FSDP2 copies unsharded weights on the compute stream, which waits for each copy. (Sharded weights are copied on the
stream of their all-gather.)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fsdp_qlora.sharding.host_memory import SideStream
from fsdp_qlora.sharding.recompute import unwrapped


def is_streamed(parameter: torch.Tensor) -> bool:
    """Whether a parameter of a streamed module is frozen and not managed by FSDP2."""
    return not parameter.requires_grad and not isinstance(parameter, DTensor)


def stream_weights(model: PreTrainedModel, modules: Sequence[nn.Module], device: torch.device) -> None:
    """Install hooks that prefetch each module's frozen weights, and free them after use.

    The weights are in host memory, those of a module side by side. Results are the same to the bit. A block that keeps
    its activations may keep its weights with them; one that recomputes does not.
    """
    stream = _WeightStream(modules, device)
    head = model.get_output_embeddings()
    for index, module in enumerate(modules):

        def enter(*_: Any, index: int = index) -> None:
            stream.enter(index)

        def enter_in_backward(module: nn.Module, args: Any, output: Any, index: int = index) -> None:
            tensor = output if isinstance(output, torch.Tensor) else output[0]
            if tensor.requires_grad:
                tensor.register_hook(lambda _: stream.enter(index))

        inner = unwrapped(module)  # its hooks run again when the block is recomputed
        inner.register_forward_pre_hook(enter)
        inner.bring_weights = enter  # type: ignore[assignment]  # for distributed.shards.whole_weights
        if module is head and model.base_model is not model:  # its weights may be used without its forward method
            model.base_model.register_forward_hook(enter)
        elif module is not head:
            module.register_forward_hook(enter_in_backward)


class _WeightStream:
    """Follows the order in which modules are used, forward then backward. Two modules are on the device at a time."""

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        side = SideStream(device)
        self.parts = [_Part(module, side, device) for module in modules]

    def enter(self, index: int) -> None:
        """Bring the weights of a module to the device, prefetch those of the next one, and free all others."""
        following = self._following(index)
        for position, part in enumerate(self.parts):
            if position not in (index, following):
                part.release()
        part = self.parts[index]
        part.prefetch()
        part.bind()
        self.parts[following].prefetch()

    def _following(self, index: int) -> int:
        """The module that is used next. The backward pass begins where the forward pass ends, and vice versa."""
        last = len(self.parts) - 1
        is_backward = torch._C._current_graph_task_id() != -1
        if is_backward:
            return max(index - 1, 0)
        if index < last:
            return index + 1
        return max(last - 1, 0) if torch.is_grad_enabled() else 0


class _Part:
    """The frozen weights of one module: on the host, on the device, or being copied there."""

    def __init__(self, module: nn.Module, side: SideStream, device: torch.device) -> None:
        self.side, self.device = side, device
        frozen = filter(is_streamed, {*module.parameters()})
        self.parameters = sorted(frozen, key=lambda parameter: parameter.data_ptr())
        self.host = [parameter.data for parameter in self.parameters]
        self.whole = _span(self.host)
        self.on_device: torch.Tensor | None = None
        self.copied: torch.cuda.Event | None = None
        self.is_used = False

    def prefetch(self) -> None:
        """Start to copy the weights to the device, unless that has been done."""
        if self.on_device is None:
            self.on_device = torch.empty_like(self.whole, device=self.device)
            self.copied = self.side.copy(self.on_device, self.whole)

    def bind(self) -> None:
        """Point the module's parameters to the device's copy. The compute stream waits for the copy first."""
        if self.is_used or not self.parameters:
            return
        assert self.on_device is not None
        self.side.compute_waits(self.copied)
        start = self.host[0].data_ptr()
        for parameter, host in zip(self.parameters, self.host, strict=True):
            first = host.data_ptr() - start
            part = self.on_device[first : first + host.numel() * host.element_size()]
            parameter.data = part.view(host.dtype).view(host.shape)
        self.is_used = True

    def release(self) -> None:
        """Point the parameters to the host's memory again, and free the device's copy."""
        if self.on_device is None:
            return
        if not self.is_used:
            self.side.compute_waits(self.copied)  # the freed memory may be the compute stream's next tensor
        for parameter, host in zip(self.parameters, self.host, strict=True):
            parameter.data = host
        self.on_device, self.is_used = None, False


def _span(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A uint8 view from the first to the last of some tensors in one allocation."""
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    storage, last = tensors[0].untyped_storage(), tensors[-1]
    assert storage.data_ptr() == last.untyped_storage().data_ptr()
    size = last.data_ptr() + last.numel() * last.element_size() - tensors[0].data_ptr()
    whole = torch.empty(0, dtype=torch.uint8)
    return whole.set_(storage, tensors[0].data_ptr() - storage.data_ptr(), (size,), (1,))
