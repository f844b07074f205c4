"""Generates text with a sharded model.

Every rank has its own prompts, and all ranks run the same number of forward passes.
"""

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from fsdp_qlora.data.batches.image_inputs import ImageInputs
from fsdp_qlora.data.batches.row_images import NO_IMAGES, RowImages
from fsdp_qlora.distributed.process_group import all_gather_strings, gather_numbers
from fsdp_qlora.distributed.ranks import Ranks, derive_seed
from fsdp_qlora.model.architecture.decoder import find_towers
from fsdp_qlora.model.architecture.precision import Precision
from fsdp_qlora.model.kernels.in_use import GRAPHS, ways_in_use
from fsdp_qlora.model.quantizers.decoded_once import decoded_once
from fsdp_qlora.sharding.groups import reshard_all
from fsdp_qlora.sharding.vocabulary import shared_head_of, sharing_ranks
from fsdp_qlora.training.generation.model_cache import cache_argument, shares_prompts
from fsdp_qlora.training.generation.passes import Batch, Passes
from fsdp_qlora.training.generation.prompt_images import NONE_SHOWN, ShownImages
from fsdp_qlora.training.generation.sampling import Completion, Draws, SamplingOptions, Stops
from fsdp_qlora.training.generation.token_graphs import say_no_graphs, why_not_graphed
from fsdp_qlora.utils.errors import UserError

# Tokens of an answer from which graphs are worth their captures, which take as long as two tokens.
_GRAPHED_TOKENS = 16


class KeptWeights(NamedTuple):
    """The weights that stay from pass to pass while a batch is answered (planning/generation.py).

    are_decoded: decoded ones of linear layers. are_in_place: all that blocks read, in their memory.
    """

    are_decoded: bool = False
    are_in_place: bool = False


NONE_KEPT = KeptWeights()


class TextGenerator:
    """Generates with one loaded model.

    Afterwards the model is sharded, and torch's random state is as before. The model stays in
    evaluation mode: a training step sets its mode itself.

    Args:
        image_inputs: makes the model's arguments for images of prompts; None if none has any.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ranks: Ranks,
        precision: Precision,
        stops: Stops,
        options: SamplingOptions,
        weights: KeptWeights = NONE_KEPT,
        image_inputs: ImageInputs | None = None,
    ) -> None:
        self._model = model
        self.ranks = ranks
        self._precision = precision
        self.stops = stops
        self._options = options
        self._weights = weights
        self._image_inputs = image_inputs

    def generate(
        self,
        prompts: Mapping[int, Sequence[int]],
        show: Callable[[Completion], object] = lambda completion: None,
        beat: Callable[[], object] = lambda: None,
        seeds: Mapping[int, int] | None = None,
        limits: Mapping[int, int] | None = None,
        most: int | None = None,
        images: Mapping[int, RowImages] | None = None,
    ) -> dict[int, Completion]:
        """Complete this rank's prompts.

        Called on every rank: one that has no prompts takes part until all have ended.

        Args:
            prompts: index -> token ids.
            show: called with a completion after each of its tokens.
            beat: called after each forward pass, on every rank; may raise, if on all of them.
            seeds: index -> seed of its draws; else as the options say.
            limits: index -> its maximum tokens; else as the options say.
            most: the largest limit of all ranks.
            images: index -> the images of its prompt, of one row. Others have none.
        """
        # A rank without prompts computes one token, whose completion has ended before it begins.
        asked = prompts or {0: [0]}
        longest = most or self._options.max_new_tokens
        of_index = {index: (limits or {}).get(index, longest) for index in asked}
        completions = _Completions(of_index, self.stops, show, is_done=not prompts)
        batch = Batch.of(
            [*asked.values()],
            shares_prompts=shares_prompts(self._model),
            images=[(images or {}).get(index, NO_IMAGES) for index in asked],
        )
        draws = Draws(self._options, self._seeds([*asked], seeds or {}))
        with self._generating(batch, longest) as passes, torch.no_grad():
            self._write(passes, draws, completions, beat, longest)
        return completions.with_logps(draws.logps) if prompts else {}

    def _write(
        self,
        passes: Passes,
        draws: Draws,
        completions: "_Completions",
        beat: Callable[[], object],
        most: int,
    ) -> None:
        """Draw tokens until all completions of all ranks have ended, or are cut at `most`."""
        # A GPU is given the next pass before the host reads a token: a wait for it would leave the
        # GPU idle at each token. The pass after the last token is then computed for nothing.
        num_ahead = 1 if self.ranks.device.type == "cuda" else 0
        unread = deque[_Reading]()
        logits = passes.prompts()
        beat()
        for number in range(1, most + 1):
            tokens = draws(logits)
            unread.append(_Reading(tokens))
            if number < most:
                while len(unread) > num_ahead:
                    completions.follow(unread.popleft().tokens())
                # A rank whose completions have all ended goes on with forward passes, in which the
                # others need its shards, until all ranks are done.
                if self._have_all_ended(completions):
                    break
                logits = passes.next(tokens)
                beat()
        for reading in unread:
            completions.follow(reading.tokens())

    def _have_all_ended(self, completions: "_Completions") -> bool:
        if self.ranks.world_size == 1:
            return completions.have_ended
        # By the host: the device may still compute the next pass.
        numbers = gather_numbers([completions.have_ended], torch.device("cpu"))
        return bool(numbers.all())

    @contextlib.contextmanager
    def _generating(self, batch: Batch, most: int) -> Iterator[Passes]:
        """Prepare the model for passes over a batch in this block. Called on every rank.

        most: tokens of an answer.
        """
        model = self._model.eval()
        device = self.ranks.device
        sizes = [len(batch.prompts), len(batch.places), batch.has_images]
        of_ranks = gather_numbers(sizes, device).int().tolist()
        counts = [tuple(of_ranks[rank][:2]) for rank in sharing_ranks(model)]
        shown = NONE_SHOWN
        # Gathering towers is collective: a rank without images takes part if another one has some.
        if any(has_images for _, _, has_images in of_ranks):
            if cache_argument(model) is None:
                # Passes after the first do not get the images again.
                raise UserError(
                    f"{type(model).__name__} has no cache, so it cannot answer to images."
                )
            shown = ShownImages(self._image_inputs, [*find_towers(model).values()])
        decoding: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._weights.are_decoded:
            decoding = decoded_once(model, len(batch.places), device)
        most_graphed = self._most_graphed(batch, most)
        head = shared_head_of(model)
        try:
            with decoding, self._precision.autocasting(device):
                yield Passes(model, batch, device, counts, most_graphed, shown)
        finally:
            if head:
                head.counts = None
            # A forward pass alone leaves weights gathered.
            reshard_all(model)

    def _most_graphed(self, batch: Batch, most: int) -> int | None:
        """Tokens of an answer, if graphs compute them; else the log has said why they do not."""
        if ways_in_use().answers != GRAPHS or most < _GRAPHED_TOKENS:
            return None
        reason = "weights move between tokens"
        if self._weights.are_in_place:
            longest = most + max(map(len, batch.prompts))
            reason = why_not_graphed(self._model, longest)
        if reason:
            say_no_graphs(reason)
            return None
        return most

    def answer_all(
        self,
        prompts: Sequence[Sequence[int]],
        at_a_time: int,
        beat: Callable[[], object] = lambda: None,
        seeds: Sequence[int] | None = None,
        *,
        limits: Sequence[int] | None = None,
        images: Sequence[RowImages] | None = None,
        shows_progress: bool = False,
    ) -> list[Completion]:
        """Complete prompts, each on one rank.

        Called on every rank with all prompts, and returns all completions.

        Args:
            at_a_time: prompts of a rank in one batch, which share its cache.
            beat, seeds: as for `generate`.
            limits: the maximum tokens of each completion, if they differ.
            images: of each prompt, of one row; None if no prompt has any.
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
            chosen_limits = {place: limits[place] for place in chosen} if limits else None
            chosen_images = {place: images[place] for place in chosen} if images else None
            # The same on all ranks, which make as many passes.
            of_round = slice(first * number_of_ranks, (first + at_a_time) * number_of_ranks)
            local |= self.generate(
                {place: prompts[place] for place in chosen},
                beat=beat,
                seeds=chosen_seeds,
                limits=chosen_limits,
                most=max(limits[of_round]) if limits else None,
                images=chosen_images,
            )
        parts = all_gather_strings(json.dumps([*local.items()]), torch.device("cpu"))
        completions = dict[int, Completion]()
        for part in parts:
            for place, values in json.loads(part):
                completions[int(place)] = Completion(*values)
        return [completions[place] for place in sorted(completions)]

    def _seeds(self, numbers: Sequence[int], seeds: Mapping[int, int]) -> list[int]:
        """The seed of each prompt's draws."""
        found = []
        for number in numbers:
            default = derive_seed("generate", self._options.seed, number)
            found.append(seeds.get(number, default))
        return found


