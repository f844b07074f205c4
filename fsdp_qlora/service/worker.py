"""Executes the commands of a service on each rank: train, save, load or sample with an adapter."""

import base64
import contextlib
import itertools
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tinker import types
from transformers import PreTrainedTokenizerBase

from fsdp_qlora.distributed.process_group import release_cached_memory
from fsdp_qlora.distributed.ranks import derive_seed
from fsdp_qlora.planning.placement import PlacedModel
from fsdp_qlora.planning.run_rows import plan_generation
from fsdp_qlora.service.adapter_store import AdapterState, AdapterStore
from fsdp_qlora.service.messages import (
    Limits,
    TrainRequest,
    encode_samples,
    parse_train_request,
    rows_to_score,
)
from fsdp_qlora.service.training import RequestTrainer
from fsdp_qlora.sharding.parallelize import kept_gathered, reshard_all
from fsdp_qlora.training.forward import token_logprobs, values_of_tokens
from fsdp_qlora.training.generation.generator import TextGenerator
from fsdp_qlora.training.generation.sampling import Completion, SamplingOptions, Stops
from fsdp_qlora.training.top_tokens import TopTokens

BASE: Mapping[str, Any] = {"rank": 0, "seed": 0, "train_attn": False, "train_mlp": False}
# Saved weights that are kept in host memory; others are read again.
_SNAPSHOTS = 8

Command = dict[str, Any]
Result = bytes | None


