"""Builds a model without memory for its weights, on the meta device."""

import importlib.util
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from fsdp_qlora.model.architecture.attention import choose_sdpa
from fsdp_qlora.model.architecture.config import (
    MOST_OF_A_WEIGHT,
    auto_class,
    one_process_at_a_time,
)
from fsdp_qlora.model.architecture.shapes import any_layer_has
from fsdp_qlora.utils.errors import UserError

# Elements of a tensor from which on it is created on the meta device. Smaller ones cost little
# memory, and may become buffers, which must be real.
_LARGE = 2**24


def _attention_candidates(
    requested: str, config: PretrainedConfig, compute_dtype: torch.dtype, device: torch.device
) -> list[str]:
    if requested == "flash_attention_2" and (device.type == "cpu" or compute_dtype.itemsize != 2):
        raise UserError(
            "attn_implementation flash_attention_2 needs a GPU and 16-bit compute; this run "
            f"computes in {str(compute_dtype).removeprefix('torch.')} on {device.type}. Leave it "
            "at auto."
        )
    if requested not in ("auto", "sdpa"):
        return [requested]
    best_sdpa = choose_sdpa(config, compute_dtype, device)
    if requested == "sdpa":
        return [best_sdpa]
    has_flash = device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
    candidates: list[str] = []
    # flash-attn 2 needs 16 bits and Ampere (8.0) or newer.
    fits_flash = has_flash and compute_dtype.itemsize == 2
    if fits_flash and torch.cuda.get_device_capability(device) >= (8, 0):
        candidates.append("flash_attention_2")
    # SDPA has no soft cap on attention logits (gemma2): transformers would leave it out silently.
    if not any_layer_has(config, "attn_logit_softcapping"):
        candidates.append(best_sdpa)
    return [*candidates, "eager"]


class _LargeOnMeta(TorchFunctionMode):
    """Creates large tensors on the meta device at once.

    accelerate moves a parameter there only after it was created, and the experts of a layer may
    exceed the memory.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.zeros) and kwargs.get("device") is None:
            # The size may be given in many ways: a tensor without memory knows it.
            on_meta = func(*args, **(kwargs | {"device": "meta"}))
            if on_meta.numel() >= _LARGE:
                return on_meta
        return func(*args, **kwargs)


def _check_sizes(model: nn.Module, config: PretrainedConfig) -> None:
    # A damaged config.json gives sizes that cost nothing on the meta device, and fail only when
    # memory is allocated.
    for path, parameter in model.named_parameters():
        if not 0 < parameter.numel() <= MOST_OF_A_WEIGHT:
            raise UserError(
                f"The {config.model_type} model described by config.json has weights of size "
                f"{parameter.numel()}, such as {path}. Download it again."
            )


def _build_empty(
    auto: Any, config: PretrainedConfig, *, trust_remote_code: bool, **options: Any
) -> PreTrainedModel:
    # Buffers stay real: rotary tables are computed at construction and are in no weight file.
    with (
        one_process_at_a_time(enabled=trust_remote_code),
        init_empty_weights(include_buffers=False),
        _LargeOnMeta(),
        no_init_weights(),
    ):
        model: PreTrainedModel = auto.from_config(
            config, trust_remote_code=trust_remote_code, **options
        )
    return model


def build_meta_model(
    config: PretrainedConfig,
    *,
    attn_implementation: str,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    device: torch.device,
    experts_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build the model with every parameter on the meta device and every buffer real.

    Args:
        attn_implementation: a transformers name, or "auto" for the best one that the model and
            device support.
        dtype: dtype of the parameters.
        compute_dtype, device: restrict "auto": flash-attn needs 16 bits and an Ampere GPU.
        experts_implementation: a transformers name; None for its default.
        trust_remote_code: run code from the model's folder.
    Raises:
        UserError: the requested attention implementation cannot be used, or the configuration is
            inconsistent.
    """
    candidates = _attention_candidates(attn_implementation, config, compute_dtype, device)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    if experts_implementation:
        options["experts_implementation"] = experts_implementation
    auto = auto_class(config, trust_remote_code=trust_remote_code)
    for candidate in candidates:
        try:
            model = _build_empty(auto, config, attn_implementation=candidate, **options)
        # transformers raises these for an implementation that the model does not support.
        except (ValueError, ImportError) as error:
            if candidate != candidates[-1]:
                continue
            raise UserError(
                f"The {config.model_type} model cannot be built with attn_implementation "
                f"{candidate}: {error}"
            ) from error
        except (
            ArithmeticError,
            AssertionError,
            LookupError,
            RuntimeError,
            TypeError,
            AttributeError,
        ) as error:
            raise UserError(
                f"The {config.model_type} model described by config.json cannot be built: "
                f"{str(error).partition(chr(10))[0]}. Download it again."
            ) from error
        _check_sizes(model, config)
        # accelerate makes a new parameter whenever one is registered, which parts tied weights.
        model.tie_weights()
        # Training reads no keys and values again, so none are stored.
        model.config.use_cache = False
        return model
    raise AssertionError("no attention candidate")
