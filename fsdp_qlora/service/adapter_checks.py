"""Checks whether a server uses the adapters of a service, model by model.

The log-probabilities of its answers are compared with those of the adapted model and of the base.
"""

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdp_qlora.service.messages import rows_to_score
from fsdp_qlora.service.sampling import SampleRequest
from fsdp_qlora.training.forward import ForwardPass, token_logprobs
from fsdp_qlora.training.generation.sampling import Completion
from fsdp_qlora.training.rl.adapter_use import check_use
from fsdp_qlora.utils.errors import RolloutError, UserError

# Tokens of answers that decide, and of prompts and answers that are computed for one comparison.
_FEWEST_TOKENS = 64
_MOST_TOKENS = 2**14
_REMEDY = (
    "use a version that reads them, or train without (--lora_target_parameters). It must give the "
    "model's own log-probabilities (--logprobs-mode raw_logprobs)."
)


@dataclass
class Distances:
    """Sums over tokens of answers by the same saved weights."""

    tokens: int = 0
    to_model: float = 0.0
    to_base: float = 0.0

    def add(self, other: "Distances") -> None:
        self.tokens += other.tokens
        self.to_model += other.to_model
        self.to_base += other.to_base


class AdapterChecks:
    """The models whose adapters a server is known to use, or to ignore.

    `is_due` and `refusal` may be called in any thread of rank 0. `compare` is called on every rank,
    with the same answers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Of models that are not decided: the distances by the request that has saved the weights,
        # in the order in which they were first sampled from.
        self._undecided = defaultdict[str, dict[str, Distances]](dict)
        self._used: set[str] = set()
        self._refusals: dict[str, str] = {}

    def is_due(self, model: str, saved_by: str) -> bool:
        """Whether answers by these weights of a model should be compared.

        Each comparison costs two forward passes, so they become rare: they are due for the first,
        second, fourth and eighth weights, and so on, until it is decided.
        """
        with self._lock:
            if model in self._used or model in self._refusals:
                return False
            weights = self._undecided[model]
            distances = weights.setdefault(saved_by, Distances())
            number = list(weights).index(saved_by) + 1
            return distances.tokens < _FEWEST_TOKENS and number & (number - 1) == 0

    def refusal(self, model: str) -> str | None:
        """Why the server's answers for this model are not used; None if they are."""
        return self._refusals.get(model)

    def compare(
        self,
        weights: tuple[str, str],
        forward: ForwardPass,
        requests: Sequence[SampleRequest],
        answers: Sequence[Sequence[Completion]],
    ) -> None:
        """Compare answers with the adapter in the shards and with the base.

        Args:
            weights: the model, and the request that has saved its weights.
        Raises:
            UserError: on every rank, if the server ignores the adapter.
        """
        model, saved_by = weights
        found = _distances_of(forward, requests, answers)
        # No thread sees that there are enough tokens before it is decided.
        with self._lock:
            distances = self._undecided[model].setdefault(saved_by, Distances())
            distances.add(found)
            if distances.tokens >= _FEWEST_TOKENS:
                self._decide(model, distances)

    def _decide(self, model: str, distances: Distances) -> None:
        """Decide whether the server uses a model's adapters, if it can be told."""
        to_model = distances.to_model / distances.tokens
        to_base = distances.to_base / distances.tokens
        try:
            is_used = check_use(to_model, to_base, _REMEDY)
        except RolloutError as error:
            self._refusals[model] = str(error)
            del self._undecided[model]
            raise UserError(str(error)) from error
        if is_used:
            self._used.add(model)
            del self._undecided[model]


def _distances_of(
    forward: ForwardPass,
    requests: Sequence[SampleRequest],
    answers: Sequence[Sequence[Completion]],
) -> Distances:
    """The distances of answers from the adapted model and from the base."""
    distances = Distances()
    rows = list[list[int]]()
    # Of each row's answer: its log-probabilities, and the number of tokens before it.
    given = list[tuple[np.ndarray, int]]()
    tokens = 0
    for request, own in zip(requests, answers, strict=True):
        for answer in own:
            row = [*request.prompt, *answer.token_ids]
            tokens += len(row)
            if rows and tokens > _MOST_TOKENS:
                break
            rows.append(row)
            given.append((np.array(answer.logps, np.float32), len(request.prompt)))
    table = rows_to_score(rows)
    of_model = np.split(token_logprobs(forward, table), table.offsets[1:-1])
    of_base = np.split(token_logprobs(forward, table, at_start=True), table.offsets[1:-1])
    for (logps, first), model, base in zip(given, of_model, of_base, strict=True):
        distances.tokens += len(logps)
        distances.to_model += float(np.abs(logps - model[first:]).sum())
        distances.to_base += float(np.abs(logps - base[first:]).sum())
    return distances
