"""New tokens: rows of a frozen embedding and head that train alone, in PEFT's format
(trainable_token_indices).

The rows are a matrix [n, H] beside the frozen one [V, H]. An embedding's output has them at their
tokens; to a head's frozen rows they are copied whenever it is used.
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
from fsdp_qlora.utils.errors import UserError

_PIECE = 2**12  # rows added up at a time


class NewTokens(NamedTuple):
    """Tokens whose rows train. ids: ascending. starts: of each the tokens from the mean of whose
    rows it starts.
    """

    ids: tuple[int, ...]
    starts: tuple[Sequence[int], ...] = ()

    def grow(self, config: PretrainedConfig) -> None:
        """Let a configuration's vocabulary have all of them; a base often has rows to spare."""
        for part in (config, config.get_text_config()):
            if hasattr(part, "vocab_size"):
                part.vocab_size = max(part.vocab_size, self.ids[-1] + 1)


def add_tokens(
    known: PreTrainedTokenizerBase, words: Sequence[str], num_rows: int
) -> tuple[Any, NewTokens]:
    """A copy of the tokenizer that has these tokens, and their ids.

    words: each a token, or "token: description", from whose tokens its row starts; others start
    from all. Without a tokenizer, in a plan, they follow the `num_rows` of the embedding.
    """
    if known is None:
        return None, NewTokens(tuple(range(num_rows, num_rows + len(words))))
    tokenizer = copy.deepcopy(known)
    rows = range(min(len(known), num_rows))
    described = {
        token: description for token, _, description in (word.partition(": ") for word in words)
    }
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in described])
    starts: dict[int, Sequence[int]] = {}
    for token, description in described.items():
        index = tokenizer.convert_tokens_to_ids(token)
        named = tuple(known.encode(description, add_special_tokens=False)) if description else ()
        starts[index] = named or ((index,) if index in rows else rows)
    ids = tuple(sorted(starts))
    return tokenizer, NewTokens(ids, tuple(starts[index] for index in ids))


class TokenRows(nn.Module):
    """The rows of new tokens, [n, H] under PEFT's name, a child of the embedding or head. indices:
    int64 [n].
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
        """Copy the rows to their places in frozen ones, which are those from `first` on, and return
        these.
        """
        own = self.among(first, len(weight))
        return weight.index_copy_(
            0, self.indices[own] - first, self.trainable_tokens_delta[own].to(weight.dtype)
        )


def with_token_rows(model: nn.Module) -> dict[str, tuple[Any, TokenRows]]:
    """Path -> the embedding, or a head that does not share its weight,
    and its rows of new tokens.
    """
    modules = (
        (path, module, module._modules.get("token_adapter"))
        for path, module in model.named_modules()
    )
    return {path: (module, rows) for path, module, rows in modules if isinstance(rows, TokenRows)}


def add_token_rows(model: PreTrainedModel, tokens: NewTokens, *, looks_up: bool) -> None:
    """Add rows (fp32, meta device) to a model's embedding and head. Raises UserError if these use
    more than rows.

    looks_up: whether the embedding is a plain one.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if not looks_up or type(head).forward is not nn.Linear.forward or head.bias is not None:
        name = type(model).__name__
        raise UserError(
            f"--add_tokens: embedding and head of {name} do more than with rows. Use "
            "--modules_to_save."
        )
    for module in [embedding] if has_tied_embeddings(model) else [embedding, head]:
        rows = torch.empty(len(tokens.ids), module.weight.shape[1], device="meta")
        module.token_adapter = TokenRows(tokens, rows)


def attach_token_rows(model: PreTrainedModel) -> None:
    """Let a model compute with its rows of new tokens. Before it is sharded, since hooks of sharded
    modules follow.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    rows, own = (getattr(module, "token_adapter", None) for module in (embedding, head))
    if rows is None:
        return
    of_head = own or rows
    tokens = list[torch.Tensor]()

    def insert(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        ids = tokens.pop()
        frozen = module._parameters["weight"]
        places = torch.searchsorted(rows.indices, ids).clamp_(max=len(rows.indices) - 1)
        module._parameters["weight"] = rows.trainable_tokens_delta.to(output.dtype)
        found = module.forward(places)  # which may scale them
        module._parameters["weight"] = frozen
        return torch.where((rows.indices[places] == ids)[..., None], found, output)

    def multiply(
        module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor:
        if hasattr(module, "vocab_shard") and not torch.is_grad_enabled():
            return output  # vocabulary.SharedHead has put them into its own
        computed = F.linear(args[0], of_head.trainable_tokens_delta.to(args[0].dtype))
        return output.index_copy(-1, of_head.indices, computed.to(output.dtype))

    embedding.padding_idx = None  # the row without a gradient, which no frozen one has
    # Lookup renumbers them
    embedding.register_forward_pre_hook(lambda _, args: tokens.append(args[0]), prepend=True)
    embedding.register_forward_hook(insert)
    vars(head)["new_rows"] = of_head  # no child of the head, if it is the embedding's
    head.register_forward_hook(multiply)


@torch.no_grad()
def start_token_rows(model: nn.Module, mesh: DeviceMesh) -> None:
    """Set the rows of new tokens of a loaded model to the means that they start from.

    Collective.
    """
    for module, rows in with_token_rows(model).values():
        (first, last) = own_rows(module.weight, mesh)
        local = local_part(module.weight)
        means: dict[Sequence[int], torch.Tensor] = {}
        for start in set(rows.tokens.starts):
            ids = torch.tensor(start)
            parts = (ids[(first <= ids) & (ids < last)] - first).to(local.device).split(_PIECE)
            means[start] = torch.stack(
                [local[part].sum(0, dtype=torch.float64) for part in parts]
            ).sum(0) / len(ids)
        if means:
            whole = torch.stack([means[start] for start in rows.tokens.starts]).to(mesh.device_type)
            dist.all_reduce(whole, group=mesh["shard"].get_group())
            store_rows(delta := rows.trainable_tokens_delta, whole[slice(*own_rows(delta, mesh))])
