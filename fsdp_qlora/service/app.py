"""The web server of a service: Tinker's protocol over HTTP, as its client speaks it (tinker 0.38).

It answers what needs no model itself, hands the rest to the desk, and holds a client's question for a result until the
result is there.
"""

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from tinker import types

from fsdp_qlora.service.desk import REQUESTS, Desk, describe_invalid
from fsdp_qlora.service.messages import parse_train_request
from fsdp_qlora.service.records import DONE, WAITING, Piece
from fsdp_qlora.utils.errors import UserError

MOST_BYTES = 2**26  # of a request; the client sends 5 MB at a time
_HELD_SECONDS = 25.0  # a question for a result; the client waits 45
_PROTOBUF = "application/x-protobuf"
_NO_HEAD = "This service trains no adapter of the head: train_unembed is taken as false."
_CHECKPOINTS = {"weights": "training", "sampler_weights": "sampler"}


class App:
    """The endpoints. They run in one thread; `wake` may be called in any. api_key: that requests must have."""

    def __init__(self, desk: Desk, api_key: str | None) -> None:
        self.desk, self.records, self.api_key = desk, desk.records, api_key
        self.trained = desk.bases[0].names[0]
        self.api = FastAPI(title="fsdp_qlora", docs_url=None, redoc_url=None, openapi_url=None)
        self._waiting: dict[str, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.api.middleware("http")(self._guard)
        for error in (UserError, ValidationError):
            self.api.exception_handler(error)(_refused)
        post, get, prefix = self.api.post, self.api.get, "/api/v1"
        get(f"{prefix}/healthz")(lambda: {"status": "ok"})
        get(f"{prefix}/get_server_capabilities")(self.capabilities)
        for path in ("client/config", "telemetry"):
            post(f"{prefix}/{path}")(lambda: {"status": "accepted"})
        post(f"{prefix}/client/dynamic_config")(lambda: {"sample_cancel_enabled": True})
        for endpoint in (
            self.create_session, self.session_heartbeat, self.create_sampling_session, self.get_info, self.weights_info,
            self.retrieve_future, self.cancel_future, self.forward_backward, self.asample,
        ):  # fmt: skip
            post(f"{prefix}/{endpoint.__name__}")(endpoint)
        for kind in REQUESTS.keys() - {"asample"}:
            post(f"{prefix}/{kind}")(self._model_piece(kind))
        post(f"{prefix}/sessions/{{session_id}}/finish")(lambda session_id: {})
        get(f"{prefix}/samplers/{{sampler_id}}")(self.sampler)
        get(f"{prefix}/training_runs")(self.training_runs)
        get(f"{prefix}/training_runs/{{model}}")(self.training_run)
        get(f"{prefix}/training_runs/{{model}}/checkpoints")(self.checkpoints)
        get(f"{prefix}/checkpoints")(self.checkpoints)
        self.api.delete(f"{prefix}/training_runs/{{model}}/checkpoints/{{part}}/{{name}}")(self.delete_checkpoint)
        self.api.put(f"{prefix}/training_runs/{{model}}/checkpoints/{{part}}/{{name}}/ttl")(self.set_ttl)

        self.api.exception_handler(404)(_not_served)

    def wake(self, name: str) -> None:
        """Let the clients go on that wait for this piece."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: self._waiting.get(name, asyncio.Event()).set())

    async def _guard(self, request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        self._loop = asyncio.get_running_loop()
        key, given = self.api_key, request.headers.get("x-api-key", "")
        if key and not hmac.compare_digest(given.encode(), key.encode()):
            return _error(401, "The key in X-API-Key is missing or wrong.")
        size = request.headers.get("content-length", "0" if request.method in ("GET", "DELETE") else "")
        if not size.isdigit() or int(size) > MOST_BYTES:
            return _error(413, f"A request needs a Content-Length of at most {MOST_BYTES:,} bytes.")
        return await call_next(request)

    # --- sessions and models ---

    def capabilities(self) -> dict[str, Any]:
        named = [(names[0], limits.context_length) for names, _, limits in self.desk.bases]
        about = [{"model_name": name, "max_context_length": length, "sampleable": True} for name, length in named]
        return {"supported_models": [{**each, "trainable": not number} for number, each in enumerate(about)]}

    async def create_session(self, request: Request) -> dict[str, Any]:
        asked = await _read(request, types.CreateSessionRequest)
        session = secrets.token_hex(16)
        about = {"user_metadata": asked.user_metadata, "display_name": asked.display_name, "time": time.time()}
        self.records.put("session", session, about)
        return {"session_id": session, "warning_message": _NO_HEAD}

    async def session_heartbeat(self, request: Request) -> dict[str, Any]:
        self._known("session", (await _read(request, types.SessionHeartbeatRequest)).session_id)
        return {"type": "session_heartbeat"}

    async def create_sampling_session(self, request: Request) -> dict[str, Any]:
        asked = await _read(request, types.CreateSamplingSessionRequest)
        self._known("session", asked.session_id)
        name = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        self.records.put("sampler", name, self._weights(asked.model_path, asked.base_model))
        return {"sampling_session_id": name}

    def _weights(self, path: str | None, base: str | None) -> dict[str, Any]:
        """The saved weights to sample from, or a base as it is. Raises UserError if there are none."""
        if path is not None:
            self.desk.path_of(path)
            return {"path": path}
        self.desk.base_named(str(base))
        return {"path": None, "base": base}

    async def get_info(self, request: Request) -> dict[str, Any]:
        model = (await _read(request, types.GetInfoRequest)).model_id
        about = self._known("model", model)["about"]
        data = {"arch": "decoder", "model_name": self.trained, "tokenizer_id": self.desk.bases[0].tokenizer}
        return {"model_id": model, "model_data": data, "is_lora": True, "lora_rank": about["rank"]}

    async def weights_info(self, request: Request) -> dict[str, Any]:
        path = str((await _read_json(request)).get("tinker_path"))
        self.desk.path_of(path)
        about = self._known("model", path.split("/")[2])["about"]
        adapter = {"lora_rank": about["rank"], "train_attn": about["train_attn"], "train_mlp": about["train_mlp"]}
        return {"base_model": self.trained, "is_lora": True, "train_unembed": False, **adapter}

    def _known(self, kind: str, name: str) -> dict[str, Any]:
        if (about := self.records.get(kind, name)) is None:
            raise HTTPException(404, f"There is no {kind} {name[:200]!r}.")
        return about

    # --- work ---

    def _model_piece(self, kind: str) -> Callable[[Request], Awaitable[dict[str, Any]]]:
        """The endpoint of a request that a model's ranks work on. The desk finds what is wrong with it."""

        async def endpoint(request: Request) -> dict[str, Any]:
            content = await _read_json(request)
            model, seq = content.get("model_id"), content.get("seq_id")
            if kind == "create_model" or (kind == "load_weights" and model is None):
                self._known("session", str(content.get("session_id")))
                model, seq = f"{content['session_id']}:train:{content.get('model_seq_id')}", 0
            return self._submit(kind, model, seq, await request.body())

        return endpoint

    async def forward_backward(self, request: Request) -> dict[str, Any]:
        body = await request.body()
        message = parse_train_request(body)
        return self._submit("forward_backward", message.model_id, message.seq_id, body)

    async def asample(self, request: Request) -> dict[str, Any]:
        content, body = await _read_json(request), await request.body()
        sampler, seq = content.get("sampling_session_id"), content.get("seq_id")
        if sampler is None:
            sampler, seq = f"direct:{secrets.token_hex(16)}", 0
            weights = self._weights(content.get("model_path"), content.get("base_model"))
            self.records.put("sampler", sampler, weights)
        number = content.get("num_samples", 1)
        answer = self._submit("asample", sampler, seq, body)
        count = number if isinstance(number, int) and 0 < number < 2**12 else 1
        return {**answer, "sample_sequence_ids": [f"{answer['request_id']}:{sample}" for sample in range(count)]}

    def _submit(self, kind: str, target: Any, seq: Any, body: bytes) -> dict[str, Any]:
        if not isinstance(target, str) or not isinstance(seq, int) or not 0 <= seq < 2**62 or len(target) > 200:
            raise UserError("The request does not say for which model or sampler it is, and which of its requests.")
        self._known("sampler", target) if kind == "asample" else None
        if kind not in ("create_model", "asample") and seq > 0:
            self._known_or_asked(target)
        piece = Piece(f"{target}:{seq}", target, seq, kind, body)
        self.desk.submit(piece)
        return {"request_id": piece.id, "model_id": target}

    def _known_or_asked(self, model: str) -> None:
        if self.records.result(f"{model}:0") is None:
            raise HTTPException(404, f"There is no model {model[:200]!r}.")

    async def retrieve_future(self, request: Request) -> Response:
        name = (await _read(request, types.FutureRetrieveRequest)).request_id
        found = self.records.result(name)
        if found is not None and found[0] == WAITING:
            waiting = self._waiting.setdefault(name, asyncio.Event())
            found = self.records.result(name)  # it may have come meanwhile
            if found is not None and found[0] == WAITING:
                try:
                    await asyncio.wait_for(waiting.wait(), _HELD_SECONDS)
                except TimeoutError:
                    again = {"type": "try_again", "request_id": name, "queue_state": "active"}
                    return JSONResponse(again, 408)
                found = self.records.result(name)
            self._waiting.pop(name, None)
        if found is None:
            raise HTTPException(404, f"There is no request {name[:200]!r}.")
        state, result = found
        is_binary = state == DONE and not result.startswith(b"{")
        return Response(result, media_type=_PROTOBUF if is_binary else "application/json")

    async def cancel_future(self, request: Request) -> dict[str, Any]:
        self.desk.cancel(str((await _read_json(request)).get("request_id")))
        return {}

    # --- what there is ---

    def sampler(self, sampler_id: str) -> dict[str, Any]:
        about = self._known("sampler", sampler_id)
        return {"sampler_id": sampler_id, "base_model": about.get("base", self.trained), "model_path": about["path"]}

    def training_runs(self, limit: int = 20, offset: int = 0) -> dict[str, Any]:
        names = [name for name, _ in self.records.find("model")]
        cursor = {"offset": offset, "limit": limit, "total_count": len(names)}
        return {"training_runs": [self.training_run(name) for name in names[offset : offset + limit]], "cursor": cursor}

    def training_run(self, model: str) -> dict[str, Any]:
        about, saved = self._known("model", model), self._checkpoints(model)
        last = {
            kind: next((each for each in reversed(saved) if each["checkpoint_type"] == kind), None)
            for kind in _CHECKPOINTS.values()
        }
        return {
            **{"training_run_id": model, "base_model": self.trained, "model_owner": "local", "is_lora": True},
            **{"lora_rank": about["about"]["rank"], "last_request_time": _date(about["time"])},
            **{"last_checkpoint": last["training"], "last_sampler_checkpoint": last["sampler"]},
            "user_metadata": about["user_metadata"],
        }

    def checkpoints(self, model: str = "", limit: int = 2**31, offset: int = 0) -> dict[str, Any]:
        return {"checkpoints": self._checkpoints(model)[offset : offset + limit]}

    def _checkpoints(self, model: str) -> list[dict[str, Any]]:
        return [
            {
                **{"checkpoint_id": "/".join(uri.split("/")[3:]), "checkpoint_type": _CHECKPOINTS[uri.split("/")[3]]},
                **{"time": _date(about["time"]), "tinker_path": uri, "user_metadata": about["user_metadata"]},
                "expires_at": _date(about["expires"]) if about["expires"] else None,
            }
            for uri, about in self.records.find("checkpoint")
            if model in ("", uri.split("/")[2])
        ]

    def delete_checkpoint(self, model: str, part: str, name: str) -> dict[str, Any]:
        self.desk.delete(f"tinker://{model}/{part}/{name}")
        return {}

    async def set_ttl(self, model: str, part: str, name: str, request: Request) -> dict[str, Any]:
        uri, seconds = f"tinker://{model}/{part}/{name}", (await _read_json(request)).get("ttl_seconds")
        about = self._known("checkpoint", uri)
        expires = time.time() + seconds if isinstance(seconds, int) else None
        self.records.put("checkpoint", uri, {**about, "expires": expires})
        return {}


async def _read(request: Request, kind: type[Any]) -> Any:
    return kind.model_validate_json(await request.body())


async def _read_json(request: Request) -> dict[str, Any]:
    try:
        content = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise UserError("The body is no JSON.") from error
    if not isinstance(content, dict):
        raise UserError("The body is no JSON object.")
    return content


def _refused(request: Request, error: Exception) -> Response:
    return _error(400, describe_invalid(error) if isinstance(error, ValidationError) else str(error))


def _not_served(request: Request, error: Any) -> Response:
    """Name what was asked for, or the endpoint that is not there."""
    is_endpoint = error.detail == "Not Found"
    return _error(404, f"{request.url.path[:200]} is not served." if is_endpoint else str(error.detail))


def _error(status: int, reason: str) -> Response:
    return JSONResponse({"error": reason, "category": "user"}, status)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
