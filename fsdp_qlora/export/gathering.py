"""Whole tensors of a model, in the form that files have."""

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fsdp_qlora.model.experts import expert_parameters


def dtype_of(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype


def as_stored(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that a parameter is in the base's files, by their names there.

    Merged parameters of experts are split, as transformers does on saving.
    """
    if not expert_parameters(model):
        return {name: tensor}
    return {
        part: value.contiguous()
        for part, value in revert_weight_conversion(model, {name: tensor}).items()
    }


def gather_all(
    named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, *, keep: bool
) -> dict[str, torch.Tensor]:
    """Take whole tensors one at a time, floats in `dtype` on the CPU.

    Without `keep` each is freed at once.
    """
    state = {}
    # `named` gathers as it is iterated, so every rank has to consume all of it.
    for name, whole in named:
        if keep:
            state[name] = whole.to("cpu", dtype_of(whole, dtype)).contiguous()
    return state
