"""Generates text with a sharded model.

Every rank has its own prompts, and all ranks run the same number of forward passes.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from fsdp_qlora.distributed.process_group import all_gather_strings, gather_numbers
from fsdp_qlora.distributed.ranks import Ranks, derive_seed
from fsdp_qlora.model.architecture.precision import Precision
from fsdp_qlora.sharding.parallelize import reshard_all
from fsdp_qlora.sharding.vocabulary import shared_head_of, sharing_ranks
from fsdp_qlora.training.generation.sampling import Completion, Draws, SamplingOptions, Stops


class TextGenerator:
    """Generates with one loaded model. Afterwards it is sharded, and torch's random state is as
    before; a training step sets the mode itself.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ranks: Ranks,
        precision: Precision,
        stops: Stops,
        options: SamplingOptions,
    ) -> None:
        self._model = model
        self.ranks = ranks
        self._precision = precision
        self.stops = stops
        self._options = options

    def generate(
        self,
        prompts: Mapping[int, Sequence[int]],
        show: Callable[[Completion], object] = lambda completion: None,
        beat: Callable[[], object] = lambda: None,
        seeds: Mapping[int, int] | None = None,
    ) -> dict[int, Completion]:
        """Complete this rank's prompts. Called on every rank: one that has none takes part until
        all have ended.

        Args:
            prompts: index -> token ids. seeds: of their draws, else as the options say. show:
            called with a completion after each of its tokens. beat: called after each forward pass,
                on every rank; may raise, if on all of them.
        """
        model = self._model
        device = self.ranks.device
        batch = prompts or {0: [0]}
        made = {index: Completion([], is_done=not prompts) for index in batch}
        # Logits follow the ids. Where embeddings are offloaded, model.device is the CPU, and
        # transformers warns.
        inputs = [torch.tensor(ids, device=device) for ids in batch.values()]
        padded = partial(pad_sequence, batch_first=True, padding_side="left")

        def follow(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            """Take each completion's next token; returns which have ended."""
            for index, token in zip(batch, input_ids[:, -1].tolist(), strict=True):
                if not made[index].is_done:
                    made[index].token_ids.append(token)
                    made[index] = made[index]._replace(
                        is_done=self.stops.ends(made[index].token_ids)
                    )
                    show(made[index])
            return torch.tensor([made[index].is_done for index in batch], device=input_ids.device)

        def beaten(*_: Any) -> None:
            beat()

        draws = self._draws([*batch], seeds or {})
        beating = model.register_forward_hook(beaten)
        counts = gather_numbers([len(batch)], device).flatten().int().tolist()
        # The model's own one may ask for sampling or penalties.
        model_config = model.generation_config
        model.generation_config = GenerationConfig()
        head = shared_head_of(model)
        try:
            if head:
                head.counts = [counts[rank] for rank in sharing_ranks(model)]
            with (
                warnings.catch_warnings(action="ignore", category=UserWarning),
                self._precision.autocasting(device),
            ):
                model.eval().generate(
                    padded(inputs),
                    attention_mask=padded([torch.ones_like(ids) for ids in inputs]),
                    max_new_tokens=self._options.max_new_tokens,
                    logits_processor=LogitsProcessorList(draws),
                    stopping_criteria=StoppingCriteriaList([follow]),
                    synced_gpus=True,
                )
        finally:
            model.generation_config = model_config
            beating.remove()
            if head:
                head.counts = None
            reshard_all(model)
        for drawn in draws:
            for index, logps in zip(batch, torch.cat(drawn.logps, dim=1).tolist(), strict=True):
                made[index] = made[index]._replace(logps=logps[: len(made[index].token_ids)])
        return made if prompts else {}

    def answer_all(
        self,
        prompts: Sequence[Sequence[int]],
        at_a_time: int,
        beat: Callable[[], object] = lambda: None,
        seeds: Sequence[int] | None = None,
        *,
        shows_progress: bool = False,
    ) -> list[Completion]:
        """Complete prompts, each on one rank. Called on every rank with all of them, and returns
        all completions.

        Args:
            at_a_time: of a rank in one batch, which shares its cache. beat, seeds: as for
                `generate`. shows_progress: a bar on rank 0.
        """
        number_of_ranks = self.ranks.world_size
        own = dict[int, Completion]()
        places = range(self.ranks.rank, len(prompts), number_of_ranks)
        rounds = range(0, -(-len(prompts) // number_of_ranks), at_a_time)  # as often on every rank
        for first in tqdm(
            rounds, unit=" batches", disable=not (shows_progress and self.ranks.is_rank_0)
        ):
            chosen = places[first : first + at_a_time]
            own_seeds = {place: seeds[place] for place in chosen} if seeds else None
            own |= self.generate(
                {place: prompts[place] for place in chosen}, beat=beat, seeds=own_seeds
            )
        parts = all_gather_strings(json.dumps([*own.items()]), torch.device("cpu"))
        gathered = [pair for part in parts for pair in json.loads(part)]
        return [
            Completion(*values) for _, values in sorted(gathered, key=lambda pair: int(pair[0]))
        ]

    def _draws(self, numbers: Sequence[int], seeds: Mapping[int, int]) -> list[Draws]:
        """One if tokens are drawn, or their log-probabilities wanted."""
        own = [
            seeds.get(number, derive_seed("generate", self._options.seed, number))
            for number in numbers
        ]
        return (
            [Draws(self._options, own)]
            if self._options.temperature or self._options.plain_logps
            else []
        )
