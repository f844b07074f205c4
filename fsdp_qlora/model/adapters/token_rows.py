"""New tokens: rows of a frozen embedding and head that train alone.

PEFT's format is trainable_token_indices. The rows are a matrix [n, H] beside the frozen matrix
[V, H]. They replace the embedding's output at their tokens, and the head's logits of their tokens;
a head whose rows ranks share has copies of them in its own rows.
"""

import bisect
import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AddedToken, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from fsdp_qlora.distributed.shards import local_part, own_rows, store_rows
from fsdp_qlora.model.architecture.structure import has_tied_embeddings
from fsdp_qlora.model.module_state import state_of
from fsdp_qlora.utils.errors import UserError

_CHILD = "token_adapter"  # PEFT's name of the rows below their embedding or head
_PIECE = 2**12  # rows added up at a time


class NewTokens(NamedTuple):
    """Tokens whose rows train.

    ids: ascending. starts: for each of them the tokens whose rows' mean is its first value.
    """

    ids: tuple[int, ...]
    starts: tuple[Sequence[int], ...] = ()

    def grow(self, config: PretrainedConfig) -> None:
        """Enlarge a configuration's vocabulary so that it contains all of them."""
        # A base often has more rows than its tokenizer has tokens: then nothing changes. Models
        # for images have the size in the configuration of the text model, or in both.
        for part in (config, config.get_text_config()):
            if hasattr(part, "vocab_size"):
                part.vocab_size = max(part.vocab_size, self.ids[-1] + 1)


def add_tokens(
    known: PreTrainedTokenizerBase, words: Sequence[str], num_rows: int
) -> tuple[Any, NewTokens]:
    """A copy of the tokenizer that has these tokens, and their ids.

    words: each a token, or "token: description". A row starts from the mean of the description's
    tokens; without a description, from the token's own row if there is one, else from the mean of
    all. Without a tokenizer, in a plan, the tokens follow the `num_rows` of the embedding.
    """
    if known is None:
        return None, NewTokens(tuple(range(num_rows, num_rows + len(words))))
    tokenizer = copy.deepcopy(known)
    # Either may be larger: embeddings are padded, and tokenizers have tokens without a row.
    rows = range(min(len(known), num_rows))
    descriptions: dict[str, str] = {}
    for word in words:
        token, _, description = word.partition(": ")
        descriptions[token] = description
    # normalized=False: the token is found as it was written, before a normalizer changes the text.
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in descriptions])
    starts: dict[int, Sequence[int]] = {}
    for token, description in descriptions.items():
        index = tokenizer.convert_tokens_to_ids(token)
        # by the tokenizer without the new tokens, which have no rows to start from
        described_by: Sequence[int] = ()
        if description:
            described_by = tuple(known.encode(description, add_special_tokens=False))
        if described_by:
            starts[index] = described_by
        elif index in rows:
            starts[index] = (index,)
        else:
            starts[index] = rows
    # Ascending, so that `among` can find a range of tokens by bisection.
    ids = tuple(sorted(starts))
    return tokenizer, NewTokens(ids, tuple(starts[index] for index in ids))


