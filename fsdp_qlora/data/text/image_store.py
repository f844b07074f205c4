"""A folder of images under the hashes of their content: links to files, and copies of images without one."""

import hashlib
import io
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fsdp_qlora.data.content import BadRow, Image
from fsdp_qlora.utils.errors import RankError, UserError
from fsdp_qlora.utils.files import cache_folder

UNREADABLE = ("the image", "an image in the row")  # how reasons begin


def keep(image: Image) -> tuple[bytes, Any]:
    """Keep an image for `load`: a file by a link to it.

    Returns:
        Its name, the 16 bytes of a hash of what is in its file; and the image, as `load` gives it.
    Raises:
        BadRow: it is missing, or cannot be read.
    """
    where = f"{UNREADABLE[0]} {image}" if isinstance(image, Path) else UNREADABLE[1]
    try:
        content = image.read_bytes() if isinstance(image, Path) else image
        pixels = _decode(content)
    except Exception as error:  # Pillow raises many kinds
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:100] or type(error).__name__
        raise BadRow(f"{where} cannot be read, or is no image ({reason})") from error
    name = hashlib.blake2b(content, digest_size=16).digest()
    path = _path(name)
    draft = Path(f"{path}.{os.getpid()}.{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(image, Path):
            draft.symlink_to(image.resolve())
        else:
            draft.write_bytes(content)
        draft.replace(path)
    except OSError as error:
        raise UserError(
            f"Images need a folder for links: {path.parent} cannot be written ({error.strerror}). The environment "
            "variable FSDP_QLORA_CACHE names another."
        ) from error
    return name, pixels


def load(name: bytes) -> Any:
    """A kept image, as Pillow's in RGB. Raises RankError if it is not what it was."""
    path = _path(name)
    try:
        content = path.read_bytes()
        reason = "" if hashlib.blake2b(content, digest_size=16).digest() == name else "it has changed"
    except OSError as error:
        reason = str(error.strerror)
    if reason:
        raise RankError(f"The image {os.path.realpath(path)} was read before, and now: {reason}. Start again.")
    return _decode(content)


def are_as_kept(names: Iterable[bytes]) -> bool:
    """Whether images are still there and not written since they were kept, as far as times of files tell."""
    try:
        return all(path.stat().st_mtime_ns <= path.lstat().st_mtime_ns for path in map(_path, names))
    except OSError:
        return False


def _decode(content: bytes) -> Any:
    from PIL import Image as Pillow
    from transformers.image_utils import load_image  # turns it as its file says, and makes it RGB

    with Pillow.open(io.BytesIO(content)) as image:
        return load_image(image)


def _path(name: bytes) -> Path:
    return cache_folder() / "images" / name.hex()[:2] / name.hex()
