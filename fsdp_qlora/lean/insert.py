"""Puts the lean functions into a model, and switches them between steps."""

from torch import nn

from fsdp_qlora.lean.gated_mlp import GatedMlp, as_gated_mlp
from fsdp_qlora.lean.rms_norm import RmsNorm, as_rms_norm
from fsdp_qlora.lean.rotary import use_rotary, uses_rotary


def make_lean(model: nn.Module) -> None:
    """Replace the norms, MLPs and rotary embeddings of a model on the meta device, wherever ours compute the same.

    Names and parameters stay.
    """
    for path, module in list(model.named_modules()):
        replaced = as_rms_norm(module) or as_gated_mlp(module)
        if replaced is not None:
            model.set_submodule(path, replaced)
        else:
            use_rotary(module)


def keep_little(block: nn.Module, enabled: bool) -> None:
    """Let a block keep less for its backward pass: norms and products of gates are computed again there."""
    for module in block.modules():
        if isinstance(module, RmsNorm | GatedMlp):
            module.is_lean = enabled


def describe_lean(model: nn.Module) -> str:
    """What computes the blocks' norms and gates, for a line of the log."""
    modules = list(model.modules())
    norms, mlps = ([module for module in modules if isinstance(module, kind)] for kind in (RmsNorm, GatedMlp))
    compiled = " compiled" if mlps and all(mlp.compiled for mlp in mlps) else ""
    rotary = sum(map(uses_rotary, modules))
    by = f"{len(norms)} norms by torch's rms_norm, {len(mlps)} MLPs with a gate by one{compiled} function"
    return f"{by}, rotary embeddings of {rotary} attention modules by another, the rest by the model's code"
