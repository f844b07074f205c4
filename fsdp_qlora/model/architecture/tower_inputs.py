"""Arguments of towers: models pass on to them what they get for their text."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from fsdp_qlora.model.architecture.token_mixers import DESCRIPTION

# A tower may have positions of its own under this name; those of text end at the model.
_ABOUT_TEXT = DESCRIPTION - {"position_ids"}


def keep_documents_from(towers: Iterable[nn.Module]) -> None:
    """Call towers without the arguments that describe documents of text.

    Their attention would take the bounds of these for bounds of images.
    """
    for tower in towers:
        tower.register_forward_pre_hook(_drop_documents, with_kwargs=True)


def _drop_documents(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {name: value for name, value in kwargs.items() if name not in _ABOUT_TEXT}
