"""Attention of the device's fused kernels, which the CPU lacks, in float32.

Shapes: B batch, H query heads, L queries, S keys, D head dim. Keys may have fewer heads than
queries.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from stand_in.values.generators import place_of, seed_of
from stand_in.values.memory import alias, bind
from stand_in.values.ways import Way, launched

Seed = tuple[int, int]  # of the device's generator: seed and offset


class Sequences(NamedTuple):
    """Queries and keys that attend to each other. Views: what is copied into them is the operator's
    output.
    """

    of_queries: list[torch.Tensor]  # each [B, H, L, D]
    of_keys: list[torch.Tensor]  # each [B, H or fewer, S, D]
    lse: torch.Tensor  # [B, H, L or more], log-sum-exp of each query's scores


class Rule(NamedTuple):
    """Which keys a query sees, and how much its scores count."""

    scale: float
    bias: torch.Tensor | None  # broadcasts to [B, H, L, S]
    left: int  # keys before a query's own place, -1 for all
    right: int  # keys after it
    # the last query's own place is the last key, else the first one's is the first
    is_aligned_to_end: bool
    dropout: float

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(q, k.mT) * self.scale
        if self.bias is not None:
            scores = scores + self.bias
        rows, columns = scores.shape[-2:]
        own = torch.arange(rows)[:, None] + (columns - rows if self.is_aligned_to_end else 0)
        keys = torch.arange(columns)
        hidden = torch.zeros(rows, columns, dtype=torch.bool)
        if self.right >= 0:
            hidden |= keys > own + self.right
        if self.left >= 0:
            hidden |= keys < own - self.left
        return scores.masked_fill(hidden, float("-inf"))

    def kept(self, shares: torch.Tensor, seed: Seed, number: int) -> torch.Tensor | float:
        """Factors of dropout for the sequence with this number:
        the backward pass finds the same.
        """
        if not self.dropout:
            return 1.0
        generator = torch.Generator().manual_seed(seed_of(*seed, number))
        return (torch.rand(shares.shape, generator=generator) >= self.dropout).float() / (
            1 - self.dropout
        )


def is_flash(given: dict[str, Any]) -> bool:
    """Whether these are the arguments of torch's own flash operators, which SDPA's are not."""
    return "window_size_left" in given


def rule_of(given: dict[str, Any]) -> Rule:
    window = [given.get(name) for name in ("window_size_left", "window_size_right")]
    left, right = (-1 if keys is None else int(keys) for keys in window)
    return Rule(
        scale=given["query"].shape[-1] ** -0.5 if given["scale"] is None else given["scale"],
        bias=None if given.get("attn_bias") is None else alias(given["attn_bias"]).float(),
        left=left,
        right=0 if given["is_causal"] else right,
        is_aligned_to_end=is_flash(given),
        dropout=given["dropout_p"],
    )


def sequences(
    given: dict[str, Any],
    like_queries: Sequence[torch.Tensor],
    like_keys: Sequence[torch.Tensor],
    lse: torch.Tensor,
) -> Iterator[Sequences]:
    """Tensors of an operator as [B, H, L, D]. SDPA's are, flash's are [B, L, H, D] or, packed, [all
    tokens, H, D].
    """
    if not is_flash(given):
        yield Sequences([*like_queries], [*like_keys], lse)
    elif given["cum_seq_q"] is None:
        yield Sequences(
            [x.transpose(1, 2) for x in like_queries], [x.transpose(1, 2) for x in like_keys], lse
        )
    else:
        ends_q = alias(given["cum_seq_q"]).tolist()
        ends_k = alias(given["cum_seq_k"]).tolist()
        for i in range(len(ends_q) - 1):
            q = slice(ends_q[i], ends_q[i + 1])
            k = slice(ends_k[i], ends_k[i + 1])
            yield Sequences(
                [x[q].transpose(0, 1)[None] for x in like_queries],
                [x[k].transpose(0, 1)[None] for x in like_keys],
                lse[:, q][None],
            )


def to_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat key or value heads for the queries that share them."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def shares_of(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """A query that sees no key has an lse of -inf and no shares."""
    return (scores - lse.masked_fill(lse.isinf(), 0)[..., None]).exp()


def made_by_cudnn(func: Any, args: Any, kwargs: Any) -> Any:
    """The outputs of cuDNN's operators, which the stand-in lacks: new memory, as torch makes it."""
    given = bind(func, args, kwargs)
    query = given["query"]
    if "grad_out" in given:
        return tuple(torch.empty_like(given[name]) for name in ("query", "key", "value"))
    rows, heads, length, _ = query.shape
    lse = query.new_empty(rows, heads, length, 1, dtype=torch.float32)
    seeds = [query.new_empty((), dtype=torch.int64) for _ in range(2)]
    sizes = (length, given["key"].shape[2])
    return (torch.empty_like(query), lse, None, None, *sizes, *seeds, None)


