"""Requests for one answer, as a server gets them: to a prompt of text, and to one with images.

A prompt of text is sent as its tokens to the completions API, which has no place for images. With
images it goes to vLLM's API of tokens: the server expands one token for each image itself, and says
to which tokens it has answered.
"""

import functools
import io
import threading
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fsdp_qlora.data.batches.row_images import RowImages
from fsdp_qlora.data.text.image_processor import ImageProcessor
from fsdp_qlora.data.text.image_store import load
from fsdp_qlora.training.rl.client import COMPLETIONS, GENERATE
from fsdp_qlora.utils.errors import RankError, RolloutError

# Prompts that stay prepared: those of the answers that are asked for at the same time.
_KEPT = 32


class SentPrompt(NamedTuple):
    """A prompt as a server gets it."""

    ids: Sequence[int]
    """All of its tokens, as the model sees them."""
    placed_ids: Sequence[int] = ()
    """With one token for each image, where it shows any."""
    images: Sequence[str] = ()
    """The images, as data URIs of PNG."""


class Request(NamedTuple):
    """A request for one answer."""

    path: str
    body: dict[str, Any]
    ids: Sequence[int] | None = None
    """The tokens of the prompt that the server must find; None where it gets them."""


def request_for(name: str, prompt: SentPrompt, settings: Mapping[str, Any]) -> Request:
    """Make a request for one answer.

    Args:
        name: of the base or of an adapter, at the server.
        settings: of sampling, with the names that both APIs share.
    """
    # Text alone cannot be learned from: tokenized again, it may have other tokens.
    body = {"model": name, "return_token_ids": True}
    if not prompt.images:
        return Request(COMPLETIONS, {**body, "prompt": list(prompt.ids), **settings})
    body["token_ids"] = list(prompt.placed_ids)
    body["content_parts"] = [{"type": "image_url", "url": url} for url in prompt.images]
    body["sampling_params"] = dict(settings)
    return Request(GENERATE, body, prompt.ids)


class ImageSender:
    """Prepares prompts with images for a server. Threads may share it.

    processor: the model's.
    """

    def __init__(self, processor: ImageProcessor) -> None:
        self._processor = processor
        # Threads ask for the answers to a prompt at the same time: one of them prepares it.
        self._lock = threading.Lock()
        self._prepared = functools.lru_cache(_KEPT)(self._prepare)

    def sent(self, ids: Sequence[int], images: RowImages) -> SentPrompt:
        """The prompt as the server gets it. images: those that it shows.

        Raises:
            RolloutError: an image has changed since it was read, or the prompt's tokens do not
                show these images.
        """
        with self._lock:
            return self._prepared(tuple(ids), tuple(map(bytes, images.names)))

    def _prepare(self, ids: tuple[int, ...], names: tuple[bytes, ...]) -> SentPrompt:
        # The pixels that this run's processor gets: read again, a file may be turned or converted
        # in another way.
        try:
            images = [load(name) for name in names]
            placed_ids = self._processor.with_placeholders(ids, images)
        except RankError as error:
            raise RolloutError(str(error)) from error
        except ValueError as error:
            raise RolloutError(
                f"A prompt with images cannot be sent to a server: {error}."
            ) from error
        return SentPrompt(ids, placed_ids, [_data_uri(image) for image in images])


def _data_uri(image: Any) -> str:
    """A Pillow image as PNG, which keeps each pixel."""
    # Such as a profile of colours, by which the server could change pixels.
    image.info.clear()
    file = io.BytesIO()
    # Higher levels take much longer for a few percent.
    image.save(file, "PNG", compress_level=1)
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
