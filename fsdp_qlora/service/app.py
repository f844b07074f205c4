"""The web application of a service: its endpoints, and the answers to requests that fail.

`access.py` is around it: what comes here is from an allowed client, whole and of bounded size.
"""

import sqlite3

from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import ValidationError

from fsdp_qlora.service import endpoints
from fsdp_qlora.service.client_requests import ClientRequests
from fsdp_qlora.service.plain_json import PlainJSON
from fsdp_qlora.service.reasons import LONGEST_REASON, describe_invalid
from fsdp_qlora.service.request_queue import Busy
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import shown


def make_app(requests: ClientRequests) -> FastAPI:
    """The application for these requests. It runs in one thread."""
    app = FastAPI(
        title="fsdp_qlora",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        default_response_class=PlainJSON,
    )
    app.state.requests = requests
    app.include_router(endpoints.router)

    @app.exception_handler(UserError)
    def refuse(request: Request, error: UserError) -> Response:
        return _error(400, str(error))

    @app.exception_handler(ValidationError)
    def refuse_invalid(request: Request, error: ValidationError) -> Response:
        return _error(400, describe_invalid(error))

    @app.exception_handler(Busy)
    def refuse_for_now(request: Request, error: Busy) -> Response:
        return _error(429, str(error))

    @app.exception_handler(sqlite3.Error)
    def report_lost_records(request: Request, error: sqlite3.Error) -> Response:
        # The request was not taken; its client asks again.
        return _error(503, f"The service's folder cannot be read or written now ({error}).")

    @app.exception_handler(404)
    def name_what_is_missing(request: Request, error: HTTPException) -> Response:
        # "Not Found" is Starlette's own text for a path without an endpoint.
        if error.detail == "Not Found":
            return _error(404, f"{shown(request.url.path)} is not served.")
        return _error(404, str(error.detail))

    return app


def _error(status: int, reason: str) -> Response:
    return PlainJSON({"error": reason[:LONGEST_REASON], "category": "user"}, status)
