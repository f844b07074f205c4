"""Prefetches frozen weights from host memory, one module ahead, if a rank holds them all.

FSDP2 copies unsharded weights on the compute stream, which waits for each copy. (Sharded weights
are copied on the stream of their all-gather.)

The codes of quantized experts stay on the host in a pass of few tokens, such as one that generates:
the layer asks for those of the experts that the tokens have chosen.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fsdp_qlora.model.architecture.shapes import block_shapes
from fsdp_qlora.model.module_state import set_state, state_of
from fsdp_qlora.model.quantizers.base import QuantizedExperts, QuantizedWeight
from fsdp_qlora.sharding.host_memory import SideStream
from fsdp_qlora.sharding.recompute import unwrapped


def is_streamed(parameter: torch.Tensor) -> bool:
    """Whether a parameter of a streamed module is frozen and not managed by FSDP2."""
    return not parameter.requires_grad and not isinstance(parameter, DTensor)


def stream_weights(
    model: PreTrainedModel, modules: Sequence[nn.Module], device: torch.device
) -> None:
    """Install hooks that prefetch each module's frozen weights, and free them after use.

    The weights are in host memory, those of a module side by side. Results are the same to the bit.
    A block that keeps its activations may keep its weights with them; one that recomputes does not.
    """
    stream = _WeightStream(modules, device)
    chosen = max(shape.chosen for shape in block_shapes(model.config))
    head = model.get_output_embeddings()
    for index, module in enumerate(modules):
        # index is a default argument: a closure would see the last one in all functions.
        def enter(*_: Any, index: int = index, choices: int | None = None) -> None:
            stream.enter(index, choices)

        def enter_with(module: nn.Module, args: Any, index: int = index) -> None:
            # With gradients all codes are copied, since the backward pass uses them again.
            stream.choices = None if torch.is_grad_enabled() else chosen * _count_tokens(args[0])
            stream.enter(index, stream.choices)

        def enter_in_backward(
            module: nn.Module, args: Any, output: Any, index: int = index
        ) -> None:
            # The gradient of a block's output is the first thing in its part of the backward pass.
            tensor = output if isinstance(output, torch.Tensor) else output[0]
            if tensor.requires_grad:
                tensor.register_hook(lambda _: stream.enter(index))

        inner = unwrapped(module)  # its hooks run again when the block is recomputed
        inner.register_forward_pre_hook(enter_with)
        set_state(inner, replace(state_of(inner), load_weights_to_gpu=enter))
        # The head's weights are used without its forward method where the loss is computed in
        # chunks (training/head_loss.py): they are loaded when the blocks end.
        if module is head and model.base_model is not model:
            model.base_model.register_forward_hook(
                lambda *_, enter=enter: enter(choices=stream.choices)
            )
        elif module is not head:
            module.register_forward_hook(enter_in_backward)


def _count_tokens(x: torch.Tensor) -> int:
    """Tokens in a module's input: hidden states [.., hidden], or the embedding's [..]."""
    return math.prod(x.shape[:-1] if x.is_floating_point() else x.shape)


class _WeightStream:
    """Follows the order in which modules are used, forward then backward.

    Two modules are on the device at a time: the one at work, and the next one, being copied.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        side = SideStream(device)
        self.parts = [_Part(module, side, device) for module in modules]
        self.choices: int | None = None  # of the pass at work

    def enter(self, index: int, choices: int | None = None) -> None:
        """Load the weights of a module to the device, prefetch the next one's, and free all others.

        choices: maximum choices of experts in a pass without backward.
        """
        following = self._following(index)
        # Free before allocating, so that the next module gets the memory of the one before.
        for position, part in enumerate(self.parts):
            if position not in (index, following):
                part.release()
        part = self.parts[index]
        # Nothing to do where it was prefetched; the first module of a pass, or one after an
        # exception, was not.
        part.prefetch(choices)
        part.bind()
        # After `bind`: its copy waits for what the compute stream has queued so far, and the work
        # of this module comes after it, so that the two overlap.
        self.parts[following].prefetch(choices)

    def _following(self, index: int) -> int:
        """The module that is used next. Backward begins where forward ends, and vice versa."""
        last = len(self.parts) - 1
        # Also in a recomputed block, whose forward hooks run within the backward pass.
        is_backward = torch._C._current_graph_task_id() != -1
        if is_backward:
            return max(index - 1, 0)
        if index < last:
            return index + 1
        # The last one is used again at once, and stays; then comes the one before. Without
        # gradients the next thing is another forward pass.
        return max(last - 1, 0) if torch.is_grad_enabled() else 0


