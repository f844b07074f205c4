"""Turns a client's request into a command for all ranks, and refuses what cannot be carried out."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tinker import types

from fsdp_qlora.service import names
from fsdp_qlora.service.messages import Limits, TrainRequest, parse_train_request
from fsdp_qlora.service.records import QueuedRequest, Records
from fsdp_qlora.service.sampling import SampleRequest, read_sample_request
from fsdp_qlora.service.saved_weights import SAMPLER_WEIGHTS, SavedWeights, unnamed_sampler
from fsdp_qlora.service.wall_clock import WallClock
from fsdp_qlora.service.worker import Command
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import shown

# Endpoint -> the client library's class of its request, which checks the fields.
REQUESTS: dict[str, Any] = {
    "create_model": types.CreateModelRequest,
    "optim_step": types.OptimStepRequest,
    "save_weights": types.SaveWeightsRequest,
    "save_weights_for_sampler": types.SaveWeightsForSamplerRequest,
    "load_weights": types.LoadWeightsRequest,
    "save_weights_external": types.SaveWeightsExternalRequest,
    "asample": types.SampleRequest,
}
_MOST_METADATA = 2**16  # bytes of JSON
_LARGEST = torch.finfo(torch.float32).max


class Base(NamedTuple):
    """A model that is served.

    names: by which clients may call it. tokenizer: a folder, or a name on the hub.
    """

    names: Sequence[str]
    tokenizer: str
    limits: Limits


class WantedSample(NamedTuple):
    """A request for samples, as it was read.

    sampler: what to sample from, as the records have it.
    """

    sampler: Mapping[str, Any]
    request: SampleRequest

    def is_alike(self, other: "WantedSample") -> bool:
        """Whether both draw alike from the same weights."""
        same_weights = self.sampler["path"] == other.sampler["path"] and self.base == other.base
        return same_weights and self.request.drawing == other.request.drawing

    @property
    def base(self) -> str | None:
        """The name of the base to sample from; None for saved weights."""
        return self.sampler.get("base")


class CommandReader:
    """Reads requests. Each method raises UserError or pydantic's ValidationError if one cannot be
    carried out.

    Args:
        bases: the one whose adapters are trained, and others as they are.
        most_rank: of adapters.
    """

    def __init__(
        self,
        records: Records,
        weights: SavedWeights,
        clock: WallClock,
        bases: Sequence[Base],
        most_rank: int,
    ) -> None:
        self.records = records
        self.weights = weights
        self.clock = clock
        self.bases = bases
        self.most_rank = most_rank

    def base_named(self, name: str) -> int:
        """The number of the base that clients call so."""
        for number, base in enumerate(self.bases):
            if name in base.names:
                return number
        served = " and ".join(base.names[0] for base in self.bases)
        raise UserError(f"The base {shown(name)} is not served; here is {served}.")

    def model(self, name: str) -> dict[str, Any]:
        """The entry of a model."""
        entry = self.records.get("model", name)
        if entry is None:
            raise UserError(f"There is no model {shown(name)}.")
        return entry

    # --- training ---

    def read(self, queued: QueuedRequest) -> Command:
        """The command for a model's request.

        A command of forward_backward gets its body when it is sent.
        """
        command: Command = {"kind": queued.kind, "model": queued.target, "seq": queued.seq}
        if queued.kind == "forward_backward":
            # To refuse what is wrong before the ranks get it; each rank reads it again.
            self.model(queued.target)
            TrainRequest.read(
                parse_train_request(self.records.body(queued.id)), self.bases[0].limits
            )
            return command
        request: Any = REQUESTS[queued.kind].model_validate_json(self.records.body(queued.id))
        if isinstance(request, types.CreateModelRequest):
            return command | {"settings": self._create(queued.target, request), "makes": True}
        if isinstance(request, types.LoadWeightsRequest):
            return command | self._load(queued, request)
        self.model(queued.target)
        if isinstance(request, types.SaveWeightsExternalRequest):
            raise UserError(
                "save_weights_external is not served: save_state leaves a folder that PEFT loads."
            )
        if isinstance(request, types.OptimStepRequest):
            return command | {"params": _adamw_params(request)}
        return command | self._save(queued, request)

    def _create(self, model: str, request: types.CreateModelRequest) -> dict[str, Any]:
        lora = request.lora_config
        if self.base_named(request.base_model):
            raise UserError(
                f"{request.base_model} is not trained here, but {self.bases[0].names[0]}."
            )
        if lora is None or request.optimizer_config.type != "adamw":
            raise UserError("Only LoRA adapters with AdamW are served.")
        if not 0 < lora.rank <= self.most_rank:
            raise UserError(
                f"The rank is {lora.rank}; this service has 1 to {self.most_rank} (its "
                "--lora_rank)."
            )
        if not (lora.train_attn or lora.train_mlp):
            raise UserError("The head has no adapter here: train_attn or train_mlp must be true.")
        # Recorded as JSON, so that the model can be made again after a kill.
        settings = {
            "rank": lora.rank,
            "seed": lora.seed or 0,
            "train_attn": lora.train_attn,
            "train_mlp": lora.train_mlp,
        }
        self._register(model, settings, request.user_metadata)
        return settings

    def _register(self, model: str, settings: Mapping[str, Any], metadata: Any) -> None:
        check_metadata(metadata)
        if self.records.get("model", model) is None:
            created = {"about": dict(settings), "user_metadata": metadata, "time": self.clock.now()}
            self.records.put("model", model, created)

    def _load(self, queued: QueuedRequest, request: types.LoadWeightsRequest) -> Command:
        folder = self.weights.folder_of(request.path)
        # Number 0 makes the model by loading; a model's own numbers begin at 1.
        is_new = queued.seq == 0
        if is_new:
            saved_by, _, _ = names.parts_of(request.path)
            self._register(queued.target, self.model(saved_by)["about"], request.user_metadata)
        settings = self.model(queued.target)["about"]
        return {
            "path": str(folder),
            "optimizer": request.optimizer,
            "settings": settings,
            "makes": is_new,
        }

    def _save(self, queued: QueuedRequest, request: Any) -> Command:
        is_sampler = queued.kind == "save_weights_for_sampler"
        kind = SAMPLER_WEIGHTS if is_sampler else "weights"
        uri = self.weights.name_new(queued.target, kind, request.path, queued.seq)
        self.weights.check_new(uri, queued.id, overwrites=getattr(request, "overwrite", False))
        check_metadata(request.user_metadata)
        entry = {
            "piece": queued.id,
            "time": self.clock.now(),
            "expires": self.weights.expiry(request.ttl_seconds),
            "user_metadata": request.user_metadata,
        }
        answer: dict[str, Any] = {"path": uri}
        if request.path is None:
            answer = {"sampling_session_id": unnamed_sampler(queued.target, queued.seq)}
            sampler = {"path": uri, "time": self.clock.now()}
            self.records.put("sampler", answer["sampling_session_id"], sampler)
            self.weights.delete_idle(queued.target)
        folder = names.folder_below(self.weights.folder, *names.parts_of(uri))
        return {
            "kind": "save",
            "path": str(folder),
            "optimizer": not is_sampler,
            "answer": answer,
            "uri": uri,
            "entry": entry,
        }

    # --- sampling ---

    def read_sample(self, queued: QueuedRequest) -> WantedSample:
        """A request for samples."""
        request = types.SampleRequest.model_validate_json(self.records.body(queued.id))
        sampler = self.records.get("sampler", queued.target)
        if sampler is None:
            raise UserError(f"There is no sampler {shown(queued.target)}.")
        if sampler["path"] is not None:
            self.weights.folder_of(sampler["path"])
            self.weights.note_sampling(sampler["path"])
        base = 0 if sampler["path"] is not None else self.base_named(sampler["base"])
        return WantedSample(
            sampler, read_sample_request(queued.id, request, self.bases[base].limits)
        )

    def sampling(self, wanted: WantedSample) -> Command:
        """The command for a request and others that draw alike; they are added to its `requests`.

        saved_by: weights may be saved anew under their name, so what the ranks keep is kept by the
        request that saved.
        """
        path = wanted.sampler["path"]
        command: Command = {"kind": "asample", "base": 0, "path": None, "saved_by": None}
        if path is None:
            command["base"] = self.base_named(str(wanted.base))
        else:
            command |= {
                "path": str(self.weights.folder_of(path)),
                "saved_by": self.weights.entry(path)["piece"],
            }
        return command | {"params": wanted.request.drawing, "requests": []}


def check_metadata(metadata: Any) -> None:
    """Raise UserError if metadata of a client is too large to keep, or is no JSON."""
    try:
        size = len(json.dumps(metadata, allow_nan=False))
    except (ValueError, RecursionError) as error:
        raise UserError(f"user_metadata is no JSON: {error}.") from error
    if size > _MOST_METADATA:
        raise UserError(
            f"user_metadata has {size:,} characters; at most {_MOST_METADATA:,} are kept."
        )


def _adamw_params(request: types.OptimStepRequest) -> dict[str, float]:
    if not isinstance(request.optim_params, types.AdamParams):
        raise UserError("Only AdamW is served.")
    params: dict[str, float] = request.optim_params.model_dump()
    # Larger numbers become infinite in the float32 of the weights, or cannot be converted.
    is_finite = all(0 <= value <= _LARGEST for value in params.values())
    if not is_finite or max(params["beta1"], params["beta2"]) >= 1:
        raise UserError(f"AdamW cannot take these parameters: {params}.")
    return params
