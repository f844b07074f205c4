"""Rollouts by a server that takes LoRA adapters at run time.

A server has OpenAI's completions API and takes LoRA adapters at run time, as vLLM. Before each
generation the adapter is written to a folder that both see, and loaded under a name of its own: the
run, the version and a hash of its weights. Requests ask for that name, and an answer under another
one ends the run. So nothing is learned from other weights, whichever process dies in between.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_qlora.distributed.process_group import raise_on_all_ranks
from fsdp_qlora.distributed.ranks import Ranks, derive_seed
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.model.adapters.peft_folder import WEIGHTS
from fsdp_qlora.training.episodes.played_episode import Episode
from fsdp_qlora.training.generation.sampling import Completion, SamplingOptions, Stops
from fsdp_qlora.training.rl.client import (
    BYTES_PER_TOKEN,
    COMPLETIONS,
    MOST_BYTES,
    RequestFailed,
    Server,
    shortened,
)
from fsdp_qlora.training.rl.replies import Reply, Unusable
from fsdp_qlora.utils.errors import RolloutError, TrainingError
from fsdp_qlora.utils.files import record_of

# vLLM takes what a request leaves out from the model's generation_config.json.
_WHOLE_DISTRIBUTION = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def completions_of(text: str) -> list[Completion]:
    """The completions of the JSON that `ServerEngine.ask` returns."""
    return [Completion(*values) for values in json.loads(text)]


@dataclass(eq=False)
class ServerEngine:
    """Has a server answer prompts, as `Engine` says."""

    server: Server
    save: Callable[[Path], object]
    """Saves the adapter into a folder; called on every rank."""
    prefix: Path
    """Begins the paths of these folders, with the run's name."""
    ranks: Ranks
    control: Control
    stops: Stops
    options: SamplingOptions
    vocab_size: int

    def complete(
        self, prompts: Sequence[Sequence[int]], generation: int, version: int
    ) -> list[Completion]:
        """Save the adapter, and have the server answer with it."""
        self.publish(version)
        answers = partial(self.ask, version, prompts, generation)
        return completions_of(self.server.answer_of(answers, self.control, self.ranks, version))

    def play(self, episodes: Sequence[Episode], count: int, generation: int, version: int) -> None:
        """Save the adapter, and have the server write the turns of episodes as a `TurnEngine`.

        Each episode goes on by itself.
        """
        self.publish(version)
        turns = partial(self._turns, version, episodes, generation)
        self.server.answer_of(turns, self.control, self.ranks, version)

    def publish(self, version: int, versions_needed: Callable[[], set[int]] = set) -> None:
        """Save the adapter for the server, and delete older ones. Called on every rank.

        versions_needed: gives those that stay besides the newest one; called on rank 0.
        """
        folder = self._folder(version)
        with raise_on_all_ranks(TrainingError, self.ranks.device):
            if self.ranks.is_rank_0:
                folders = sorted(folder.parent.glob("*"), key=lambda path: path.stat().st_mtime)
                needed = {self._folder(needed) for needed in versions_needed()}
                # The server may still read the newest one.
                for old in folders[:-1]:
                    if old not in needed:
                        shutil.rmtree(old, ignore_errors=True)
            self.save(folder)

    def _folder(self, version: int) -> Path:
        return self.prefix.with_name(f"{self.prefix.name}-v{version}")

    def name_of(self, version: int) -> str:
        """The name of a saved adapter on the server; empty if its folder cannot be read.

        It has a hash, so that a server cannot answer by other weights of the same version, such as
        those of a run that was resumed from an earlier checkpoint.
        """
        folder = self._folder(version)
        try:
            return f"{folder.name}-{record_of(folder / WEIGHTS).sha256[:12]}"
        except OSError:
            return ""

    def ask(self, version: int, prompts: Sequence[Sequence[int]], generation: int) -> str:
        """Ask for all answers of a saved adapter. Called in a thread of rank 0.

        Returns:
            JSON for `completions_of`.
        """
        name, load = self._loaded(version)
        most = self.options.max_new_tokens

        # The seed follows from the prompt's place: an answer that is asked for again, after a fault
        # or by a resumed run, has the same one.
        def answer(place: int) -> Completion:
            seed = derive_seed("rollouts", self.options.seed, generation, place)
            return self._answer(self._request(name, prompts[place], seed, most), load)

        return json.dumps(self.server.all_answers(len(prompts), answer))

    def _turns(self, version: int, episodes: Sequence[Episode], generation: int) -> str:
        """Play all episodes. Returns no text."""
        name, load = self._loaded(version)

        # Called again after a fault: the episode then goes on with the turn that it waits for.
        def play(place: int) -> None:
            episode = episodes[place]
            episode.begin()
            while not episode.is_over:
                parts = ("rollouts", self.options.seed, generation, place)
                seed = derive_seed(*parts, *([episode.turn] if episode.turn else []))
                request = self._request(name, episode.token_ids, seed, episode.room)
                episode.take(self._answer(request, load))

        self.server.all_answers(len(episodes), play)
        return ""

    def _loaded(self, version: int) -> tuple[str, Callable[[], None]]:
        """Have the server load a saved adapter. Returns its name, and what loads it again."""
        name = self.name_of(version)
        if not name:
            raise RolloutError(f"The adapter in {self._folder(version)} cannot be read.")
        load = partial(self.server.load, name, self._folder(version))
        self.server.patiently(load)
        return name, load

    def _request(self, name: str, prompt: Sequence[int], seed: int, most: int) -> dict[str, Any]:
        """The body of a request for one answer of `most` tokens at most."""
        return {
            "model": name,
            "prompt": list(prompt),
            "max_tokens": most,
            # Every server takes a seed of 31 bits.
            "seed": seed % 2**31,
            "temperature": self.options.temperature,
            **_WHOLE_DISTRIBUTION,
            "stop_token_ids": sorted(self.stops.tokens),
            "stop": [self.stops.text] if self.stops.text else [],
            # Text alone cannot be learned from: tokenized again, it may have other tokens.
            "return_token_ids": True,
            # The log-probability of the drawn token, and of no other one.
            "logprobs": 0,
        }

    def _answer(self, request: dict[str, Any], load: Callable[[], None]) -> Completion:
        """Ask for one answer.

        Raises RequestFailed, or RolloutError if it cannot be learned from.
        """
        try:
            longest = MOST_BYTES + BYTES_PER_TOKEN * request["max_tokens"]
            content = self.server.ask(COMPLETIONS, request, longest)
        except RequestFailed as error:
            # vLLM answers so where it does not know the adapter, as after a restart.
            if error.status != 404:
                raise
            load()
            raise RequestFailed("it had lost the adapter, which is loaded again") from error
        with self.server.reading():
            reply = Reply(COMPLETIONS, content)
            finish: str = reply.get("choices", 0, "finish_reason", kind=str)
            # vLLM ends answers with "abort" when it is stopped itself.
            if finish not in ("stop", "length"):
                raise RequestFailed(f"an answer ended with {shortened(finish)!r}")
            model: str = reply.get("model", kind=str)
            if model != request["model"]:
                raise Unusable(
                    f"answers as {shortened(model)} instead of {request['model']}: it may "
                    "have sampled from other weights"
                )
            tokens = reply.get("choices", 0, kind=dict).get("token_ids")
            problem = self._problem(tokens, request["max_tokens"], is_done=finish == "stop")
            if problem:
                raise Unusable(problem)
            return Completion(tokens, finish == "stop", reply.token_logps(len(tokens)))

    def _problem(self, tokens: Any, most: int, *, is_done: bool) -> str | None:
        """Why an answer's tokens cannot be learned from; None if they can.

        most: the tokens that were asked for.
        """
        if not isinstance(tokens, list) or not tokens:
            return "returns text alone, without the token ids that vLLM gives for return_token_ids"
        for token in tokens:
            # type() and not isinstance: JSON's true would be the token 1.
            if type(token) is not int or not 0 <= token < self.vocab_size:
                return (
                    f"returns the token {token!r:.100}, and the model's vocabulary has "
                    f"{self.vocab_size}"
                )
        if len(tokens) > most or not (is_done or len(tokens) == most):
            return f"returns {len(tokens):,} tokens, cut, instead of {most:,}"
        if not self.stops.tokens.isdisjoint(tokens[:-1]):
            return "goes on behind the token that ends an answer"
        if is_done and not self.stops.ends(tokens):
            return "leaves out the token that ends an answer"
        return None
