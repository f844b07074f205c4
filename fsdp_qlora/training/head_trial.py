"""Finds out, on a few tokens, whether and how a model's loss can be computed from its hidden states and its head."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_qlora.distributed import gather_numbers
from fsdp_qlora.sharding.parallelize import reshard_all
from fsdp_qlora.training.head_loss import HeadLoss, LogitForm, attach_head_loss, free_head_before_backward

log = logging.getLogger("fsdp_qlora")

_TOKENS, _POINTS = 8, 1024
_LARGEST = 1000.0  # output of the head, far above any cap
# Of the largest logit. In 16 bits a model scales and caps with three roundings.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def few_tokens(model: PreTrainedModel) -> torch.Tensor:
    """Token ids to try a model with, int64 [1, 8]."""
    vocabulary = model.get_input_embeddings().num_embeddings
    return (torch.arange(1, _TOKENS + 1) * 37 % vocabulary)[None]


@torch.no_grad()
def find_head_loss(model: PreTrainedModel, inputs: Mapping[str, Any]) -> HeadLoss | None:
    """The loss over chunks of tokens, or None where the model needs whole logits, which is said in one line.

    Called on every rank, with weights loaded; runs the model and compares with its own logits.

    Args:
        inputs: the base model's arguments, as in a step, for `few_tokens`.
    """
    why_not = _wrong_structure(model)
    if not why_not:
        model.eval()
        seen = _Seen()
        with _watched(model, seen):
            logits = model(**inputs, use_cache=False).logits
        form = _find_form(seen, logits, model.config)
        loss = attach_head_loss(model, form)
        fits = _agrees(seen, logits, form) and _same_loss(seen, loss, inputs, form)
        reshard_all(model)
        if not gather_numbers([float(not fits)], logits.device).any():  # the same on every rank
            free_head_before_backward(model)
            return loss
        why_not = "its logits are not its head's outputs, scaled or capped"
    log.info("The loss is computed from whole logits, which takes more memory: %s.", why_not)
    return None


def _wrong_structure(model: PreTrainedModel) -> str:
    head, base = model.get_output_embeddings(), model.base_model
    if base is model or head is None or any(module is head for module in base.modules()):
        return f"{type(model).__name__} does not keep its head apart from its decoder"
    if not isinstance(head, nn.Linear):
        return f"the head of {type(model).__name__} is a {type(head).__name__}"
    return ""


@dataclass
class _Seen:
    """What passed between decoder and head: hidden states, outputs, and the outputs given to the model instead."""

    decoder_output: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    head_input: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    head_output: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    ramp: torch.Tensor = field(default_factory=lambda: torch.empty(0))


@contextlib.contextmanager
def _watched(model: PreTrainedModel, seen: _Seen) -> Iterator[None]:
    """Look at the model's forward pass, and let the head give outputs of all sizes, to see what becomes of them."""

    def after_decoder(module: nn.Module, inputs: Any, output: Any) -> None:
        seen.decoder_output = output[0]

    def after_head(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        seen.head_input, seen.head_output = inputs[0], output
        seen.ramp = torch.linspace(-1, 1, output.shape[-1], device=output.device).pow(3).mul(_LARGEST).to(output.dtype)
        return seen.ramp.expand_as(output).clone()

    handles = [
        model.base_model.register_forward_hook(after_decoder),
        model.get_output_embeddings().register_forward_hook(after_head),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _find_form(seen: _Seen, logits: torch.Tensor, config: PretrainedConfig) -> LogitForm:
    """The scale and cap, among the numbers of the model's config, that explain its logits best; 1 and none if equal."""
    points = torch.linspace(0, len(seen.ramp) - 1, min(_POINTS, len(seen.ramp)), device=logits.device).long()
    outputs, logits = seen.ramp[points].float(), logits[0, 0, : len(seen.ramp)].float()
    if len(logits) < len(seen.ramp):
        return LogitForm()  # `_agrees` will say no
    logits = logits[points]
    numbers = _numbers(config)
    # No cap is as small as to bend the smallest outputs.
    few = outputs.abs().argsort()[: max(2, len(points) // 8)]
    scales = [1.0, *numbers, *(1 / number for number in numbers)]
    guesses = torch.tensor(scales, device=logits.device)[:, None] * outputs[few]
    scale = scales[int((guesses - logits[few]).abs().amax(dim=1).argmin().item())]
    forms = [LogitForm(scale), *(LogitForm(scale, number) for number in numbers if number > 0)]
    errors = [(form.logits(outputs.clone()) - logits).abs().amax() for form in forms]
    return forms[int(torch.stack(errors).argmin().item())]


def _numbers(config: PretrainedConfig) -> list[float]:
    """All numbers of a config but 0, in its own order."""
    values: list[Any] = [*config.to_dict().values(), *config.get_text_config().to_dict().values()]
    return list(dict.fromkeys(float(v) for v in values if type(v) in (int, float) and abs(v) > 1e-6))


def _agrees(seen: _Seen, logits: torch.Tensor, form: LogitForm) -> bool:
    """Whether the head's input is the decoder's output, and the form explains all logits."""
    if seen.head_input.shape != seen.decoder_output.shape or logits.shape != seen.head_output.shape:
        return False
    expected = form.logits(seen.ramp.float().clone()).expand_as(logits)
    tolerance = _TOLERANCE[seen.ramp.dtype]
    return _is_near(seen.head_input, seen.decoder_output, tolerance) and _is_near(logits, expected, tolerance)


def _same_loss(seen: _Seen, loss: HeadLoss, inputs: Mapping[str, Any], form: LogitForm) -> bool:
    """Whether decoder and head, called by us, give the loss that follows from the outputs seen."""
    targets = inputs["input_ids"][0]
    rows = torch.arange(len(targets), device=targets.device)
    logits = form.logits(seen.head_output[0].float().clone())
    expected = F.cross_entropy(logits, targets, reduction="sum")
    return _is_near(loss(inputs, rows, targets), expected, 10 * _TOLERANCE[seen.ramp.dtype])


def _is_near(value: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    value, expected = value.float(), expected.float()
    return bool(((value - expected).abs().amax() <= tolerance * expected.abs().amax()).item())