def forward(
    func: Any, args: Any, kwargs: Any, make: Callable[[Any, Any, Any], Any] = launched
) -> Any:
    given = bind(func, args, kwargs)
    rule = rule_of(given)
    place = place_of((), {})
    # Without a generator it is the GPU's.
    assert place is not None
    seed = (place.seed, place.offset)
    outputs = make(func, args, kwargs)
    q, k, v, out = (alias(x) for x in (given["query"], given["key"], given["value"], outputs[0]))
    lse_of_rows = by_row(alias(outputs[1]), q)
    for number, part in enumerate(sequences(given, [q, out], [k, v], lse_of_rows)):
        q, out = part.of_queries
        k, v = (to_heads(x.float(), q.shape[1]) for x in part.of_keys)
        scores = rule.scores(q.float(), k)
        lse = scores.logsumexp(-1)
        shares = shares_of(scores, lse)
        out.copy_(torch.matmul(shares * rule.kept(shares, seed, number), v))
        # the memory-efficient kernel has none where no gradient is needed, else it is padded
        if part.lse.numel():
            part.lse[..., : q.shape[2]].copy_(lse)
    if rule.dropout:
        keep_seed(
            dict(zip((each.name for each in func._schema.returns), outputs, strict=True)), seed
        )
    return outputs


def by_row(lse: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp without the last dimension of one number that cuDNN's has."""
    return lse[..., 0] if lse.dim() == query.dim() == 4 else lse


def backward(
    func: Any, args: Any, kwargs: Any, make: Callable[[Any, Any, Any], Any] = launched
) -> Any:
    """Gradients from the output and the log-sum-exp that are given, as the kernels have them.

    They need not be those of these keys: ring attention gives those of all of its parts.
    """
    given = bind(func, args, kwargs)
    rule = rule_of(given)
    seed = saved_seed(given) if rule.dropout else (0, 0)
    outputs = make(func, args, kwargs)
    grad, q, k, v, out = (
        alias(given[name]) for name in (next(iter(given)), "query", "key", "value", "out")
    )
    made = [alias(x) for x in outputs[:3]]
    lse = by_row(alias(given["logsumexp"]), q)
    parts = sequences(given, [grad, q, out, made[0]], [k, v, *made[1:]], lse)
    for number, part in enumerate(parts):
        grad, q, out = (x.float() for x in part.of_queries[:3])
        heads = q.shape[1]
        groups = part.of_keys[0].shape[1]
        k, v = (to_heads(x.float(), heads) for x in part.of_keys[:2])
        shares = shares_of(rule.scores(q, k), part.lse[..., : q.shape[2]])
        kept = rule.kept(shares, seed, number)
        of_scores = shares * (torch.matmul(grad, v.mT) * kept - (grad * out).sum(-1, keepdim=True))
        of_q = torch.matmul(of_scores, k) * rule.scale
        of_k = torch.matmul(of_scores.mT, q) * rule.scale
        of_v = torch.matmul((shares * kept).mT, grad)
        of_k, of_v = (x.unflatten(1, (groups, -1)).sum(2) for x in (of_k, of_v))
        for target, value in zip(
            [part.of_queries[3], *part.of_keys[2:]], (of_q, of_k, of_v), strict=True
        ):
            target.copy_(value)
        if rule.bias is not None and outputs[3] is not None:
            alias(outputs[3]).copy_(of_scores.sum_to_size(outputs[3].shape))
    return outputs


def seeds_in(named: dict[str, Any]) -> list[torch.Tensor]:
    """Where the kernels keep the seed and the offset of their dropout: in one tensor, or in one for
    each.
    """
    names = ("rng_state", "philox_seed", "philox_offset")
    return [alias(named[name]).view(torch.int64) for name in names if name in named]


def keep_seed(outputs: dict[str, Any], seed: Seed) -> None:
    numbers = torch.tensor(seed)
    for tensor in seeds_in(outputs):
        tensor.copy_(numbers[: tensor.numel()].view(tensor.shape))
        numbers = numbers[tensor.numel() :]


def saved_seed(given: dict[str, Any]) -> Seed:
    seed, offset, *_ = (
        number for tensor in seeds_in(given) for number in tensor.flatten().tolist()
    )
    return seed, offset


WAYS: dict[str, Way] = {
    "_scaled_dot_product_cudnn_attention": partial(forward, make=made_by_cudnn),
    "_scaled_dot_product_cudnn_attention_backward": partial(backward, make=made_by_cudnn),
    "_scaled_dot_product_flash_attention": forward,
    "_scaled_dot_product_flash_attention_backward": backward,
    "_scaled_dot_product_efficient_attention": forward,
    "_scaled_dot_product_efficient_attention_backward": backward,
    "_flash_attention_forward": forward,
    "_flash_attention_backward": backward,
}
