"""The models whose rows can be divided among ranks (context parallelism), and among how many."""

import math

from fsdp_qlora.model.architecture.attention import can_share, packing_blocker
from fsdp_qlora.model.architecture.rope import changing_rope
from fsdp_qlora.model.architecture.shapes import block_shapes
from fsdp_qlora.model.architecture.token_mixers import can_continue, has_convolution
from fsdp_qlora.model.model_parts import ModelParts
from fsdp_qlora.utils.errors import UserError


def context_blocker(parts: ModelParts, documents: str | None) -> str | None:
    """Why ranks cannot share the tokens of a row, by a model's structure; None if no reason is
    known.

    The rest is found by a probe (training/probes.py).

    Args:
        documents: from `attention.choose`; only our own attention exchanges heads.
    """
    reason = packing_blocker(parts.model)
    if reason:
        return reason
    if not can_share(documents):
        return (
            f"its attention is computed by {documents or parts.model.config._attn_implementation}"
        )
    rope = changing_rope(parts.model.config)
    if rope:
        return f"its rope type {rope[0]} depends on the length of whole rows"
    mixers = filter(
        has_convolution, (module for block in parts.blocks for module in block.modules())
    )
    stuck = {type(module).__name__ for module in mixers if not can_continue(module)}
    return f"{', '.join(sorted(stuck))} takes no state from other ranks" if stuck else None


def check_context(parts: ModelParts, documents: str | None, size: int) -> None:
    """Refuse a model of which so many ranks cannot share the tokens. Arguments as for
    `context_blocker`.

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
            "which so many ranks "
            f"cannot share equally. Possible: {', '.join(map(str, possible))}."
        )


def sizes_that_divide_heads(parts: ModelParts) -> list[int]:
    """The numbers of ranks that can share the heads of queries equally, ascending; the last is that
    of the heads.
    """
    heads = math.gcd(*(shape.heads for shape in block_shapes(parts.model.config)))
    return [size for size in range(1, heads + 1) if heads % size == 0]
