"""The web application of a service: Tinker's protocol over HTTP.

The protocol is the one of tinker's client, version 0.38. The application answers what needs no
model itself, hands the rest to the scheduler, and holds a client's question for a result until it
is there.
`access.py` is around it: what comes here is from an allowed client, whole and of bounded size.
"""

import asyncio
import contextlib
import json
import secrets
import sqlite3
from collections.abc import Awaitable, Callable
from typing import TypeGuard, TypeVar

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from fsdp_qlora.service.access import JSON, PROTOBUF
from fsdp_qlora.service.command_reader import REQUESTS, check_metadata
from fsdp_qlora.service.entries import CheckpointEntry, SamplerEntry, is_integer
from fsdp_qlora.service.names import has_form, parts_of, session_of
from fsdp_qlora.service.reasons import LONGEST_REASON, describe_invalid
from fsdp_qlora.service.records import DONE, WAITING, Entries, Entry, QueuedRequest
from fsdp_qlora.service.request_queue import Busy
from fsdp_qlora.service.scheduler import Scheduler
from fsdp_qlora.service.train_request import parse_train_request
from fsdp_qlora.service.wall_clock import date_of
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import shown

# Characters of a session's name for people.
_MAX_DISPLAYED = 1000
# Time for which a question for a result is held; the client waits for 45 s.
_HELD_SECONDS = 25.0
_NO_HEAD = "This service trains no adapter of the head: train_unembed is taken as false."
# Kind of saved weights in a tinker:// path -> type of a checkpoint in the protocol.
_CHECKPOINTS = {"weights": "training", "sampler_weights": "sampler"}


JsonObject = dict[str, object]
RequestType = TypeVar("RequestType", bound=BaseModel)


class PlainJSON(JSONResponse):
    """JSON of ASCII: a client's texts may have halves of surrogates, which UTF-8 has not."""

    def render(self, content: object) -> bytes:
        return json.dumps(content, ensure_ascii=True, allow_nan=False).encode()


