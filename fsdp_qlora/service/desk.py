"""Takes the requests of clients on rank 0, and turns them into orders for all ranks.

Pieces of a model are done in the order of their numbers, whatever order they come in. A request that cannot be done
fails alone, and its number counts as used: a client goes on with the next one.
"""

import base64
import json
import logging
import math
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from tinker import types

from fsdp_qlora.service.messages import Limits, TrainRequest, parse_train_request, prompt_tokens
from fsdp_qlora.service.records import DONE, FAILED, Piece, Records
from fsdp_qlora.service.worker import Order, Result
from fsdp_qlora.utils.errors import UserError

log = logging.getLogger("fsdp_qlora")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PATH = re.compile(r"tinker://([A-Za-z0-9][A-Za-z0-9:._-]*)/(weights|sampler_weights)/([A-Za-z0-9][A-Za-z0-9._-]*)")
_UNNAMED = "unnamed-"
_MOST_TOP = 1024  # likeliest tokens
_KEPT_UNNAMED = 8  # sampler weights without a name, of a model
_MOST_SAMPLES = 1024  # of requests that are answered together
_SWEEP_SECONDS = 60.0  # between two looks for weights that have expired
_IDLE_SECONDS = 3600.0  # after which older unnamed weights are deleted that nobody samples from
_KEPT_RESULTS = 20_000  # of requests, besides those that a model's state needs
_MOST_TRIES = 3  # of a request during which the service ends
REQUESTS: dict[str, Any] = {
    "create_model": types.CreateModelRequest,
    "optim_step": types.OptimStepRequest,
    "save_weights": types.SaveWeightsRequest,
    "save_weights_for_sampler": types.SaveWeightsForSamplerRequest,
    "load_weights": types.LoadWeightsRequest,
    "save_weights_external": types.SaveWeightsExternalRequest,
    "asample": types.SampleRequest,
}


class Base(NamedTuple):
    """A model that is served. names: by which clients may call it. tokenizer: a folder, or a name on the hub."""

    names: Sequence[str]
    tokenizer: str
    limits: Limits


