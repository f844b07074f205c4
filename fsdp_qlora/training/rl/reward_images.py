"""Images of prompts as reward functions get them."""

from collections.abc import Sequence
from typing import Any, overload

from fsdp_qlora.data.text.image_store import load

IMAGES = "images"
"""The argument of reward functions, as in TRL."""
NAMES = "names of images"
"""The key of what becomes this argument; no column of a dataset is called so by chance."""


class RewardImages(Sequence[list[Any]]):
    """The images of each answer's prompt, Pillow's in RGB, read when they are asked for.

    A function that does not look at them costs no time.

    Args:
        names: of each prompt's images in the store, as `RowImages.hex_names`.
    """

    def __init__(self, names: Sequence[Sequence[str]]) -> None:
        self._names = names

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, place: int) -> list[Any]: ...
    @overload
    def __getitem__(self, place: slice) -> "RewardImages": ...
    def __getitem__(self, place: int | slice) -> "list[Any] | RewardImages":
        if isinstance(place, slice):
            return RewardImages(self._names[place])
        return [load(bytes.fromhex(name)) for name in self._names[place]]
