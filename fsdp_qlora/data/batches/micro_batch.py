"""Micro-batches: rows of tokens become tensors, padded or concatenated (padding-free), for one pass
of one rank.

A `Collator` lays out an optimizer step or an evaluation: rounds of micro-batches that all ranks
compute at the same time.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fsdp_qlora.data.batches.rows import Numbers, TokenizedRows
from fsdp_qlora.data.batches.schedule import TOKENS_OF_AN_EMPTY_RANK, Round, Schedule
from fsdp_qlora.data.batches.taught import OfTargets
from fsdp_qlora.data.text.image_processor import ImageProcessor
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
    answers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Values of targets. Of sampled answers, each [N]: advantages, shares (one over the targets of
    its row), and old_logps and sampled_logps where rows have them, all float32; table_indices,
    int64: which of the table's tokens the target is. Of turns with weights: weights. From a
    teacher: see data/batches/taught.py, [N, ..]. Empty for others.
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
        """Copy to a device, with what only losses of documents read if they are asked
        `per_document`.
        """
        names = ["input_ids", "target_rows", "targets"]
        names += ["target_counts", "desired", "reference"] if per_document else []
        columns = {name: getattr(self, name) for name in names}
        moved = to_device(dict(self.documents) | dict(self.answers) | columns, device)
        images = to_device(self.images, device)
        answers = {name: moved.pop(name) for name in self.answers}
        own = {name: moved.pop(name) for name in names}
        return dataclasses.replace(self, **own, answers=answers, documents=moved, images=images)

    def part(self, index: int, num_parts: int) -> "MicroBatch":
        """One of equally many tokens for each rank that shares this micro-batch, with their
        targets.

        Documents stay whole: their ranks exchange what attention needs of them.
        """
        if num_parts == 1:
            return self
        length = self.input_ids.shape[1] // num_parts
        is_own = self.target_rows // length == index
        rows = self.target_rows[is_own] - index * length
        targets = self.targets[is_own]
        answers = {name: values[is_own] for name, values in self.answers.items()}
        if not len(rows):
            rows = rows.new_zeros(1)
            targets = targets.new_full((1,), IGNORE_INDEX)
            answers = {
                name: values.new_zeros(1, *values.shape[1:]) for name, values in answers.items()
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
            answers=answers,
            documents=documents_of_part(self.documents, index, num_parts),
        )

    def beside(self, batches: Sequence["MicroBatch"]) -> "MicroBatch":
        """Add the tokens of the micro-batches on the ranks that share the vocabulary with this one.

        All of them then have equally many targets, so that they take the same part in the head's
        collectives.
        """
        missing = max(len(batch.targets) for batch in batches) - len(self.targets)
        return dataclasses.replace(
            self,
            target_rows=F.pad(self.target_rows.view(-1, len(self.targets)), (0, missing)).flatten(),
            targets=F.pad(self.targets, (0, missing), value=IGNORE_INDEX),
            answers={
                name: F.pad(values, (0, 0) * (values.dim() - 1) + (0, missing))
                for name, values in self.answers.items()
            },
            tokens_of_ranks=[batch.input_ids.flatten() for batch in batches],
        )


def with_teacher(student: MicroBatch, teacher: MicroBatch) -> MicroBatch:
    """Documents with the teacher's behind them, which have the same targets; `ReferencePass` takes
    them apart.
    """
    inputs = inputs_with_teacher(student.model_inputs, teacher.model_inputs)
    rows = torch.cat([student.target_rows, teacher.target_rows + student.input_ids.numel()])
    return dataclasses.replace(
        student, input_ids=inputs.pop("input_ids"), target_rows=rows, documents=inputs
    )


def inputs_with_teacher(student: Mapping[str, Any], teacher: Mapping[str, Any]) -> dict[str, Any]:
    """The model's arguments for the tokens of both, one behind the other."""
    joined = {
        name: torch.cat([student[name], teacher[name]], dim=1)
        for name in ("input_ids", "position_ids")
    }
    return (
        dict(student)
        | {f"{BESIDE}{name}": value for name, value in teacher.items() if name not in joined}
        | joined
    )


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
        rows, pad_token_id: as for `pad_rows`. shares_prompts: compute once what both documents of a
        row begin with. num_parts: equal parts that the sequence can be divided into, with a
        document of padding behind the others.
    """
    if not len(rows):
        empty = pad_rows(table, rows, pad_token_id=pad_token_id)
        described = describe_documents([TOKENS_OF_AN_EMPTY_RANK], num_parts=num_parts)
        input_ids = empty.input_ids.new_full(described["position_ids"].shape, pad_token_id)
        return dataclasses.replace(empty, input_ids=input_ids, documents=described)
    documents = table.learned_documents(rows)
    starts = table.document_offsets[documents]
    lengths = table.document_offsets[documents + 1] - starts
    firsts = np.cumsum(lengths) - lengths
    places = np.arange(lengths.sum()) + np.repeat(starts - firsts, lengths)
    input_ids = table.input_ids[places].astype(np.int64)
    labels = np.where(table.learned[places], input_ids, IGNORE_INDEX)
    labels[firsts] = IGNORE_INDEX  # nothing comes before it to predict it from
    shared = table.num_shared[rows] if shares_prompts else None
    described = describe_documents(lengths.tolist(), shared, num_parts=num_parts)
    filling = sum(described["document_lengths"]) - len(input_ids)
    filled = F.pad(torch.from_numpy(input_ids), (0, filling), value=pad_token_id)
    own = filled[None, described.get("own_tokens", slice(None))]
    return _batch(table, rows, documents, own, torch.from_numpy(labels)[None], described)


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
    desired = (
        table.desired[np.asarray(rows, dtype=np.int64)] if len(table.desired) else table.desired
    )
    reference = table.reference[documents] if len(table.reference) else table.reference
    has_values = len(table.advantages) > 0 or table.learned.dtype.kind == "f"
    return MicroBatch(
        input_ids,
        target_rows,
        targets,
        num_targets.tolist(),
        _floats(num_targets),
        _floats(desired),
        _floats(reference),
        _answers(table, rows, num_targets) if has_values else {},
        described,
    )


def _answers(
    table: TokenizedRows, rows: Numbers, num_targets: np.ndarray
) -> dict[str, torch.Tensor]:
    """`MicroBatch.answers` of some rows; without a target those of one that counts nothing, as in
    `learned_rows`.
    """
    bounds = [(table.offsets[row] + 1, table.offsets[row + 1]) for row in rows]
    learned = [first + np.flatnonzero(table.learned[first:end]) for first, end in bounds]
    indices = np.concatenate(learned) if num_targets.sum() else np.zeros(1, np.int64)
    if not len(table.advantages):
        return {"weights": _floats(table.learned[indices])}
    advantages = table.advantages[np.asarray(rows, dtype=np.int64)]
    shares = 1 / np.maximum(num_targets, 1)
    of_rows = {
        "advantages": np.repeat(advantages, num_targets),
        "shares": np.repeat(shares, num_targets),
    }
    of_tokens = {name: getattr(table, name) for name in ("old_logps", "sampled_logps")}
    values = {name: np.resize(array, len(indices)) for name, array in of_rows.items()}
    values |= {name: array[indices] for name, array in of_tokens.items() if len(array)}
    return {name: _floats(array) for name, array in values.items()} | {
        "table_indices": torch.from_numpy(indices)
    }


def _floats(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))


def learned_rows(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens of labels [B, T] have a target, the next token's label: their row in [B * T,
    ..], and the target.

    At least one, without a target if need be, so that a micro-batch without targets runs forward
    and backward like the others.
    """
    following = torch.full_like(labels, IGNORE_INDEX)
    following[:, :-1] = labels[:, 1:]
    following = following.flatten()
    rows = (following != IGNORE_INDEX).nonzero().flatten()
    rows = rows if len(rows) else rows.new_zeros(1)
    return rows, following[rows]


