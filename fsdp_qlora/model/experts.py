"""The experts in a model: which modules they are, whose forward is replaced, and their weights."""

import copy
import inspect
import math
from collections.abc import Iterator
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from fsdp_qlora.model.architecture.decoder import find_blocks
from fsdp_qlora.model.architecture.structure import block_linears, read_directly
from fsdp_qlora.model.module_state import set_state, state_of
from fsdp_qlora.model.quantizers.padded_groups import PADDED, experts_way
from fsdp_qlora.model.quantizers.routed import (
    GROUP_BYTES,
    all_tokens_forward,
    apply_gate,
    experts_forward,
    identities_forward,
)

# The parameters of gated experts in transformers: gate and up projections are one parameter.
_GATED = {"gate_up_proj", "down_proj"}
# Arguments of the forward pass of experts in transformers' models, after `self`.
_ROUTED_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]
_ALL_TOKENS_ARGUMENTS = ["hidden_states"]


def route_experts(model: nn.Module, device: torch.device) -> None:
    """Replace the forward of experts without transformers' interface, in a model as built.

    They then multiply only the tokens that chose them.

    device: where the model will compute, for the memory of a group of experts.

    Where they are [experts, in, out], the attribute `is_transposed` stays away: PEFT reads it, and
    takes their parameters as [experts, out, in].
    """
    for module in model.modules():
        if _takes_all_tokens(module):
            attributes = {
                "has_gate": True,
                "_apply_gate": MethodType(apply_gate, module),
                "forward": MethodType(all_tokens_forward, module),
            }
            vars(module).update(attributes)
            set_state(module, replace(state_of(module), takes_all_tokens=True))
        else:
            vars(module).update(_replacement_of_loop(module))
    # Only now do all of them have what they are found by.
    for module in filter(loops_over_experts, model.modules()):
        set_state(module, replace(state_of(module), group_bytes=GROUP_BYTES[device.type]))


def loops_over_experts(module: nn.Module) -> bool:
    """Whether `routed` multiplies these experts: by transformers' attribute or `route_experts`'s.

    transformers' decorator `use_experts_implementation` sets `is_transposed`.
    """
    return hasattr(module, "is_transposed") or state_of(module).takes_all_tokens


