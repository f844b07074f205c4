"""A server as the engine of a run: one with OpenAI's completions API that takes LoRA adapters at run time, as vLLM.

Before each generation the adapter is written to a folder that both see, and loaded under a name of its own: the run,
the version and a hash of its weights. Requests ask for that name, and an answer under another one ends the run. So
nothing is learned from other weights, whichever process dies in between.
"""

import json
import logging
import math
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_qlora.distributed.process_group import raise_on_all_ranks
from fsdp_qlora.distributed.ranks import Ranks, derive_seed
from fsdp_qlora.distributed.supervision.clock import begun
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.model.adapters.peft_folder import WEIGHTS
from fsdp_qlora.training.generation.generate import Completion, SamplingOptions, Stops
from fsdp_qlora.training.rl.client import RequestFailed, Server
from fsdp_qlora.training.rl.engine import run_on_rank_0
from fsdp_qlora.utils.errors import RolloutError, RunStopped, TrainingError
from fsdp_qlora.utils.files import record_of

log = logging.getLogger("fsdp_qlora")

_LINE_SECONDS = 60.0  # until a line says how many answers there are, then twice as long
_IN_FLIGHT = 128  # requests at a time, which the server batches
# vLLM takes what a request leaves out from the model's generation_config.json.
_WHOLE_DISTRIBUTION = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(eq=False)
class ServerEngine:
    """Has a server answer prompts, as `Engine` says.

    save: the adapter into a folder, on every rank. prefix: of these folders, with the run's name.
    """

    server: Server
    save: Callable[[Path], object]
    prefix: Path
    ranks: Ranks
    control: Control
    stops: Stops
    options: SamplingOptions
    vocab_size: int

    def complete(self, prompts: Sequence[Sequence[int]], number: int, version: int) -> list[Completion]:
        folder = self.prefix.with_name(f"{self.prefix.name}-v{version}")
        with raise_on_all_ranks(TrainingError, self.ranks.device):
            if self.ranks.is_rank_0:  # the newest one may still be read
                for path in sorted(folder.parent.glob("*"), key=lambda path: path.stat().st_mtime)[:-1]:
                    shutil.rmtree(path, ignore_errors=True)
            self.save(folder)
        try:
            text = run_on_rank_0(partial(self._answers, folder, prompts, number), self.control, self.ranks, version)
        except (RolloutError, RunStopped):
            self.server.is_closed = True
            raise
        return [Completion(*values) for values in json.loads(text)]

    def _answers(self, folder: Path, prompts: Sequence[Sequence[int]], number: int) -> str:
        """All answers as JSON, each as the values of a Completion."""
        name = f"{folder.name}-{record_of(folder / WEIGHTS).sha256[:12]}"
        load = partial(self.server.load, name, folder)
        self.server.patiently(load)
        places, found = range(len(prompts)), dict[int, Completion]()

        def answer(first: int) -> None:
            for place in places[first::_IN_FLIGHT]:
                request = self._request(name, prompts[place], derive_seed("rollouts", self.options.seed, number, place))
                found[place] = self.server.patiently(partial(self._answer, request, load))

        left, seconds = {begun(partial(answer, first)) for first in places[:_IN_FLIGHT]}, _LINE_SECONDS
        while left:
            done, left = wait(left, seconds, FIRST_EXCEPTION)
            for task in done:
                task.result()
            if left:
                log.info("The server has given %d of %d answers.", len(found), len(places))
                seconds *= 2
        return json.dumps([found[place] for place in places])

    def _request(self, name: str, prompt: Sequence[int], seed: int) -> dict[str, Any]:
        return {
            **{"model": name, "prompt": list(prompt), "max_tokens": self.options.max_new_tokens, "seed": seed % 2**31},
            **{"temperature": self.options.temperature, **_WHOLE_DISTRIBUTION},
            **{"stop_token_ids": sorted(self.stops.tokens), "stop": [self.stops.text] if self.stops.text else []},
            **{"return_token_ids": True, "logprobs": 0},
        }

    def _answer(self, request: dict[str, Any], load: Callable[[], None]) -> Completion:
        """Ask for one answer. Raises RequestFailed, or RolloutError if it cannot be learned from."""
        try:
            content = self.server.ask("/v1/completions", request)
        except RequestFailed as error:
            if error.status != 404:
                raise
            load()
            raise RequestFailed("it had lost the adapter, which is loaded again") from error
        try:
            response = json.loads(content)
            choice, model = response["choices"][0], response["model"]
            tokens, is_done = choice.get("token_ids"), choice["finish_reason"] == "stop"
            if choice["finish_reason"] not in ("stop", "length"):  # vLLM's abort, when it ends
                raise RequestFailed(f"an answer ended with {choice['finish_reason']!r}")
            logps = list(choice["logprobs"]["token_logprobs"])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise RolloutError(f"The server {self.server.url} gives an answer without {error}.") from error
        problem = self._problem(tokens, logps, is_done=is_done)
        if model != request["model"]:
            problem = f"answers as {model} where {request['model']} is asked, and nothing is learned from other weights"
        if problem:
            raise RolloutError(f"The server {self.server.url} {problem}.")
        return Completion(tokens, is_done, logps)

    def _problem(self, tokens: Any, logps: Any, *, is_done: bool) -> str | None:
        """Why an answer cannot be learned from; None if it can."""
        if not isinstance(tokens, list) or not tokens:
            return "returns text alone, without the token ids that vLLM gives for return_token_ids"
        if outside := [token for token in tokens if not (isinstance(token, int) and 0 <= token < self.vocab_size)]:
            return f"returns the token {outside[0]!r}, and the model's vocabulary has {self.vocab_size}"
        if is_done and not self.stops.ends(tokens):
            return "leaves out the token that ends an answer"
        known = [isinstance(each, (int, float)) and math.isfinite(each) for each in logps]
        if known != [True] * len(tokens):
            return "gives no log-probability of each token, by which tokens are weighed"
        return None
