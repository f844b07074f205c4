"""Micro-batches: rows of tokens as tensors for one pass of one rank.

Rows are padded, or concatenated into one sequence (padding-free).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fsdp_qlora.data.batches.rows import Numbers, TokenizedRows
from fsdp_qlora.data.batches.schedule import TOKENS_OF_AN_EMPTY_RANK
from fsdp_qlora.data.batches.shared_tokens import SharedTokens
from fsdp_qlora.data.batches.side_by_side import FlatArray
from fsdp_qlora.data.batches.target_values import target_indices
from fsdp_qlora.distributed.device import to_device

IGNORE_INDEX = -100  # the label that torch's cross entropy ignores
# before the names of the arguments of `describe_documents` for the teacher's documents
BESIDE = "beside_"


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one rank: B sequences of T tokens, padded, or B = 1 and each row a document of
    its own.

    N tokens have a target in D documents; a row is one document, or two: answers to one prompt.
    """

    input_ids: torch.Tensor
    """int64 [B, T]."""
    target_rows: torch.Tensor
    """Which of the model's B * T outputs predict a target, int64 [N]; where a teacher's documents
    follow, [2 * N].
    """
    targets: torch.Tensor
    """The tokens to predict, int64 [N]; -100 counts nothing."""
    num_targets: list[int]
    """Targets of each document on this rank, in order; none on a rank without rows."""
    target_counts: torch.Tensor
    """Targets of each document on all ranks that share the micro-batch, float32 [D]."""
    desired: torch.Tensor
    """1 for a desired answer and 0 for another, float32 [rows]; empty where rows have no label."""
    reference: torch.Tensor
    """Log-probabilities under the reference that are known before, float32 [D]; empty where they
    are not.
    """
    target_values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Values of each target besides its token, by name, [N, ..]; empty for plain rows.

    data/batches/target_values.py lists the names, with those that write and read each.
    """
    documents: Mapping[str, Any] = field(default_factory=dict)
    """Arguments by which the model knows documents in one sequence, see `describe_documents`; empty
    if padded.
    """
    tokens_of_ranks: Sequence[torch.Tensor] | None = None
    """Token ids of each rank that shares the vocabulary, int64 on the CPU; None where ranks share
    none.
    """
    images: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Arguments of the model for images, from its processor; empty without any."""
    calls_towers: bool = False
    """Whether a micro-batch of the round has images: then all ranks gather the parts for them."""

    @property
    def model_inputs(self) -> dict[str, Any]:
        return {"input_ids": self.input_ids} | dict(self.documents) | dict(self.images)

    def to(self, device: torch.device, *, per_document: bool) -> "MicroBatch":
        """Copy to a device.

        per_document: also copy what only losses of documents read.
        """
        names = ["input_ids", "target_rows", "targets"]
        if per_document:
            names += ["target_counts", "desired", "reference"]
        columns = {name: getattr(self, name) for name in names}
        # All tensors go in one call, so that `to_device` may copy them together; their names do not
        # overlap (tests/preferences/test_rows.py checks it).
        moved = to_device(dict(self.documents) | dict(self.target_values) | columns, device)
        images = to_device(self.images, device)
        target_values = {name: moved.pop(name) for name in self.target_values}
        columns = {name: moved.pop(name) for name in names}
        return dataclasses.replace(
            self, **columns, target_values=target_values, documents=moved, images=images
        )

    def part(self, index: int, num_parts: int) -> "MicroBatch":
        """One of equally many tokens for each rank that shares this micro-batch, with their
        targets.

        Documents stay whole: their ranks exchange what attention needs of them.
        """
        if num_parts == 1:
            return self
        # The sequence is a multiple of `num_parts` long: `concatenate_rows` adds the padding.
        length = self.input_ids.shape[1] // num_parts
        is_own = self.target_rows // length == index
        rows = self.target_rows[is_own] - index * length
        targets = self.targets[is_own]
        target_values = {name: values[is_own] for name, values in self.target_values.items()}
        if not len(rows):
            # One target that counts nothing, as in `learned_rows`: the loss and its backward pass
            # have collectives, in which a rank without targets takes part, too.
            rows = rows.new_zeros(1)
            targets = targets.new_full((1,), IGNORE_INDEX)
            target_values = {
                name: values.new_zeros(1, *values.shape[1:])
                for name, values in target_values.items()
            }
        return dataclasses.replace(
            self,
            input_ids=self.input_ids.chunk(num_parts, dim=1)[index],
            target_rows=rows,
            targets=targets,
            num_targets=[
                int(document.sum())
                for document in is_own[: sum(self.num_targets)].split(self.num_targets)
            ],
            target_values=target_values,
            documents=documents_of_part(self.documents, index, num_parts),
        )

    def beside(self, batches: Sequence["MicroBatch"]) -> "MicroBatch":
        """Add the tokens of the micro-batches on the ranks that share the vocabulary with this one.

        All of them then have equally many targets, so that they take the same part in the head's
        collectives.
        """
        missing = max(len(batch.targets) for batch in batches) - len(self.targets)
        # Where a teacher's documents follow, target_rows are [2, N]: each line is filled by itself.
        target_rows = self.target_rows.view(-1, len(self.targets))
        return dataclasses.replace(
            self,
            target_rows=F.pad(target_rows, (0, missing)).flatten(),
            targets=F.pad(self.targets, (0, missing), value=IGNORE_INDEX),
            # F.pad counts from the last dim: nothing is added but at the end of the first one.
            target_values={
                name: F.pad(values, (0, 0) * (values.dim() - 1) + (0, missing))
                for name, values in self.target_values.items()
            },
            tokens_of_ranks=[batch.input_ids.flatten() for batch in batches],
        )


