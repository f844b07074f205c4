"""A teacher on a server: its top tokens for the completions of a run."""

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.target_values import number_targets
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.training.rl.client import BYTES_PER_TOKEN, COMPLETIONS, MOST_BYTES, Server
from fsdp_qlora.training.rl.replies import Reply


@dataclass(eq=False)
class ServerTeacher:
    """A `Teacher` on a server, which gives its k top tokens in the place of each token.

    They are of the student's vocabulary.
    """

    server: Server
    k: int
    vocab_size: int
    ranks: Ranks
    control: Control

    def __post_init__(self) -> None:
        # For each token of the completions that were asked about last, as `TopTokens` has them.
        self._values = torch.zeros(1, 2 * self.k + 1)

    def targets(self, table: TokenizedRows, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """The teacher's tokens of rows, in the form of `TeacherCache.target_values`.

        For the completions that were asked about last; other rows get any values.
        """
        # Rows that nobody has asked about, such as a probe's, may have more targets: the remainder
        # keeps their numbers in range.
        numbers = number_targets(table, rows)["numbers"] % len(self._values)
        ids, logps = self._values[numbers].tensor_split([self.k], dim=1)
        return {"teacher_ids": ids.long(), "teacher_logps": logps}

    def request(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], version: int
    ) -> None:
        """Request the top tokens for completions. Called on every rank, with all of them.

        Raises:
            RunStopped: on every rank.
            RolloutError: the server fails; the same on every rank.
        """

        def ask() -> str:
            name = self.server.patiently(self.server.names)[0]
            answers = self.server.all_answers(
                len(prompts),
                lambda place: self._answer(name, prompts[place], completions[place]),
            )
            # Ranks share a text, and base64 keeps every bit of the float32 numbers.
            return b64encode(np.concatenate(answers).tobytes()).decode()

        content = b64decode(self.server.answer_of(ask, self.control, self.ranks, version))
        values = torch.frombuffer(bytearray(content), dtype=torch.float32)
        self._values = values.view(-1, 2 * self.k + 1)

    def _answer(self, name: str, prompt: Sequence[int], completion: Sequence[int]) -> np.ndarray:
        """Ask about one completion: float32 [tokens, 2 * k + 1].

        Raises:
            RequestFailed: it may be asked again.
            RolloutError: the answer cannot be learned from.
        """
        ids = [*prompt, *completion]
        # One token is generated, since vLLM allows no fewer, and thrown away.
        request = {"model": name, "prompt": ids, "max_tokens": 1, "prompt_logprobs": self.k}
        longest = MOST_BYTES + BYTES_PER_TOKEN * (self.k + 1) * len(ids)
        with self.server.reading():
            reply = Reply(COMPLETIONS, self.server.ask(COMPLETIONS, request, longest))
            top_tokens = reply.top_tokens(len(prompt), len(ids), self.k, self.vocab_size)
            return np.array(top_tokens, np.float32)
