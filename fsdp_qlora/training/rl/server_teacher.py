"""A teacher on a server: its likeliest tokens for the completions of a run."""

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.taught import target_numbers
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.training.rl.client import BYTES_PER_TOKEN, COMPLETIONS, MOST_BYTES, Server
from fsdp_qlora.training.rl.replies import Reply


@dataclass(eq=False)
class ServerTeacher:
    """Has a server give the k likeliest tokens of a teacher for each token, of the student's
    vocabulary.
    """

    server: Server
    k: int
    vocab_size: int
    ranks: Ranks
    control: Control

    def __post_init__(self) -> None:
        # of the last completions' tokens, as `divergence.likeliest`
        self._told = torch.zeros(1, 2 * self.k + 1)

    def __call__(self, table: TokenizedRows, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """As `TaughtRows.of_targets`, for the completions that were asked about last; others get
        any values.
        """
        numbers = target_numbers(table, rows)["table_indices"] % len(self._told)
        ids, logps = self._told[numbers].tensor_split([self.k], dim=1)
        return {"teacher_ids": ids.long(), "teacher_logps": logps}

    def ask(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], version: int
    ) -> None:
        """Ask about the tokens of completions. Called on every rank, with all of them.

        Raises:
            RunStopped: on every rank. RolloutError: the server fails; the same on every rank.
        """

        def ask() -> str:
            name = self.server.patiently(self.server.names)[0]
            found = self.server.all_answers(
                len(prompts), lambda i: self._answer(name, prompts[i], completions[i])
            )
            return b64encode(np.concatenate(found).tobytes()).decode()

        content = b64decode(self.server.answer_of(ask, self.control, self.ranks, version))
        self._told = torch.frombuffer(bytearray(content), dtype=torch.float32).view(
            -1, 2 * self.k + 1
        )

    def _answer(self, name: str, prompt: Sequence[int], completion: Sequence[int]) -> np.ndarray:
        """Ask about one completion. Raises RequestFailed, or RolloutError if it cannot be learned
        from.
        """
        ids = [*prompt, *completion]
        request = {"model": name, "prompt": ids, "max_tokens": 1, "prompt_logprobs": self.k}
        longest = MOST_BYTES + BYTES_PER_TOKEN * (self.k + 1) * len(ids)
        with self.server.reading():
            reply = Reply(COMPLETIONS, self.server.ask(COMPLETIONS, request, longest))
            return np.array(
                reply.likeliest(len(prompt), len(ids), self.k, self.vocab_size), np.float32
            )
