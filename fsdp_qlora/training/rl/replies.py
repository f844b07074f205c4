"""Reads what a server of completions answers.

An answer that cannot be used is refused in words that say why.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

from fsdp_qlora.training.divergence import LEAST, LEAST_LOGP
from fsdp_qlora.utils.text import printable

# Numbers up to this one are finite in float32.
_LARGEST = 3e38
# A log-probability may be so far above 0, and the sum of probabilities above 1, by a server's
# rounding.
_ROUNDING = 0.01
# Fewer than k tokens are accepted if they have this probability together: a teacher with a small
# vocabulary names all of its tokens.
_ALMOST_ALL = 0.999
_NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}
_WEIGHED = (
    "gives no log-probability of each token, by which tokens are weighed, but {}. It must answer "
    "`logprobs: 0` with a number for each token in choices[0].logprobs.{}, as vLLM does: "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora"
)
_TEACHER = (
    "gives no prompt_logprobs that can be learned, but {}. It must answer `prompt_logprobs: {}` "
    "with the top tokens of each place in choices[0].prompt_logprobs, as vLLM does: "
    "vllm serve MODEL --max-logprobs {}"
)


class Unusable(ValueError):
    """An answer cannot be used.

    The message is the end of a sentence that begins with the server.
    """


class Reply:
    """The JSON that a server has answered at a path of its API.

    Raises Unusable if it is no JSON.
    """

    def __init__(self, path: str, content: bytes) -> None:
        self.path = path
        try:
            self._content = json.loads(content)
        except (ValueError, RecursionError) as error:
            start = printable(content[:60].decode(errors="replace"))
            raise Unusable(
                f"answers {path} with no JSON, but with {start!r}. Give the address of a server "
                "with OpenAI's completions API, such as vLLM's http://localhost:8000"
            ) from error

    def get(self, *place: str | int, kind: type) -> Any:
        """The value at a place.

        Args:
            place: names and indices, from the outside in.
            kind: the value's type.
        Raises:
            Unusable: it is missing, or of another type.
        """
        value = self._content
        where = ""
        for key in place:
            if isinstance(key, int):
                has_key = isinstance(value, list) and key < len(value)
                where += f"[{key}]"
            else:
                has_key = isinstance(value, dict) and key in value
                where += f".{key}"
            if not has_key:
                raise Unusable(f"answers {self.path} without {where.lstrip('.')}")
            value = value[key]
        # type() and not isinstance: JSON's true would be a number.
        if type(value) is not kind:
            raise Unusable(
                f"answers {self.path} with {_shown(value)} as {where.lstrip('.')}, which "
                f"is {_NAMES[kind]}"
            )
        return value

    def token_logps(self, count: int, *, of_parts: bool = False) -> list[float]:
        """The log-probabilities of a completion's tokens.

        of_parts: whether the API gives each token as an object, as to prompts with images.

        Raises Unusable.
        """
        name = "content" if of_parts else "token_logprobs"
        try:
            logps: list[Any] = self.get("choices", 0, "logprobs", name, kind=list)
        except Unusable as error:
            raise Unusable(_WEIGHED.format("none", name)) from error
        if len(logps) != count:
            raise Unusable(_WEIGHED.format(f"{len(logps)} for {count} tokens", name))
        if of_parts:
            logps = [part.get("logprob") if isinstance(part, dict) else part for part in logps]
        for logp in logps:
            if not (_is_logp(logp) and logp > -_LARGEST):
                raise Unusable(_WEIGHED.format(f"{_shown(logp)} for one", name))
        return logps

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Make sure that the server has answered to these tokens of a prompt with images.

        Raises Unusable.
        """
        found: list[Any] = self.get("prompt_token_ids", kind=list)
        if found == [*ids]:
            return
        pairs = enumerate(zip(found, ids, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), min(len(found), len(ids)))
        raise Unusable(
            f"answers to other tokens than the prompt with images has: {len(found):,} instead of "
            f"{len(ids):,}, and the first other one is number {place + 1:,}. Its processor of "
            "images must write as many tokens for each as the one here: give it the same "
            "preprocessor_config.json and processor_config.json as in --model_name, no "
            "--mm-processor-kwargs, and a release of transformers that reads them alike"
        )

    def top_tokens(self, first: int, count: int, k: int, vocab_size: int) -> list[list[float]]:
        """A teacher's top tokens in the place of each token from `first` of `count`.

        Each has k ids, k log-probabilities, and the log-probability of all other tokens.

        Args:
            vocab_size: ids from this one on are unknown to the student.
        Raises:
            Unusable: it cannot be learned from.
        """
        try:
            logps_of_tokens = self.get("choices", 0, "prompt_logprobs", kind=list)
            if len(logps_of_tokens) != count:
                raise Unusable(f"{len(logps_of_tokens)} for {count} tokens")
            return [_top_tokens_of(logps, k, vocab_size) for logps in logps_of_tokens[first:]]
        except Unusable as error:
            raise Unusable(_TEACHER.format(str(error).removeprefix("answers "), k, k)) from error


def _top_tokens_of(logps: Any, k: int, vocab_size: int) -> list[float]:
    """Ids, log-probabilities and the log-probability of all others, from the answer for one place.

    The answer may name more tokens than asked: vLLM adds the prompt's own token.
    """
    if not isinstance(logps, dict):
        raise Unusable(f"{_shown(logps)} for one token")
    # Equally likely tokens are in the order of their ids, whatever the order of the answer.
    named = sorted((-_logp_of(token, value), int(token)) for token, value in logps.items())
    # fsum rounds once, so the rest of a sum near 1 is as exact as its terms.
    total = math.fsum(math.exp(-negative) for negative, _ in named)
    if total > 1 + _ROUNDING:
        raise Unusable(f"tokens whose probabilities add up to {total:.4g}")
    if len(named) < k and total < _ALMOST_ALL:
        raise Unusable(f"{len(named)} tokens where --top_k {k} are asked")
    known = [(token, -negative) for negative, token in named[:k] if token < vocab_size]
    others = 1 - math.fsum(math.exp(logp) for _, logp in known)
    # A teacher with more tokens may name too few of the student's. A token that nobody has counts
    # nothing.
    known += [(-1, LEAST_LOGP)] * (k - len(known))
    known_ids: list[float] = [token for token, _ in known]
    known_logps = [logp for _, logp in known]
    return [*known_ids, *known_logps, math.log(max(others, LEAST))]


def _logp_of(token: str, value: Any) -> float:
    """The log-probability of a token that is named in a place, at least `LEAST`."""
    # isdigit() also takes digits of other scripts, and int() of a long text takes very long.
    is_id = token.isascii() and token.isdigit() and len(token) <= 10 and str(int(token)) == token
    if not is_id:
        raise Unusable(f"a token with the id {_shown(token)}")
    logp: Any = value.get("logprob") if isinstance(value, dict) else None
    if not _is_logp(logp):
        raise Unusable(f"{_shown(logp)} as the log-probability of the token {token}")
    return float(max(logp, LEAST_LOGP))


def _is_logp(value: Any) -> bool:
    """Whether a value is a number of 0 or less, apart from rounding. NaN is not.

    -inf is, which is the logarithm of a probability of 0.
    """
    return type(value) in (int, float) and bool(value <= _ROUNDING)


def _shown(value: Any) -> str:
    """A value of JSON in a message."""
    is_like_json = value is None or type(value) in (bool, str)
    text = json.dumps(value) if is_like_json else f"{value!r:.60}"
    return printable(text[:60])
