"""A function of each token alone, such as an MLP, computed in pieces of a long row's tokens.

As in ALST's tiled MLP (Bekman et al. 2025, arXiv 2506.13996), forward and backward: what is as wide
as the MLP is there for one piece at a time. The backward pass computes each piece again, and
activation checkpointing of its block ends before them, so products are as many as without pieces;
but a quantized weight is decoded for each.
"""

from collections.abc import Callable
from contextvars import ContextVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fsdp_qlora.model.architecture.kept import Kept

# Tokens of a piece. Decoding a matrix from 4 bits takes 1 to 3% of the time of a product with so
# many.
PIECE_TOKENS = 8192
# Of the piece at work, from 0: what is random follows from it.
piece_number: ContextVar[int] = ContextVar("piece_number", default=0)


def count_pieces(num_tokens: int, *, hidden: int, inner: int) -> int:
    """In how many pieces an MLP of this inner size is computed: 1 where rows are short, or other
    tensors wider.
    """
    return (
        -(-num_tokens // PIECE_TOKENS) if num_tokens >= 2 * PIECE_TOKENS and inner > hidden else 1
    )


def split_tokens(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The pieces of x [.., N, n]."""
    return x.split(PIECE_TOKENS, dim=-2)


def in_pieces(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """function(x) for x [.., n]; the function is given [1, N, n] and its output for a token depends
    on no other.
    """
    rows = x.reshape(1, -1, x.shape[-1])
    state = torch.get_rng_state()
    kept = Kept(rows)
    pieces = [*split_tokens(rows)]
    needs_grad = x.requires_grad
    found = []

    def compute(index: int) -> torch.Tensor:
        # in the backward pass: of the x that autograd has kept, or the block computed again
        if not pieces:
            pieces.extend(split_tokens(kept.take()[0].detach().requires_grad_(needs_grad)))
        number = piece_number.set(index)
        try:
            return function(pieces[index])
        finally:
            piece_number.reset(number)

    # The block's own hooks would keep what torch's checkpoint keeps besides x, and compute the
    # pieces to have it again.
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        for index in range(len(pieces)):
            torch.set_rng_state(state)  # so that each layer draws one seed, as without pieces
            found.append(checkpoint(compute, index, use_reentrant=False))
    pieces.clear()
    return torch.cat(found, dim=1).view(*x.shape[:-1], -1)