def with_teacher(student: MicroBatch, teacher: MicroBatch) -> MicroBatch:
    """Put the teacher's documents, which have the same targets, behind the student's.

    `ReferencePass` takes them apart.
    """
    inputs = inputs_with_teacher(student.model_inputs, teacher.model_inputs)
    # [2 * N]: each target's place in the student's document, then in the teacher's
    rows = torch.cat([student.target_rows, teacher.target_rows + student.input_ids.numel()])
    return dataclasses.replace(
        student, input_ids=inputs.pop("input_ids"), target_rows=rows, documents=inputs
    )


def inputs_with_teacher(student: Mapping[str, Any], teacher: Mapping[str, Any]) -> dict[str, Any]:
    """The model's arguments for the tokens of both, one behind the other."""
    inputs = dict(student)
    for name, value in teacher.items():
        if name in ("input_ids", "position_ids"):
            inputs[name] = torch.cat([student[name], value], dim=1)
        else:
            # Bounds of documents cannot be joined: each half keeps its own.
            inputs[f"{BESIDE}{name}"] = value
    return inputs


def pad_rows(table: TokenizedRows, rows: Numbers, *, pad_token_id: int) -> MicroBatch:
    """Pad documents on the right to the longest of them.

    There is no attention mask: in a causal model no token sees the padding after it, and padding is
    never a target.

    Args:
        rows: row indices. Without any, the batch is one row of padding, for a rank that has no rows
            in this round.
    """
    documents = table.learned_documents(rows)
    starts = table.document_offsets[documents]
    ends = table.document_offsets[documents + 1]
    shape = (
        (len(documents), int((ends - starts).max()))
        if len(documents)
        else (1, TOKENS_OF_AN_EMPTY_RANK)
    )
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        ids = table.input_ids[start:end]
        input_ids[i, : end - start] = ids
        labels[i, : end - start] = np.where(table.learned[start:end], ids, IGNORE_INDEX)
    labels[:, 0] = IGNORE_INDEX  # nothing comes before it to predict it from
    return _batch(table, rows, documents, torch.from_numpy(input_ids), torch.from_numpy(labels), {})


