"""After an error in a forward or a backward pass: FSDP2 as before the pass, which can be repeated then."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from fsdp_qlora.sharding.parallelize import fsdp_modules, reshard_all


def forget_pass(model: PreTrainedModel) -> None:
    """Have FSDP2 as before a forward pass, on a rank that has waited for no other in the pass, but to reduce gradients.

    Gradients that it has not reduced are dropped, also those of earlier micro-batches.
    """
    root = model._get_fsdp_state()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
    _drop_gradients(fsdp_modules(model))
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
        return
    # Until torch 2.13 is required: with no gradients left, what ends a backward pass does the same.
    root._state_ctx.iter_forward_root = None
    root._root_post_backward_final_callback()
    reshard_all(model)


def is_reducing(model: PreTrainedModel) -> bool:
    """Whether a step's last backward pass has failed while FSDP2 was reducing some gradients: nobody knows how far."""
    groups = (module._get_fsdp_state()._fsdp_param_group for module in fsdp_modules(model))
    ended = (group for group in groups if group and group._training_state.name == "POST_BACKWARD")
    trained = ([each for each in group.fsdp_params if each.sharded_param.requires_grad] for group in ended)
    return any(parameters and not any(map(_is_reduced, parameters)) for parameters in trained)


class Reduced:
    """Modules whose gradients are reduced over the ranks already, which the others will not do again in this step."""

    def __init__(self) -> None:
        self._modules: list[FSDPModule] = []

    def find(self, model: PreTrainedModel) -> None:
        """Take note of what has been reduced when a pass has failed."""
        self._modules = [module for module in fsdp_modules(model) if any(map(_is_reduced, _parameters(module)))]

    def leave_out(self) -> None:
        """Let the next backward pass, a step's last, reduce the other modules' gradients alone."""
        for module in self._modules:
            module.set_requires_gradient_sync(False, recurse=False)

    def forget(self) -> None:
        """After that pass, as if there had not been another."""
        _drop_gradients(self._modules)
        for module in self._modules:
            module.set_requires_gradient_sync(True, recurse=False)
        self._modules = []


def _parameters(module: FSDPModule) -> Sequence[Any]:
    """FSDP2's own objects for the parameters that it gathers with the module."""
    group = module._get_fsdp_state()._fsdp_param_group
    return group.fsdp_params if group else ()


def _is_reduced(parameter: Any) -> bool:
    return parameter.sharded_param.grad is not None


def _drop_gradients(modules: Iterable[FSDPModule]) -> None:
    """Drop those that have been accumulated on this rank alone."""
    for module in modules:
        for parameter in _parameters(module):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
