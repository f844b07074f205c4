"""A training request: protobuf becomes checked arrays, and results become protobuf."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from fsdp_qlora.data.batches.micro_batch import IGNORE_INDEX, MicroBatch
from fsdp_qlora.data.batches.row_images import NO_IMAGES, RowImages, images_of_rows
from fsdp_qlora.data.batches.rows import Numbers, TokenizedRows
from fsdp_qlora.service.losses import LOSSES, Loss
from fsdp_qlora.service.messages import Limits, rows_of_tokens
from fsdp_qlora.service.sent_images import (
    NO_BASE_IMAGES,
    BaseImages,
    SentImage,
    SequenceImages,
    SequenceReader,
)
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import shown

# Little-endian, on any machine.
_DTYPES = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4"}
# Datums of a request.
_MAX_DATUMS = 2**14


@dataclass(frozen=True, eq=False)
class TrainRequest:
    """A forward_backward that can be computed.

    K is the maximum number of targets of a position: 1, except for a loss over several likely
    tokens.
    """

    loss: str
    """A name in `LOSSES`."""
    config: dict[str, float]
    forward_only: bool
    shapes: Sequence[Sequence[int]]
    """The shape of each datum's targets: [tokens] or [tokens, its own K]."""
    tokens: np.ndarray
    """The input tokens of all datums, int32 [positions]."""
    inputs: dict[str, np.ndarray]
    """Targets and the loss's tensors, by name: int64 or float32 [positions, K]."""
    images: RowImages = NO_IMAGES
    """The images of the datums."""
    contents: dict[str, np.ndarray] = field(default_factory=dict)
    """The files' bytes by their hexadecimal names, uint8."""

    @classmethod
    def read(
        cls,
        message: pb.ForwardBackwardRequest,
        limits: Limits,
        base_images: BaseImages = NO_BASE_IMAGES,
    ) -> "TrainRequest":
        """Check the request. Raises UserError if it cannot be computed."""
        loss = LOSSES.get(message.loss_fn)
        if loss is None:
            raise UserError(
                f"The loss {shown(message.loss_fn)} is not served; these are: {', '.join(LOSSES)}."
            )
        given = dict(message.loss_fn_config) | {
            name: each.number for name, each in message.loss_fn_config_v2.items()
        }
        unknown = given.keys() - loss.config.keys()
        if unknown:
            raise UserError(f"The loss {message.loss_fn} has no setting {shown(sorted(unknown))}.")
        if not all(map(math.isfinite, given.values())):
            raise UserError(
                f"The loss {message.loss_fn} has a setting that is not finite: {shown(given)}."
            )
        if not message.data:
            raise UserError("The request has no data.")
        width = _check_sizes(message, limits)
        tokens, images = _read_sequences(message, limits, base_images)
        if any(images):
            # Only now is it known how many tokens stand for images.
            limits.check_targets(sum(map(len, tokens)), width)
        datums = [
            _read_inputs(datum, number, (message.loss_fn, loss), len(ids), limits)
            for number, (datum, ids) in enumerate(zip(message.data, tokens, strict=True))
        ]
        contents = dict[str, np.ndarray]()
        for own in images:
            contents |= own.contents
        return cls(
            loss=message.loss_fn,
            config=dict(loss.config) | given,
            forward_only=message.forward_only,
            shapes=[datum["target_tokens"].shape for datum in datums],
            tokens=np.concatenate(tokens).astype(np.int32),
            inputs=_joined(datums),
            images=images_of_rows([own.row for own in images]),
            contents=contents,
        )

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each datum, int64 [datums]."""
        return np.array([shape[0] for shape in self.shapes], np.int64)

    @functools.cached_property
    def table(self) -> TokenizedRows:
        """A row for each datum: its tokens, and one behind them."""
        parts = np.split(self.tokens, np.cumsum(self.lengths)[:-1])
        # A row's targets are its next tokens, so the last one needs a token behind it.
        return rows_of_tokens([np.append(part, np.int32(0)) for part in parts], self.images)

    @functools.cached_property
    def values(self) -> dict[str, np.ndarray]:
        """The inputs, and of each target its place and its datum, int64 [positions, K]."""
        count, width = self.inputs["target_tokens"].shape
        datum = np.arange(len(self.shapes)).repeat(self.lengths)
        return self.inputs | {
            "places": np.arange(count * width, dtype=np.int64).reshape(count, width),
            "datum": datum[:, None].repeat(width, axis=1),
        }

    def target_values(self, rows: Numbers) -> dict[str, torch.Tensor]:
        """The values of some rows' targets, [N, K].

        Without targets, the values of one target that counts nothing.
        """
        # A row has one target less than tokens.
        starts = self.table.offsets - np.arange(len(self.table.offsets))
        chosen = np.concatenate(
            [np.arange(starts[row], starts[row + 1]) for row in rows] or [np.zeros(1, np.int64)]
        )
        return {name: torch.from_numpy(array[chosen]) for name, array in self.values.items()}

    def with_targets(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch with the request's own targets, [N * K].

        They replace the next tokens of its table.
        """
        is_target = (batch.targets != IGNORE_INDEX)[:, None]
        targets = torch.where(is_target, batch.target_values["target_tokens"], IGNORE_INDEX)
        values = {name: column.flatten() for name, column in batch.target_values.items()}
        rows = batch.target_rows.repeat_interleave(targets.shape[1])
        return dataclasses.replace(
            batch, target_rows=rows, targets=targets.flatten(), target_values=values
        )

    def encode(self, logprobs: np.ndarray, metrics: Mapping[str, float]) -> bytes:
        """The answer. logprobs: float32 [positions of all datums, K]."""
        answer = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
        first = 0
        # A record has datums with tensors of one width; neighbours share one.
        for trailing, group in itertools.groupby(self.shapes, key=lambda shape: shape[1:]):
            lengths = [shape[0] for shape in group]
            width = trailing[0] if trailing else 1
            own = logprobs[first : first + sum(lengths), :width].astype("<f4")
            first += sum(lengths)
            record = answer.loss_fn_outputs.add(num_datums=len(lengths))
            field = record.fields["logprobs"]
            field.dtype = pb.DTYPE_FLOAT32
            field.trailing_shape.extend(trailing)
            field.data = own.tobytes()
            ends = np.cumsum([0, *lengths], dtype="<i8") * (own.itemsize * width)
            field.offsets = ends.tobytes()
        return answer.SerializeToString()