def padding_notes(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """A sentence if a run pads the experts of a model on this device."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return  # planned for a GPU elsewhere
    has_experts = any(map(loops_over_experts, model.modules()))
    if has_experts and experts_way(device, dtype) == PADDED:
        yield (
            "Experts are multiplied in groups and padded to the longest of each, since this GPU "
            f"has no grouped kernel for {str(dtype).removeprefix('torch.')}: at most one row of "
            "padding for each row of an expert with more than 16. The log has the number."
        )


def router_linears(model: nn.Module) -> list[str]:
    """Paths of the linear layers that select or weight experts.

    They are too sensitive for 4 bits or an adapter.
    """
    routers = []
    for path, module in model.named_modules():
        counts = {child.num_experts for child in module.children() if loops_over_experts(child)}
        if not counts:
            continue
        for name, child in module.named_children():
            linears = {
                inner: layer
                for inner, layer in child.named_modules()
                if isinstance(layer, nn.Linear)
            }
            # A router that is a module of its own has no other linear layer (gemma4).
            if len(linears) != 1:
                continue
            [(inner, linear)] = linears.items()
            # A linear layer itself with one output weights a shared expert (qwen2_moe).
            widths = {*counts} if inner else {1, *counts}
            if linear.out_features in widths:
                routers.append(f"{path}.{name}.{inner}".rstrip("."))
    return routers


def expert_parameters(model: nn.Module) -> list[str]:
    """Paths of the 3-D parameters inside the decoder blocks whose experts are multiplied here."""
    inside = {*find_blocks(model).modules()}
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if module in inside and loops_over_experts(module)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and parameter.is_floating_point()
    ]


def quantizable_weights(model: nn.Module) -> tuple[list[str], list[str]]:
    """The weights of a 4-bit base.

    Returns the paths of the blocks' linear layers without routers, and of their expert parameters.
    """
    # Code that reads a layer's `weight` itself would find codes, or miss an adapter.
    others = {*router_linears(model), *read_directly(model)}
    linears = [path for path in block_linears(model) if path not in others]
    return linears, expert_parameters(model)


def _takes_all_tokens(module: nn.Module) -> bool:
    """Whether these experts are gated MLPs that are given every token in turn (llama4).

    Their weights are [experts, in, out], and there are no biases.

    An expert gets zeros for the tokens that did not choose it, and such an MLP maps zeros to zeros.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if shapes.keys() != _GATED or hasattr(module, "is_transposed"):
        return False
    inputs = shapes["gate_up_proj"]
    outputs = shapes["down_proj"]
    # gate_up_proj is [experts, hidden, 2 * inner], down_proj [experts, inner, hidden].
    is_mlp = (
        len(outputs) == 3
        and inputs == (outputs[0], outputs[2], 2 * outputs[1])
        and hasattr(module, "act_fn")
    )
    return is_mlp and _forward_arguments(module) == _ALL_TOKENS_ARGUMENTS


@torch.no_grad()
def _replacement_of_loop(module: nn.Module) -> dict[str, Any]:
    """Attributes with which our functions replace the loop of gated experts [experts, out, in].

    Empty for other modules. The loop and our function are compared with small random weights.
    """
    if module._parameters.keys() != _GATED or hasattr(module, "is_transposed"):
        return {}
    shapes = [tuple(parameter.shape) for parameter in module.parameters()]
    if [*map(len, shapes)] != [3, 3] or _forward_arguments(module) != _ROUTED_ARGUMENTS:
        return {}
    # gate_up_proj is [all experts, 2 * inner, hidden], down_proj [experts, hidden, inner]: an
    # expert that returns its input has rows in the first alone (longcat_flash).
    num_all = shapes[0][0]
    num_experts, hidden, inner = shapes[1]
    if shapes[0][1:] != (2 * inner, hidden):
        return {}
    forward = experts_forward if num_all == num_experts else identities_forward
    gate = getattr(type(module), "_apply_gate", apply_gate)
    attributes: dict[str, Any] = {
        "num_experts": num_experts,
        "has_gate": True,
        "is_transposed": False,
    }
    small = copy.copy(module)
    random = torch.Generator("cpu").manual_seed(0)
    # Layers as small as the ratio of their sizes allows.
    unit = math.gcd(hidden, inner)
    hidden = hidden // unit
    inner = inner // unit

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=random, device="cpu")

    gate_up = draw(num_all, 2 * inner, hidden)
    down = draw(num_experts, hidden, inner)
    x = draw(3, hidden)
    # The copy has a dict of parameters of its own, so that the module keeps its weights.
    vars(small).update(attributes, _parameters={"gate_up_proj": gate_up, "down_proj": down})
    vars(small)["_apply_gate"] = MethodType(gate, small)
    # The first and the last expert, and where there are some the first and last identity.
    last = num_all - 1
    choices = [[0, last], [num_experts - 1, 0], [last, num_experts // 2]]
    index = torch.tensor(choices, device="cpu")
    shares = index + 0.5
    try:
        is_near = torch.allclose(
            forward(small, x, index, shares), small(x, index, shares), atol=1e-4
        )
    except (RuntimeError, TypeError, AttributeError, IndexError):
        return {}
    if not is_near:
        return {}
    attributes["_apply_gate"] = MethodType(gate, module)
    attributes["forward"] = MethodType(forward, module)
    return attributes


def _forward_arguments(module: nn.Module) -> list[str]:
    """The names of the arguments of a module's forward pass, without `self`."""
    return list(inspect.signature(type(module).forward).parameters)[1:]
