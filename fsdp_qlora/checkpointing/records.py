"""Reads and checks run.json, status.json and a checkpoint's state.json: required keys and their types.

People edit these files. An error is reported in one sentence here, before a wrong value fails elsewhere.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_qlora.checkpointing.layout import RUN, STATUS
from fsdp_qlora.errors import ENDINGS, UserError
from fsdp_qlora.storage.files import open_own


class _Kind(NamedTuple):
    words: str
    accepts: Callable[[Any], bool]


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < 2**53


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**63 and math.isfinite(value)


_TEXT = _Kind("a text", lambda value: isinstance(value, str))
_TEXT_OR_NULL = _Kind("a text or null", lambda value: value is None or isinstance(value, str))
_TABLE = _Kind("a table", lambda value: isinstance(value, dict))
_COUNT = _Kind("a whole number of 1 or more", lambda value: _is_whole(value, 1))
_STEP = _Kind("a whole number of 0 or more", lambda value: _is_whole(value, 0))
_STEP_OR_NONE = _Kind("a whole number of -1 or more", lambda value: _is_whole(value, -1))
_AMOUNT = _Kind("a number of 0 or more", lambda value: _is_number(value) and value >= 0)
_NUMBER_OR_NULL = _Kind("a number or null", lambda value: value is None or _is_number(value))
_NUMBERS = _Kind("a list of numbers", lambda value: isinstance(value, list) and all(map(_is_number, value)))
_LOSS_SCALE = _Kind(
    "empty, or a table of two numbers, scale and steps_since_change",
    lambda value: (
        value == {}
        or (
            isinstance(value, dict)
            and all(_is_number(value.get(key)) and value[key] >= 0 for key in ("scale", "steps_since_change"))
        )
    ),
)
_PLACE = _Kind(
    "empty, or a table of the whole numbers epoch, part, after, offset and taken",
    lambda value: (
        value == {}
        or (
            isinstance(value, dict)
            and value.keys() == {"epoch", "part", "after", "offset", "taken"}
            and all(_is_whole(number, 0) for number in value.values())
        )
    ),
)
_STATE = _Kind(
    f"one of running, {', '.join(ENDINGS)}", lambda value: isinstance(value, str) and value in {"running", *ENDINGS}
)

# Key -> kind of its value. In status.json only the state is required: earlier versions wrote fewer keys.
_RUN = {
    "run_id": _TEXT, "options": _TABLE, "facts": _TABLE, "world_size": _COUNT, "global_batch_size": _COUNT,
}  # fmt: skip
_OPTIONS = {"batch_size": _COUNT, "gradient_accumulation_steps": _COUNT}
_STATUS = {
    "state": _STATE, "step": _STEP, "saved_step": _STEP_OR_NONE, "start_step": _STEP, "deaths": _STEP,
    "seconds": _AMOUNT, "reserve_seconds": _AMOUNT, "reason": _TEXT_OR_NULL, "recompute": _STEP,
    "too_few": _STEP,
}  # fmt: skip
_PROGRESS = {
    "step": _STEP, "num_tokens": _AMOUNT, "train_seconds": _AMOUNT, "num_skipped": _STEP, "loss": _NUMBER_OR_NULL,
    "first_eval_loss": _NUMBER_OR_NULL, "eval_loss": _NUMBER_OR_NULL, "best_eval_loss": _NUMBER_OR_NULL,
    "best_eval_step": _STEP_OR_NONE, "num_evals_without_best": _STEP, "last_eval_step": _STEP_OR_NONE,
    "recent_losses": _NUMBERS, "loss_scale": _LOSS_SCALE, "stream": _PLACE,
}  # fmt: skip


def read_run(output_dir: Path) -> dict[str, Any]:
    """The content of run.json; empty if there is none.

    Raises:
        UserError: it cannot be read, or is not valid.
    """
    advice = "Restore the original, or start from zero with --resume off --overwrite_output_dir true."
    return _read(output_dir / RUN, run_error, advice)


def read_status(output_dir: Path) -> dict[str, Any]:
    """The content of status.json; empty if there is none.

    Raises:
        UserError: it cannot be read, or is not valid.
    """
    advice = "Restore the original, or delete it: the run then resumes and counts its hours from zero."
    return _read(output_dir / STATUS, lambda status: _first_error(status, _STATUS, required={"state"}), advice)


def run_error(run: Mapping[str, Any]) -> str | None:
    """What is wrong with the content of a run.json; None if it is valid."""
    return _first_error(run, _RUN) or _first_error(run["options"], _OPTIONS, where="options.")


def state_error(state: Any, step: int | None) -> str | None:
    """What is wrong with the state.json of a checkpoint; None if it is valid. step: None if unknown."""
    tables = {"about": _TABLE, "progress": _TABLE, "tensors": _TABLE}
    error = _first_error(state, tables) if isinstance(state, dict) else "it is no table"
    if error:
        return error
    if error := run_error(state["about"]):
        return f"about: {error}"
    if error := _first_error(state["progress"], _PROGRESS, required={"step"}, where="progress."):
        return error
    if step not in (None, state["progress"]["step"]):
        return f"its step is {state['progress']['step']}, not {step}"
    return None


def _read(path: Path, error_of: Callable[[dict[str, Any]], str | None], advice: str) -> dict[str, Any]:
    try:
        with open(open_own(path, 0), "rb") as file:
            content = json.loads(file.read().decode())
        error = error_of(content) if isinstance(content, dict) else "it is no table"
    except FileNotFoundError:
        return {}
    except OSError as failure:
        error = failure.strerror or str(failure)
    except (ValueError, RecursionError):
        error = "it is not JSON"
    if error:
        raise UserError(f"{path} cannot be used: {error}. {advice}")
    return dict(content)


def _first_error(
    content: Mapping[str, Any], kinds: Mapping[str, _Kind], *, required: set[str] | None = None, where: str = ""
) -> str | None:
    """What is wrong with the first key that is missing or whose value is not of its kind."""
    for key, kind in kinds.items():
        if key not in content and (required is None or key in required):
            return f"{where}{key} is not there"
        if key in content and not kind.accepts(content[key]):
            shown = json.dumps(content[key])
            return f"{where}{key} must be {kind.words}, but is {shown[:60]}{'...' * (len(shown) > 60)}"
    return None
