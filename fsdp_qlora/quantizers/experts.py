"""Mixture-of-experts layers of transformers: finds the modules of experts, their 3-D parameters and their routers.

transformers keeps the experts of a layer in 3-D parameters, [experts, out, in] or (transposed) [experts, in, out], and
lets a function of the caller's multiply with them: `routed.py` has ours. A module of experts that it gives every token
(llama4) gets a forward of its own here, which multiplies those tokens alone that chose an expert.
"""

import inspect
from types import MethodType

from torch import nn

from fsdp_qlora.model.direct_weights import read_directly
from fsdp_qlora.model.models import block_linears, find_blocks
from fsdp_qlora.quantizers.routed import all_tokens_forward, apply_gate


def _takes_all_tokens(module: nn.Module) -> bool:
    """Whether these experts are gated MLPs [experts, in, out] without biases that are given every token in turn.

    An expert gets zeros for the tokens that did not choose it, and such an MLP maps zeros to zeros.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if shapes.keys() != {"gate_up_proj", "down_proj"} or hasattr(module, "is_transposed"):
        return False
    inputs, outputs = shapes["gate_up_proj"], shapes["down_proj"]
    is_mlp = len(outputs) == 3 and inputs == (outputs[0], outputs[2], 2 * outputs[1]) and hasattr(module, "act_fn")
    return is_mlp and list(inspect.signature(type(module).forward).parameters)[1:] == ["hidden_states"]


def route_experts(model: nn.Module) -> None:
    """Let experts that transformers gives every token multiply with those that chose them alone, in a model as built.

    The attribute `is_transposed` stays away: PEFT reads it, and takes their parameters as [experts, out, in].
    """
    for module in filter(_takes_all_tokens, model.modules()):
        own = {"_apply_gate": MethodType(apply_gate, module), "forward": MethodType(all_tokens_forward, module)}
        vars(module).update(takes_all_tokens=True, has_gate=True, **own)


def loops_over_experts(module: nn.Module) -> bool:
    """Whether these experts are used one at a time: by transformers' attribute or `route_experts`'s."""
    return hasattr(module, "is_transposed") or hasattr(module, "takes_all_tokens")


def router_linears(model: nn.Module) -> list[str]:
    """Paths of the linear layers that select or weight experts: too sensitive for 4 bits or an adapter."""
    routers = []
    for path, module in model.named_modules():
        counts = {child.num_experts for child in module.children() if loops_over_experts(child)}
        for name, child in module.named_children():
            if counts and isinstance(child, nn.Linear) and child.out_features in {1, *counts}:
                routers.append(f"{path}.{name}")
    return routers


def expert_parameters(model: nn.Module) -> list[str]:
    """Paths of the 3-D parameters inside the decoder blocks whose experts are used one at a time."""
    inside = {*find_blocks(model).modules()}
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if module in inside and loops_over_experts(module)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and parameter.is_floating_point()
    ]


def quantizable_weights(model: nn.Module) -> tuple[list[str], list[str]]:
    """Weights of a 4-bit base: paths of the blocks' linear layers without routers, and of their expert parameters."""
    others = {*router_linears(model), *read_directly(model)}  # who reads a weight would find codes, or miss an adapter
    return [path for path in block_linears(model) if path not in others], expert_parameters(model)
