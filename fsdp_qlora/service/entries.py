"""The entries of a service's records, as they are stored in JSON.

The keys are those of existing folders: they stay.
"""

from collections.abc import Mapping
from typing import NotRequired, TypedDict, TypeGuard

Metadata = Mapping[str, object] | None
"""Data that a client keeps with its sessions, models and weights."""


class AdapterSettings(TypedDict):
    """The settings of a new adapter."""

    rank: int
    seed: int
    train_attn: bool
    train_mlp: bool


class SessionEntry(TypedDict):
    """A client's session. Times are seconds since 1970."""

    user_metadata: Metadata
    display_name: str | None
    time: float
    used: NotRequired[float]
    """Time of the client's last request. Older folders have sessions without it."""
    is_finished: NotRequired[bool]


class ModelEntry(TypedDict):
    """A model, which is an adapter that a client trains."""

    about: AdapterSettings
    user_metadata: Metadata
    time: float
    live: NotRequired[int]
    """The number of the request after which the model's state was saved last."""


class SamplerEntry(TypedDict):
    """The weights of a sampler: saved ones, or a base."""

    path: str | None
    """The tinker:// path of saved weights."""
    base: NotRequired[str | None]
    """The name of a base, if there is no path."""
    time: float


class CheckpointEntry(TypedDict):
    """Weights that a client has saved."""

    piece: str
    """The id of the request that saved them."""
    time: float
    expires: float | None
    user_metadata: Metadata


class BaseEntry(TypedDict):
    """The base of the folder's adapters, and how they are computed."""

    model: str
    identity: NotRequired[dict[str, object]]
    ways: NotRequired[dict[str, str]]
    """How its parts were computed last: `kernels.in_use.Ways`."""


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value of JSON is an integer; its true and false are integers in Python."""
    return isinstance(value, int) and not isinstance(value, bool)
