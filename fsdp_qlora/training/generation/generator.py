"""Generates text with a sharded model.

Every rank has its own prompts, and all ranks run the same number of forward passes.
"""

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Generates with one loaded model.

    Afterwards the model is sharded, and torch's random state is as before. The model stays in
    evaluation mode: a training step sets its mode itself.
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
        """Complete this rank's prompts.

        Called on every rank: one that has no prompts takes part until all have ended.

        Args:
            prompts: index -> token ids.
            show: called with a completion after each of its tokens.
            beat: called after each forward pass, on every rank; may raise, if on all of them.
            seeds: index -> seed of its draws; else as the options say.
        """
        # A rank without prompts computes one token, whose completion has ended before it begins.
        batch = prompts or {0: [0]}
        completions = {index: Completion([], is_done=not prompts) for index in batch}

        def follow(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            """Take each completion's next token; returns which have ended."""
            # A completion that has ended gets further tokens while others of its batch go on.
            for index, token in zip(batch, input_ids[:, -1].tolist(), strict=True):
                completion = completions[index]
                if not completion.is_done:
                    completion.token_ids.append(token)
                    is_done = self.stops.ends(completion.token_ids)
                    completions[index] = completion._replace(is_done=is_done)
                    show(completions[index])
            is_done_of_batch = [completions[index].is_done for index in batch]
            return torch.tensor(is_done_of_batch, device=input_ids.device)

        draws = self._draws([*batch], seeds or {})
        # Logits follow the ids. Where embeddings are offloaded, model.device is the CPU, and
        # transformers warns.
        inputs = [torch.tensor(ids, device=self.ranks.device) for ids in batch.values()]
        # Padded on the left, so that every prompt's next token is in the last column.
        padded = partial(pad_sequence, batch_first=True, padding_side="left")
        with self._generating(len(batch), beat):
            # synced_gpus: a rank whose completions have all ended goes on with forward passes, in
            # which the others need its shards, until all ranks are done.
            self._model.eval().generate(
                padded(inputs),
                attention_mask=padded([torch.ones_like(ids) for ids in inputs]),
                max_new_tokens=self._options.max_new_tokens,
                logits_processor=LogitsProcessorList(draws),
                stopping_criteria=StoppingCriteriaList([follow]),
                synced_gpus=True,
            )
        for drawn in draws:
            logps_of_batch = torch.cat(drawn.logps, dim=1).tolist()
            for index, logps in zip(batch, logps_of_batch, strict=True):
                num_tokens = len(completions[index].token_ids)
                completions[index] = completions[index]._replace(logps=logps[:num_tokens])
        return completions if prompts else {}

    @contextlib.contextmanager
    def _generating(self, num_prompts: int, beat: Callable[[], object]) -> Iterator[None]:
        """Prepare the model for `generate` in this block. Called on every rank.

        num_prompts: of this rank's batch, the one of a rank without prompts included.
        """
        model = self._model
        device = self.ranks.device

        # A forward hook that returns something replaces the output, so beat's result is dropped.
        def beaten(*_: Any) -> None:
            beat()

        beating = model.register_forward_hook(beaten)
        counts = gather_numbers([num_prompts], device).flatten().int().tolist()
        # The model's own configuration may ask for sampling or penalties.
        model_config = model.generation_config
        model.generation_config = GenerationConfig()
        head = shared_head_of(model)
        try:
            if head:
                # The head then computes the logits of last tokens alone, and is not gathered.
                head.counts = [counts[rank] for rank in sharing_ranks(model)]
            with (
                warnings.catch_warnings(action="ignore", category=UserWarning),
                self._precision.autocasting(device),
            ):
                yield
        finally:
            model.generation_config = model_config
            beating.remove()
            if head:
                head.counts = None
            # A forward pass alone leaves weights gathered.
            reshard_all(model)

    def answer_all(
        self,
        prompts: Sequence[Sequence[int]],
        at_a_time: int,
        beat: Callable[[], object] = lambda: None,
        seeds: Sequence[int] | None = None,
        *,
        shows_progress: bool = False,
    ) -> list[Completion]:
        """Complete prompts, each on one rank.

        Called on every rank with all prompts, and returns all completions.

        Args:
            at_a_time: prompts of a rank in one batch, which share its cache.
            beat, seeds: as for `generate`.
            shows_progress: a bar on rank 0.
        """
        number_of_ranks = self.ranks.world_size
        local = dict[int, Completion]()
        places = range(self.ranks.rank, len(prompts), number_of_ranks)
        # Rounded up, so that every rank has the same number of rounds; the last one may be empty on
        # some of them.
        rounds = range(0, -(-len(prompts) // number_of_ranks), at_a_time)
        is_hidden = not (shows_progress and self.ranks.is_rank_0)
        for first in tqdm(rounds, unit=" batches", disable=is_hidden):
            chosen = places[first : first + at_a_time]
            chosen_seeds = {place: seeds[place] for place in chosen} if seeds else None
            local |= self.generate(
                {place: prompts[place] for place in chosen}, beat=beat, seeds=chosen_seeds
            )
        parts = all_gather_strings(json.dumps([*local.items()]), torch.device("cpu"))
        completions = dict[int, Completion]()
        for part in parts:
            for place, values in json.loads(part):
                completions[int(place)] = Completion(*values)
        return [completions[place] for place in sorted(completions)]

    def _draws(self, numbers: Sequence[int], seeds: Mapping[int, int]) -> list[Draws]:
        """The processor that draws tokens, in a list; empty for greedy decoding."""
        if not self._options.temperature and not self._options.plain_logps:
            return []
        seeds_of_prompts = []
        for number in numbers:
            default = derive_seed("generate", self._options.seed, number)
            seeds_of_prompts.append(seeds.get(number, default))
        return [Draws(self._options, seeds_of_prompts)]
