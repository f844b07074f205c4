"""The engine of a run's rollouts, as the run calls it: its own model or a server."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fsdp_qlora.data.batches.row_images import NO_IMAGES, RowImages
from fsdp_qlora.training.generation.sampling import Completion

# (prompts, generation, version, images) -> completions: answers each prompt with the weights that
# the run has now; one is there as often as it has answers. Called on every rank with all, and
# returns all. prompts: token ids. generation: its number in the run; an answer's seed follows from
# the run's, this number and its place. version: optimizer steps that the weights have had. images:
# of each prompt, as those of a table of one row.
Engine = Callable[[Sequence[Sequence[int]], int, int, Sequence[RowImages]], list[Completion]]


class PromptTokens(NamedTuple):
    """Prompts as an engine gets them: the token ids of each, and its images."""

    ids: Sequence[Sequence[int]]
    images: Sequence[RowImages]

    @classmethod
    def of(cls, ids: Sequence[Sequence[int]], images: Sequence[RowImages] | None) -> "PromptTokens":
        """Prompts, of which none has images where these are None."""
        return cls(ids, [NO_IMAGES] * len(ids) if images is None else images)
