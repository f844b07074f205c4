"""Answers prompts at the evaluations of a run, with the weights that it has then."""

import contextlib
from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

from fsdp_qlora.data.batches.row_images import RowImages
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.sharding.groups import kept_gathered
from fsdp_qlora.training.generation.generator import TextGenerator
from fsdp_qlora.training.generation.sampling import Completion


class Answering:
    """Answers prompts with a loaded model, between two training steps.

    Nothing of the training changes: no random number is drawn from torch's state, and weights are
    sharded again afterwards.

    Args:
        generator: of the model.
        at_a_time: prompts of a rank in one batch, whose cache has room beside the training.
        gathered: the model, if the weights of its blocks stay gathered from token to token.
    """

    def __init__(
        self,
        generator: TextGenerator,
        *,
        at_a_time: int = 1,
        gathered: PreTrainedModel | None = None,
    ) -> None:
        self._generator = generator
        self._at_a_time = at_a_time
        self._gathered = gathered

    @property
    def ranks(self) -> Ranks:
        """The ranks of the model."""
        return self._generator.ranks

    def text_of(self, token_ids: list[int]) -> str:
        """The text of an answer, without what ended it."""
        return self._generator.stops.text_of(token_ids)

    def answers_to(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[RowImages],
        beat: Callable[[], object],
    ) -> list[Completion]:
        """Answer prompts, each on one rank. Called on every rank, with the same result.

        Args:
            prompts: token ids.
            images: of each prompt, as those of a table of one row.
            beat: called for each token; may raise, if on all ranks.
        """
        staying: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self._gathered is not None:
            staying = kept_gathered(self._gathered)
        with staying:
            return self._generator.answer_all(prompts, self._at_a_time, beat, images=images)
