"""Asks a server for one answer to a prompt, and refuses one that cannot be learned from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_qlora.training.generation.sampling import Completion, SamplingOptions, Stops
from fsdp_qlora.training.rl.client import (
    BYTES_PER_TOKEN,
    MOST_BYTES,
    RequestFailed,
    Server,
    shortened,
)
from fsdp_qlora.training.rl.replies import Reply, Unusable
from fsdp_qlora.training.rl.server_requests import Request, SentPrompt, request_for

# vLLM takes what a request leaves out from the model's generation_config.json.
_UNCHANGED = {"min_p": 0.0, "repetition_penalty": 1.0}
# Added to the logits of tokens that are not to be drawn: the least that the API takes.
_NEVER = -100.0


@dataclass(frozen=True, eq=False)
class ServerAnswers:
    """Answers of a server with the same sampling options and ends.

    texts: end an answer, besides the tokens of `stops`.
    """

    server: Server
    stops: Stops
    texts: Sequence[str]
    options: SamplingOptions
    vocab_size: int

    def request(self, name: str, prompt: SentPrompt, seed: int) -> Request:
        """A request for one answer.

        Args:
            name: of the base or of an adapter, at the server.
        """
        settings = {
            "max_tokens": self.options.max_new_tokens,
            # Every server takes a seed of 31 bits.
            "seed": seed % 2**31,
            "temperature": self.options.temperature,
            "top_p": self.options.top_p,
            "top_k": self.options.top_k or -1,
            **_UNCHANGED,
            "stop_token_ids": sorted(self.stops.tokens),
            "stop": list(self.texts),
            # Otherwise the end tokens of the model's own files end an answer, too.
            "ignore_eos": not self.stops.tokens,
            # The log-probability of the drawn token, and of no other one.
            "logprobs": 0,
        }
        # A config may name tokens of other media that the vocabulary lacks, which servers refuse.
        known = [token for token in self.options.never if 0 <= token < self.vocab_size]
        if known:
            settings["logit_bias"] = {str(token): _NEVER for token in known}
        return request_for(name, prompt, settings)

    def ask(self, request: Request, load: Callable[[], object] | None) -> Completion:
        """Ask for one answer.

        Args:
            load: has the adapter of this name loaded again; None for the base.
        Raises:
            RequestFailed: the request may be repeated.
            RolloutError: the answer cannot be learned from.
        """
        try:
            longest = MOST_BYTES + BYTES_PER_TOKEN * self.options.max_new_tokens
            content = self.server.ask(request.path, request.body, longest)
        except RequestFailed as error:
            # vLLM answers so where it does not know the adapter, as after a restart.
            if error.status != 404 or load is None:
                raise
            load()
            raise RequestFailed("it had lost the adapter, which is loaded again") from error
        with self.server.reading():
            reply = Reply(request.path, content)
            finish: str = reply.get("choices", 0, "finish_reason", kind=str)
            # vLLM ends answers with "abort" when it is stopped itself.
            if finish not in ("stop", "length"):
                raise RequestFailed(f"an answer ended with {shortened(finish)!r}")
            model: str = reply.get("model", kind=str)
            asked = request.body["model"]
            if model != asked:
                raise Unusable(
                    f"answers as {shortened(model)} instead of {asked}: it may have sampled from "
                    "other weights"
                )
            if request.ids is not None:
                reply.check_prompt(request.ids)
            tokens = reply.get("choices", 0, kind=dict).get("token_ids")
            problem = self._problem(tokens, is_done=finish == "stop")
            if problem:
                raise Unusable(problem)
            of_parts = request.ids is not None
            logps = reply.token_logps(len(tokens), of_parts=of_parts)
            return Completion(tokens, finish == "stop", logps)

    def _problem(self, tokens: Any, *, is_done: bool) -> str | None:
        """Why an answer's tokens cannot be learned from; None if they can."""
        if not isinstance(tokens, list) or not tokens:
            return "returns text alone, without the token ids that vLLM gives for return_token_ids"
        for token in tokens:
            # type() and not isinstance: JSON's true would be the token 1.
            if type(token) is not int or not 0 <= token < self.vocab_size:
                return (
                    f"returns the token {token!r:.100}, and the model's vocabulary has "
                    f"{self.vocab_size}"
                )
            if token in self.options.never:
                return (
                    f"returns the token {token}, which stands for an image or the like: it must "
                    "take logit_bias, as vLLM does"
                )
        most = self.options.max_new_tokens
        if len(tokens) > most or not (is_done or len(tokens) == most):
            return f"returns {len(tokens):,} tokens, cut, instead of {most:,}"
        if not self.stops.tokens.isdisjoint(tokens[:-1]):
            return "goes on behind the token that ends an answer"
        if is_done and not self.stops.ends(tokens):
            return "leaves out the token that ends an answer"
        return None