class RequestStops(Stops):
    """Ends an answer as a request says.

    stop: None for the model's own end, texts or token ids besides it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model: Any,
        stop: Sequence[str] | Sequence[int] | None,
    ):
        super().__init__(tokenizer, model, "")
        self._texts = [each for each in stop or () if isinstance(each, str)]
        self._longest = max((len(text.encode(errors="replace")) for text in self._texts), default=0)
        self.tokens |= {each for each in stop or () if isinstance(each, int)}
        if stop is not None and not stop:
            self.tokens = set()

    def ends(self, tokens: list[int]) -> bool:
        if tokens[-1] in self.tokens:
            return True
        if not self._texts:
            return False
        # Only the end is decoded: a text before it would have ended the answer earlier.
        end = self._tokenizer.decode(tokens[-self._longest - 1 :])
        return any(text in end for text in self._texts)


@dataclass(eq=False)
class Worker:
    """Executes commands; every rank the same ones, in the same order.

    beat: called while it computes. free: bytes of the GPU that has least, when all bases are
    loaded.
    """

    training: RequestTrainer
    placed: PlacedModel
    limits: Limits
    beat: Callable[[], object]
    free: int | None = None
    models: dict[str, AdapterState] = field(default_factory=dict)
    snapshots: OrderedDict[tuple[str, str] | None, AdapterState] = field(
        default_factory=OrderedDict
    )

    @property
    def adapters(self) -> AdapterStore:
        return self.training.adapters

    def execute(self, command: Command) -> list[Result]:
        """The results of a command's requests, the same on every rank.

        Raises:
            UserError: on every rank, if a checkpoint cannot be loaded.
        """
        do = {
            "create_model": self._create,
            "load_weights": self._load,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save": self._save,
            "asample": self._sample,
            "drop": self._drop,
        }
        results: list[Result] = do[command["kind"]](command)
        return results

    def recover(self) -> list[str]:
        """After a failure that all ranks had: be ready for the next command. Called on every rank.

        The adapter in the shards may have changed, so it is given up, whosever it is. Until a whole
        forward pass FSDP2 takes a block that an error left in work for gathered.

        Returns:
            The models that are lost with it: what is in host memory is older.
        """
        self.training.targets.request = None
        lost = [name for name, adapter in self.models.items() if adapter is self.adapters.active]
        for name in lost:
            del self.models[name]
        self.adapters.abandon()
        forward = self.adapters.trainer.forward
        reshard_all(forward.model)
        release_cached_memory(self.adapters.trainer.ranks.device)
        # Any whole pass: every block is gathered and freed once.
        token_logprobs(forward, rows_to_score([[0, 0]]))
        reshard_all(forward.model)
        return lost

    # --- models ---

    def _create(self, command: Command) -> list[Result]:
        self.models[command["model"]] = self.adapters.make(command["settings"])
        return [_json(type="create_model", model_id=command["model"])]

    def _load(self, command: Command) -> list[Result]:
        path = Path(command["path"])
        settings = command.get("settings")
        name = command["model"]
        adapter = self.adapters.load(path, with_optimizer=command["optimizer"], settings=settings)
        if self.adapters.active is self.models.get(name):
            self.adapters.active = None
        self.models[name] = adapter
        return [_json(type="load_weights", model_id=name)]

    def _drop(self, command: Command) -> list[Result]:
        if self.adapters.active is self.models.pop(command["model"], None):
            self.adapters.active = None
        return []

    def _save(self, command: Command) -> list[Result]:
        adapter = self.models[command["model"]]
        self.adapters.save(adapter, Path(command["path"]), with_optimizer=command["optimizer"])
        return [_json(**command["answer"])]

    # --- training ---

    def _forward_backward(self, command: Command) -> list[Result]:
        request = TrainRequest.read(
            parse_train_request(base64.b64decode(command["body"])), self.limits
        )
        adapter = self.models[command["model"]]
        return [self.training.forward_backward(adapter, request, command["seq"])]

    def _optim_step(self, command: Command) -> list[Result]:
        params = types.AdamParams(**command["params"])
        metrics = self.training.optim_step(self.models[command["model"]], params)
        return [_json(metrics=metrics)]

    # --- sampling ---

    def _snapshot(self, path: str | None, saved_by: str | None) -> AdapterState:
        """Saved weights, or the base, in host memory.

        saved_by: the request that saved them. Others may be saved later under the same name.
        """
        key = None if path is None else (path, str(saved_by))
        if key not in self.snapshots:
            if path is None:
                adapter = self.adapters.make(BASE)
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

    def _forget_snapshot(self, key: tuple[str, str] | None) -> None:
        if self.adapters.active is self.snapshots.pop(key):
            self.adapters.active = None

    def _sample(self, command: Command) -> list[Result]:
        """Answer requests that draw alike from the same weights."""
        self.adapters.activate(self._snapshot(command["path"], command["saved_by"]))
        requests: list[Command] = command["requests"]
        answers = self._complete(requests, command["params"])
        scores = self._scores(requests)
        return [encode_samples(own, *scores.get(number, ())) for number, own in enumerate(answers)]

    def _scores(self, requests: Sequence[Command]) -> dict[int, tuple[Any, ...]]:
        """Number of a request -> what it asks for about its prompt's tokens.

        These are their log-probabilities, and the likeliest tokens.
        """
        wanted = [(number, each) for number, each in enumerate(requests) if each["scores"]]
        if not wanted:
            return {}
        table = rows_to_score([each["prompt"] for _, each in wanted])
        forward = self.adapters.trainer.forward
        logps = token_logprobs(forward, table)
        found = dict[int, tuple[Any, ...]]()
        # One pass for all of them, with as many tokens as the largest request asks for.
        most = max(each["top"] for _, each in wanted)
        wide = None
        if most:
            wide = values_of_tokens(forward, table, TopTokens(most, self.limits.vocabulary))
        for (number, each), (first, last) in zip(
            wanted, itertools.pairwise(table.offsets), strict=True
        ):
            own = logps[first:last].copy()
            # NaN is "no value": at the first token, or but for the last ones that were asked for.
            num_unscored = len(own) - each["last"] if each["last"] else 1
            own[:num_unscored] = np.nan
            top = None
            k = each["top"]
            if k and wide is not None:
                # `most` columns of ids, then `most` of log-probabilities, the likeliest first.
                rows = wide[first:last]
                top = (rows[:, :k], rows[:, most : most + k])
            found[number] = (own, top)
        return found

    def _complete(self, requests: Sequence[Command], params: Command) -> list[list[Completion]]:
        """Each request's answers, gathered from all ranks."""
        trainer = self.adapters.trainer
        most_new = params["max_tokens"]
        asked = [(each, sample) for each in requests for sample in range(each["num_samples"])]
        longest = most_new + max(len(each["prompt"]) for each in requests)
        plan = plan_generation(self.placed, len(asked), longest, most_new, self.free)
        how = {name: params[name] for name in ("temperature", "top_p", "top_k")}
        options = SamplingOptions(most_new, **how, plain_logps=True)
        stops = RequestStops(self.placed.model.tokenizer, trainer.model, params["stop"])
        generator = TextGenerator(
            trainer.model, trainer.ranks, self.placed.model.precision, stops, options
        )
        # A sample depends on its request's seed and its number alone, whatever is answered with it.
        seeds = [derive_seed("sample", each["seed"], sample) for each, sample in asked]
        with kept_gathered(trainer.model) if plan.gathered else contextlib.nullcontext():
            prompts = [each["prompt"] for each, _ in asked]
            answers = iter(generator.answer_all(prompts, plan.at_a_time, self.beat, seeds))
        return [list(itertools.islice(answers, each["num_samples"])) for each in requests]


def _json(**content: Any) -> bytes:
    return json.dumps(content).encode()