def parse_train_request(body: bytes) -> pb.ForwardBackwardRequest:
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise UserError("The body is no ForwardBackwardRequest.") from error


def _read_sequences(
    message: pb.ForwardBackwardRequest, limits: Limits, base_images: BaseImages
) -> tuple[list[np.ndarray], list[SequenceImages]]:
    """The tokens of each datum, and its images. Raises UserError."""
    reader = SequenceReader(base_images, limits.context_length)
    sent = [
        _pieces(datum.model_input, f"Datum {number}") for number, datum in enumerate(message.data)
    ]
    tokens = list[np.ndarray]()
    images = list[SequenceImages]()
    for number, pieces in enumerate(sent):
        ids, own = reader.read(pieces, f"Datum {number}")
        tokens.append(limits.check(ids, f"Datum {number}"))
        limits.check_images(len(ids), own.num_values, f"Datum {number}")
        images.append(own)
    if any(images):
        for number, pieces in enumerate(sent):
            reader.refuse_image_tokens(pieces, f"Datum {number}")
    return tokens, images


def _pieces(chunks: Sequence[pb.Chunk], what: str) -> list[np.ndarray | SentImage]:
    pieces = list[np.ndarray | SentImage]()
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind == "image":
            pieces.append(_sent_image(chunk.image, what))
        elif kind == "encoded_text":
            try:
                pieces.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
            except ValueError as error:
                raise UserError(f"{what} has tokens that are no 32-bit numbers.") from error
        else:
            raise UserError(
                f"{what} has {kind or 'an empty chunk'}, and only tokens and images are served."
            )
    return pieces


def _sent_image(image: pb.ImageChunk, what: str) -> SentImage:
    if image.HasField("override_dimensions"):
        raise UserError(f"{what}: override_dimensions of an image is not served.")
    expected = image.expected_tokens if image.HasField("expected_tokens") else None
    return SentImage(image.data, expected)