class Desk:
    """The requests that wait, and what is known of models and checkpoints.

    Args:
        folder: of checkpoints. bases: the one whose adapters are trained, and others as they are. most_rank: of
            adapters. most_models: in memory. save_times: steps and seconds after which a model's state is saved, so
            that fewer pieces must be repeated after a kill; 0 for never.
    Attributes:
        on_done: is told each piece that has a result.
    """

    def __init__(
        self,
        records: Records,
        folder: Path,
        bases: Sequence[Base],
        *,
        most_rank: int,
        most_models: int,
        save_times: tuple[int, float],
    ) -> None:
        self.records, self.folder, self.bases = records, folder, bases
        self.most_rank, self.most_models, self.save_times = most_rank, most_models, save_times
        self.on_done: Callable[[str], object] = lambda name: None
        self._ready = threading.Condition()
        self._waiting = {piece.id: piece for piece in records.waiting()}
        self._next: dict[str, int] = {}  # the number whose turn it is, of each target
        self._used_at: dict[str, float] = {}  # the models in memory
        self._saved_at: dict[str, float] = {}
        self._steps: dict[str, int] = {}  # since then
        self._with_gradients: set[str] = set()
        self._sampled_at: dict[str, float] = {}  # weights
        self._read: dict[str, tuple[Order, Order]] = {}  # samples that wait
        self._in_work: list[Piece] = []
        self._orders: deque[Order] = deque()
        self._started = self._swept_at = time.monotonic()

    # --- for the web server's threads ---

    def submit(self, piece: Piece) -> None:
        """Take a request, once: one with the same target and number is the same."""
        if self.records.add(piece):
            with self._ready:
                self._waiting[piece.id] = piece
                self._ready.notify()

    def cancel(self, name: str) -> None:
        """Give up a request for samples that has not begun."""
        with self._ready:
            piece = self._waiting.get(name)
            if piece is None or piece.kind != "asample":
                return
            del self._waiting[name]
        self._fail(piece, "cancelled")

    def base_named(self, name: str) -> int:
        """The number of the base that clients call so. Raises UserError if none is."""
        if (number := next((number for number, base in enumerate(self.bases) if name in base.names), None)) is None:
            served = " and ".join(base.names[0] for base in self.bases)
            raise UserError(f"The base {name[:200]!r} is not served; here is {served}.")
        return number

    def path_of(self, uri: str) -> Path:
        """The folder of saved weights. Raises UserError if there is none."""
        match = _PATH.fullmatch(uri)
        if match is None or self.records.get("checkpoint", uri) is None:
            raise UserError(f"There are no saved weights {uri[:200]!r}.")
        return self._folder(*match.groups())

    def delete(self, uri: str) -> None:
        """Delete saved weights. Raises UserError if there are none."""
        path = self.path_of(uri)
        self.records.delete("checkpoint", uri)
        shutil.rmtree(path, ignore_errors=True)

    # --- for the main thread ---

    def take(self, seconds: float) -> Order | None:
        """The next order; None if there is none within these seconds."""
        self._sweep()
        while not self._orders:
            with self._ready:
                piece = self._first() or (self._ready.wait(seconds) and self._first())
                if not piece:
                    break
                del self._waiting[piece.id]
            try:
                self._in_work = [piece]
                if self.records.begin(piece.id) > _MOST_TRIES:
                    raise UserError("The service has ended each time that it worked on this request.")
                self._orders.extend(self._orders_of(piece))
            except (UserError, ValidationError) as error:
                self.refuse(str(error) if isinstance(error, UserError) else describe_invalid(error))
        return self._orders.popleft() if self._orders else None

    def finish(self, order: Order, results: list[Result]) -> None:
        """Record what an order has led to, and tell the clients that wait for it."""
        if "uri" in order:
            self.records.put("checkpoint", order["uri"], order["entry"])
        if "live" in order:
            self._note_live(order["model"], order["live"])
        if order["kind"] == "forward_backward":
            self._with_gradients.add(order["model"])
        elif order["kind"] in ("optim_step", "load_weights"):
            self._with_gradients.discard(order["model"])
        if order.get("repeats"):
            return
        pieces, self._in_work = self._in_work, []
        self.records.finish([(piece.id, DONE, result) for piece, result in zip(pieces, results, strict=True)])
        for piece in pieces:
            self._turn(piece)
        if self._is_save_due(order):
            self._orders.append(self._live_order(order["model"], order["seq"]))

    def _live_order(self, model: str, seq: int) -> Order:
        """The order that saves a model's state, which has no gradients, after the piece of this number."""
        path = str(self._folder(model, "live", str(seq)))
        live = {"kind": "save", "model": model, "path": path, "optimizer": True, "answer": {}}
        return {**live, "live": seq, "repeats": True}

    def _is_save_due(self, order: Order) -> bool:
        """Whether a model's state is to be saved. Weights that were loaded may be deleted."""
        if order["kind"] != "optim_step":
            return bool(order["kind"] == "load_weights")
        model, (steps, seconds) = order["model"], self.save_times
        self._steps[model] = self._steps.get(model, 0) + 1
        return 0 < steps <= self._steps[model] or 0 < seconds < time.monotonic() - self._saved_at[model]

    def refuse(self, reason: str) -> None:
        """Record that the last order, and those that were to follow, cannot be carried out."""
        pieces, self._in_work = self._in_work, []
        self._orders.clear()
        for piece in pieces:
            self._used_at.pop(piece.target, None)  # it may not be where it was
            self._fail(piece, reason)

    def _fail(self, piece: Piece, reason: str) -> None:
        answer = json.dumps({"error": reason, "category": "user"}).encode()
        self.records.finish([(piece.id, FAILED, answer)])
        self._turn(piece)

    def _turn(self, piece: Piece) -> None:
        """It is the next one's turn."""
        self._next[piece.target] = piece.seq + 1
        self._read.pop(piece.id, None)
        self.on_done(piece.id)

    def _first(self) -> Piece | None:
        """The piece that came first of those whose turn it is."""
        for piece in self._waiting.values():
            if piece.kind == "asample":
                return piece
            if piece.target not in self._next:
                live = (self.records.get("model", piece.target) or {}).get("live", -1)
                self._next[piece.target] = max(live, self.records.last_done(piece.target)) + 1
            if piece.seq == self._next[piece.target]:
                return piece
        return None

    def _orders_of(self, piece: Piece) -> list[Order]:
        """The order for a piece, behind those that bring its model to where it was and make room for it."""
        if piece.kind == "asample":
            return [self._sampling(piece)]
        order, model = self._order(piece), piece.target
        before = [] if model in self._used_at or order.get("makes") else self._restored(model)
        while len(self._used_at.keys() - {model}) >= self.most_models:
            oldest = min(self._used_at.keys() - {model}, key=self._used_at.__getitem__)
            del self._used_at[oldest]
            if oldest not in self._with_gradients:
                before.append(self._live_order(oldest, self._next[oldest] - 1))
            before.append({"kind": "drop", "model": oldest, "repeats": True})
        self._used_at[model] = time.monotonic()
        self._saved_at.setdefault(model, time.monotonic())
        return [*before, order]

    def _restored(self, model: str) -> list[Order]:
        """The orders by which a model that was in memory before comes back."""
        live, orders = self._model(model).get("live", -1), list[Order]()
        if live >= 0:
            path = str(self._folder(model, "live", str(live)))
            orders.append({"kind": "load_weights", "model": model, "path": path, "optimizer": True})
        for piece in self.records.done_after(model, live):
            if piece.kind not in ("save_weights", "save_weights_for_sampler"):
                orders.append(self._order(piece))
        log.info("Model %s: brought back by %d pieces of work.", model, len(orders))
        return [{**order, "repeats": True} for order in orders]

    def _note_live(self, model: str, seq: int) -> None:
        """Record a model's saved state, which replaces the one before and the pieces that led to it."""
        before = self._model(model).get("live", -1)
        self.records.put("model", model, {**self._model(model), "live": seq})
        self.records.forget_bodies(model, seq)
        self._saved_at[model], self._steps[model] = time.monotonic(), 0
        if before != seq:
            shutil.rmtree(self._folder(model, "live", str(before)), ignore_errors=True)

    # --- what is asked for ---

    def _model(self, name: str) -> dict[str, Any]:
        if (about := self.records.get("model", name)) is None:
            raise UserError(f"There is no model {name[:200]!r}.")
        return about

    def _order(self, piece: Piece) -> Order:
        """The order for a model's piece. Raises UserError or ValidationError if it cannot be carried out."""
        order: Order = {"kind": piece.kind, "model": piece.target, "seq": piece.seq}
        if piece.kind == "forward_backward":
            self._model(piece.target)
            TrainRequest.read(parse_train_request(piece.body), self.bases[0].limits)
            return {**order, "body": base64.b64encode(piece.body).decode()}
        request: Any = REQUESTS[piece.kind].model_validate_json(piece.body)
        if isinstance(request, types.CreateModelRequest):
            return {**order, "about": self._create(piece.target, request), "makes": True}
        if isinstance(request, types.LoadWeightsRequest):
            return {**order, **self._load(piece, request)}
        self._model(piece.target)
        if isinstance(request, types.SaveWeightsExternalRequest):
            raise UserError("save_weights_external is not served: save_state leaves a folder that PEFT loads.")
        if not isinstance(request, types.OptimStepRequest):
            return {**order, **self._save(piece, request)}
        if not isinstance(request.optim_params, types.AdamParams):
            raise UserError("Only AdamW is served.")
        params = request.optim_params.model_dump()
        if not all(0 <= value < math.inf for value in params.values()) or max(params["beta1"], params["beta2"]) >= 1:
            raise UserError(f"AdamW cannot take these parameters: {params}.")
        return {**order, "params": params}

    def _create(self, model: str, request: types.CreateModelRequest) -> dict[str, Any]:
        lora = request.lora_config
        if self.base_named(request.base_model):
            raise UserError(f"{request.base_model} is not trained here, but {self.bases[0].names[0]}.")
        if lora is None or request.optimizer_config.type != "adamw":
            raise UserError("Only LoRA adapters with AdamW are served.")
        if not 0 < lora.rank <= self.most_rank:
            raise UserError(f"The rank is {lora.rank}; this service has 1 to {self.most_rank} (its --lora_rank).")
        if not (lora.train_attn or lora.train_mlp):
            raise UserError("The head has no adapter here: train_attn or train_mlp must be true.")
        about = {"rank": lora.rank, "seed": lora.seed or 0, "train_attn": lora.train_attn, "train_mlp": lora.train_mlp}
        self._register(model, about, request.user_metadata)
        return about

    def _register(self, model: str, about: Mapping[str, Any], metadata: Any) -> None:
        if self.records.get("model", model) is None:
            created = {"about": dict(about), "user_metadata": metadata, "time": time.time()}
            self.records.put("model", model, created)

    def _load(self, piece: Piece, request: types.LoadWeightsRequest) -> Order:
        path, makes = self.path_of(request.path), piece.seq == 0
        if makes:
            self._register(piece.target, self._model(request.path.split("/")[2])["about"], request.user_metadata)
        about = self._model(piece.target)["about"]
        return {"path": str(path), "optimizer": request.optimizer, "about": about, "makes": makes}

    def _save(self, piece: Piece, request: Any) -> Order:
        is_sampler, is_named = piece.kind == "save_weights_for_sampler", request.path is not None
        name = request.path if is_named else f"{_UNNAMED}{piece.seq:08d}"
        if not _NAME.fullmatch(name) or (is_named and name.startswith(_UNNAMED)):
            raise UserError(f"The name {name[:200]!r} is not allowed: at most 128 letters, digits and ._- are.")
        part = "sampler_weights" if is_sampler else "weights"
        uri = f"tinker://{piece.target}/{part}/{name}"
        taken = self.records.get("checkpoint", uri)
        if taken and taken["piece"] != piece.id and not getattr(request, "overwrite", False):
            raise UserError(f"There are weights named {name} already.")
        entry = {"piece": piece.id, "time": time.time(), "user_metadata": request.user_metadata}
        entry["expires"] = time.time() + request.ttl_seconds if request.ttl_seconds else None
        answer: dict[str, Any] = {"path": uri}
        if not is_named:
            session, _, number = piece.target.partition(":train:")
            answer = {"sampling_session_id": f"{session}:sample:{number}-{piece.seq}"}
            self.records.put("sampler", answer["sampling_session_id"], {"path": uri})
            unnamed = [uri for uri, _ in self.records.find("checkpoint", f"tinker://{piece.target}/{part}/{_UNNAMED}%")]
            for old in unnamed[: 1 - _KEPT_UNNAMED]:
                if time.monotonic() - self._sampled_at.get(old, self._started) > _IDLE_SECONDS:
                    self.delete(old)
        path = str(self._folder(piece.target, part, name))
        return {"kind": "save", "path": path, "optimizer": not is_sampler, "answer": answer, "uri": uri, "entry": entry}

    def _sampling(self, piece: Piece) -> Order:
        """One order for a request and the others that draw alike from the same weights."""
        wanted, first = self._sample_request(piece)
        requests, total = [first], first["num_samples"]
        with self._ready:
            others = [other for other in self._waiting.values() if other.kind == "asample"]
        for other in others:
            try:
                how, request = self._sample_request(other)
            except (UserError, ValidationError):
                continue  # fails when its turn comes
            if how == wanted and total + request["num_samples"] <= _MOST_SAMPLES:
                with self._ready:
                    if self._waiting.pop(other.id, None) is None:
                        continue  # cancelled
                self._in_work.append(other)
                requests.append(request)
                total += request["num_samples"]
        return {"kind": "asample", **wanted, "requests": requests}

    def _sample_request(self, piece: Piece) -> tuple[Order, Order]:
        """`_read_sample`, once for each request: all that wait are looked at for each order."""
        found = self._read[piece.id] = self._read.get(piece.id) or self._read_sample(piece)
        return found

    def _read_sample(self, piece: Piece) -> tuple[Order, Order]:
        """How a request draws, and what is its own. Raises UserError or ValidationError if it cannot be done."""
        request = types.SampleRequest.model_validate_json(piece.body)
        if (sampler := self.records.get("sampler", piece.target)) is None:
            raise UserError(f"There is no sampler {piece.target[:200]!r}.")
        for name in ("topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
            if getattr(request, name):
                raise UserError(f"{name} is not served.")
        path = str(self.path_of(sampler["path"])) if sampler["path"] else None
        base = self.base_named(sampler["base"]) if path is None else 0
        self._sampled_at[sampler["path"]] = time.monotonic()
        limits = self.bases[base].limits
        prompt, params = prompt_tokens(request, limits), request.sampling_params
        room = limits.context_length + 1 - len(prompt)
        most = min(params.max_tokens or room, room)
        if not (most > 0 and 0 <= params.temperature < math.inf and 0 < params.top_p <= 1 and params.top_k >= -1):
            raise UserError("max_tokens must be 1 or more, temperature 0 or more, top_p in (0, 1], top_k -1 or more.")
        if not 0 < request.num_samples <= _MOST_SAMPLES or not 0 <= request.topk_prompt_logprobs <= _MOST_TOP:
            raise UserError(f"num_samples must be 1 to {_MOST_SAMPLES}, topk_prompt_logprobs 0 to {_MOST_TOP}.")
        last = request.prompt_logprobs_last_n
        if last is not None and not (request.prompt_logprobs and 0 < last < len(prompt)):
            raise UserError("prompt_logprobs_last_n goes with prompt_logprobs, and is below the prompt's length.")
        stop = [params.stop] if isinstance(params.stop, str) else params.stop
        drawn: Order = {"max_tokens": most, "temperature": params.temperature, "top_p": params.top_p}
        drawn |= {"top_k": max(params.top_k, 0), "stop": None if stop is None else list(stop)}
        own = {"prompt": prompt.tolist(), "num_samples": request.num_samples, "top": request.topk_prompt_logprobs}
        own |= {"seed": piece.id if params.seed is None else params.seed, "last": last}
        own["scores"] = bool(request.prompt_logprobs or request.topk_prompt_logprobs)
        return {"base": base, "path": path, "params": drawn}, own

    # --- files ---

    def _sweep(self) -> None:
        """Delete now and then what has expired, and old results."""
        if time.monotonic() - self._swept_at > _SWEEP_SECONDS:
            self._swept_at = time.monotonic()
            self.records.forget_old(_KEPT_RESULTS)
            for uri, about in list(self.records.find("checkpoint")):
                if about["expires"] and about["expires"] < time.time():
                    self.delete(uri)

    def _folder(self, model: str, part: str, name: str) -> Path:
        return self.folder / model.replace(":", "_") / part / name


def describe_invalid(error: ValidationError) -> str:
    """A sentence about the first field of a request that is wrong."""
    first = error.errors(include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'The request'}: {first['msg']}."
