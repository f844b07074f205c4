"""Reads sequences in which clients send images among tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fsdp_qlora.data.batches.row_images import NO_IMAGES, RowImages
from fsdp_qlora.data.content import BadRow, most_row_bytes
from fsdp_qlora.data.text.image_processor import ImageProcessor
from fsdp_qlora.data.text.image_store import name_of, read_sent
from fsdp_qlora.utils.errors import UserError

# Pixels of all images of a request: a few KiB may unpack to gigabytes, and each takes time.
_MAX_PIXELS = 2**27
# Images of a request: processors enlarge small ones.
_MAX_IMAGES = 1024


class SentImage(NamedTuple):
    """An image as a client sends it."""

    content: bytes
    """The bytes of its file, PNG or JPEG."""
    expected_tokens: int | None
    """How many tokens the client takes it for."""


Pieces = Sequence[np.ndarray | SentImage]
"""A sequence as a client sends it: tokens, int32, and images among them."""


@dataclass(frozen=True)
class SequenceImages:
    """The images of a sequence."""

    names: list[str] = field(default_factory=list)
    """The hexadecimal name of each image, in the order in which they are shown."""
    num_values: int = 0
    """The numbers that the processor makes of them."""
    num_pixels: int = 0
    """The pixels of their files, each of which has been unpacked once."""
    contents: dict[str, np.ndarray] = field(default_factory=dict)
    """The files' bytes by these names, uint8."""

    def __bool__(self) -> bool:
        return bool(self.names)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.contents.values()))

    @property
    def row(self) -> RowImages:
        """The images of one row."""
        if not self.names:
            return NO_IMAGES
        names = np.frombuffer(b"".join(map(bytes.fromhex, self.names)), np.uint8)
        sizes = np.array([[len(self.names), self.num_values]], np.int64)
        return RowImages(names.reshape(len(self.names), -1), sizes)


NO_SENT_IMAGES = SequenceImages()


@dataclass(frozen=True, eq=False)
class BaseImages:
    """How a base reads images.

    Args:
        processor: of the base; None if it takes no images.
        refusal: why it takes none, as the end of a sentence.
    """

    processor: ImageProcessor | None = None
    refusal: str = "only tokens are served"


NO_BASE_IMAGES = BaseImages()


class SequenceReader:
    """Reads the sequences of one request. Raises UserError if one cannot be used.

    longest: the maximum number of tokens of a sequence.
    """

    def __init__(self, base: BaseImages, longest: int) -> None:
        self._base = base
        self._longest = longest
        self._images_left = _MAX_IMAGES
        self._pixels_left = _MAX_PIXELS

    def read(self, pieces: Pieces, what: str) -> tuple[np.ndarray, SequenceImages]:
        """The tokens of a sequence, int32, with those that stand for images, and the images.

        what: names the sequence in errors.
        """
        sent = [piece for piece in pieces if isinstance(piece, SentImage)]
        if not sent:
            return np.concatenate([np.zeros(0, np.int32), *pieces]), NO_SENT_IMAGES
        if self._base.processor is None:
            raise UserError(f"{what} has an image, and {self._base.refusal}.")
        self._images_left -= len(sent)
        if self._images_left < 0:
            raise UserError(f"The request has more than {_MAX_IMAGES:,} images. Send fewer.")
        pixels_left = self._pixels_left
        try:
            written, num_values = self._written(self._base.processor, sent, what)
        except BadRow as error:
            raise UserError(f"{what}: {error}.") from error
        of_images = iter(written)
        parts = [next(of_images) if isinstance(piece, SentImage) else piece for piece in pieces]
        names = [name_of(image.content).hex() for image in sent]
        contents = {
            name: np.frombuffer(image.content, np.uint8)
            for name, image in zip(names, sent, strict=True)
        }
        num_pixels = pixels_left - self._pixels_left
        return np.concatenate(parts), SequenceImages(names, num_values, num_pixels, contents)

    def refuse_image_tokens(self, pieces: Pieces, what: str) -> None:
        """Refuse tokens at which the model would look for an image that is not there.

        Only a request with images has to be checked: others are never computed beside them.
        """
        assert self._base.processor is not None
        known = self._base.processor.image_ids
        for piece in pieces:
            if isinstance(piece, SentImage):
                continue
            found = piece[np.isin(piece, known)]
            if len(found):
                raise UserError(
                    f"{what} has the token {found[0]}, which stands for an image, a video or "
                    "sound. Send images as chunks of their own."
                )

    def _written(
        self, processor: ImageProcessor, sent: Sequence[SentImage], what: str
    ) -> tuple[list[np.ndarray], int]:
        """The tokens that stand for each image, and how many numbers the processor makes of all.

        Raises BadRow or UserError.
        """
        written = list[np.ndarray]()
        num_values = 0
        num_tokens = 0
        pixels_left = most_row_bytes() // 3  # pixels of three bytes
        # One after the other, so that a sequence that is too long is found before all are pixels.
        for number, image in enumerate(sent, start=1):
            shown = read_sent(image.content, pixels_left)
            pixels_left -= shown.width * shown.height
            self._pixels_left -= shown.width * shown.height
            if self._pixels_left < 0:
                raise UserError(
                    f"The images of the request have more than {_MAX_PIXELS // 10**6} megapixels. "
                    "Send fewer at a time."
                )
            [ids], size = processor.tokens_for([shown])
            if image.expected_tokens not in (None, len(ids)):
                raise UserError(
                    f"{what}: image {number} has expected_tokens {image.expected_tokens}, and the "
                    f"processor of the model writes {len(ids)} tokens for it."
                )
            num_tokens += len(ids)
            if num_tokens > self._longest:
                raise UserError(
                    f"{what}: its first {number} images have {num_tokens:,} tokens; here a "
                    f"sequence has at most {self._longest:,}."
                )
            written.append(np.array(ids, np.int32))
            num_values += size
        return written, num_values
