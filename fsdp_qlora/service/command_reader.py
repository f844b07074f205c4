"""Turns a client's request into a job for all ranks, or refuses it."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from pydantic import BaseModel
from tinker import types

from fsdp_qlora.service import names
from fsdp_qlora.service.commands import (
    CreateModel,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    Sample,
    SaveWeights,
)
from fsdp_qlora.service.entries import (
    AdapterSettings,
    CheckpointEntry,
    Metadata,
    ModelEntry,
    SamplerEntry,
)
from fsdp_qlora.service.jobs import Job
from fsdp_qlora.service.messages import Limits
from fsdp_qlora.service.parsed_requests import ParsedRequests
from fsdp_qlora.service.records import QueuedRequest, Records
from fsdp_qlora.service.sampling import Drawing, SampleRequest, read_sample_request
from fsdp_qlora.service.saved_weights import SAMPLER_WEIGHTS, SavedWeights, unnamed_sampler
from fsdp_qlora.service.sent_images import NO_BASE_IMAGES, BaseImages
from fsdp_qlora.service.train_request import TrainRequest, parse_train_request
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import shown

# Endpoint -> the client library's class of its request, which checks the fields.
REQUESTS: Mapping[str, type[BaseModel]] = {
    "create_model": types.CreateModelRequest,
    "optim_step": types.OptimStepRequest,
    "save_weights": types.SaveWeightsRequest,
    "save_weights_for_sampler": types.SaveWeightsForSamplerRequest,
    "load_weights": types.LoadWeightsRequest,
    "save_weights_external": types.SaveWeightsExternalRequest,
    "asample": types.SampleRequest,
}
_MAX_METADATA = 2**16  # bytes of JSON
_LARGEST = torch.finfo(torch.float32).max


class Base(NamedTuple):
    """A model that is served."""

    names: Sequence[str]
    """Names by which clients may call it; the first one is its own."""
    tokenizer: str
    """A folder, or a name on the hub."""
    limits: Limits
    images: BaseImages = NO_BASE_IMAGES


class WantedSample(NamedTuple):
    """A parsed request for samples."""

    sampler: SamplerEntry
    drawing: Drawing
    request: SampleRequest

    def is_alike(self, other: "WantedSample") -> bool:
        """Whether both have the same weights and sampling settings, and both or none images.

        The tokens of a text may stand for images that nobody has sent.
        """
        same_weights = self.sampler["path"] == other.sampler["path"] and self.base == other.base
        same_kind = bool(self.request.images) == bool(other.request.images)
        return same_weights and same_kind and self.drawing == other.drawing

    @property
    def base(self) -> str | None:
        """The name of the base to sample from; None for saved weights."""
        return self.sampler.get("base")


class CommandReader:
    """Reads requests. Each method raises UserError or pydantic's ValidationError if one cannot be
    carried out.

    Args:
        bases: the one whose adapters are trained, and others as they are.
        max_rank: of adapters.
    """

    def __init__(
        self,
        records: Records,
        weights: SavedWeights,
        parsed: ParsedRequests,
        bases: Sequence[Base],
        max_rank: int,
    ) -> None:
        self.records = records
        self.weights = weights
        self.clock = weights.clock
        self.parsed = parsed
        self.bases = bases
        self.max_rank = max_rank

    def base_named(self, name: str) -> int:
        """The number of the base with this name."""
        for number, base in enumerate(self.bases):
            if name in base.names:
                return number
        served = " and ".join(base.names[0] for base in self.bases)
        raise UserError(f"The base {shown(name)} is not served; here is {served}.")

    def model(self, name: str) -> ModelEntry:
        """The entry of a model."""
        entry = self.records.models.get(name)
        if entry is None:
            raise UserError(f"There is no model {shown(name)}.")
        return entry

    # --- training ---

    def read(self, queued: QueuedRequest) -> Job:
        """The job of a model's request."""
        if queued.kind == "forward_backward":
            # Checked before the model is brought back for it.
            self.model(queued.target)
            return Job(ForwardBackward(queued.target, queued.seq, self.train_request(queued.id)))
        request = REQUESTS[queued.kind].model_validate_json(self.records.body(queued.id))
        if isinstance(request, types.CreateModelRequest):
            settings = self._create(queued.target, request)
            answer = _json(type="create_model", model_id=queued.target)
            return Job(CreateModel(queued.target, settings), answer=answer)
        if isinstance(request, types.LoadWeightsRequest):
            return self._load(queued, request)
        self.model(queued.target)
        if isinstance(request, types.OptimStepRequest):
            return Job(OptimStep(queued.target, _adam_params(request)))
        if isinstance(request, types.SaveWeightsRequest | types.SaveWeightsForSamplerRequest):
            return self._save(queued, request)
        raise UserError(
            "save_weights_external is not served: save_state leaves a folder that PEFT loads."
        )

    def read_repeat(self, queued: QueuedRequest) -> Job:
        """The job that repeats a request whose result is known.

        Its arrays are missing. `train_request` reads them when it is its turn.
        """
        if queued.kind == "forward_backward":
            self.model(queued.target)
            return Job(ForwardBackward(queued.target, queued.seq, None), is_internal=True)
        return dataclasses.replace(self.read(queued), is_internal=True)

    def train_request(self, name: str) -> TrainRequest:
        """The checked arrays of a forward_backward."""
        message = self.parsed.take(name)
        if message is None:
            message = parse_train_request(self.records.body(name))
        base = self.bases[0]
        return TrainRequest.read(message, base.limits, base.images)

    def _create(self, model: str, request: types.CreateModelRequest) -> AdapterSettings:
        lora = request.lora_config
        if self.base_named(request.base_model):
            raise UserError(
                f"{request.base_model} is not trained here, but {self.bases[0].names[0]}."
            )
        if lora is None or request.optimizer_config.type != "adamw":
            raise UserError("Only LoRA adapters with AdamW are served.")
        if not 0 < lora.rank <= self.max_rank:
            raise UserError(
                f"The rank is {lora.rank}; this service has 1 to {self.max_rank} (its --lora_rank)."
            )
        if not (lora.train_attn or lora.train_mlp):
            raise UserError("The head has no adapter here: train_attn or train_mlp must be true.")
        # Recorded as JSON, so that the model can be made again after a kill.
        settings: AdapterSettings = {
            "rank": lora.rank,
            "seed": lora.seed or 0,
            "train_attn": lora.train_attn,
            "train_mlp": lora.train_mlp,
        }
        self._register(model, settings, request.user_metadata)
        return settings

    def _register(self, model: str, settings: AdapterSettings, metadata: Metadata) -> None:
        check_metadata(metadata)
        if self.records.models.get(model) is None:
            created: ModelEntry = {
                "about": settings,
                "user_metadata": metadata,
                "time": self.clock.now(),
            }
            self.records.models.put(model, created)

    def _load(self, queued: QueuedRequest, request: types.LoadWeightsRequest) -> Job:
        folder = self.weights.folder_of(request.path)
        # Number 0 makes the model by loading; a model's own numbers begin at 1.
        is_new = queued.seq == 0
        if is_new:
            saved_by, _, _ = names.parts_of(request.path)
            self._register(queued.target, self.model(saved_by)["about"], request.user_metadata)
        command = LoadWeights(
            queued.target,
            str(folder),
            with_optimizer=request.optimizer,
            settings=self.model(queued.target)["about"],
        )
        return Job(command, answer=_json(type="load_weights", model_id=queued.target))

    def _save(
        self,
        queued: QueuedRequest,
        request: types.SaveWeightsRequest | types.SaveWeightsForSamplerRequest,
    ) -> Job:
        is_state = isinstance(request, types.SaveWeightsRequest)
        kind = "weights" if is_state else SAMPLER_WEIGHTS
        overwrites = isinstance(request, types.SaveWeightsRequest) and request.overwrite
        uri = self.weights.name_new(queued.target, kind, request.path, queued.seq)
        self.weights.check_new(uri, queued.id, overwrites=overwrites)
        check_metadata(request.user_metadata)
        entry: CheckpointEntry = {
            "piece": queued.id,
            "time": self.clock.now(),
            "expires": self.weights.expiry(request.ttl_seconds),
            "user_metadata": request.user_metadata,
        }
        answer = _json(path=uri)
        if request.path is None:
            answer = _json(sampling_session_id=self._unnamed_sampler(queued, uri))
        folder = names.folder_below(self.weights.folder, *names.parts_of(uri))
        command = SaveWeights(queued.target, str(folder), with_optimizer=is_state)
        return Job(command, answer=answer, checkpoint=(uri, entry))

    def _unnamed_sampler(self, queued: QueuedRequest, uri: str) -> str:
        """Make the sampler of weights that a request saves without a name; returns its name."""
        sampler = unnamed_sampler(queued.target, queued.seq)
        self.records.samplers.put(sampler, {"path": uri, "time": self.clock.now()})
        self.weights.delete_idle(queued.target)
        return sampler

    # --- sampling ---

    def read_sample(self, queued: QueuedRequest) -> WantedSample:
        """A request for samples."""
        request = types.SampleRequest.model_validate_json(self.records.body(queued.id))
        sampler = self.records.samplers.get(queued.target)
        if sampler is None:
            raise UserError(f"There is no sampler {shown(queued.target)}.")
        path = sampler["path"]
        if path is not None:
            self.weights.folder_of(path)
            self.weights.note_sampling(path)
        number = 0 if path is not None else self.base_named(str(sampler.get("base")))
        base = self.bases[number]
        drawing, own = read_sample_request(queued.id, request, base.limits, base.images)
        return WantedSample(sampler, drawing, own)

    def samples_trained_base(self, sampler: str) -> bool:
        """Whether a sampler is of the base whose adapters are trained, with one or without."""
        entry = self.records.samplers.get(sampler)
        if entry is None:
            return False
        return entry["path"] is not None or entry.get("base") in self.bases[0].names

    def sampling(self, wanted: WantedSample) -> Sample:
        """The command of a request.

        Requests with the same weights and sampling settings may be added to it.
        """
        requests = (wanted.request,)
        path = wanted.sampler["path"]
        if path is None:
            base = self.base_named(str(wanted.base))
            return Sample(wanted.drawing, requests, base=base)
        folder = str(self.weights.folder_of(path))
        saved_by = self.weights.entry(path)["piece"]
        return Sample(wanted.drawing, requests, folder, saved_by)


def check_metadata(metadata: Metadata) -> None:
    """Raise UserError if metadata of a client is too large to keep, or is not JSON."""
    try:
        size = len(json.dumps(metadata, allow_nan=False))
    except (ValueError, RecursionError) as error:
        raise UserError(f"user_metadata is not JSON: {error}.") from error
    if size > _MAX_METADATA:
        raise UserError(
            f"user_metadata has {size:,} characters; at most {_MAX_METADATA:,} are kept."
        )


def _adam_params(request: types.OptimStepRequest) -> types.AdamParams:
    params = request.optim_params
    if not isinstance(params, types.AdamParams):
        raise UserError("Only AdamW is served.")
    values: dict[str, float] = params.model_dump()
    # Larger numbers become infinite in the float32 of the weights, or cannot be converted.
    is_finite = all(0 <= value <= _LARGEST for value in values.values())
    if not is_finite or max(params.beta1, params.beta2) >= 1:
        raise UserError(f"AdamW cannot take these parameters: {values}.")
    return params


def _json(**content: str) -> bytes:
    return json.dumps(content).encode()
