"""The commands that rank 0 sends to all ranks, and their messages.

A message is a command's JSON, in which arrays are replaced by their dtype and shape, and then the
bytes of the arrays themselves.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import torch
from pydantic import BaseModel
from tinker import types

from fsdp_qlora.distributed.process_group import broadcast_bytes
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.service.entries import AdapterSettings
from fsdp_qlora.service.sampling import Drawing, SampleRequest
from fsdp_qlora.service.train_request import TrainRequest
from fsdp_qlora.training.generation.sampling import Completion

# A GPU would be busy while ranks wait.
_BY_GLOO = torch.device("cpu")
# Bytes of the number in front of a message: the length of its JSON.
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class CreateModel:
    """Make a new adapter for a model."""

    model: str
    settings: AdapterSettings


@dataclass(frozen=True)
class LoadWeights:
    """Load saved weights into a model."""

    model: str
    path: str
    with_optimizer: bool
    settings: AdapterSettings | None = None
    """The model's own; None takes those of the weights."""


@dataclass(frozen=True, eq=False)
class ForwardBackward:
    """Compute a request's losses, and add its gradients to the model's."""

    model: str
    seq: int
    """The request's number, which seeds dropout."""
    request: TrainRequest | None
    """None until the command is sent: requests to repeat are many, and would fill the memory."""


@dataclass(frozen=True)
class OptimStep:
    """Update a model by its gradients."""

    model: str
    params: types.AdamParams


@dataclass(frozen=True)
class SaveWeights:
    """Save a model as it is now."""

    model: str
    path: str
    with_optimizer: bool


@dataclass(frozen=True)
class Sample:
    """Answer requests for samples with the same weights and sampling settings."""

    drawing: Drawing
    requests: tuple[SampleRequest, ...]
    path: str | None = None
    """The path of saved weights; None samples from a base."""
    saved_by: str | None = None
    """The request that saved the weights. Others may be saved later under the same name."""
    base: int = 0
    """The number of the base."""
    answers: list[list[Completion]] | None = None
    """Each request's answers, where a server has given them: as lists on the other ranks."""
    checked: str | None = None
    """The model that the weights are of, if these answers show whether the server uses them."""

    @property
    def image_contents(self) -> dict[str, np.ndarray]:
        """The bytes of the prompts' images by their names."""
        contents = dict[str, np.ndarray]()
        for request in self.requests:
            contents |= request.images.contents
        return contents


@dataclass(frozen=True)
class DropModel:
    """Remove a model from memory."""

    model: str


Command = CreateModel | LoadWeights | ForwardBackward | OptimStep | SaveWeights | Sample | DropModel
_TYPES = {kind.__name__: kind for kind in get_args(Command)}


def share(command: Command | None, ranks: Ranks) -> Command | None:
    """Rank 0's command, on every rank. Collective."""
    if ranks.world_size == 1:
        return command
    message = broadcast_bytes(b"" if command is None else pack(command), _BY_GLOO)
    if ranks.is_rank_0 or not len(message):
        return command
    return unpack(message)


def pack(command: Command) -> bytes:
    """The message of a command."""
    arrays = list[np.ndarray]()
    content = [type(command).__name__, _plain(command, arrays)]
    head = json.dumps(content).encode()
    length = len(head).to_bytes(_LENGTH_BYTES, "little")
    return b"".join([length, head, *(array.tobytes() for array in arrays)])


def unpack(message: np.ndarray) -> Command:
    """The command of a message, uint8 [bytes]."""
    length = int.from_bytes(message[:_LENGTH_BYTES].tobytes(), "little")
    rest = message[_LENGTH_BYTES:]
    name, content = json.loads(rest[:length].tobytes())
    command: Command = _typed(_TYPES[name], content, _Bytes(rest[length:]))
    return command


class _Bytes:
    """The bytes of a message's arrays, in the order in which its JSON names them."""

    def __init__(self, content: np.ndarray) -> None:
        self._content = content
        self._first = 0

    def take(self, dtype: str, shape: list[int]) -> np.ndarray:
        last = self._first + math.prod(shape) * np.dtype(dtype).itemsize
        # A copy, as its beginning in the message may be at any byte.
        own = self._content[self._first : last].tobytes()
        self._first = last
        return np.frombuffer(bytearray(own), dtype).reshape(shape)


def _plain(value: object, arrays: list[np.ndarray]) -> object:
    """The JSON of a value. Its arrays are added to `arrays`."""
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return [value.dtype.str, value.shape]
    if isinstance(value, BaseModel):
        return value.model_dump()
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: _plain(getattr(value, name), arrays) for name in names}
    if isinstance(value, tuple):
        return [_plain(each, arrays) for each in value]
    if isinstance(value, Mapping):
        return {name: _plain(each, arrays) for name, each in value.items()}
    # A list is JSON already, and may have a million tokens.
    return value


def _typed(kind: Any, content: Any, arrays: _Bytes) -> Any:
    """A value of a type, of the forms that commands have, from its JSON."""
    if isinstance(kind, UnionType) and content is not None:
        # X | None: otherwise the types of a union are JSON's own.
        kind = get_args(kind)[0]
    if content is None:
        return None
    if kind is np.ndarray:
        return arrays.take(*content)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        values = {name: _typed(hints[name], each, arrays) for name, each in content.items()}
        return kind(**values)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind(**content)
    arguments = get_args(kind)
    if get_origin(kind) is tuple:
        return tuple(_typed(arguments[0], each, arrays) for each in content)
    if get_origin(kind) is dict:
        return {name: _typed(arguments[1], each, arrays) for name, each in content.items()}
    return content
