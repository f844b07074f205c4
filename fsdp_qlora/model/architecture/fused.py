"""Replaces a model's own norms and MLPs by modules that compute the same with less memory."""

from torch import nn

from fsdp_qlora.model.architecture.gated_mlp import (
    GatedMlp,
    Mlp,
    as_gated_mlp,
    as_own_mlp,
    linears_alone,
)
from fsdp_qlora.model.architecture.rms_norm import RmsNorm, as_rms_norm


def fuse_modules(model: nn.Module) -> None:
    """Replace the norms and MLPs of a model on the meta device, wherever ours compute the same.

    Names and parameters stay.
    """
    # A list, since modules are replaced in the loop.
    for path, module in list(model.named_modules()):
        replacement = as_rms_norm(module) or as_gated_mlp(module) or as_own_mlp(module)
        if isinstance(replacement, Mlp):
            linears = linears_alone(module).values()
            replacement.inner = max(linear.out_features for linear in linears)
        if replacement is not None:
            model.set_submodule(path, replacement)


def set_save_inputs_only(block: nn.Module, enabled: bool) -> None:
    """Choose whether a block keeps less: norms and products of gates are then computed again.

    Otherwise long rows are computed in pieces, which takes no longer in a block with activation
    checkpointing.
    """
    for module in block.modules():
        if isinstance(module, RmsNorm | Mlp):
            module.inputs_only = enabled


def describe_fused(model: nn.Module) -> str:
    """Describe for the log how norms and gates are computed."""
    norms = sum(isinstance(module, RmsNorm) for module in model.modules())
    mlps = sum(isinstance(module, GatedMlp) for module in model.modules())
    return f"{norms} norms and {mlps} gated MLPs by one function each, the rest by the model's code"
