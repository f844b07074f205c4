"""The images of a row, from its columns and messages; and a folder of images under the hashes of
their content.
"""

import base64
import hashlib
import io
import math
import os
import re
import threading
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fsdp_qlora.data.content import FOLDER, MAX_ROW, BadRow, Image, Row, most_row_bytes, unicode_of
from fsdp_qlora.data.text import parts
from fsdp_qlora.utils.errors import RankError, UserError
from fsdp_qlora.utils.files import cache_folder, read_named

_PLACE = "<image>"  # where a text shows the next image of the row's column
# for others Pillow may start a program, such as Ghostscript
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# names under which it may be in a part or an object
_GIVEN = ("image", "image_url", "bytes", "path", "url")


class Images:
    """The images of a row in the order in which its turns show them: in parts of type image, or by
    `<image>`.
    """

    def __init__(self, row: Row) -> None:
        self._folder = str(row.get(FOLDER) or "")
        value = row.get("images")
        listed = value if isinstance(value, list) else [value] if value else []
        self._listed = [
            self._image(image, f"image {index}") for index, image in enumerate(listed, start=1)
        ]
        self._left = iter(self._listed)
        self.shown: list[Image] = []

    def read(
        self, content: object, turn_number: int, *, can_show: bool
    ) -> str | list[dict[str, str]]:
        """The content of turn `number`: text, or parts where it shows images. Raises BadRow."""
        where = f"turn {turn_number}"
        place = {"type": "image"}
        if isinstance(content, str):
            texts = content.split(_PLACE) if self._listed and can_show else [content]
            listed: Any = [
                part for text in texts for part in (place, {"type": "text", "text": text})
            ][1:]
        elif not isinstance(listed := content, list | tuple):
            raise BadRow(f"{where}: its content is not text but {type(content).__name__}")
        contents = [self._part(part, where, can_show=can_show) for part in listed]
        if place in contents:
            return [part for part in contents if part.get("text") != ""]
        return "".join(part["text"] for part in contents)

    def _part(self, part: object, where: str, *, can_show: bool) -> dict[str, str]:
        kind = parts.kind_of(part)
        if isinstance(part, Mapping) and kind in parts.IMAGES:
            if not can_show:
                raise BadRow(f"{where}: an answer has an image, and only text can be learned")
            image = (
                self._image(part, where)
                if any(part.get(name) for name in _GIVEN)
                else next(self._left, None)
            )
            if image is None:
                raise BadRow(f"{where} shows more images than the {len(self._listed)} of the row")
            self.shown.append(image)
            return {"type": "image"}  # a template needs no more
        text = (
            part.get("text", part.get("value"))
            if isinstance(part, Mapping) and kind in parts.TEXTS
            else None
        )
        if not isinstance(text, str):
            raise BadRow(
                f"{where}: a part of its content is {kind}, and only text and images can be "
                "trained on"
            )
        return {"type": "text", "text": unicode_of(text, where)}

    def _image(self, value: object, where: str) -> Image:
        if isinstance(value, Mapping):  # of datasets, or OpenAI's
            return self._image(
                next((value[name] for name in _GIVEN if value.get(name)), None), where
            )
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str):
            raise BadRow(f"{where} is not the path of an image but {type(value).__name__}")
        if value.startswith("data:"):
            try:
                return base64.b64decode(value.partition(",")[2], validate=True)
            except ValueError as error:
                raise BadRow(f"{where}: an image is not base64 ({error})") from error
        path = unicode_of(value, where).removeprefix("file://")
        if "://" in path:
            raise BadRow(f"{where}: {path} is a URL. Download the images, and give their paths")
        return Path(self._folder, path)

    def show_rest(self, messages: list[dict[str, Any]]) -> None:
        """Show images for which no text has a place before the first question; put all contents
        into parts.
        """
        rest = [*self._left]
        if rest and self.shown:
            raise BadRow(
                f"the row has {len(self._listed)} images, and its messages show "
                f"{len(self.shown)} of them"
            )
        self.shown += rest
        if not self.shown:
            return
        for message in messages:
            if isinstance(message.get("content"), str):
                message["content"] = [{"type": "text", "text": message["content"]}]
        if rest:
            question = next(
                (message for message in messages if message["role"] == "user"), messages[0]
            )
            question["content"] = [{"type": "image"}] * len(rest) + question["content"]


# --- links to files, and copies of images without one ---

UNREADABLE = ("the image", "an image in the row")  # how reasons begin


def keep_all(images: Iterable[Image]) -> tuple[tuple[bytes, ...], list[Any]]:
    """`keep` the images of a row, whose pixels in RGB may have as many bytes as a row. Raises
    BadRow.
    """
    names = list[bytes]()
    pixels = list[Any]()
    left = most_row_bytes() // 3
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
        reason = getattr(error, "strerror", None) or _said(error) or type(error).__name__
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
            f"Images need a folder for links: {path.parent} cannot be written ({error.strerror}). "
            "The environment "
            "variable FSDP_QLORA_CACHE names another."
        ) from error
    return name, pixels


def load(name: bytes) -> Any:
    """A kept image, as Pillow's in RGB. Raises RankError if it is not what it was."""
    path = _path(name)
    try:
        content = read_named(path, most_row_bytes())
        reason = (
            "" if hashlib.blake2b(content, digest_size=16).digest() == name else ("it has changed")
        )
    except OSError as error:
        reason = str(error.strerror)
    if reason:
        raise RankError(
            f"The image {os.path.realpath(path)} was read before, and now: {reason}. Start again."
        )
    return _decode(content)


def are_as_kept(names: Iterable[bytes]) -> bool:
    """Whether images are still there and not written since they were kept, as far as times of files
    tell.
    """
    try:
        return all(
            path.stat().st_mtime_ns <= path.lstat().st_mtime_ns for path in map(_path, names)
        )
    except OSError:
        return False


def _said(error: Exception) -> str:
    """Its first words, without an object's address, which each start would have another of."""
    return " ".join(re.sub(r"<\S+ object at 0x\w+>", "", str(error)).split())[:100]


def _decode(content: bytes, most_pixels: float = math.inf) -> Any:
    """The pixels. Raises ValueError, and many kinds of Pillow's, before they are decoded if they
    are too many.
    """
    from PIL import Image as Pillow
    from transformers.image_utils import load_image  # turns it as its file says, and makes it RGB

    # of bombs, which are bounded here, and of odd tags
    warnings.filterwarnings("ignore", module="PIL")
    with Pillow.open(io.BytesIO(content), formats=_FORMATS) as image:
        if image.width * image.height > most_pixels:
            most = most_row_bytes() // 3e6
            raise ValueError(
                f"with it the row has more than {most:.0f} megapixels; {MAX_ROW} raises that"
            )
        if image.mode[0] in "IF":  # which RGB would have white for nearly all values of
            raise ValueError(f"its numbers are of mode {image.mode}; convert it to 8 bits")
        return load_image(image)


def _path(name: bytes) -> Path:
    return cache_folder() / "images" / name.hex()[:2] / name.hex()