class App:
    """The endpoints. They run in one thread; `wake` may be called in any."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.records = scheduler.records
        self.bases = scheduler.reader.bases
        self.trained = self.bases[0].names[0]
        self.api = FastAPI(
            title="fsdp_qlora",
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
            default_response_class=PlainJSON,
        )
        # Events of the results that clients wait for at this moment.
        self._waiting: dict[str, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        for error in (UserError, ValidationError):
            self.api.exception_handler(error)(_refused)
        self.api.exception_handler(sqlite3.Error)(_not_recorded)
        self.api.exception_handler(Busy)(_busy)
        self.api.exception_handler(404)(_not_served)
        post = self.api.post
        get = self.api.get
        prefix = "/api/v1"
        get(f"{prefix}/healthz")(lambda: {"status": "ok"})
        get(f"{prefix}/get_server_capabilities")(self.capabilities)
        for path in ("client/config", "telemetry"):
            post(f"{prefix}/{path}")(lambda: {"status": "accepted"})
        post(f"{prefix}/client/dynamic_config")(lambda: {"sample_cancel_enabled": True})
        for endpoint in (
            self.create_session,
            self.session_heartbeat,
            self.create_sampling_session,
            self.get_info,
            self.weights_info,
            self.retrieve_future,
            self.cancel_future,
            self.forward_backward,
            self.asample,
        ):
            post(f"{prefix}/{endpoint.__name__}")(endpoint)
        for kind in REQUESTS.keys() - {"asample"}:
            post(f"{prefix}/{kind}")(self._model_request(kind))
        post(f"{prefix}/sessions/{{session_id}}/finish")(self.finish_session)
        get(f"{prefix}/samplers/{{sampler_id}}")(self.sampler)
        get(f"{prefix}/training_runs")(self.training_runs)
        get(f"{prefix}/training_runs/{{model}}")(self.training_run)
        get(f"{prefix}/training_runs/{{model}}/checkpoints")(self.checkpoints)
        get(f"{prefix}/checkpoints")(self.checkpoints)
        self.api.delete(f"{prefix}/training_runs/{{model}}/checkpoints/{{part}}/{{name}}")(
            self.delete_checkpoint
        )
        self.api.put(f"{prefix}/training_runs/{{model}}/checkpoints/{{part}}/{{name}}/ttl")(
            self.set_ttl
        )

    def wake(self, name: str) -> None:
        """Wake the clients that wait for this request."""
        # asyncio's events belong to the thread of their loop.
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._set, name)

    def _set(self, name: str) -> None:
        event = self._waiting.get(name)
        if event:
            event.set()

    # --- sessions and models ---

    def capabilities(self) -> JsonObject:
        # Adapters are trained on the first base; others are as they are.
        supported = [
            {
                "model_name": base.names[0],
                "max_context_length": base.limits.context_length,
                "sampleable": True,
                "trainable": number == 0,
            }
            for number, base in enumerate(self.bases)
        ]
        return {"supported_models": supported}

    async def create_session(self, request: Request) -> JsonObject:
        asked = await _read(request, types.CreateSessionRequest)
        check_metadata(asked.user_metadata)
        if len(asked.display_name or "") > _MAX_DISPLAYED:
            raise UserError(f"display_name has more than {_MAX_DISPLAYED:,} characters.")
        session = self.scheduler.sessions.create(asked.user_metadata, asked.display_name)
        return {"session_id": session, "warning_message": _NO_HEAD}

    async def session_heartbeat(self, request: Request) -> JsonObject:
        self._known_session((await _read(request, types.SessionHeartbeatRequest)).session_id)
        return {"type": "session_heartbeat"}

    async def finish_session(self, session_id: str) -> JsonObject:
        entry = self._known(self.records.sessions, session_id)
        self.scheduler.sessions.note_end(session_id, entry)
        return {}

    async def create_sampling_session(self, request: Request) -> JsonObject:
        asked = await _read(request, types.CreateSamplingSessionRequest)
        self._known_session(asked.session_id)
        name = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        if not has_form("sampler", name):
            raise UserError("sampling_session_seq_id is a number, 0 or more and below 10^19.")
        self.records.samplers.put(name, self._sampled(asked.model_path, asked.base_model))
        return {"sampling_session_id": name}

    def _sampled(self, path: object, base: object) -> SamplerEntry:
        """The entry of a sampler of saved weights, or of a base as it is.

        Raises UserError if there are none.
        """
        now = self.scheduler.clock.now()
        if path is not None:
            self.scheduler.weights.entry(str(path))
            return {"path": str(path), "time": now}
        self.scheduler.reader.base_named(str(base))
        return {"path": None, "base": str(base), "time": now}

    async def get_info(self, request: Request) -> JsonObject:
        model = (await _read(request, types.GetInfoRequest)).model_id
        settings = self._known(self.records.models, model)["about"]
        data = {
            "arch": "decoder",
            "model_name": self.trained,
            "tokenizer_id": self.bases[0].tokenizer,
        }
        return {
            "model_id": model,
            "model_data": data,
            "is_lora": True,
            "lora_rank": settings["rank"],
        }

    async def weights_info(self, request: Request) -> JsonObject:
        path = str((await _read_json(request)).get("tinker_path"))
        self.scheduler.weights.entry(path)
        model, _, _ = parts_of(path)
        settings = self._known(self.records.models, model)["about"]
        return {
            "base_model": self.trained,
            "is_lora": True,
            "train_unembed": False,
            "lora_rank": settings["rank"],
            "train_attn": settings["train_attn"],
            "train_mlp": settings["train_mlp"],
        }

    def _known(self, entries: Entries[Entry], name: object) -> Entry:
        """The entry of that name.

        Each name of a request comes through here, or is made of one that has.
        """
        entry = entries.get(str(name)) if has_form(entries.kind, name) else None
        if entry is None:
            raise HTTPException(404, f"There is no {entries.kind} {shown(name)}.")
        return entry

    def _known_session(self, name: object) -> None:
        """Check that the session exists, and record that it is in use."""
        entry = self._known(self.records.sessions, name)
        self.scheduler.sessions.note_use(str(name), entry)

    # --- work ---

    def _model_request(self, kind: str) -> Callable[[Request], Awaitable[JsonObject]]:
        """The endpoint of a request that a model's ranks work on.

        The scheduler checks the request.
        """

        async def endpoint(request: Request) -> JsonObject:
            content = await _read_json(request)
            body = await request.body()
            # load_weights without a model makes one, as create_model does.
            makes_model = kind == "create_model" or (
                kind == "load_weights" and content.get("model_id") is None
            )
            if makes_model:
                self._known_session(content.get("session_id"))
                number = content.get("model_seq_id")
                if not _is_number(number):
                    raise UserError(
                        f"model_seq_id is a number, 0 or more, and not {shown(number)}."
                    )
                # The model's name is its session's and number, so that a repeated request makes no
                # second one.
                return self._submit(kind, f"{content['session_id']}:train:{number}", 0, body)
            return self._submit_to_model(kind, content.get("model_id"), content.get("seq_id"), body)

        return endpoint

    async def forward_backward(self, request: Request) -> JsonObject:
        body = await request.body()
        message = parse_train_request(body)
        kind = "forward_backward"
        return self._submit_to_model(kind, message.model_id, message.seq_id, body, message)

    def _submit_to_model(
        self,
        kind: str,
        model: object,
        seq: object,
        body: bytes,
        message: pb.ForwardBackwardRequest | None = None,
    ) -> JsonObject:
        """Queue a request for a model that its client has made, by number 0."""
        if not self._is_made(model):
            raise HTTPException(404, f"There is no model {shown(model)}.")
        self._known_session(session_of(model))
        if seq == 0:
            raise UserError("Number 0 is the request that makes the model; others begin at 1.")
        return self._submit(kind, model, seq, body, message)

    def _is_made(self, model: object) -> TypeGuard[str]:
        """Whether a model exists, or the request that makes it has come."""
        if not has_form("model", model):
            return False
        if self.records.models.get(str(model)) is not None:
            return True
        # Clients send the next requests without waiting for the answer.
        return self.scheduler.results.get(f"{model}:0") is not None

    async def asample(self, request: Request) -> JsonObject:
        content = await _read_json(request)
        body = await request.body()
        sampler = content.get("sampling_session_id")
        seq = content.get("seq_id")
        # A single request brings its weights along, and gets a sampler of its own.
        if sampler is None:
            sampler = f"direct:{secrets.token_hex(16)}"
            seq = 0
            weights = self._sampled(content.get("model_path"), content.get("base_model"))
            self.records.samplers.put(str(sampler), weights)
        self._known(self.records.samplers, sampler)
        number = content.get("num_samples", 1)
        answer = self._submit("asample", str(sampler), seq, body)
        # The request is checked when its turn comes; here a wrong number must only do no harm.
        count = number if isinstance(number, int) and 0 < number < 2**12 else 1
        names = [f"{answer['request_id']}:{sample}" for sample in range(count)]
        return answer | {"sample_sequence_ids": names}

    def _submit(
        self,
        kind: str,
        target: str,
        seq: object,
        body: bytes,
        message: pb.ForwardBackwardRequest | None = None,
    ) -> JsonObject:
        """Queue a request for a model or sampler. message: the body, where it is protobuf."""
        if not _is_number(seq) or not has_form("request", f"{target}:{seq}"):
            raise UserError(
                "The request does not say for which model or sampler it is, and which "
                "of its requests."
            )
        queued = QueuedRequest(f"{target}:{seq}", target, seq, kind, len(body))
        self.scheduler.submit(queued, body, message)
        return {"request_id": queued.id, "model_id": target}

    async def retrieve_future(self, request: Request) -> Response:
        name = (await _read(request, types.FutureRetrieveRequest)).request_id
        found = self.scheduler.results.get(name) if has_form("request", name) else None
        if found is not None and found[0] == WAITING:
            found = await self._wait_for(name)
        if found is None:
            raise HTTPException(404, f"There is no request {shown(name)}.")
        state, result = found
        if state == WAITING:
            return PlainJSON(
                {"type": "try_again", "request_id": name, "queue_state": "active"}, 408
            )
        # Errors and some results are JSON; the others are messages of protobuf.
        is_binary = state == DONE and not result.startswith(b"{")
        return Response(result, media_type=PROTOBUF if is_binary else JSON)

    async def _wait_for(self, name: str) -> tuple[str, bytes] | None:
        """The state and result of a request, when it has a result or the client has waited for
        long.
        """
        self._loop = asyncio.get_running_loop()
        event = self._waiting.setdefault(name, asyncio.Event())
        try:
            # It may have come before the event was there.
            found = self.scheduler.results.get(name)
            if found is not None and found[0] == WAITING:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), _HELD_SECONDS)
                found = self.scheduler.results.get(name)
            return found
        finally:
            # Also where the client has gone or the records cannot be read: a client that never
            # comes back must not leave an event behind.
            if self._waiting.get(name) is event:
                del self._waiting[name]
                # Others that wait for the same ask once more.
                event.set()

    async def cancel_future(self, request: Request) -> JsonObject:
        self.scheduler.cancel(str((await _read_json(request)).get("request_id")))
        return {}

    # --- what there is ---

    def sampler(self, sampler_id: str) -> JsonObject:
        entry = self._known(self.records.samplers, sampler_id)
        return {
            "sampler_id": sampler_id,
            "base_model": entry.get("base", self.trained),
            "model_path": entry["path"],
        }

    def training_runs(self, limit: int = 20, offset: int = 0) -> JsonObject:
        names = [name for name, _ in self.records.models.find() if has_form("model", name)]
        cursor = {"offset": offset, "limit": limit, "total_count": len(names)}
        return {
            "training_runs": [self.training_run(name) for name in names[offset : offset + limit]],
            "cursor": cursor,
        }

    def training_run(self, model: str) -> JsonObject:
        entry = self._known(self.records.models, model)
        saved = self._checkpoints(model)
        last: dict[object, object] = dict.fromkeys(_CHECKPOINTS.values())
        for each in saved:
            last[each["checkpoint_type"]] = each
        return {
            "training_run_id": model,
            "base_model": self.trained,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": entry["about"]["rank"],
            "last_request_time": date_of(entry["time"]),
            "last_checkpoint": last["training"],
            "last_sampler_checkpoint": last["sampler"],
            "user_metadata": entry["user_metadata"],
        }

    def checkpoints(self, model: str = "", limit: int = 2**31, offset: int = 0) -> JsonObject:
        if model:
            self._known(self.records.models, model)
        return {"checkpoints": self._checkpoints(model)[offset : offset + limit]}

    def _checkpoints(self, model: str) -> list[JsonObject]:
        return [
            self._checkpoint(uri, entry) for uri, entry in self.scheduler.weights.of_model(model)
        ]

    @staticmethod
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

    def delete_checkpoint(self, model: str, part: str, name: str) -> JsonObject:
        self.scheduler.weights.delete(f"tinker://{model}/{part}/{name}")
        return {}

    async def set_ttl(self, model: str, part: str, name: str, request: Request) -> JsonObject:
        content = await _read_json(request)
        self.scheduler.weights.set_expiry(
            f"tinker://{model}/{part}/{name}", content.get("ttl_seconds")
        )
        return {}


def _is_number(value: object) -> TypeGuard[int]:
    """Whether a request may count with it: SQLite's integers have 64 bits."""
    return is_integer(value) and 0 <= value < 2**62


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


def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, ValidationError):
        return _error(400, describe_invalid(error))
    return _error(400, str(error))


def _busy(request: Request, error: Exception) -> Response:
    return _error(429, str(error))


def _not_recorded(request: Request, error: Exception) -> Response:
    """The request was not taken; its client asks again."""
    return _error(503, f"The service's folder cannot be read or written now ({error}).")


def _not_served(request: Request, error: Exception) -> Response:
    """Name what was asked for, or the endpoint that is not there."""
    # "Not Found" is Starlette's own text for a path without an endpoint.
    detail = error.detail if isinstance(error, HTTPException) else "Not Found"
    if detail == "Not Found":
        return _error(404, f"{shown(request.url.path)} is not served.")
    return _error(404, str(detail))


def _error(status: int, reason: str) -> Response:
    return PlainJSON({"error": reason[:LONGEST_REASON], "category": "user"}, status)
