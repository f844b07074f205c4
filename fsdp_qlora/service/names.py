"""Names of sessions, models, samplers and saved weights, and the folders that belong to them.

A client sends such names. Only one that has its form becomes a key of the records, a folder or a
part of a line.
"""

import re
from pathlib import Path

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import shown

# At most the digits of an integer of 64 bits. Not \d, which other alphabets have digits for, too.
_NUMBER = "[0-9]{1,19}"
_HEX = "[0-9a-f]{32}"
_MODEL = f"{_HEX}:train:{_NUMBER}"
_SAMPLER = f"(?:{_HEX}:sample:{_NUMBER}(?:-{_NUMBER})?|direct:{_HEX})"
# A name begins with a letter or digit, so that none is hidden, `..` or an option.
_WEIGHTS = re.compile(
    f"tinker://({_MODEL})/(weights|sampler_weights)/([A-Za-z0-9][A-Za-z0-9._-]{{0,127}})"
)
_FORMS = {
    "session": re.compile(_HEX),
    "model": re.compile(_MODEL),
    "sampler": re.compile(_SAMPLER),
    "request": re.compile(f"(?:{_MODEL}|{_SAMPLER}):{_NUMBER}"),
    "checkpoint": _WEIGHTS,
}


def has_form(kind: str, name: object) -> bool:
    """Whether a session, model, sampler, request or checkpoint may have this name."""
    return isinstance(name, str) and _FORMS[kind].fullmatch(name) is not None


def session_of(name: str) -> str:
    """The session of a model or sampler.

    A sampler of a single request has none, and gives `direct`.
    """
    return name.partition(":")[0]


def parts_of(uri: str) -> tuple[str, str, str]:
    """The model, the kind and the name of saved weights, from their tinker:// path.

    Raises:
        UserError: it has another form.
    """
    match = _WEIGHTS.fullmatch(uri)
    if match is None:
        raise UserError(f"There are no saved weights {shown(uri)}.")
    model, kind, name = match.groups()
    return model, kind, name


def weights_path(model: str, kind: str, name: str) -> str:
    """The tinker:// path of saved weights.

    Raises:
        UserError: the name is not allowed.
    """
    uri = f"tinker://{model}/{kind}/{name}"
    if _WEIGHTS.fullmatch(uri) is None:
        raise UserError(
            f"The name {shown(name)} is not allowed. Use at most 128 letters, digits and ._-."
        )
    return uri


def folder_below(root: Path, model: str, kind: str, name: str) -> Path:
    """The folder of a model's saved weights or state, which need not exist.

    All folders of a service come from here. A link among them may lead elsewhere, so the resolved
    path counts.

    Raises:
        UserError: it would not be below the service's folder.
    """
    # Colons are no part of a folder's name on some file systems.
    folder = root / model.replace(":", "_") / kind / name
    if not has_form("model", model) or not folder.resolve().is_relative_to(root.resolve()):
        raise UserError(f"The folder of {shown(model)} is not inside the service's folder.")
    return folder
