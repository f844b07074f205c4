"""Carries out the orders of a service on each rank: train, save, load or sample with an adapter."""

import base64
import contextlib
import itertools
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tinker import types
from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data.batches.micro_batch import IGNORE_INDEX, MicroBatch
from fsdp_qlora.data.batches.rows import Numbers, TokenizedRows
from fsdp_qlora.distributed.process_group import gather_numbers, release_cached_memory
from fsdp_qlora.distributed.ranks import derive_seed
from fsdp_qlora.planning.placement import PlacedModel
from fsdp_qlora.planning.run_rows import plan_generation
from fsdp_qlora.service.losses import LOSSES
from fsdp_qlora.service.messages import (
    Limits,
    TrainRequest,
    encode_samples,
    parse_train_request,
    rows_to_score,
)
from fsdp_qlora.service.rooms import Room, Rooms
from fsdp_qlora.sharding.parallelize import kept_gathered, reshard_all
from fsdp_qlora.training.divergence import Likeliest
from fsdp_qlora.training.forward import likeliest_of_tokens, token_logprobs
from fsdp_qlora.training.generation.generator import TextGenerator
from fsdp_qlora.training.generation.sampling import Completion, SamplingOptions, Stops
from fsdp_qlora.utils.errors import UserError

BASE: Mapping[str, Any] = {"rank": 0, "seed": 0, "train_attn": False, "train_mlp": False}
# Saved weights that are kept in host memory; others are read again.
_SNAPSHOTS = 8

Order = dict[str, Any]
Result = bytes | None