def concatenate_rows(
    table: TokenizedRows,
    rows: Numbers,
    *,
    pad_token_id: int,
    shares_prompts: bool = False,
    num_parts: int = 1,
) -> MicroBatch:
    """Concatenate documents into one sequence (padding-free).

    Args:
        rows, pad_token_id: as for `pad_rows`.
        shares_prompts: compute once what both documents of a row, or answers to one prompt, begin
            with.
        num_parts: equal parts that the sequence can be divided into, with a document of padding
            behind the others.
    """
    if not len(rows):
        # A rank without rows computes a document of padding, to gather weights with the others.
        empty = pad_rows(table, rows, pad_token_id=pad_token_id)
        described = describe_documents([TOKENS_OF_AN_EMPTY_RANK], num_parts=num_parts)
        input_ids = empty.input_ids.new_full(described["position_ids"].shape, pad_token_id)
        return dataclasses.replace(empty, input_ids=input_ids, documents=described)
    documents = table.learned_documents(rows)
    starts = table.document_offsets[documents]
    lengths = table.document_offsets[documents + 1] - starts
    firsts = np.cumsum(lengths) - lengths
    # For each token of the sequence its index in the table's flat arrays.
    places = np.arange(lengths.sum()) + np.repeat(starts - firsts, lengths)
    ids = table.input_ids[places].astype(np.int64)
    labels = np.where(table.learned[places], ids, IGNORE_INDEX)
    labels[firsts] = IGNORE_INDEX  # nothing comes before it to predict it from
    shared = table.shared_tokens(np.asarray(rows)) if shares_prompts else None
    described = describe_documents(lengths.tolist(), shared, num_parts=num_parts)
    filling = sum(described["document_lengths"]) - len(ids)
    filled = F.pad(torch.from_numpy(ids), (0, filling), value=pad_token_id)
    # A shared prompt is in the sequence once; labels keep the places among all tokens, because
    # `_batch` maps them itself.
    computed = filled[None, described.get("own_tokens", slice(None))]
    return _batch(table, rows, documents, computed, torch.from_numpy(labels)[None], described)


def _batch(
    table: TokenizedRows,
    rows: Numbers,
    documents: np.ndarray,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    described: dict[str, Any],
) -> MicroBatch:
    target_rows, targets = learned_rows(labels)
    places = described.get("places")
    if places is not None:
        target_rows = places[target_rows]
    num_targets = table.document_targets[documents]
    desired = np.zeros(0)
    if "desired" in table.columns:
        desired = table.columns["desired"].values[np.asarray(rows, dtype=np.int64)]
    reference = np.zeros(0)
    if "reference" in table.columns:
        reference = table.columns["reference"].values[documents]
    return MicroBatch(
        input_ids,
        target_rows,
        targets,
        num_targets.tolist(),
        _floats(num_targets),
        _floats(desired),
        _floats(reference),
        _target_values(table, rows, num_targets),
        described,
    )


def _target_values(
    table: TokenizedRows, rows: Numbers, num_targets: np.ndarray
) -> dict[str, torch.Tensor]:
    """Compute `MicroBatch.target_values` of some rows.

    Without a target these are the values of one that counts nothing, as in `learned_rows`.
    """
    of_tokens: dict[str, FlatArray] = {
        name: each.values for name, each in table.columns.items() if each.per == "token"
    }
    # Masks with weights are float, those without are bool.
    if table.learned.dtype.kind == "f":
        of_tokens["weights"] = table.learned
    has_advantages = "advantages" in table.columns
    if not of_tokens and not has_advantages:
        return {}
    indices = target_indices(table, rows)
    values = {name: _floats(column[indices]) for name, column in of_tokens.items()}
    if has_advantages:
        advantages = table.columns["advantages"].values[np.asarray(rows, dtype=np.int64)]
        shares = 1 / np.maximum(num_targets, 1)
        # Without a target both are empty: np.resize fills them with a zero for the one of
        # `indices`.
        values["advantages"] = _floats(np.resize(advantages.repeat(num_targets), len(indices)))
        values["shares"] = _floats(np.resize(shares.repeat(num_targets), len(indices)))
    return values


def _floats(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))


