"""Finds the images of a row in its columns and messages."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_qlora.data.content import FOLDER, BadRow, Image, Row, unicode_of
from fsdp_qlora.data.text import parts

_PLACE = "<image>"  # where a text shows the next image of the row's column
# names under which it may be in a part or an object
_GIVEN = ("image", "image_url", "bytes", "path", "url")


class Images:
    """The images of a row in the order in which its turns show them.

    A turn shows one with a part of type image, or with `<image>` in its text.
    """

    def __init__(self, row: Row) -> None:
        self._folder = str(row.get(FOLDER) or "")
        listed = row.get("images")
        if not isinstance(listed, list):
            listed = [listed] if listed else []
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
            # In a row without images `<image>` is a text like any other.
            texts = content.split(_PLACE) if self._listed and can_show else [content]
            listed: list[Any] = [{"type": "text", "text": texts[0]}]
            for text in texts[1:]:
                listed += [place, {"type": "text", "text": text}]
        elif isinstance(content, list | tuple):
            listed = list(content)
        else:
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
            # A part with the image itself, or a place for the next one of the row's column.
            if any(part.get(name) for name in _GIVEN):
                image: Image | None = self._image(part, where)
            else:
                image = next(self._left, None)
            if image is None:
                raise BadRow(f"{where} shows more images than the {len(self._listed)} of the row")
            self.shown.append(image)
            return {"type": "image"}  # a template needs no more
        text = None
        if isinstance(part, Mapping) and kind in parts.TEXTS:
            text = part.get("text", part.get("value"))
        if not isinstance(text, str):
            raise BadRow(
                f"{where}: a part of its content is {kind}, and only text and images can be "
                "trained on"
            )
        return {"type": "text", "text": unicode_of(text, where)}

    def _image(self, value: object, where: str) -> Image:
        if isinstance(value, Mapping):  # of datasets, or OpenAI's
            given = [value[name] for name in _GIVEN if value.get(name)]
            return self._image(given[0] if given else None, where)
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
            # A run must see the same image in every start, and read it without a network.
            raise BadRow(f"{where}: {path} is a URL. Download the images, and give their paths")
        return Path(self._folder, path)

    def show_rest(self, messages: list[dict[str, Any]]) -> None:
        """Show images for which no text has a place before the first question.

        All contents are put into parts, which is how a template sees an image.
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
            questions = [message for message in messages if message["role"] == "user"]
            question = questions[0] if questions else messages[0]
            question["content"] = [{"type": "image"}] * len(rest) + question["content"]