class RequestTargets:
    """Gives the collator the values of the request in work, if there is one."""

    def __init__(self) -> None:
        self.request: TrainRequest | None = None

    def __call__(self, table: TokenizedRows, rows: Numbers) -> dict[str, torch.Tensor]:
        """As `OfTargets`; nothing of rows that are only scored."""
        return self.request.of_targets(rows) if self.request is not None else {}


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
    """Carries out orders; every rank the same ones, in the same order.

    targets: that the trainer's collator asks. beat: called while it computes. free: bytes of the
    GPU that has least, when all bases are loaded.
    """

    rooms: Rooms
    placed: PlacedModel
    targets: RequestTargets
    limits: Limits
    beat: Callable[[], object]
    free: int | None = None
    models: dict[str, Room] = field(default_factory=dict)
    snapshots: OrderedDict[tuple[str, str] | None, Room] = field(default_factory=OrderedDict)

    def carry_out(self, order: Order) -> list[Result]:
        """The results of an order's pieces, the same on every rank.

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
        results: list[Result] = do[order["kind"]](order)
        return results

    def recover(self) -> list[str]:
        """After a failure that all ranks had: be ready for the next order. Called on every rank.

        The adapter in the shards may have changed, so it is given up, whosever it is. Until a whole
        forward pass FSDP2 takes a block that an error left in work for gathered.

        Returns:
            The models that are lost with it: what is in host memory is older.
        """
        self.targets.request = None
        lost = [name for name, room in self.models.items() if room is self.rooms.inside]
        for name in lost:
            del self.models[name]
        self.rooms.abandon()
        forward = self.rooms.trainer.forward
        reshard_all(forward.model)
        release_cached_memory(self.rooms.trainer.ranks.device)
        # Any whole pass: every block is gathered and freed once.
        token_logprobs(forward, rows_to_score([[0, 0]]))
        reshard_all(forward.model)
        return lost

    # --- models ---

    def _create(self, order: Order) -> list[Result]:
        self.models[order["model"]] = self.rooms.make(order["about"])
        return [_json(type="create_model", model_id=order["model"])]

    def _load(self, order: Order) -> list[Result]:
        path = Path(order["path"])
        about = order.get("about")
        name = order["model"]
        room = self.rooms.load(path, with_optimizer=order["optimizer"], about=about)
        if self.rooms.inside is self.models.get(name):
            self.rooms.inside = None
        self.models[name] = room
        return [_json(type="load_weights", model_id=name)]

    def _drop(self, order: Order) -> list[Result]:
        if self.rooms.inside is self.models.pop(order["model"], None):
            self.rooms.inside = None
        return []

    def _save(self, order: Order) -> list[Result]:
        room = self.models[order["model"]]
        self.rooms.save(room, Path(order["path"]), with_optimizer=order["optimizer"])
        return [_json(**order["answer"])]

    # --- training ---

    def _forward_backward(self, order: Order) -> list[Result]:
        request = TrainRequest.read(
            parse_train_request(base64.b64decode(order["body"])), self.limits
        )
        trainer = self.rooms.trainer
        ranks = self.rooms.trainer.ranks
        self.rooms.enter(self.models[order["model"]])
        batches = trainer.collator.lay_out_step(request.table, np.arange(len(request.table)))
        found = torch.zeros(request.values["places"].size, device=ranks.device)
        trainer.model.train(not request.forward_only)
        self.targets.request = request
        total = torch.zeros((), device=ranks.device)
        try:
            with trainer.forward.attending(), torch.set_grad_enabled(not request.forward_only):
                for index, batch in enumerate(batches):
                    trainer.prepare(order["seq"], index, is_last=index == len(batches) - 1)
                    loss, logps, places = self._loss(request, batch)
                    # FSDP2 averages gradients over ranks, and losses are sums.
                    if not request.forward_only:
                        (loss * (trainer.loss_scale.scale * ranks.world_size)).backward()
                    total += loss.detach()
                    found[places] = logps
        finally:
            self.targets.request = None
        # Without a backward pass, which would free them, weights may stay gathered.
        if request.forward_only:
            reshard_all(trainer.model)
        # A target is on one rank, and the others have zero there.
        dist.all_reduce(found)
        dist.all_reduce(total)
        logprobs = found.view(len(request.values["places"]), -1).cpu().numpy()
        return [request.encode(logprobs, {"loss:sum": total.item()})]

    def _loss(
        self, request: TrainRequest, batch: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A micro-batch's loss; its targets' log-probabilities, and their places in the request."""
        forward = self.rooms.trainer.forward
        losses, on_device = forward.token_losses(request.with_targets(batch), reduction="none")
        is_target = on_device.targets != IGNORE_INDEX
        logps = -losses[0]
        given = on_device.target_values
        loss = LOSSES[request.loss]

        def documents(values: torch.Tensor) -> torch.Tensor:
            sums = values.new_zeros(len(request.table)).index_add(
                0, given["datum"], values * is_target
            )
            return forward.context.summed(sums)[given["datum"]]

        values = torch.where(is_target, loss.sum(logps, given, request.config, documents), 0.0)
        return values.sum(), logps.detach()[is_target], given["places"][is_target]

    def _optim_step(self, order: Order) -> list[Result]:
        params = types.AdamParams(**order["params"])
        room = self.models[order["model"]]
        self.rooms.enter(room)
        trainer = self.rooms.trainer
        scale = room.scale
        for parameter in self.rooms.frozen(room):
            parameter.grad = None
        trainer.optimizer.take_gradients()
        squares_by_rank = gather_numbers(
            [sum(trainer.optimizer.squared_norms())], trainer.ranks.device
        )
        squares = squares_by_rank.sum().item()
        # Replicas have the same shards, which the sum counts once for each.
        norm = math.sqrt(squares / trainer.options.num_replicas) / scale.scale
        if math.isfinite(norm):
            trainer.clip_and_unscale(norm, params.grad_clip_norm)
            betas = (params.beta1, params.beta2)
            decay = params.weight_decay
            trainer.optimizer.step(
                params.learning_rate, betas=betas, eps=params.eps, weight_decay=decay
            )
            room.steps += 1
            # The shards are lost with it; the desk brings the model back without this step.
            if not self.rooms.is_finite():
                self.rooms.abandon()
                raise UserError(
                    f"The step would leave weights that are not finite; it is not taken: {params}."
                )
        trainer.optimizer.zero_grad()
        scale.update(overflowed=not math.isfinite(norm))
        # JSON has no infinity.
        metrics = {
            "grad_norm": norm if math.isfinite(norm) else -1.0,
            "skipped": float(not math.isfinite(norm)),
        }
        return [_json(metrics=metrics)]

    # --- sampling ---

    def _snapshot(self, path: str | None, saved_by: str | None) -> Room:
        """Saved weights, or the base, in host memory.

        saved_by: the request that saved them. Others may be saved later under the same name.
        """
        key = None if path is None else (path, str(saved_by))
        if key not in self.snapshots:
            if path is None:
                room = self.rooms.make(BASE)
            else:
                room = self.rooms.load(Path(path), with_optimizer=False)
            room.is_snapshot = True
            # Weights that were saved under this name before are gone.
            outdated = [other for other in self.snapshots if other is not None and other[0] == path]
            for other in outdated:
                self._forget_snapshot(other)
            self.snapshots[key] = room
            while len(self.snapshots) > _SNAPSHOTS:
                self._forget_snapshot(next(iter(self.snapshots)))
        self.snapshots.move_to_end(key)
        return self.snapshots[key]

    def _forget_snapshot(self, key: tuple[str, str] | None) -> None:
        if self.rooms.inside is self.snapshots.pop(key):
            self.rooms.inside = None

    def _sample(self, order: Order) -> list[Result]:
        """Answer requests that draw alike from the same weights."""
        self.rooms.enter(self._snapshot(order["path"], order["saved_by"]))
        requests: list[Order] = order["requests"]
        answers = self._complete(requests, order["params"])
        scores = self._scores(requests)
        return [encode_samples(own, *scores.get(number, ())) for number, own in enumerate(answers)]

    def _scores(self, requests: Sequence[Order]) -> dict[int, tuple[Any, ...]]:
        """Number of a request -> what it asks for about its prompt's tokens.

        These are their log-probabilities, and the likeliest tokens.
        """
        wanted = [(number, each) for number, each in enumerate(requests) if each["scores"]]
        if not wanted:
            return {}
        table = rows_to_score([each["prompt"] for _, each in wanted])
        forward = self.rooms.trainer.forward
        logps = token_logprobs(forward, table)
        found = dict[int, tuple[Any, ...]]()
        # One pass for all of them, with as many tokens as the largest request asks for.
        most = max(each["top"] for _, each in wanted)
        wide = None
        if most:
            wide = likeliest_of_tokens(forward, table, Likeliest(most, self.limits.vocabulary))
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

    def _complete(self, requests: Sequence[Order], params: Order) -> list[list[Completion]]:
        """Each request's answers, gathered from all ranks."""
        trainer = self.rooms.trainer
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
