"""The models whose rows can be divided among ranks (context parallelism), and among how many."""

import math

from fsdp_qlora.model.architecture.attention import can_share, packing_blocker
from fsdp_qlora.model.architecture.rope import changing_rope
from fsdp_qlora.model.architecture.shapes import block_shapes
from fsdp_qlora.model.architecture.token_mixers import can_continue, has_convolution
from fsdp_qlora.model.model_parts import ModelParts
from fsdp_qlora.utils.errors import UserError


def context_blocker(parts: ModelParts, documents: str | None) -> str | None:
    """The reason in a model's structure why ranks cannot share a row's tokens; None if unknown.

    A probe finds the rest (training/probes.py).

    Args:
        documents: from `attention.choose`; only our own attention exchanges heads.
    """
    reason = packing_blocker(parts.model)
    if reason:
        return reason
    if not can_share(documents):
        implementation = documents or parts.model.config._attn_implementation
        return f"its attention is computed by {implementation}"
    # A rank has the positions of its own tokens only, so it does not know how long the row is.
    rope = changing_rope(parts.model.config)
    if rope:
        return f"its rope type {rope[0]} depends on the length of whole rows"
    # A convolution or a state needs what precedes the rank's first token.
    stuck: set[str] = set()
    for module in parts.blocks.modules():
        if has_convolution(module) and not can_continue(module):
            stuck.add(type(module).__name__)
    if stuck:
        return f"{', '.join(sorted(stuck))} takes no state from other ranks"
    return None


def check_context(parts: ModelParts, documents: str | None, size: int) -> None:
    """Refuse a model whose rows `size` ranks cannot share.

    Other arguments as for `context_blocker`.

    Raises:
        UserError: the model cannot be divided so.
    """
    if size == 1:
        return
    reason = context_blocker(parts, documents)
    if reason:
        raise UserError(
            f"--context_parallel_size {size} cannot divide {type(parts.model).__name__}: {reason}."
        )
    possible = sizes_that_divide_heads(parts)
    if size not in possible:
        raise UserError(
            f"--context_parallel_size {size}: this model's attention has {possible[-1]} heads, "
            f"which {size} ranks cannot share equally. Give one of {', '.join(map(str, possible))}."
        )


def sizes_that_divide_heads(parts: ModelParts) -> list[int]:
    """The numbers of ranks that divide the query heads of every block, ascending."""
    # Blocks may differ in heads: a size must divide all, so their greatest common divisor.
    heads = math.gcd(*(shape.heads for shape in block_shapes(parts.model.config)))
    return [size for size in range(1, heads + 1) if heads % size == 0]
