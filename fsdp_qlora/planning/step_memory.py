"""Estimates what comes and goes on a rank's device within a training step, from a model on the meta device."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_qlora.adapters.insert import adapter_modules
from fsdp_qlora.model.fused import PIECE, GatedMlp, RmsNorm
from fsdp_qlora.model.models import canonical_name
from fsdp_qlora.model.precision import Precision
from fsdp_qlora.quantizers.base import QuantizedWeight
from fsdp_qlora.sharding.model_parts import ModelParts, each_parameter
from fsdp_qlora.sharding.vocabulary import is_shared
from fsdp_qlora.training.head_loss import logits_bytes, tokens_at_a_time

# Of the activations that a block keeps without recompute: what its backward pass holds at once with their gradients.
# Where many tokens go through a gate in pieces, the second and three pieces (model/fused.py). The allocator
# of the stand-in counts 4.2 GiB for Qwen3-8B's 4.6 GiB at 32,768 tokens, and 1.0 for Llama-2-70B's 1.2 at 4,096.
_BACKWARD_FACTOR, _IN_PIECES_FACTOR = 1.5, 0.95


@dataclass(frozen=True)
class Step:
    """What a step's memory depends on besides the model.

    num_shards: ranks that share one copy. frees_blocks: a block's weights are freed after use; else all of them are
    gathered at once. accumulates: gradients of several micro-batches add up unsharded. num_rows, num_tokens: of a
    micro-batch. cpu_offload: weights come from the host. offloads_activations: what blocks keep for the backward pass
    is there.
    """

    num_shards: int
    frees_blocks: bool
    cpu_offload: bool | int
    precision: Precision
    num_rows: int
    num_tokens: int
    accumulates: bool = False
    offloads_activations: bool = False


@dataclass(frozen=True)
class StepBytes:
    """Bytes on a rank's device in a step, besides its shards and the optimizer's state.

    blocks: gathered blocks, or unsharded copies of them: the one at work and the next, or all. ends: the gathered head
    (or embeddings), or from the host a rank's rows of a shared head. copies: of adapters and tied embeddings in the
    compute dtype, from forward to backward. gradients: unsharded ones. logits: of the tokens computed at a time.
    exchanged: hidden states of these tokens, of all ranks, where they share the head, and gradients. kept: the inputs
    of all blocks, with recompute. block: kept by one block without recompute. at_work: of a block in its backward pass.
    """

    blocks: int
    ends: int
    copies: int
    gradients: int
    logits: int
    exchanged: int
    kept: int
    block: int
    at_work: int

    @property
    def peak(self) -> int:
        """The most at a time: at the head or in a block, with recompute of every block."""
        # What is gathered lies in a buffer and then, beside it, in the weights.
        at_head = self.exchanged + self.ends + max(self.ends, self.logits)
        return self.copies + self.gradients + self.kept + max(at_head, self.blocks + self.at_work)


def estimate_step(parts: ModelParts, step: Step) -> StepBytes:
    """What comes and goes in a step with recompute of every block."""
    dtype = step.precision.compute_dtype
    model, blocks = parts.model, parts.blocks
    shared = is_shared(parts, step.num_shards, step.precision.param_dtype)
    ends = _ends(model, step, shared)
    stays = parts.is_tied and not any(shared)
    sizes = [_gathered(block, step) for block in blocks]
    gathered = min(sum(sizes), 2 * max(sizes)) if step.frees_blocks else sum(sizes)
    adapters = sum(parameter.numel() for part in adapter_modules(model) for parameter in part.parameters())
    in_blocks = [sum(p.numel() for part in adapter_modules(block) for p in part.parameters()) for block in blocks]
    vocabulary = model.get_input_embeddings().num_embeddings
    hidden_size = model.config.get_text_config().hidden_size
    hidden = step.num_tokens * hidden_size * _residual_size(model, step)
    exchanged = step.num_shards * min(step.num_tokens, tokens_at_a_time(vocabulary, dtype)) * hidden_size
    kept = {is_lean: max(_kept(block, model, step, is_lean=is_lean) for block in blocks) for is_lean in (False, True)}
    return StepBytes(
        # Shards from the host are on the device before they are gathered.
        blocks=int(gathered * (1 + (1 / step.num_shards if step.cpu_offload and step.num_shards > 1 else 0))),
        ends=0 if stays else ends,
        copies=adapters * dtype.itemsize + (ends if stays else 0),
        # float32, as they are reduced
        gradients=4 * (adapters if step.accumulates else max(in_blocks)),
        logits=logits_bytes(step.num_tokens, vocabulary, dtype),
        exchanged=2 * exchanged * dtype.itemsize if shared[1] else 0,
        kept=hidden * (2 if step.offloads_activations else len(blocks)),
        block=kept[True],
        at_work=_in_backward(blocks, kept[False], dtype) + max(_decoded(block, dtype) for block in blocks),
    )


def _ends(model: PreTrainedModel, step: Step, shared: tuple[bool, bool]) -> int:
    """Bytes of the embeddings or the head, whichever is more, beside the shards. shared: whether ranks share them."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings() or model.get_input_embeddings())
    found = [0 if elsewhere else _gathered(module, step) for module, elsewhere in zip(ends, shared, strict=True)]
    if shared[1] and step.cpu_offload is True:
        found.append(-(-_gathered(ends[1], step) // step.num_shards))
    return max(found)


def _gathered(module: nn.Module, step: Step) -> int:
    """Bytes of a module's unsharded weights that are no adapter's; 0 for weights that FSDP2 leaves as they are."""
    dtype = step.precision.param_dtype
    is_whole = step.num_shards == 1 and not step.cpu_offload
    return sum(
        parameter.numel() * (dtype if dtype and category == "trainable" else parameter.dtype).itemsize
        for parameter, category, _, in_adapter in each_parameter(module)
        if not in_adapter and not (is_whole and category != "trainable")
    )


def _residual_size(model: PreTrainedModel, step: Step) -> int:
    """Bytes of an element of the hidden states between blocks."""
    embeddings: torch.Tensor = model.get_input_embeddings().weight
    return (step.precision.param_dtype or embeddings.dtype).itemsize


def _kept(block: nn.Module, model: PreTrainedModel, step: Step, *, is_lean: bool) -> int:
    """About what a block keeps for its backward pass: the inputs and outputs of its matrices.

    Args:
        is_lean: without recompute, when what follows a norm and what is gated is not kept (model/fused.py).
    """
    config = model.config.get_text_config()
    # Of a mixture's experts [experts, out, in] some work on a token.
    active = getattr(config, "num_experts_per_tok", None) or 1
    per_token = 0
    for parent, shapes in _matrices(block).items():
        outputs, inputs = ([(active if len(shape) == 3 else 1) * shape[i] for shape in shapes] for i in (-2, -1))
        if is_lean and isinstance(parent, GatedMlp):
            inputs = []
        elif is_lean and any(isinstance(module, RmsNorm) for module in block.modules()):
            inputs = [max(inputs)]  # of attention's output layer
        per_token += sum(outputs) + sum(inputs)
    size = step.precision.compute_dtype.itemsize
    scores = 0
    if model.config._attn_implementation == "eager":  # the scores, and their probabilities in float32 and again
        scores = step.num_tokens**2 // step.num_rows * config.num_attention_heads * (4 + 2 * size)
    return int(per_token * step.num_tokens * size) + scores


def _in_backward(blocks: Iterable[nn.Module], kept: int, dtype: torch.dtype) -> int:
    """About what a block's backward pass holds at once, beside a decoded weight. kept: what it keeps for it."""
    held = _BACKWARD_FACTOR * kept
    if all(any(isinstance(module, GatedMlp) for module in block.modules()) for block in blocks):
        held = min(held, _IN_PIECES_FACTOR * kept + 3 * PIECE * dtype.itemsize)
    return int(held)


def _matrices(block: nn.Module) -> dict[nn.Module, list[tuple[int, ...]]]:
    """The shapes of a block's matrices by the module that uses them, adapters' apart."""
    in_adapters = {module for adapter in adapter_modules(block) for module in adapter.modules()}
    found: dict[nn.Module, list[tuple[int, ...]]] = {}
    for path, module in block.named_modules():
        if module in in_adapters:
            continue
        shapes = [tuple(p.shape) for p in module.parameters(recurse=False) if p.dim() > 1]
        if isinstance(module, QuantizedWeight):
            shapes = [module.shape]
        if shapes:
            parent = block.get_submodule(canonical_name(path).rpartition(".")[0])
            found.setdefault(parent, []).extend(shapes)
    return found


def _decoded(block: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the largest matrix of a block that is decoded for use."""
    quantized = [module for module in block.modules() if isinstance(module, QuantizedWeight)]
    return max((math.prod(module.shape[-2:]) * dtype.itemsize for module in quantized), default=0)
