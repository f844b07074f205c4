"""Operators of which the CPU has no same form."""

from collections.abc import Sequence
from typing import Any

import torch

from stand_in.values.memory import alias, fill, on_cpu
from stand_in.values.ways import (
    Way,
    both,
    by_name,
    compute_widened,
    cpu_alone,
    launched,
    noted,
)

HALVES = (torch.float16, torch.bfloat16)


def floats(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [alias(tensor).float() for tensor in tensors]


def to_copy(func: Any, args: Any, kwargs: Any) -> Any:
    """The outcome may be a tensor of either device, and pinned."""
    made = launched(func, args, kwargs)
    alias(made).copy_(alias(args[0]))
    return made


def widened(func: Any, args: Any, kwargs: Any) -> Any:
    """Norms: the statistics of 16-bit inputs are float32 on the device, and 16 bits on the CPU."""
    outputs = launched(func, args, kwargs)
    fill(func, outputs, compute_widened(func, on_cpu(args), on_cpu(kwargs)))
    return outputs


def with_dtype(func: Any, args: Any, kwargs: Any) -> Any:
    """mm.dtype, bmm.dtype, addmm.dtype, baddbmm.dtype: products of 16 bits, kept in float32."""
    made = launched(func, args, kwargs)
    product = getattr(torch, func._schema.name.removeprefix("aten::"))
    alias(made).copy_(
        product(*floats(*(each for each in args if isinstance(each, torch.Tensor))), **kwargs)
    )
    return made


def index(func: Any, args: Any, kwargs: Any) -> Any:
    """The device's form counts the entries of a mask and reads the count."""
    is_mask = any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    return (cpu_alone if is_mask else both)(func, args, kwargs)


def softmax(func: Any, args: Any, kwargs: Any) -> Any:
    """The device's form alone can widen its result to float32."""
    x, dim, is_widened = args
    if not is_widened:
        return both(func, args, kwargs)
    made = launched(func, args, kwargs)
    alias(made).copy_(func(alias(x).float(), dim, False))
    return made


def softmax_backward(func: Any, args: Any, kwargs: Any) -> Any:
    grad, output, dim, input_dtype = args
    if grad.dtype == input_dtype:
        return both(func, args, kwargs)
    made = launched(func, args, kwargs)
    alias(made).copy_(func(alias(grad), alias(output), dim, grad.dtype))
    return made


def rms_norm(given: dict[str, Any], outputs: Sequence[torch.Tensor]) -> None:
    [x] = floats(given["input"])
    eps = torch.finfo(given["input"].dtype).eps if given["eps"] is None else given["eps"]
    rstd = (x.square().mean(normalized_dims(given), keepdim=True) + eps).rsqrt()
    alias(outputs[0]).copy_(x * rstd * weight_of(given))
    alias(outputs[1]).copy_(rstd.view(outputs[1].shape))


def rms_norm_backward(given: dict[str, Any], outputs: Sequence[torch.Tensor]) -> None:
    grad, x, rstd = floats(given["grad_out"], given["input"], given["rstd"])
    of_x, of_weight = given["output_mask"]
    normal = x * rstd
    scaled = grad * weight_of(given)
    if of_x:
        mean = (scaled * normal).mean(normalized_dims(given), keepdim=True)
        alias(outputs[0]).copy_(rstd * (scaled - normal * mean))
    if of_weight and given["weight"] is not None:
        alias(outputs[1]).copy_((grad * normal).sum_to_size(outputs[1].shape))


def normalized_dims(given: dict[str, Any]) -> tuple[int, ...]:
    return tuple(range(-len(given["normalized_shape"]), 0))


def weight_of(given: dict[str, Any]) -> torch.Tensor | float:
    return 1.0 if given["weight"] is None else alias(given["weight"]).float()


def foreach_copy(func: Any, args: Any, kwargs: Any) -> Any:
    """The device's kernel reads 16-bit floats as float32 and back, which makes every NaN 0x7fff
    (pytorch#159333).

    It changes bytes that only travel as bf16, as those of quantized weights do. The CPU's form does
    not.
    """
    outputs = both(func, args, kwargs)
    for target, source in zip(args[0], args[1], strict=True):
        if (
            target.is_cuda
            and source.is_cuda
            and target.dtype == source.dtype
            and target.dtype in HALVES
        ):
            own = alias(target)
            if (nans := own.isnan()).any():
                noted["words changed to 0x7fff by _foreach_copy_"] += int(nans.sum())
                own.view(torch.int16)[nans] = 0x7FFF
    return outputs


WAYS: dict[str, Way] = {
    "_to_copy": to_copy,
    "_softmax": softmax,
    "_log_softmax": softmax,
    "_softmax_backward_data": softmax_backward,
    "_log_softmax_backward_data": softmax_backward,
    "native_layer_norm": widened,
    "native_layer_norm_backward": widened,
    "native_group_norm": widened,
    "native_group_norm_backward": widened,
    "_fused_rms_norm": by_name(rms_norm),
    "_fused_rms_norm_backward": by_name(rms_norm_backward),
    "_foreach_copy_": foreach_copy,
    "index": index,
    "index_put": index,
    "index_put_": index,
    "_index_put_impl_": index,
}
