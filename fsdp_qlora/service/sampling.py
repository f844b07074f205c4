"""Reads requests for samples: their sampling settings, and what differs between them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tinker import types

from fsdp_qlora.service.messages import Limits, prompt_of
from fsdp_qlora.service.sent_images import NO_SENT_IMAGES, BaseImages, SequenceImages
from fsdp_qlora.training.generation.sampling import SamplingOptions
from fsdp_qlora.utils.errors import UserError

# Samples of requests that are answered together.
MAX_SAMPLES = 1024
# Most likely tokens of a place in a prompt.
_MAX_TOP = 1024
# Numbers that are found of the prompts of requests that are answered together: 256 MiB of float32.
MAX_PROMPT_VALUES = 2**26
# Bytes of images of requests that are answered together.
_MAX_IMAGE_BYTES = 2**27
# Tokens and texts that end an answer. Each text is looked for at each token.
_MAX_STOPS = 1024
_MAX_STOP_TEXTS = 64
_LONGEST_STOP_TEXT = 1000
_NOT_SERVED = (
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "record_stability_info",
)


@dataclass(frozen=True)
class Drawing:
    """Sampling settings that requests must have in common to be answered together."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    """0 for all tokens."""
    stop: list[str | int] | None
    """Texts or tokens that end an answer; None for the model's own end."""

    def options(self) -> SamplingOptions:
        """These settings for an engine. Log-probabilities are the model's own."""
        return SamplingOptions(
            self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            plain_logps=True,
        )


@dataclass(frozen=True)
class SampleRequest:
    """A request for samples of a prompt, without sampling settings."""

    prompt: list[int]
    num_samples: int
    seed: str | int
    scores: bool
    """Whether log-probabilities of the prompt's tokens are wanted."""
    top: int
    """The number of most likely tokens to find in each place of the prompt."""
    last: int | None
    """The number of last tokens of the prompt to score; None for all."""
    images: SequenceImages = NO_SENT_IMAGES
    """The images of the prompt."""


class SampleGroup:
    """Requests that are answered together."""

    def __init__(self, requests: list[SampleRequest]) -> None:
        self.requests = requests

    def has_room_for(self, request: SampleRequest) -> bool:
        """Whether the samples and values of prompts fit into memory with one more request."""
        together = [*self.requests, request]
        scored = [each for each in together if each.scores]
        num_tokens = sum(len(each.prompt) for each in scored)
        top = max((each.top for each in scored), default=0)
        num_samples = sum(each.num_samples for each in together)
        return (
            num_samples <= MAX_SAMPLES
            and prompt_values(num_tokens, top) <= MAX_PROMPT_VALUES
            and sum(each.images.num_bytes for each in together) <= _MAX_IMAGE_BYTES
        )


def read_sample_request(
    name: str, request: types.SampleRequest, limits: Limits, base_images: BaseImages
) -> tuple[Drawing, SampleRequest]:
    """Check a request and fill in its defaults.

    Args:
        name: of the request, which seeds its samples if it has no seed.
    Raises:
        UserError: it cannot be answered.
    """
    for field in _NOT_SERVED:
        if getattr(request, field):
            raise UserError(f"{field} is not served.")
    prompt, images = prompt_of(request, limits, base_images)
    params = request.sampling_params
    max_new = _max_new_tokens(params, limits.context_length + 1 - len(prompt))
    _check_counts(request, len(prompt))
    drawing = Drawing(
        max_tokens=max_new,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        stop=_stops(params.stop),
    )
    own = SampleRequest(
        prompt=prompt.tolist(),
        num_samples=request.num_samples,
        seed=name if params.seed is None else params.seed,
        scores=bool(request.prompt_logprobs or request.topk_prompt_logprobs),
        top=request.topk_prompt_logprobs,
        last=request.prompt_logprobs_last_n,
        images=images,
    )
    return drawing, own


def _max_new_tokens(params: types.SamplingParams, room: int) -> int:
    """How many tokens may be drawn, of the `room` that a prompt leaves."""
    most = room if params.max_tokens is None else min(params.max_tokens, room)
    is_drawable = (
        0 <= params.temperature < math.inf and 0 < params.top_p <= 1 and params.top_k >= -1
    )
    if most < 1 or not is_drawable:
        raise UserError(
            "max_tokens must be 1 or more, temperature 0 or more, top_p in (0, 1], "
            "top_k -1 or more."
        )
    return most


def _check_counts(request: types.SampleRequest, prompt_length: int) -> None:
    has_samples = 0 < request.num_samples <= MAX_SAMPLES
    if not has_samples or not 0 <= request.topk_prompt_logprobs <= _MAX_TOP:
        raise UserError(
            f"num_samples must be 1 to {MAX_SAMPLES}, topk_prompt_logprobs 0 to {_MAX_TOP}."
        )
    last = request.prompt_logprobs_last_n
    if last is not None and not (request.prompt_logprobs and 0 < last < prompt_length):
        raise UserError(
            "prompt_logprobs_last_n goes with prompt_logprobs, and is below the prompt's length."
        )
    if prompt_values(prompt_length, request.topk_prompt_logprobs) > MAX_PROMPT_VALUES:
        raise UserError(
            f"topk_prompt_logprobs is too large for a prompt of {prompt_length:,} tokens."
        )


def prompt_values(num_tokens: int, top: int) -> int:
    """How many numbers are found for prompts of `num_tokens` tokens.

    They are ids and log-probabilities of the top tokens, and one of the token itself.
    """
    return num_tokens * (2 * top + 1)


def _stops(stop: str | Sequence[str] | Sequence[int] | None) -> list[str | int] | None:
    """The texts or tokens that end an answer; None for the model's own end."""
    if stop is None:
        return None
    stops: list[str | int] = [stop] if isinstance(stop, str) else [*stop]
    if len(stops) > _MAX_STOPS:
        raise UserError(f"stop has {len(stops):,} entries; at most {_MAX_STOPS:,} are allowed.")
    texts = [each for each in stops if isinstance(each, str)]
    # An empty text would be in every answer.
    have_length = all(0 < len(text) <= _LONGEST_STOP_TEXT for text in texts)
    if len(texts) > _MAX_STOP_TEXTS or not have_length:
        raise UserError(
            f"stop has {len(texts):,} texts; at most {_MAX_STOP_TEXTS} are allowed, each of 1 to "
            f"{_LONGEST_STOP_TEXT:,} characters."
        )
    return stops
