"""The protocol's messages: from the bytes of a request to rows of tokens, and from results to bytes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from fsdp_qlora.data.batches.micro_batch import IGNORE_INDEX, MicroBatch
from fsdp_qlora.data.batches.rows import Numbers, TokenizedRows
from fsdp_qlora.service.losses import LOSSES
from fsdp_qlora.utils.errors import UserError

_DTYPES = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4"}
_MOST_VALUES = 2**26  # of a tensor; a sparse one may say more than it sends
_NO_TOP = -99999.0  # where a top-k list is empty


@dataclass(frozen=True)
class Limits:
    """Limits of a request. vocabulary: its token ids are below this. context_length: tokens of a row."""

    vocabulary: int
    context_length: int

    def check(self, tokens: np.ndarray, what: str) -> np.ndarray:
        if not 0 < len(tokens) <= self.context_length:
            raise UserError(f"{what} has {len(tokens):,} tokens; here it must be 1 to {self.context_length:,}.")
        return self.check_known(tokens, what)

    def check_known(self, tokens: np.ndarray, what: str) -> np.ndarray:
        if len(bad := tokens[(tokens < 0) | (tokens >= self.vocabulary)]):
            raise UserError(f"{what} has the token {bad[0]}; the model has the tokens 0 to {self.vocabulary - 1:,}.")
        return tokens


@dataclass(frozen=True, eq=False)
class TrainRequest:
    """A forward_backward. K is the most targets of a position: 1, but for a loss over several likely tokens.

    table: a row for each datum, its tokens and one behind them. values: name -> [positions of all datums, K]; places
    numbers them. shapes: of each datum's targets.
    """

    table: TokenizedRows
    values: Mapping[str, np.ndarray]
    shapes: Sequence[tuple[int, ...]]
    loss: str
    config: Mapping[str, float]
    forward_only: bool

    @classmethod
    def read(cls, message: pb.ForwardBackwardRequest, limits: Limits) -> "TrainRequest":
        """Raises UserError: it cannot be computed."""
        if (loss := LOSSES.get(message.loss_fn)) is None:
            raise UserError(f"The loss {message.loss_fn!r} is not served; these are: {', '.join(LOSSES)}.")
        given = {**message.loss_fn_config, **{name: each.number for name, each in message.loss_fn_config_v2.items()}}
        if unknown := given.keys() - loss.config.keys():
            raise UserError(f"The loss {message.loss_fn} has no setting {', '.join(sorted(unknown))}.")
        names = ("target_tokens", *loss.tensors, *loss.optional)
        rows, datums = list[np.ndarray](), list[dict[str, np.ndarray]]()
        for number, datum in enumerate(message.data):
            tokens = limits.check(_tokens(datum.model_input, f"Datum {number}"), f"Datum {number}")
            if unknown := datum.loss_fn_inputs.keys() - {*names, "mask"}:
                raise UserError(f"Datum {number}: the loss {message.loss_fn} takes no {', '.join(sorted(unknown))}.")
            for name in names:
                if name not in datum.loss_fn_inputs and name not in loss.optional:
                    raise UserError(f"Datum {number} has no {name}, which the loss {message.loss_fn} needs.")
            found = {name: _array(datum.loss_fn_inputs[name], name) for name in names if name in datum.loss_fn_inputs}
            limits.check_known(found["target_tokens"], f"Datum {number}")
            shape = (len(tokens), *found["target_tokens"].shape[1:])
            if len(shape) > 1 and message.loss_fn != "cross_entropy":
                raise UserError(f"Datum {number}: only cross_entropy takes several targets of a token.")
            for name, array in found.items():
                if array.shape != shape:
                    raise UserError(f"Datum {number}: {name} has the shape {array.shape}, and {shape} is needed.")
            rows.append(np.append(tokens, 0))
            datums.append({**{name: np.ones(shape, np.float32) for name in loss.optional}, **found})
        if not rows:
            raise UserError("The request has no data.")
        return cls(
            _table(rows),
            _joined(datums),
            [datum["target_tokens"].shape for datum in datums],
            message.loss_fn,
            {**loss.config, **given},
            message.forward_only,
        )

    def of_targets(self, rows: Numbers) -> dict[str, torch.Tensor]:
        """The values of some rows' targets, [N, K]; of one that counts nothing if they have none."""
        starts = self.table.offsets - np.arange(len(self.table.offsets))
        chosen = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows] or [np.zeros(1, np.int64)])
        return {name: torch.from_numpy(array[chosen]) for name, array in self.values.items()}

    def with_targets(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch with the request's own targets, [N * K], where its table has the next tokens."""
        is_target = (batch.targets != IGNORE_INDEX)[:, None]
        targets = torch.where(is_target, batch.answers["target_tokens"], IGNORE_INDEX)
        answers = {name: values.flatten() for name, values in batch.answers.items()}
        rows = batch.target_rows.repeat_interleave(targets.shape[1])
        return dataclasses.replace(batch, target_rows=rows, targets=targets.flatten(), answers=answers)

    def encode(self, logprobs: np.ndarray, metrics: Mapping[str, float]) -> bytes:
        """The answer. logprobs: float32 [positions of all datums, K]."""
        answer, first = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics), 0
        for number, shape in enumerate(self.shapes):
            trailing = list(shape[1:])
            if not number or trailing != list(self.shapes[number - 1][1:]):
                record = answer.loss_fn_outputs.add()
                field = record.fields["logprobs"]
                field.dtype, field.offsets = pb.DTYPE_FLOAT32, np.zeros(1, "<i8").tobytes()
                field.trailing_shape.extend(trailing)
            own = logprobs[first : first + shape[0], : trailing[0] if trailing else 1]
            field.data += own.astype("<f4").tobytes()
            field.offsets += np.array([len(field.data)], "<i8").tobytes()
            record.num_datums += 1
            first += shape[0]
        return answer.SerializeToString()


