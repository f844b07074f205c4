"""Answers to requests for samples, from one adapter at a time or from the base."""

import contextlib
import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fsdp_qlora.distributed.ranks import derive_seed
from fsdp_qlora.planning.generation import AnswerSize, plan_generation
from fsdp_qlora.planning.placement import PlacedModel
from fsdp_qlora.service.adapter_checks import AdapterChecks
from fsdp_qlora.service.adapter_store import AdapterState, AdapterStore
from fsdp_qlora.service.commands import Sample
from fsdp_qlora.service.entries import AdapterSettings
from fsdp_qlora.service.messages import PromptScores, encode_samples, rows_to_score
from fsdp_qlora.service.sampling import Drawing, SampleRequest
from fsdp_qlora.sharding.groups import kept_gathered
from fsdp_qlora.training.forward import token_logprobs, values_of_tokens
from fsdp_qlora.training.generation.generator import KeptWeights, TextGenerator
from fsdp_qlora.training.generation.sampling import Completion, Stops
from fsdp_qlora.training.top_tokens import TopTokens

_BASE: AdapterSettings = {"rank": 0, "seed": 0, "train_attn": False, "train_mlp": False}
# Saved weights that are kept in host memory; others are read again.
_SNAPSHOTS = 8

SnapshotKey = tuple[str, str] | None
"""The path of saved weights, and the request that saved them; None for the base."""


