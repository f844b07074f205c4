"""Why a request fails, in a sentence for its client."""

import json
import logging
import sqlite3

from pydantic import ValidationError

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import shown

log = logging.getLogger("fsdp_qlora")

# Characters of an error that a client gets.
LONGEST_REASON = 2000


def reason_of(error: Exception, doing: str) -> str:
    """The reason of a failure, in a sentence for the request's client.

    doing: what could not be done to it.
    """
    if isinstance(error, ValidationError):
        return describe_invalid(error)
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, sqlite3.Error):
        return f"The request cannot be {doing}: the service's folder cannot be written ({error})."
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    log.warning("A request could not be %s, and failed. %s", doing, shown(reason))
    return f"The request could not be {doing} ({reason[:500]})."


def describe_invalid(error: ValidationError) -> str:
    """A sentence about the first field of a request that is wrong."""
    first = error.errors(include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'The request'}: {first['msg']}."


def error_body(reason: str) -> bytes:
    """The answer to a request that fails."""
    return json.dumps({"error": reason[:LONGEST_REASON], "category": "user"}).encode()