def parse_train_request(body: bytes) -> pb.ForwardBackwardRequest:
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise UserError("The body is no ForwardBackwardRequest.") from error


def prompt_tokens(request: types.SampleRequest, limits: Limits) -> np.ndarray:
    """The prompt's tokens, int32. Raises UserError if it has other things, or an unknown token."""
    texts = [chunk for chunk in request.prompt.chunks if isinstance(chunk, types.EncodedTextChunk)]
    if len(texts) < len(request.prompt.chunks):
        raise UserError("Prompts of other things than tokens are not served.")
    try:
        tokens = np.array([token for chunk in texts for token in chunk.tokens], np.int32)
    except OverflowError as error:
        raise UserError("The prompt has a token that is no 32-bit number.") from error
    return limits.check(tokens, "The prompt")


def rows_to_score(prompts: Sequence[Sequence[int]]) -> TokenizedRows:
    """A row for each prompt, whose tokens are targets but for the first."""
    return _table([np.array(prompt, np.int32) for prompt in prompts])


def encode_samples(
    answers: Sequence[Any], prompt_logprobs: np.ndarray | None = None, top: tuple[np.ndarray, np.ndarray] | None = None
) -> bytes:
    """The answer to a SampleRequest.

    Args:
        answers: completions. prompt_logprobs: float32 [tokens], NaN at the first. top: ids and log-probabilities of the
            likeliest tokens, [tokens, k].
    """
    answer = pb.SampleResponse()
    for each in answers:
        tokens, logprobs = np.array(each.token_ids, "<i4"), np.array(each.logps or [], "<f4")
        reason = pb.STOP_REASON_STOP if each.is_done else pb.STOP_REASON_LENGTH
        answer.sequences.add(stop_reason=reason, tokens=tokens.tobytes(), logprobs=logprobs.tobytes())
    if prompt_logprobs is not None:
        answer.prompt_logprobs = prompt_logprobs.astype("<f4").tobytes()
    if top is not None:
        ids, logps = (np.array(array) for array in top)
        ids[0], logps[0] = 0, _NO_TOP
        answer.topk_prompt_logprobs.length, answer.topk_prompt_logprobs.k = ids.shape
        answer.topk_prompt_logprobs.token_ids = ids.astype("<i4").tobytes()
        answer.topk_prompt_logprobs.logprobs = logps.astype("<f4").tobytes()
    return answer.SerializeToString()


def _tokens(chunks: Sequence[pb.Chunk], what: str) -> np.ndarray:
    kinds = {chunk.WhichOneof("chunk") for chunk in chunks}
    if other := kinds - {"encoded_text"}:
        raise UserError(f"{what} has {next(iter(other)) or 'an empty chunk'}, and only tokens are served.")
    try:
        return np.concatenate(
            [np.zeros(0, np.int32), *(np.frombuffer(chunk.encoded_text.tokens, "<i4") for chunk in chunks)]
        )
    except ValueError as error:
        raise UserError(f"{what} has tokens that are no 32-bit numbers.") from error


def _array(tensor: pb.Tensor, name: str) -> np.ndarray:
    """The dense values of a tensor, int64 for target_tokens and float32 for others. Raises UserError."""
    try:
        if math.prod(tensor.shape) > _MOST_VALUES:
            raise ValueError("it is too large")
        if tensor.HasField("sparse_csr"):
            csr = tensor.sparse_csr
            rows, columns = (np.frombuffer(part, "<i8") for part in (csr.crow_indices, csr.col_indices))
            array = np.zeros(tuple(tensor.shape), _DTYPES[tensor.dtype])
            if len(rows) != len(array) + 1 or rows[0] != 0 or rows[-1] != len(columns) or (columns < 0).any():
                raise ValueError("its indices are not those of rows and columns")
            array[np.repeat(np.arange(len(array)), np.diff(rows)), columns] = np.frombuffer(csr.values, array.dtype)
        else:
            array = np.frombuffer(tensor.dense, _DTYPES[tensor.dtype])
            array = array.reshape(tuple(tensor.shape) or -1)
        if not np.isfinite(array).all():
            raise ValueError("a number is not finite")
        if array.ndim not in (1, 2) or not array.size:
            raise ValueError(f"its shape is {array.shape}")
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
        raise UserError(f"{name} cannot be read: {error}.") from error
    return array.astype(np.int64 if name == "target_tokens" else np.float32)


def _table(rows: Sequence[np.ndarray]) -> TokenizedRows:
    """Rows whose tokens are all learned, but for the first of each."""
    lengths = [len(row) for row in rows]
    learned = np.concatenate([np.arange(length) > 0 for length in lengths])
    ids, offsets = np.concatenate(rows).astype(np.int32), np.cumsum([0, *lengths], dtype=np.int64)
    return TokenizedRows(ids, learned, offsets, np.arange(len(rows), dtype=np.int64))


def _joined(datums: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The values of all datums, [positions, K]; where one has fewer targets than K, the rest weighs nothing."""
    width = max(array.shape[1] if array.ndim > 1 else 1 for datum in datums for array in datum.values())
    values = {}
    for name in datums[0]:
        parts = [datum[name].reshape(len(datum[name]), -1) for datum in datums]
        values[name] = np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts])
    count = len(values["target_tokens"])
    values["places"] = np.arange(count * width, dtype=np.int64).reshape(count, width)
    lengths = [len(datum["target_tokens"]) for datum in datums]
    values["datum"] = np.arange(len(datums)).repeat(lengths)[:, None].repeat(width, axis=1)
    return values