def _check_sizes(message: pb.ForwardBackwardRequest, limits: Limits) -> int:
    """Refuse a request that is too large, by the sizes that it names.

    No array has been made by then.

    Returns:
        The maximum targets of a token.
    """
    if len(message.data) > _MAX_DATUMS:
        raise UserError(
            f"The request has {len(message.data):,} datums; at most {_MAX_DATUMS:,} "
            "are served at a time."
        )
    positions = 0
    width = 1
    for datum in message.data:
        # Four bytes for a token.
        positions += sum(len(chunk.encoded_text.tokens) for chunk in datum.model_input) // 4
        if any(len(tensor.shape) > 2 for tensor in datum.loss_fn_inputs.values()):
            raise UserError(
                "A tensor has more than two dimensions; those of targets are [tokens] or [tokens, "
                "K]."
            )
        if "target_tokens" in datum.loss_fn_inputs:
            width = max(width, *datum.loss_fn_inputs["target_tokens"].shape[1:2], 0)
    limits.check_targets(positions, width)
    return width


def _read_inputs(
    datum: pb.Datum, number: int, named_loss: tuple[str, Loss], length: int, limits: Limits
) -> dict[str, np.ndarray]:
    """The values of a datum's targets: a loss's tensors, [length] or [length, K].

    Raises UserError.
    """
    loss_name, loss = named_loss
    names = ("target_tokens", *loss.tensors, *loss.optional)
    given = datum.loss_fn_inputs
    unknown = given.keys() - {*names, "mask"}
    if unknown:
        raise UserError(f"Datum {number}: the loss {loss_name} takes no {shown(sorted(unknown))}.")
    for name in names:
        if name not in given and name not in loss.optional:
            raise UserError(f"Datum {number} has no {name}, which the loss {loss_name} needs.")
    shape = (length, *given["target_tokens"].shape[1:])
    if len(shape) > 2 or min(shape) < 1:
        raise UserError(
            f"Datum {number}: target_tokens has the shape {shape}; it must be [tokens] or [tokens, "
            "K]."
        )
    if len(shape) > 1 and loss_name != "cross_entropy":
        raise UserError(f"Datum {number}: only cross_entropy takes several targets of a token.")
    values = {name: np.ones(shape, np.float32) for name in loss.optional}
    for name in names:
        if name in given:
            values[name] = _array(given[name], f"Datum {number}: {name}", shape)
    limits.check_known(values["target_tokens"], f"Datum {number}")
    return values


def _array(tensor: pb.Tensor, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The dense values of a tensor of this shape.

    int64 for target_tokens, and float32 for others. Raises UserError.
    """
    try:
        if tuple(tensor.shape) not in (shape, ()):
            raise ValueError(f"its shape is {tuple(tensor.shape)}, and {shape} is needed")
        dtype = np.dtype(_DTYPES[tensor.dtype])
        if tensor.HasField("sparse_csr"):
            array = _dense(tensor.sparse_csr, shape, dtype)
        else:
            array = np.frombuffer(tensor.dense, dtype).reshape(shape)
        if not np.isfinite(array).all():
            raise ValueError("a number is not finite")
        if name.endswith("target_tokens") and (array != array.astype(np.int64)).any():
            raise ValueError("a token is no whole number")
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
        raise UserError(f"{name} cannot be read: {error}.") from error
    return array.astype(np.int64 if name.endswith("target_tokens") else np.float32)


def _dense(csr: pb.SparseCsr, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """The values of a tensor in compressed rows, [rows, columns].

    Raises ValueError or IndexError.
    """
    rows, columns = (np.frombuffer(part, "<i8") for part in (csr.crow_indices, csr.col_indices))
    values = np.frombuffer(csr.values, dtype)
    counts = np.diff(rows)
    is_whole = (
        len(shape) == 2 and len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == len(columns)
    )
    if not is_whole or len(values) != len(columns) or (columns < 0).any() or (counts < 0).any():
        raise ValueError("its indices are not those of rows and columns")
    array = np.zeros(shape, dtype)
    array[np.repeat(np.arange(len(array)), counts), columns] = values
    return array


def _joined(datums: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The inputs of all datums, [positions, K].

    Where one has fewer targets than K, the rest weighs nothing.
    """
    width = max(
        array.shape[1] if array.ndim > 1 else 1 for datum in datums for array in datum.values()
    )
    values = {}
    for name in datums[0]:
        parts = [datum[name].reshape(len(datum[name]), -1) for datum in datums]
        values[name] = np.concatenate(
            [np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts]
        )
    return values