def learned_rows(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the tokens of labels [B, T] that have a target, which is the next token's label.

    Returns:
        Their rows in [B * T, ..], and the targets.

    There is at least one, without a target if need be, so that a micro-batch without targets runs
    forward and backward like the others.
    """
    following = torch.full_like(labels, IGNORE_INDEX)
    following[:, :-1] = labels[:, 1:]
    following = following.flatten()
    rows = (following != IGNORE_INDEX).nonzero().flatten()
    if not len(rows):
        rows = rows.new_zeros(1)
    return rows, following[rows]


def describe_documents(
    lengths: list[int], shared: SharedTokens | None = None, *, num_parts: int = 1
) -> dict[str, Any]:
    """The arguments by which a model of transformers knows documents in one row of T tokens.

    Args:
        shared: tokens that the model computes for one document alone, all but their attention
            (model/architecture/attention.py).
        num_parts: of equal size, for which a document is added if the tokens cannot be divided.
    Returns:
        `position_ids`, int64 [1, T], from 0 in each document. The others are for the attention
        function: `cu_seq_lens_q`, `cu_seq_lens_k`, where documents begin and end, int32 [documents
        + 1]; `max_length_q`, `max_length_k`, the longest document's tokens; `document_lengths`,
        those of each, without asking a device. With shared tokens `position_ids` are of the N
        tokens that are computed; the rest has names that other layers ignore: `own_tokens`, int64
        [N], has their places among all T, and `places`, int64 [T], those of all T among them.
        `document_ends` and `own_ends` are the bounds of documents among both. `shared_tokens`,
        int64 [S], are the places among N of those that other documents copy, and `copies`, int64
        [S, C], the places of their copies among T.
    """
    num_computed = sum(lengths)
    if shared is not None:
        num_computed -= int(np.sum(shared.counts))
    missing = -num_computed % num_parts
    if missing:
        # A document of its own, so that no other attends to the padding.
        lengths = [*lengths, missing]
    ends = np.cumsum([0, *lengths], dtype=np.int32)
    position_ids = np.arange(ends[-1], dtype=np.int64) - np.repeat(ends[:-1], lengths)
    bounds = torch.from_numpy(ends)
    longest = max(lengths)
    # The names by which transformers hands them to flash attention.
    arguments: dict[str, Any] = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    arguments |= {"max_length_q": longest, "max_length_k": longest}
    if shared is not None:
        skipped = np.zeros(len(lengths), dtype=np.int64)
        skipped[: len(shared.counts)] = shared.counts
        is_own = position_ids >= np.repeat(skipped, lengths)
        sources = np.arange(len(lengths))
        sources[: len(shared.sources)] = shared.sources
        # as far into the document that computes them
        in_source = position_ids + np.repeat(ends[sources], lengths)
        computed_places = np.cumsum(is_own) - 1
        places = computed_places[np.where(is_own, np.arange(ends[-1]), in_source)]
        own_lengths = np.array(lengths) - skipped
        # Not the names above: with them flash attention would take the tokens for whole documents.
        arguments = {
            "own_tokens": np.flatnonzero(is_own),
            "places": places,
            "document_ends": ends,
            "own_ends": np.cumsum([0, *own_lengths], dtype=np.int32),
        }
        arguments |= _copies(places, ~is_own)
        arguments = {name: torch.from_numpy(array) for name, array in arguments.items()}
        position_ids = position_ids[is_own]
    return {
        "position_ids": torch.from_numpy(position_ids)[None],
        "document_lengths": lengths,
    } | arguments


def _copies(places: np.ndarray, is_copy: np.ndarray) -> dict[str, np.ndarray]:
    """The `shared_tokens` and `copies` of `describe_documents`.

    Args:
        places: of all T tokens among those that are computed.
        is_copy: bool [T], whether a token is a copy.
    """
    copies = np.flatnonzero(is_copy)
    copies = copies[np.argsort(places[copies], kind="stable")]
    shared_tokens, counts = np.unique(places[copies], return_counts=True)
    most = int(counts.max(initial=1))
    if (counts < most).any():
        raise ValueError("some tokens have more copies than others")
    return {"shared_tokens": shared_tokens, "copies": copies.reshape(-1, most)}


def documents_of_part(documents: Mapping[str, Any], index: int, num_parts: int) -> dict[str, Any]:
    """The arguments of `describe_documents` for one of the ranks that share a row.

    Documents stay whole.
    """
    part = dict(documents)
    part["position_ids"] = documents["position_ids"].chunk(num_parts, dim=1)[index]
    return part