class _Reading:
    """Tokens on their way from the device to the host."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._on_host = tokens
        if tokens.is_cuda:
            self._on_host = torch.empty_like(tokens, device="cpu", pin_memory=True)
            self._on_host.copy_(tokens, non_blocking=True)
            self._copied = torch.cuda.current_stream().record_event()

    def tokens(self) -> list[int]:
        """The tokens; the host waits until they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[int] = self._on_host.tolist()
        return tokens


class _Completions:
    """The completions of a batch while they are written.

    limits: index -> the maximum tokens. is_done: whether they have all ended before they begin.
    """

    def __init__(
        self,
        limits: Mapping[int, int],
        stops: Stops,
        show: Callable[[Completion], object],
        *,
        is_done: bool,
    ) -> None:
        self._of_index = {index: Completion([], is_done=is_done) for index in limits}
        self._limits = limits
        self._stops = stops
        self._show = show

    @property
    def have_ended(self) -> bool:
        return all(map(self._has_ended, self._of_index))

    def _has_ended(self, index: int) -> bool:
        completion = self._of_index[index]
        return completion.is_done or len(completion.token_ids) >= self._limits[index]

    def follow(self, tokens: Sequence[int]) -> None:
        """Take the next token of each."""
        # A completion that has ended gets further tokens while others of its batch go on.
        for (index, completion), token in zip([*self._of_index.items()], tokens, strict=True):
            if not self._has_ended(index):
                completion.token_ids.append(token)
                is_done = self._stops.ends(completion.token_ids)
                completion = completion._replace(is_done=is_done)
                self._of_index[index] = completion
                self._show(completion)

    def with_logps(self, logps: Sequence[torch.Tensor]) -> dict[int, Completion]:
        """The completions by index, with the log-probabilities of their tokens, if there are any.

        logps: of all tokens that were drawn, [B, 1] each.
        """
        if not logps:
            return self._of_index
        logps_of_batch = torch.cat([*logps], dim=1).tolist()
        completions = {}
        for (index, completion), own in zip(self._of_index.items(), logps_of_batch, strict=True):
            completions[index] = completion._replace(logps=own[: len(completion.token_ids)])
        return completions
