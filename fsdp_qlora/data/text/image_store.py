"""A folder of images under the hashes of their content.

An image that is a file is kept as a link to it, any other as a copy.
"""

import hashlib
import io
import math
import os
import re
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fsdp_qlora.data.content import MAX_ROW, BadRow, Image, most_row_bytes
from fsdp_qlora.utils.errors import RankError, UserError
from fsdp_qlora.utils.files import cache_folder, read_named

# For others Pillow may start a program, such as Ghostscript.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# Those that strangers may send: fewer decoders read what they have made.
_SENT_FORMATS = ("PNG", "JPEG")
# How reasons begin. The cache tells by them that a row may be readable in another start.
UNREADABLE = ("the image", "an image in the row")


def keep_all(images: Iterable[Image]) -> tuple[tuple[bytes, ...], list[Any]]:
    """`keep` the images of a row, whose pixels in RGB may have as many bytes as a row.

    Raises BadRow.
    """
    names = list[bytes]()
    pixels = list[Any]()
    left = most_row_bytes() // 3  # pixels of three bytes
    for image in images:
        name, shown = keep(image, left)
        names.append(name)
        pixels.append(shown)
        left -= shown.width * shown.height
    return tuple(names), pixels


def keep(image: Image, most_pixels: int) -> tuple[bytes, Any]:
    """Keep an image for `load`: a file by a link to it.

    Returns:
        Its name, the 16 bytes of a hash of what is in its file; and the image, as `load` gives it.
    Raises:
        BadRow: it is missing, or cannot be read.
    """
    where = f"{UNREADABLE[0]} {image}" if isinstance(image, Path) else UNREADABLE[1]
    try:
        content = read_named(image, most_row_bytes()) if isinstance(image, Path) else image
        pixels = _decode(content, most_pixels)
    except Exception as error:  # Pillow raises many kinds
        raise _unreadable(where, error) from error
    name = name_of(content)
    path = _path(name)
    # Each thread of each process has a draft of its own: several may keep the same image, and the
    # last replaces the others with the same content.
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
            f"Images need a folder for links: {path.parent} cannot be written ({error.strerror}). "
            "The environment variable FSDP_QLORA_CACHE names another."
        ) from error
    return name, pixels


def name_of(content: bytes) -> bytes:
    """The name of an image: 16 bytes of a hash of what is in its file."""
    return hashlib.blake2b(content, digest_size=16).digest()


def read_sent(content: bytes, most_pixels: int) -> Any:
    """An image that a stranger has sent, PNG or JPEG, as Pillow's in RGB. Nothing is kept.

    Raises BadRow.
    """
    try:
        return _decode(content, most_pixels, _SENT_FORMATS)
    except Exception as error:  # Pillow raises many kinds
        raise _unreadable(UNREADABLE[1], error) from error


def load(name: bytes) -> Any:
    """A kept image, as Pillow's in RGB. Raises RankError if it is not what it was."""
    path = _path(name)
    try:
        content = read_named(path, most_row_bytes())
        # A link leads to the user's file, which may be another one now.
        is_same = name_of(content) == name
        reason = "" if is_same else "it has changed"
    except OSError as error:
        reason = str(error.strerror)
    if reason:
        raise RankError(
            f"The image {os.path.realpath(path)} was read before, and now: {reason}. Start again."
        )
    return _decode(content)


def are_as_kept(names: Iterable[bytes]) -> bool:
    """Whether images are still there and not written since they were kept.

    The times of files tell it, which is enough for the cache: `load` compares the content.
    """
    try:
        # stat follows a link to the user's file, lstat is of the link.
        return all(
            path.stat().st_mtime_ns <= path.lstat().st_mtime_ns for path in map(_path, names)
        )
    except OSError:
        return False


def _unreadable(where: str, error: Exception) -> BadRow:
    reason = getattr(error, "strerror", None) or _said(error) or type(error).__name__
    return BadRow(f"{where} cannot be read, or is no image ({reason})")


def _said(error: Exception) -> str:
    """The start of an error's message without addresses of objects.

    So it is the same in every run, and rows with the same fault are counted together.
    """
    return " ".join(re.sub(r"<\S+ object at 0x\w+>", "", str(error)).split())[:100]


def _decode(
    content: bytes, most_pixels: float = math.inf, formats: tuple[str, ...] = _FORMATS
) -> Any:
    """The pixels of an image.

    Raises ValueError, before they are decoded if they are too many, and many kinds of Pillow's.
    """
    from PIL import Image as Pillow
    from transformers.image_utils import load_image  # turns it as its file says, and makes it RGB

    # of bombs, which are bounded here, and of odd tags
    warnings.filterwarnings("ignore", module="PIL")
    with Pillow.open(io.BytesIO(content), formats=formats) as image:
        # Opening reads the header alone: a few KiB may unpack to more than the memory.
        if image.width * image.height > most_pixels:
            most = most_row_bytes() // 3e6
            raise ValueError(
                f"with it the row has more than {most:.0f} megapixels; {MAX_ROW} raises that"
            )
        if image.mode[0] in "IF":  # which RGB would have white for nearly all values of
            raise ValueError(f"its numbers are of mode {image.mode}; convert it to 8 bits")
        return load_image(image)


def _path(name: bytes) -> Path:
    # 256 folders, so that none of them has the names of all images.
    return cache_folder() / "images" / name.hex()[:2] / name.hex()