class TokenRows(nn.Module):
    """The rows of new tokens, [n, H] under PEFT's name, a child of the embedding or head.

    indices: the tokens' ids, int64 [n].
    """

    indices: torch.Tensor

    def __init__(self, tokens: NewTokens, rows: torch.Tensor) -> None:
        super().__init__()
        self.tokens = tokens
        self.trainable_tokens_delta = nn.Parameter(rows)
        self.register_buffer("indices", torch.tensor(tokens.ids), persistent=False)

    def among(self, first: int, count: int) -> slice:
        """The rows whose tokens are among `count` from `first` on."""
        return slice(
            *(bisect.bisect_left(self.tokens.ids, bound) for bound in (first, first + count))
        )

    @torch.no_grad()
    def write_into(self, weight: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Copy the rows to their places in `weight`, which begins with token `first`; return it."""
        inside = self.among(first, len(weight))
        rows = self.trainable_tokens_delta[inside].to(weight.dtype)
        return weight.index_copy_(0, self.indices[inside] - first, rows)


def with_token_rows(model: nn.Module) -> dict[str, tuple[Any, TokenRows]]:
    """Path -> the embedding, or a head that does not share its weight, and its new rows."""
    rows_by_path: dict[str, tuple[Any, TokenRows]] = {}
    for path, module in model.named_modules():
        rows = _token_rows_of(module)
        if rows is not None:
            rows_by_path[path] = (module, rows)
    return rows_by_path


def _token_rows_of(module: nn.Module | None) -> TokenRows | None:
    """A module's own rows of new tokens."""
    rows = None if module is None else module._modules.get(_CHILD)
    return rows if isinstance(rows, TokenRows) else None


def head_token_rows(model: PreTrainedModel) -> TokenRows | None:
    """The rows of new tokens with which the head computes; a tied one has none of its own."""
    rows = _token_rows_of(model.get_output_embeddings())
    return rows or _token_rows_of(model.get_input_embeddings())


def add_token_rows(model: PreTrainedModel, tokens: NewTokens, *, looks_up: bool) -> None:
    """Add rows (fp32, meta device) to a model's embedding and head.

    looks_up: whether the embedding is a plain one.
    Raises:
        UserError: the embedding or the head computes more than a lookup or a product.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if not looks_up or type(head).forward is not nn.Linear.forward or head.bias is not None:
        name = type(model).__name__
        raise UserError(
            f"--add_tokens: embedding and head of {name} compute more than a lookup and a product, "
            "so single rows cannot train. Use --modules_to_save."
        )
    # A tied head uses the embedding's rows, as it uses its weight.
    modules = [embedding] if has_tied_embeddings(model) else [embedding, head]
    for module in modules:
        rows = torch.empty(len(tokens.ids), module.weight.shape[1], device="meta")
        module.add_module(_CHILD, TokenRows(tokens, rows))


def attach_token_rows(model: PreTrainedModel) -> None:
    """Make a model compute with its rows of new tokens.

    Call it before the model is sharded: hooks run in the order in which they are registered.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    rows = _token_rows_of(embedding)
    head_rows = head_token_rows(model)
    if rows is None or head_rows is None:
        return
    # the ids of the call that is under way, from the hook before it to the hook behind it
    tokens = list[torch.Tensor]()

    def insert(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        ids = tokens.pop()
        parameters: dict[str, Any] = module._parameters
        frozen = parameters["weight"]
        # the index in `rows` of each new token; any index for other tokens, which `where` drops
        places = torch.searchsorted(rows.indices, ids).clamp_(max=len(rows.indices) - 1)
        # The module's own forward with the new rows as its weight, since it may scale them
        # (gemma3). Called directly: its hooks would run again.
        parameters["weight"] = rows.trainable_tokens_delta.to(output.dtype)
        new_output = module.forward(places)
        parameters["weight"] = frozen
        return torch.where((rows.indices[places] == ids)[..., None], new_output, output)

    def multiply(
        module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor:
        if state_of(module).shared_head is not None and not torch.is_grad_enabled():
            return output  # vocabulary.SharedHead has put them into its own
        logits = F.linear(args[0], head_rows.trainable_tokens_delta.to(args[0].dtype))
        return output.index_copy(-1, head_rows.indices, logits.to(output.dtype))

    # nn.Embedding gives the row of padding_idx no gradient. Frozen rows have none anyway, and among
    # the new rows the index would mean another token.
    embedding.padding_idx = None
    # First of all hooks, since `Lookup` of a shared vocabulary renumbers the ids.
    embedding.register_forward_pre_hook(lambda _, args: tokens.append(args[0]), prepend=True)
    embedding.register_forward_hook(insert)
    head.register_forward_hook(multiply)


@torch.no_grad()
def start_token_rows(model: nn.Module, mesh: DeviceMesh) -> None:
    """Set the rows of new tokens of a loaded model to the means that they start from.

    Collective.
    """
    for module, rows in with_token_rows(model).values():
        first, last = own_rows(module.weight, mesh)
        local = local_part(module.weight)
        # This rank's part of each mean, which covers only the rows that it keeps. Many tokens start
        # from the same rows, whose sum is computed once.
        means: dict[Sequence[int], torch.Tensor] = {}
        for start in set(rows.tokens.starts):
            ids = torch.tensor(start)
            own_ids = (ids[(first <= ids) & (ids < last)] - first).to(local.device)
            # In float64, so that the mean of a whole vocabulary does not depend on how many ranks
            # add up its parts; in pieces, since indexing copies rows.
            sums = [local[piece].sum(0, dtype=torch.float64) for piece in own_ids.split(_PIECE)]
            means[start] = torch.stack(sums).sum(0) / len(ids)
        # The same on all ranks: `starts` comes from the options.
        if means:
            whole = torch.stack([means[start] for start in rows.tokens.starts]).to(mesh.device_type)
            dist.all_reduce(whole, group=mesh["shard"].get_group())
            delta = rows.trainable_tokens_delta
            first_own, last_own = own_rows(delta, mesh)
            store_rows(delta, whole[first_own:last_own])
