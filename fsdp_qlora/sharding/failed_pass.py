"""After an error in a forward or a backward pass: FSDP2 as before the pass, which can be repeated then."""

import gc
import math
import time

import torch
from transformers import PreTrainedModel

from fsdp_qlora.sharding.parallelize import fsdp_modules, reshard_all


def forget_pass(model: PreTrainedModel) -> None:
    """Have FSDP2 as before a forward pass; gradients that it has not reduced are dropped, of all micro-batches."""
    root = model._get_fsdp_state()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
    _drop_gradients(model)
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
        return
    # Until torch 2.13 is required: with no gradients left, what ends a backward pass does the same.
    root._state_ctx.iter_forward_root = None
    root._root_post_backward_final_callback()
    reshard_all(model)


def _drop_gradients(model: PreTrainedModel) -> None:
    groups = (module._get_fsdp_state()._fsdp_param_group for module in fsdp_modules(model))
    for parameter in (parameter for group in groups if group for parameter in group.fsdp_params):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def wait_until_freed() -> None:
    """Let autograd's thread of a GPU drop the pass that failed, a moment after the error has come here."""
    gc.collect()
    before, now = math.inf, torch.cuda.memory_allocated()
    while now < before:
        time.sleep(0.05)
        before, now = now, torch.cuda.memory_allocated()
