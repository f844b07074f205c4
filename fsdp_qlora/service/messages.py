"""Limits of requests, and the protocol's messages of samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from fsdp_qlora.data.batches.row_images import NO_IMAGES, RowImages, images_of_rows
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.service.sent_images import BaseImages, SentImage, SequenceImages, SequenceReader
from fsdp_qlora.training.generation.sampling import Completion
from fsdp_qlora.utils.errors import UserError

# Targets of a request; a sparse tensor may say more than it sends.
_MAX_TARGETS = 2**22
# The protocol's log-probability where a top-k list is empty.
_NO_TOP = -99999.0


@dataclass(frozen=True)
class Limits:
    """Limits of a request."""

    vocabulary: int
    """Token ids are below this."""
    context_length: int
    """The maximum number of tokens of a row."""
    tokens_at_once: int
    """The maximum number of tokens of a micro-batch."""
    targets_at_once: int
    """The maximum number of targets of a micro-batch. A token may have several, and its hidden
    state is in memory once for each.
    """
    image_values: int = 0
    """The maximum number of values that the processor makes of the images of a micro-batch."""

    def check(self, tokens: np.ndarray, what: str) -> np.ndarray:
        if not 0 < len(tokens) <= self.context_length:
            raise UserError(
                f"{what} has {len(tokens):,} tokens; here it must be 1 to {self.context_length:,}."
            )
        return self.check_known(tokens, what)

    def check_targets(self, positions: int, width: int) -> None:
        """Refuse a request for whose targets there is no memory, before any is taken.

        Args:
            positions: tokens of all datums.
            width: the maximum targets of a token.
        """
        at_once = min(positions, self.tokens_at_once)
        most = min(
            _MAX_TARGETS // max(1, positions),
            self.targets_at_once // max(1, at_once),
            self.vocabulary,
        )
        if width > max(1, most) or positions > _MAX_TARGETS:
            raise UserError(
                f"The request has {positions:,} tokens with up to {width:,} targets each, and "
                f"there is memory for {max(1, most):,} each (and for {_MAX_TARGETS:,} tokens in "
                "all). Send fewer."
            )

    def check_images(self, num_tokens: int, num_values: int, what: str) -> None:
        """Refuse a sequence with images if there is no memory for micro-batches of its kind.

        Args:
            num_tokens: of the sequence.
            num_values: of its images.
        """
        at_once = -(-num_values * self.tokens_at_once // num_tokens)
        if at_once > self.image_values:
            raise UserError(
                f"{what} has images of {num_values:,} values, and there is no memory to compute "
                f"{self.tokens_at_once:,} tokens of that kind at a time. Send smaller images."
            )

    def check_known(self, tokens: np.ndarray, what: str) -> np.ndarray:
        bad = tokens[(tokens < 0) | (tokens >= self.vocabulary)]
        if len(bad):
            raise UserError(
                f"{what} has the token {bad[0]}; the model has the tokens 0 to "
                f"{self.vocabulary - 1:,}."
            )
        return tokens


def prompt_of(
    request: types.SampleRequest, limits: Limits, images: BaseImages
) -> tuple[np.ndarray, SequenceImages]:
    """The prompt's tokens, int32, and its images. Raises UserError if it cannot be read."""
    pieces = [_piece(chunk) for chunk in request.prompt.chunks]
    reader = SequenceReader(images, limits.context_length)
    tokens, shown = reader.read(pieces, "The prompt")
    if shown:
        reader.refuse_image_tokens(pieces, "The prompt")
        limits.check_images(len(tokens), shown.num_values, "The prompt")
    return limits.check(tokens, "The prompt"), shown


def _piece(chunk: types.ModelInputChunk) -> np.ndarray | SentImage:
    if isinstance(chunk, types.ImageChunk):
        return SentImage(chunk.data, chunk.expected_tokens)
    if isinstance(chunk, types.ImageAssetPointerChunk):
        raise UserError(
            "The prompt has an image_asset_pointer, and this service reads no files or addresses "
            "for its clients: send the image itself, as an ImageChunk."
        )
    if not isinstance(chunk, types.EncodedTextChunk):
        raise UserError(f"The prompt has {chunk.type}, and only tokens and images are served.")
    try:
        return np.array(chunk.tokens, np.int32)
    except OverflowError as error:
        raise UserError("The prompt has a token that is no 32-bit number.") from error


def rows_to_score(
    prompts: Sequence[Sequence[int]], images: Sequence[RowImages] = ()
) -> TokenizedRows:
    """A row for each prompt, whose tokens are targets but for the first.

    images: of each prompt, of one row; empty if no prompt has any.
    """
    shown = images_of_rows(images)
    return rows_of_tokens([np.array(prompt, np.int32) for prompt in prompts], shown)


class PromptScores(NamedTuple):
    """Scores of a prompt's tokens, as far as its request wants them; otherwise None."""

    logprobs: np.ndarray | None = None
    """float32 [tokens], NaN at the first."""
    top: tuple[np.ndarray, np.ndarray] | None = None
    """Ids and log-probabilities of the most likely tokens, [tokens, k]."""


def encode_samples(answers: Sequence[Completion], scores: PromptScores) -> bytes:
    """The answer to a SampleRequest."""
    answer = pb.SampleResponse()
    for each in answers:
        tokens = np.array(each.token_ids, "<i4")
        logprobs = np.array(each.logps or [], "<f4")
        reason = pb.STOP_REASON_STOP if each.is_done else pb.STOP_REASON_LENGTH
        answer.sequences.add(
            stop_reason=reason, tokens=tokens.tobytes(), logprobs=logprobs.tobytes()
        )
    if scores.logprobs is not None:
        answer.prompt_logprobs = scores.logprobs.astype("<f4").tobytes()
    if scores.top is not None:
        ids, logps = (np.array(array) for array in scores.top)
        # Nothing predicts the first token.
        ids[0] = 0
        logps[0] = _NO_TOP
        answer.topk_prompt_logprobs.length, answer.topk_prompt_logprobs.k = ids.shape
        answer.topk_prompt_logprobs.token_ids = ids.astype("<i4").tobytes()
        answer.topk_prompt_logprobs.logprobs = logps.astype("<f4").tobytes()
    return answer.SerializeToString()


def rows_of_tokens(rows: Sequence[np.ndarray], images: RowImages = NO_IMAGES) -> TokenizedRows:
    """Rows whose tokens are all learned, but for the first of each, with their images."""
    lengths = [len(row) for row in rows]
    learned = np.concatenate([np.arange(length) > 0 for length in lengths])
    ids = np.concatenate(rows).astype(np.int32)
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    numbers = np.arange(len(rows), dtype=np.int64)
    return TokenizedRows(ids, learned, offsets, numbers, images=images)
