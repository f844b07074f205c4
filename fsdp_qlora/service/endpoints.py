"""The endpoints of a service: Tinker's protocol over HTTP, as the client tinker 0.38 has it.

They answer what needs no model themselves, and hand the rest to the scheduler.
"""

import json
import secrets
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from pydantic import BaseModel
from tinker import types

from fsdp_qlora.service.access import JSON, PROTOBUF
from fsdp_qlora.service.client_requests import ClientRequests, JsonObject, is_number
from fsdp_qlora.service.command_reader import check_metadata
from fsdp_qlora.service.entries import CheckpointEntry
from fsdp_qlora.service.names import has_form, parts_of
from fsdp_qlora.service.plain_json import PlainJSON
from fsdp_qlora.service.records import DONE, WAITING
from fsdp_qlora.service.train_request import parse_train_request
from fsdp_qlora.service.wall_clock import date_of
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import shown

# Characters of a session's name for people.
_MAX_DISPLAYED = 1000
_NO_HEAD = "This service trains no adapter of the head: train_unembed is taken as false."
# Kind of saved weights in a tinker:// path -> type of a checkpoint in the protocol.
_CHECKPOINTS = {"weights": "training", "sampler_weights": "sampler"}

RequestType = TypeVar("RequestType", bound=BaseModel)

router = APIRouter(prefix="/api/v1")


# Asynchronous, as FastAPI calls other functions in a thread of their own.
async def _service(request: Request) -> ClientRequests:
    requests: ClientRequests = request.app.state.requests
    return requests


Service = Annotated[ClientRequests, Depends(_service)]


@router.get("/healthz")
def healthz() -> JsonObject:
    return {"status": "ok"}


@router.post("/client/config")
@router.post("/telemetry")
def accept() -> JsonObject:
    """Accept what this service has no use for."""
    return {"status": "accepted"}


@router.post("/client/dynamic_config")
def dynamic_config() -> JsonObject:
    return {"sample_cancel_enabled": True}


@router.get("/get_server_capabilities")
def capabilities(service: Service) -> JsonObject:
    # Adapters are trained on the first base; others are as they are.
    supported = [
        {
            "model_name": base.names[0],
            "max_context_length": base.limits.context_length,
            "sampleable": True,
            "trainable": number == 0,
        }
        for number, base in enumerate(service.bases)
    ]
    return {"supported_models": supported}


# --- sessions and models ---


@router.post("/create_session")
async def create_session(request: Request, service: Service) -> JsonObject:
    asked = await _read(request, types.CreateSessionRequest)
    check_metadata(asked.user_metadata)
    if len(asked.display_name or "") > _MAX_DISPLAYED:
        raise UserError(f"display_name has more than {_MAX_DISPLAYED:,} characters.")
    session = service.scheduler.sessions.create(asked.user_metadata, asked.display_name)
    return {"session_id": session, "warning_message": _NO_HEAD}


