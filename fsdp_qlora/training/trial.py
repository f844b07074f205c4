"""A trial before the first step: whether documents in one row give the values that they have when they are padded."""

from typing import Any

import torch
from transformers import PreTrainedModel

from fsdp_qlora.data.batches import describe_documents
from fsdp_qlora.distributed import Ranks, gather_numbers
from fsdp_qlora.documents import attending, why_not
from fsdp_qlora.precision import Precision
from fsdp_qlora.sharding.parallelize import reshard_all
from fsdp_qlora.sharding.vocabulary import same_tokens

# The second document is short behind a long one, so that it suffers most from what is left of the first.
_LENGTHS = (40, 8)
# Of a token's logits: rounding, also of other kernels, stays far below; what another document leaves, far above.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


def why_padded(
    model: PreTrainedModel, implementation: str | None, ranks: Ranks, precision: Precision, *, is_exact: bool
) -> str | None:
    """Why the rows of a model must be padded, in words; None if they can lie one behind the other.

    Called on every rank.

    Args:
        implementation: attention for documents, from `documents.choose`.
        is_exact: whether a token's values in float32 are the same in another batch.
    """
    if reason := "its attention has no such form" if implementation is None else why_not(model):
        return reason
    tolerance = _TOLERANCE[precision.compute_dtype if is_exact else torch.bfloat16]
    try:
        difference = _difference(model, implementation, ranks, precision)
    except (NotImplementedError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
    else:
        # The same decision on every rank.
        most = gather_numbers([difference], ranks.device).max().item()
        reason = None if most <= tolerance else f"a second document in a row differs by {most:.0%} from it alone"
    reshard_all(model)
    return reason


@torch.no_grad()
def _difference(model: PreTrainedModel, implementation: str | None, ranks: Ranks, precision: Precision) -> float:
    """The difference of the second document's logits from those in a padded batch, relative, median over tokens."""
    model.eval()
    vocab_size = model.get_input_embeddings().num_embeddings
    first, second = torch.arange(sum(_LENGTHS)).mul(7919).remainder(vocab_size).split(_LENGTHS)
    batch = torch.stack([first, torch.cat([second, second.new_zeros(len(first) - len(second))])])

    def logits(input_ids: torch.Tensor, **documents: Any) -> torch.Tensor:
        kind, dtype = ranks.device.type, precision.compute_dtype
        with torch.autocast(kind, dtype=dtype, enabled=precision.autocast), same_tokens(model, input_ids):
            found: torch.Tensor = model(input_ids=input_ids.to(ranks.device), use_cache=False, **documents).logits
        reshard_all(model)
        return found

    alone = logits(batch)[1, : len(second)].double()
    documents = {
        name: value.to(ranks.device) if isinstance(value, torch.Tensor) else value
        for name, value in describe_documents(list(_LENGTHS)).items()
    }
    with attending(model, implementation):
        behind = logits(torch.cat([first, second])[None], **documents)[0, len(first) :].double()
    scale = (alone - alone.mean(dim=-1, keepdim=True)).norm(dim=-1)
    off, scale = (behind - alone).norm(dim=-1).tolist(), scale.tolist()
    # Where there are no values, as on a stand-in for a GPU, all is equal.
    shares = sorted(a / b if b else a for a, b in zip(off, scale, strict=True))
    return shares[len(shares) // 2]