def describe_documents(
    lengths: list[int], num_shared: Numbers | None = None, *, num_parts: int = 1
) -> dict[str, Any]:
    """The arguments by which a model of transformers knows documents in one row of T tokens.

    Args:
        num_shared: of each pair of documents, with how many of the first's tokens the second
            begins. The model computes those once, all but their attention
            (model/architecture/attention.py).
        num_parts: of equal size, for which a document is added if the tokens cannot be divided.
    Returns:
        `position_ids`, int64 [1, T], from 0 in each document. The others are for the attention
        function: `cu_seq_lens_q`, `cu_seq_lens_k`, where documents begin and end, int32 [documents
        + 1]; `max_length_q`, `max_length_k`, the longest document's tokens; `document_lengths`,
        those of each, without asking a device. With shared tokens `position_ids` are of the tokens
        that are computed; `own_tokens`, int64, has their places among all T, and `places`, int64
        [T], those of all T among them. The rest has names that other layers ignore.
    """
    of_pairs = () if num_shared is None else num_shared
    missing = -(sum(lengths) - int(np.sum(of_pairs))) % num_parts
    if missing:
        lengths = [*lengths, missing]
    ends = np.cumsum([0, *lengths], dtype=np.int32)
    position_ids = np.arange(ends[-1], dtype=np.int64) - np.repeat(ends[:-1], lengths)
    bounds = torch.from_numpy(ends)
    longest = max(lengths)
    arguments: dict[str, Any] = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    arguments |= {"max_length_q": longest, "max_length_k": longest}
    if num_shared is not None:
        skipped = np.zeros(len(lengths), dtype=np.int64)
        skipped[1 : 2 * len(num_shared) : 2] = num_shared
        is_own = position_ids >= np.repeat(skipped, lengths)
        # as far into the document before
        in_first = np.arange(ends[-1]) - np.repeat([0, *lengths[:-1]], lengths)
        places = np.where(is_own, np.cumsum(is_own) - 1, (np.cumsum(is_own) - 1)[in_first])
        arguments = {
            "own_tokens": torch.from_numpy(np.flatnonzero(is_own)),
            "places": torch.from_numpy(places),
        }
        arguments["document_ends"] = bounds
        position_ids = position_ids[is_own]
    return {
        "position_ids": torch.from_numpy(position_ids)[None],
        "document_lengths": lengths,
    } | arguments