class RequestStops(Stops):
    """Ends an answer as a request says.

    stop: None for the model's own end, texts or token ids besides it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model: PreTrainedModel,
        stop: Sequence[str | int] | None,
    ):
        super().__init__(tokenizer, model, "")
        self.texts = [each for each in stop or () if isinstance(each, str)]
        self._longest = max((len(text.encode(errors="replace")) for text in self.texts), default=0)
        self.tokens |= {each for each in stop or () if isinstance(each, int)}
        if stop is not None and not stop:
            self.tokens = set()

    def ends(self, tokens: list[int]) -> bool:
        if tokens[-1] in self.tokens:
            return True
        if not self.texts:
            return False
        # Only the end is decoded: a text before it would have ended the answer earlier.
        end = self._tokenizer.decode(tokens[-self._longest - 1 :])
        return any(text in end for text in self.texts)


@dataclass(eq=False)
class RequestSampler:
    """Samples from saved weights and the base. Every rank makes the same calls."""

    adapters: AdapterStore
    placed: PlacedModel
    vocabulary: int
    """Token ids are below this."""
    beat: Callable[[], object]
    """Called while it computes."""
    checks: AdapterChecks = field(default_factory=AdapterChecks)
    """Whether a server that answers uses the adapters."""
    free: int | None = None
    """Free bytes of the fullest GPU, when all bases are loaded."""
    snapshots: OrderedDict[SnapshotKey, AdapterState] = field(default_factory=OrderedDict)

    def sample(self, command: Sample) -> list[bytes]:
        """The answer to each request.

        Raises:
            UserError: on every rank, if the server that has answered ignores the adapter.
        """
        self.adapters.activate(self._snapshot(command.path, command.saved_by))
        if command.answers is None:
            answers = self._complete(command.requests, command.drawing)
        else:
            answers = [[Completion(*values) for values in own] for own in command.answers]
        if command.checked is not None:
            weights = (command.checked, str(command.saved_by))
            forward = self.adapters.trainer.forward
            self.checks.compare(weights, forward, command.requests, answers)
        scores = self._scores(command.requests)
        return [
            encode_samples(own, scores.get(number, PromptScores()))
            for number, own in enumerate(answers)
        ]

    def stops(self, drawing: Drawing) -> RequestStops:
        """The ends of answers with these sampling settings."""
        model = self.adapters.trainer.model
        return RequestStops(self.placed.model.tokenizer, model, drawing.stop)

    # --- weights ---

    def _snapshot(self, path: str | None, saved_by: str | None) -> AdapterState:
        """Saved weights, or the base, in host memory.

        saved_by: the request that saved them. Others may be saved later under the same name.
        """
        key = None if path is None else (path, str(saved_by))
        if key not in self.snapshots:
            if path is None:
                adapter = self.adapters.make(_BASE)
            else:
                adapter = self.adapters.load(Path(path), with_optimizer=False)
            adapter.is_snapshot = True
            # Weights that were saved under this name before are gone.
            outdated = [other for other in self.snapshots if other is not None and other[0] == path]
            for other in outdated:
                self._forget_snapshot(other)
            self.snapshots[key] = adapter
            while len(self.snapshots) > _SNAPSHOTS:
                self._forget_snapshot(next(iter(self.snapshots)))
        self.snapshots.move_to_end(key)
        return self.snapshots[key]

    def _forget_snapshot(self, key: SnapshotKey) -> None:
        if self.adapters.active is self.snapshots.pop(key):
            self.adapters.active = None

    # --- prompts ---

    def _scores(self, requests: Sequence[SampleRequest]) -> dict[int, PromptScores]:
        """The scores of the prompts whose requests want them, by the requests' numbers."""
        wanted = [(number, each) for number, each in enumerate(requests) if each.scores]
        if not wanted:
            return {}
        table = rows_to_score(
            [each.prompt for _, each in wanted], [each.images.row for _, each in wanted]
        )
        forward = self.adapters.trainer.forward
        logps = token_logprobs(forward, table)
        # One pass for all of them, with as many tokens as the largest request asks for.
        most = max(each.top for _, each in wanted)
        wide = None
        if most:
            wide = values_of_tokens(forward, table, TopTokens(most, self.vocabulary))
        found = dict[int, PromptScores]()
        for (number, each), (first, last) in zip(
            wanted, itertools.pairwise(table.offsets), strict=True
        ):
            own = logps[first:last].copy()
            # NaN is "no value": at the first token, or but for the last ones that were asked for.
            num_unscored = len(own) - each.last if each.last else 1
            own[:num_unscored] = np.nan
            top = None
            if each.top and wide is not None:
                # `most` columns of ids, then `most` of log-probabilities, the most likely first.
                rows = wide[first:last]
                top = (rows[:, : each.top], rows[:, most : most + each.top])
            found[number] = PromptScores(own, top)
        return found

    # --- answers ---

    def _complete(
        self, requests: Sequence[SampleRequest], drawing: Drawing
    ) -> list[list[Completion]]:
        """Each request's answers, gathered from all ranks."""
        trainer = self.adapters.trainer
        asked = [(each, sample) for each in requests for sample in range(each.num_samples)]
        longest = drawing.max_tokens + max(len(each.prompt) for each in requests)
        most_values = max(each.images.num_values for each in requests)
        size = AnswerSize(longest, drawing.max_tokens, most_values)
        plan = plan_generation(self.placed, len(asked), size, self.free)
        # All prompts have images, or none has.
        images = [each.images.row for each, _ in asked if each.images]
        inputs = trainer.collator.image_inputs
        options = drawing.options()
        if images and inputs is not None:
            # A client could not train on such an answer: it would show an image that is not there.
            options = dataclasses.replace(options, never=inputs.processor.image_ids)
        stops = self.stops(drawing)
        generator = TextGenerator(
            trainer.model,
            trainer.ranks,
            self.placed.model.precision,
            stops,
            options,
            KeptWeights(plan.decoded > 0, plan.stays),
            inputs,
        )
        # A sample depends on its request's seed and its number alone, whatever is answered with it.
        seeds = [derive_seed("sample", each.seed, sample) for each, sample in asked]
        with kept_gathered(trainer.model) if plan.gathered else contextlib.nullcontext():
            prompts = [each.prompt for each, _ in asked]
            answers = iter(
                generator.answer_all(
                    prompts, plan.at_a_time, self.beat, seeds, images=images or None
                )
            )
        return [list(itertools.islice(answers, each.num_samples)) for each in requests]
