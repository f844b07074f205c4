"""Lengths of micro-batches for which CUDA graphs of blocks are made (sharding/graphed.py).

A graph is for one number of tokens and of documents, so micro-batches are filled up to numbers of a
short list: tokens by a document of padding, documents by empty ones.
"""

from typing import Any

import torch
import torch.nn.functional as F

# Tokens of the longest micro-batch: with more the GPU has work for longer than the host needs.
MOST_TOKENS = 8192
# Steps of the list between two powers of two: from 512 tokens on, less than an eighth is padding.
_STEPS = 8
_SMALLEST_STEP = 64
_FEWEST_DOCUMENTS = 8
# The same for shared tokens. Each that is added has copies, which attention skips.
_STEPS_SHARED = 4
_SMALLEST_SHARED = 32


def filled_multiple(num_tokens: int) -> int:
    """The number whose next multiple is the length to fill up to; 1 where no graph is made."""
    if num_tokens > MOST_TOKENS:
        return 1
    power = 1 << max(num_tokens - 1, 0).bit_length()
    return max(power // (2 * _STEPS), _SMALLEST_STEP)


def filled_length(num_tokens: int) -> int:
    """The length to which a micro-batch of this number of tokens is filled up."""
    multiple = filled_multiple(num_tokens)
    return -(-num_tokens // multiple) * multiple


def with_bounds_alone(arguments: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """Replace facts about documents by those of all micro-batches with as many tokens.

    For attention that reads where documents begin from the device. The tokens that are computed for
    each document stay the same.

    Args:
        arguments: some of a block, from `describe_documents` among them; returned as they are if
            none are.
    """
    if "own_ends" in arguments:
        return arguments | _with_shared_alone(arguments, num_tokens)
    bounds = arguments.get("cu_seq_lens_q")
    if bounds is None or "document_lengths" not in arguments:
        return arguments
    filled = _filled(bounds, _most_documents(len(bounds) - 1), num_tokens)
    return arguments | {
        "cu_seq_lens_q": filled,
        "cu_seq_lens_k": filled,
        "max_length_q": num_tokens,
        "max_length_k": num_tokens,
        # an upper bound, and the length of those that fill up
        "document_lengths": [num_tokens, 0],
    }


def _with_shared_alone(arguments: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """The same for documents that share tokens, whose number is filled up, too.

    The copies that are added are a document without queries, whose keys have no gradient.
    """
    copies = arguments["copies"]
    number, num_copies = copies.shape
    step = max((1 << max(number - 1, 0).bit_length()) // (2 * _STEPS_SHARED), _SMALLEST_SHARED)
    missing = -number % step
    most = _most_documents(len(arguments["own_ends"]))
    first = len(arguments["places"])
    last = first + missing * num_copies
    added = torch.arange(first, last, device=copies.device).view(missing, num_copies)
    return {
        "own_ends": _filled(arguments["own_ends"], most, num_tokens),
        "document_ends": _filled(arguments["document_ends"], most, last),
        "document_lengths": [last, 0],
        # Any token: what is added to its gradient is 0.
        "places": F.pad(arguments["places"], (0, last - first)),
        "shared_tokens": F.pad(arguments["shared_tokens"], (0, missing)),
        "copies": torch.cat([copies, added]),
    }


def _most_documents(number: int) -> int:
    """The number of documents to which `number` of them are filled up."""
    return max(1 << (number - 1).bit_length(), _FEWEST_DOCUMENTS)


def _filled(bounds: torch.Tensor, number: int, end: int) -> torch.Tensor:
    """The bounds of `number` documents, of which those behind the given ones go to `end`."""
    return F.pad(bounds, (0, number + 1 - len(bounds)), value=end)