def documents_of_part(documents: Mapping[str, Any], index: int, num_parts: int) -> dict[str, Any]:
    """The arguments of `describe_documents` for one of the ranks that share a row; documents stay
    whole.
    """
    return dict(documents) | {
        "position_ids": documents["position_ids"].chunk(num_parts, dim=1)[index]
    }


# --- the micro-batches of a step ---

_AHEAD = 2  # micro-batches whose images a thread reads before their use


@dataclass(frozen=True, eq=False)
class Collator:
    """Makes one rank's micro-batches.

    context_size: ranks that share each micro-batch. sharing_ranks: those that share the vocabulary
    with this one and itself. shares_prompts: the model computes the common prefix of a pair once.
    has_teacher: a row's second document is its teacher's. of_targets: gives `answers` of other rows
    than sampled ones. image_processor: for rows with images; model_arguments: of the model's
    forward pass.
    """

    schedule: Schedule
    pad_token_id: int
    rank: int = 0
    context_size: int = 1
    sharing_ranks: Sequence[int] = ()
    shares_prompts: bool = False
    has_teacher: bool = False
    of_targets: OfTargets | None = None
    image_processor: ImageProcessor | None = None
    model_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def data_rank(self) -> int:
        """The place of this rank's micro-batch in a round."""
        return self.rank // self.context_size

    def lay_out_step(self, table: TokenizedRows, rows: np.ndarray) -> "Batches":
        """Lay out the rows of an optimizer step."""
        return Batches(self, table, rows, self.schedule.rounds(rows, table.lengths))

    def lay_out_evaluation(self, table: TokenizedRows, rows: np.ndarray) -> "Batches":
        """Lay out rows of which nothing is learned."""
        size = self.schedule.batch_size * self.schedule.data_size
        # Padded rows keep the order in which their losses were always added.
        parts = (
            [rows[i : i + size] for i in range(0, len(rows), size)]
            if self.schedule.padding
            else [rows]
        )
        rounds = itertools.chain(*(self.schedule.rounds(part, table.lengths) for part in parts))
        return Batches(self, table, rows, [*rounds])

    def repeated(self, table: TokenizedRows, micro_batch: np.ndarray, num_rounds: int) -> "Batches":
        """Lay out the same micro-batch for every rank and round."""
        return Batches(
            self, table, micro_batch, [[micro_batch] * self.schedule.data_size] * num_rounds
        )

    def micro_batch(self, rows: Round, table: TokenizedRows) -> MicroBatch:
        """This rank's part of a round, with what it must know of the ranks that share the
        vocabulary with it.
        """
        # Every rank knows all rows: laid out here, the others' tokens need no collective and no
        # wait for it.
        size = self.context_size
        ranks = {self.rank, *self.sharing_ranks}
        whole = {
            data_rank: self._sequences(rows[data_rank], table)
            for data_rank in {rank // size for rank in ranks}
        }
        if self.of_targets:
            batch = whole[self.data_rank]
            told = self.of_targets(table, rows[self.data_rank])
            whole[self.data_rank] = dataclasses.replace(batch, answers=dict(batch.answers) | told)
        batches = {rank: whole[rank // size].part(rank % size, size) for rank in ranks}
        own = batches[self.rank]
        sharing = [batches[rank] for rank in self.sharing_ranks]
        if len(table.images) and table.image_sizes[np.concatenate(rows), 0].any():
            own = self._with_images(own, rows, table)
        return own.beside(sharing) if sharing else own

    def _sequences(self, rows: np.ndarray, table: TokenizedRows) -> MicroBatch:
        if self.schedule.padding:
            return pad_rows(table, rows, pad_token_id=self.pad_token_id)
        concatenated = partial(concatenate_rows, pad_token_id=self.pad_token_id)
        if self.has_teacher and len(table.splits):
            return with_teacher(
                concatenated(table, rows), concatenated(table.as_documents, 2 * rows + 1)
            )
        return concatenated(
            table, rows, shares_prompts=self.shares_prompts, num_parts=self.context_size
        )

    def _with_images(self, own: MicroBatch, rows: Round, table: TokenizedRows) -> MicroBatch:
        assert self.image_processor is not None and self.schedule.padding
        names = [[*map(bytes, table[row].images)] for row in rows[self.data_rank]]
        shown = [*filter(None, names)]
        taken = self.model_arguments
        images = self.image_processor.model_inputs(shown, own.input_ids, taken) if shown else {}
        return dataclasses.replace(own, images=images, calls_towers=True)


@dataclass(frozen=True, eq=False)
class Batches:
    """The micro-batches of a step or an evaluation; iterating gives this rank's, one for each
    round.
    """

    collator: Collator
    table: TokenizedRows
    rows: np.ndarray
    """Indices of rows of `table`, int64."""
    rounds: Sequence[Round]

    def __len__(self) -> int:
        return len(self.rounds)

    def __iter__(self) -> Iterator[MicroBatch]:
        made = (self.collator.micro_batch(rows, self.table) for rows in self.rounds)
        return _made_ahead(made) if len(self.table.images) else made

    @property
    def num_targets(self) -> int:
        """Tokens to predict, of all ranks."""
        return int(self.table.document_targets[self.table.learned_documents(self.rows)].sum())

    def sizes(self) -> dict[str, Any]:
        """Entries of a step's record that follow from its rows."""
        lengths = self.table.lengths
        computed = self.table.num_computed(shares_prompts=self.collator.shares_prompts)
        of_computed, of_lock_step = self.collator.schedule.useful_shares(
            self.rounds, lengths, computed
        )
        return {
            "num_tokens": int(lengths[self.rows].sum()),
            "useful_of_computed": round(of_computed, 4),
            "useful_of_lock_step": round(of_lock_step, 4),
        }

    def describe_samples(self, places: Iterable[tuple[int, int]]) -> str:
        """The dataset's numbers of the rows at (round, rank) places, as text; of all rows without a
        place.
        """
        shared = {(index, rank // self.collator.context_size) for index, rank in places}
        chosen = [self.rounds[index][data_rank] for index, data_rank in sorted(shared)]
        return self.table.describe_numbers(np.concatenate(chosen) if chosen else self.rows)


def _made_ahead(micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """The micro-batches, up to `_AHEAD` of which a thread makes ahead. Its exceptions are raised
    here.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="images")
    end: Any = object()
    try:
        ahead = deque(thread.submit(next, micro_batches, end) for _ in range(_AHEAD))
        while (item := ahead.popleft().result()) is not end:
            ahead.append(thread.submit(next, micro_batches, end))
            yield item
    finally:
        thread.shutdown(wait=False, cancel_futures=True)