@router.post("/session_heartbeat")
async def session_heartbeat(request: Request, service: Service) -> JsonObject:
    service.known_session((await _read(request, types.SessionHeartbeatRequest)).session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish_session(session_id: str, service: Service) -> JsonObject:
    entry = service.known(service.records.sessions, session_id)
    service.scheduler.sessions.note_end(session_id, entry)
    return {}


@router.post("/create_sampling_session")
async def create_sampling_session(request: Request, service: Service) -> JsonObject:
    asked = await _read(request, types.CreateSamplingSessionRequest)
    service.known_session(asked.session_id)
    name = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
    if not has_form("sampler", name):
        raise UserError("sampling_session_seq_id is a number, 0 or more and below 10^19.")
    service.records.samplers.put(name, service.sampler_entry(asked.model_path, asked.base_model))
    return {"sampling_session_id": name}


@router.post("/get_info")
async def get_info(request: Request, service: Service) -> JsonObject:
    model = (await _read(request, types.GetInfoRequest)).model_id
    settings = service.known(service.records.models, model)["about"]
    data = {
        "arch": "decoder",
        "model_name": service.trained,
        "tokenizer_id": service.bases[0].tokenizer,
    }
    return {
        "model_id": model,
        "model_data": data,
        "is_lora": True,
        "lora_rank": settings["rank"],
    }


@router.post("/weights_info")
async def weights_info(request: Request, service: Service) -> JsonObject:
    path = str((await _read_json(request)).get("tinker_path"))
    service.scheduler.weights.entry(path)
    model, _, _ = parts_of(path)
    settings = service.known(service.records.models, model)["about"]
    return {
        "base_model": service.trained,
        "is_lora": True,
        "train_unembed": False,
        "lora_rank": settings["rank"],
        "train_attn": settings["train_attn"],
        "train_mlp": settings["train_mlp"],
    }


# --- work of the ranks ---


@router.post("/create_model")
async def create_model(request: Request, service: Service) -> JsonObject:
    content = await _read_json(request)
    return _make_model("create_model", content, await request.body(), service)


@router.post("/load_weights")
async def load_weights(request: Request, service: Service) -> JsonObject:
    content = await _read_json(request)
    body = await request.body()
    # Without a model the request makes one, from saved weights.
    if content.get("model_id") is None:
        return _make_model("load_weights", content, body, service)
    return _submit_to_model("load_weights", content, body, service)


def _make_model(kind: str, content: JsonObject, body: bytes, service: ClientRequests) -> JsonObject:
    """Queue the request that makes a model."""
    service.known_session(content.get("session_id"))
    number = content.get("model_seq_id")
    if not is_number(number):
        raise UserError(f"model_seq_id is a number, 0 or more, and not {shown(number)}.")
    # The model's name is its session's and number, so that a repeated request makes no second one.
    model = f"{content['session_id']}:train:{number}"
    return service.submit(kind, model, 0, body)


@router.post("/optim_step")
async def optim_step(request: Request, service: Service) -> JsonObject:
    return await _hand_to_model("optim_step", request, service)


@router.post("/save_weights")
async def save_weights(request: Request, service: Service) -> JsonObject:
    return await _hand_to_model("save_weights", request, service)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(request: Request, service: Service) -> JsonObject:
    return await _hand_to_model("save_weights_for_sampler", request, service)


@router.post("/save_weights_external")
async def save_weights_external(request: Request, service: Service) -> JsonObject:
    return await _hand_to_model("save_weights_external", request, service)


async def _hand_to_model(kind: str, request: Request, service: ClientRequests) -> JsonObject:
    """Read and queue a request of a model; the scheduler checks it."""
    content = await _read_json(request)
    return _submit_to_model(kind, content, await request.body(), service)


def _submit_to_model(
    kind: str, content: JsonObject, body: bytes, service: ClientRequests
) -> JsonObject:
    return service.submit_to_model(kind, content.get("model_id"), content.get("seq_id"), body)


@router.post("/forward_backward")
async def forward_backward(request: Request, service: Service) -> JsonObject:
    body = await request.body()
    message = parse_train_request(body)
    kind = "forward_backward"
    return service.submit_to_model(kind, message.model_id, message.seq_id, body, message)


@router.post("/asample")
async def asample(request: Request, service: Service) -> JsonObject:
    content = await _read_json(request)
    body = await request.body()
    sampler = content.get("sampling_session_id")
    seq = content.get("seq_id")
    # A single request brings its weights along, and gets a sampler of its own.
    if sampler is None:
        sampler = f"direct:{secrets.token_hex(16)}"
        seq = 0
        weights = service.sampler_entry(content.get("model_path"), content.get("base_model"))
        service.records.samplers.put(str(sampler), weights)
    service.known(service.records.samplers, sampler)
    number = content.get("num_samples", 1)
    answer = service.submit("asample", str(sampler), seq, body)
    # The request is checked when its turn comes; here a wrong number must only do no harm.
    count = number if isinstance(number, int) and 0 < number < 2**12 else 1
    names = [f"{answer['request_id']}:{sample}" for sample in range(count)]
    return answer | {"sample_sequence_ids": names}


@router.post("/retrieve_future")
async def retrieve_future(request: Request, service: Service) -> Response:
    name = (await _read(request, types.FutureRetrieveRequest)).request_id
    found = service.scheduler.results.get(name) if has_form("request", name) else None
    if found is not None and found[0] == WAITING:
        found = await service.waiting.wait_for(name)
    if found is None:
        raise HTTPException(404, f"There is no request {shown(name)}.")
    state, result = found
    if state == WAITING:
        return PlainJSON({"type": "try_again", "request_id": name, "queue_state": "active"}, 408)
    # Errors and some results are JSON; the others are messages of protobuf.
    is_binary = state == DONE and not result.startswith(b"{")
    return Response(result, media_type=PROTOBUF if is_binary else JSON)


@router.post("/cancel_future")
async def cancel_future(request: Request, service: Service) -> JsonObject:
    service.scheduler.cancel(str((await _read_json(request)).get("request_id")))
    return {}


# --- what there is ---


@router.get("/samplers/{sampler_id}")
def sampler(sampler_id: str, service: Service) -> JsonObject:
    entry = service.known(service.records.samplers, sampler_id)
    return {
        "sampler_id": sampler_id,
        "base_model": entry.get("base", service.trained),
        "model_path": entry["path"],
    }


@router.get("/training_runs")
def training_runs(service: Service, limit: int = 20, offset: int = 0) -> JsonObject:
    names = [name for name, _ in service.records.models.find() if has_form("model", name)]
    cursor = {"offset": offset, "limit": limit, "total_count": len(names)}
    return {
        "training_runs": [training_run(name, service) for name in names[offset : offset + limit]],
        "cursor": cursor,
    }


@router.get("/training_runs/{model}")
def training_run(model: str, service: Service) -> JsonObject:
    entry = service.known(service.records.models, model)
    saved = _checkpoints(service, model)
    last: dict[object, object] = dict.fromkeys(_CHECKPOINTS.values())
    for each in saved:
        last[each["checkpoint_type"]] = each
    return {
        "training_run_id": model,
        "base_model": service.trained,
        "model_owner": "local",
        "is_lora": True,
        "lora_rank": entry["about"]["rank"],
        "last_request_time": date_of(entry["time"]),
        "last_checkpoint": last["training"],
        "last_sampler_checkpoint": last["sampler"],
        "user_metadata": entry["user_metadata"],
    }


@router.get("/training_runs/{model}/checkpoints")
@router.get("/checkpoints")
def checkpoints(
    service: Service, model: str = "", limit: int = 2**31, offset: int = 0
) -> JsonObject:
    if model:
        service.known(service.records.models, model)
    return {"checkpoints": _checkpoints(service, model)[offset : offset + limit]}


def _checkpoints(service: ClientRequests, model: str) -> list[JsonObject]:
    saved = service.scheduler.weights.of_model(model)
    return [_checkpoint(uri, entry) for uri, entry in saved]


def _checkpoint(uri: str, entry: CheckpointEntry) -> JsonObject:
    _, kind, name = parts_of(uri)
    return {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": _CHECKPOINTS[kind],
        "time": date_of(entry["time"]),
        "tinker_path": uri,
        "user_metadata": entry["user_metadata"],
        "expires_at": date_of(entry["expires"]) if entry["expires"] else None,
    }


@router.delete("/training_runs/{model}/checkpoints/{part}/{name}")
def delete_checkpoint(model: str, part: str, name: str, service: Service) -> JsonObject:
    service.scheduler.weights.delete(f"tinker://{model}/{part}/{name}")
    return {}


@router.put("/training_runs/{model}/checkpoints/{part}/{name}/ttl")
async def set_ttl(
    model: str, part: str, name: str, request: Request, service: Service
) -> JsonObject:
    content = await _read_json(request)
    service.scheduler.weights.set_expiry(
        f"tinker://{model}/{part}/{name}", content.get("ttl_seconds")
    )
    return {}


async def _read(request: Request, kind: type[RequestType]) -> RequestType:
    return kind.model_validate_json(await request.body())


async def _read_json(request: Request) -> JsonObject:
    try:
        content = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise UserError("The body is not JSON.") from error
    if not isinstance(content, dict):
        raise UserError("The body is not a JSON object.")
    return content
