"""A function of each token alone, such as an MLP, computed in pieces of a long row's tokens.

As in ALST's tiled MLP (Bekman et al. 2025, arXiv 2506.13996), forward and backward: tensors as wide
as the MLP exist for one piece at a time. The backward pass computes each piece again, and
activation checkpointing of its block ends before the pieces, so there are as many products as
without pieces. Only a quantized weight is decoded for each piece.
"""

from collections.abc import Callable
from contextvars import ContextVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fsdp_qlora.model.architecture.kept import Kept

# Tokens of a piece. Decoding a matrix from 4 bits takes 1 to 3% of the time of a product with this
# many tokens.
PIECE_TOKENS = 8192
# The number of the piece that is being computed, from 0. Seeds of dropout depend on it.
piece_number: ContextVar[int] = ContextVar("piece_number", default=0)


def count_pieces(num_tokens: int, *, hidden: int, inner: int) -> int:
    """The number of pieces in which an MLP of this inner size is computed."""
    # Pieces of a short row save little, and an MLP that is no wider than other tensors of the block
    # is not the peak of its memory.
    if num_tokens < 2 * PIECE_TOKENS or inner <= hidden:
        return 1
    return -(-num_tokens // PIECE_TOKENS)


def split_tokens(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The pieces of x [.., N, n]."""
    return x.split(PIECE_TOKENS, dim=-2)


def in_pieces(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """function(x) for x [.., n].

    The function is given [1, N, n], and its output for a token depends on no other token.
    """
    rows = x.reshape(1, -1, x.shape[-1])
    state = torch.get_rng_state()
    kept = Kept(rows)
    pieces = [*split_tokens(rows)]
    needs_grad = x.requires_grad
    outputs: list[torch.Tensor] = []

    def compute(index: int) -> torch.Tensor:
        # In the backward pass, of the x that autograd has kept, or that the block has computed
        # again. Once for all pieces, since x can be taken only once.
        if not pieces:
            kept_rows = kept.take()[0].detach().requires_grad_(needs_grad)
            pieces.extend(split_tokens(kept_rows))
        number = piece_number.set(index)
        try:
            return function(pieces[index])
        finally:
            piece_number.reset(number)

    # The block's own hooks would keep what torch's checkpoint keeps besides x, and compute the
    # pieces to have it again.
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        for index in range(len(pieces)):
            # Each layer draws the same seed in every piece, as it draws one without pieces. After
            # the last piece the state is as after a call without pieces.
            torch.set_rng_state(state)
            outputs.append(checkpoint(compute, index, use_reentrant=False))
    # Views of x, which must not outlive the forward pass: `Kept` has x.
    pieces.clear()
    return torch.cat(outputs, dim=1).view(*x.shape[:-1], -1)