class _Part:
    """The frozen weights of one module: on the host, on the device, or being copied there.

    loaded: of each expert layer the experts whose codes are on the device; None if all are.
    """

    def __init__(self, module: nn.Module, side: SideStream, device: torch.device) -> None:
        self.side = side
        self.device = device
        frozen = filter(is_streamed, {*module.parameters()})
        self.parameters = sorted(frozen, key=lambda parameter: parameter.data_ptr())
        # Kept for the life of the model. What is freed on the device need not be copied back: it is
        # frozen.
        self.host = [parameter.data for parameter in self.parameters]
        self.whole = _span(self.host)
        self.on_device: torch.Tensor | None = None
        self.copied: torch.cuda.Event | None = None
        self.is_used = False
        # By identity: `==` of tensors compares values.
        host_of = {id(parameter): host for parameter, host in self.pairs()}
        self.codes: dict[QuantizedExperts, torch.Tensor] = {}
        self.quantized = [each for each in module.modules() if isinstance(each, QuantizedWeight)]
        for layer in self.quantized:
            if isinstance(layer, QuantizedExperts) and id(layer.weight) in host_of:
                self.codes[layer] = host_of[id(layer.weight)]
        self.loaded: dict[QuantizedExperts, set[int]] | None = None
        for layer in self.codes:
            layer.bring = partial(self.load_to_gpu, layer)

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter and its values on the host."""
        return zip(self.parameters, self.host, strict=True)

    def prefetch(self, choices: int | None = None) -> None:
        """Start to copy the weights, unless that has been done.

        choices: if they are fewer than experts, the codes of experts stay on the host.
        """
        is_partial = choices is not None and any(choices < layer.shape[0] for layer in self.codes)
        # A pass of few tokens may have left some codes out, and this one needs all.
        if self.on_device is not None and self.loaded is not None and not is_partial:
            self.release()
        if self.on_device is not None:
            return
        # On the compute stream, whose later work alone may use this memory after it is freed.
        self.on_device = torch.empty_like(self.whole, device=self.device)
        self.loaded = None
        if not is_partial:
            # One copy of all parameters, which are side by side: a launch costs the host time.
            self.copied = self.side.copy(self.on_device, self.whole)
            return
        self.loaded = {layer: set() for layer in self.codes}
        for parameter, host in self.pairs():
            if not any(parameter is layer.weight for layer in self.codes):
                # The last event stands for all: the copies are in the order of one stream.
                host_bytes = host.view(-1).view(torch.uint8)
                self.copied = self.side.copy(self._place(host), host_bytes)

    def _place(self, host: torch.Tensor) -> torch.Tensor:
        """Where a parameter's bytes are on the device."""
        assert self.on_device is not None
        first = host.data_ptr() - self.host[0].data_ptr()
        return self.on_device[first : first + host.numel() * host.element_size()]

    def load_to_gpu(self, layer: QuantizedExperts, experts: Sequence[int]) -> None:
        """Copy the codes of these experts, unless they are there. The layer calls it in use."""
        if self.loaded is None:
            return
        host = self.codes[layer]
        rows = math.prod(layer.shape[1:]) // layer.row_weights
        for expert in sorted({*experts} - self.loaded[layer]):
            expert_rows = slice(expert * rows, (expert + 1) * rows)
            # On the compute stream, since the layer needs them at once. The host memory is pinned
            # and never written, so the host need not wait.
            layer.weight.data[expert_rows].copy_(host[expert_rows], non_blocking=True)
        self.loaded[layer].update(experts)

    def bind(self) -> None:
        """Point the parameters to the device's copy, for which the compute stream waits."""
        if self.is_used or not self.parameters:
            return
        assert self.on_device is not None
        self.side.compute_waits(self.copied)
        # `.data` and not new parameters: hooks, the optimizer and FSDP2's lists know these objects.
        for parameter, host in self.pairs():
            parameter.data = self._place(host).view(host.dtype).view(host.shape)
        self.is_used = True

    def release(self) -> None:
        """Point the parameters to the host's memory again, and free the device's copy."""
        if self.on_device is None:
            return
        if not self.is_used:
            # the freed memory may be the compute stream's next tensor
            self.side.compute_waits(self.copied)
        for parameter, host in self.pairs():
            parameter.data = host
        for layer in self.quantized:
            layer.forget_views()
        self.on_device = None
        self.is_used = False


def _span(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A uint8 view from the first to the last of some tensors in one allocation."""
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    storage = tensors[0].untyped_storage()
    last = tensors[-1]
    assert storage.data_ptr() == last.untyped_storage().data_ptr()
    start = tensors[0].data_ptr()
    stop = last.data_ptr() + last.numel() * last.element_size()
    # By `set_`, since no view of one tensor can reach beyond it; alignment leaves gaps in between.
    whole = torch.empty(0, dtype=torch.uint8)
    return whole.set_(storage, start - storage.data_ptr(), (stop - start,), (1,))
