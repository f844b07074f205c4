"""Options of other trainers and their values, by the names here; the .yaml beside this file has the rows."""

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fsdp_qlora.config.older import OLDER

_TABLES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
OTHER_NAMES: dict[str, str] = {theirs: ours for ours, names in _TABLES["names"].items() for theirs in names.split()}
_NOT_HERE = {name: reason for reason, names in _TABLES["reasons"].items() for name in names.split()}
_VALUES_OF: dict[str, dict[str, str]] = {
    name: rows for names, rows in _TABLES["values"].items() for name in names.split()
}


class Advice(NamedTuple):
    """option: the one here. value: its value, "" if it is the same as there. reason: why there is no option instead."""

    option: str = ""
    value: str = ""
    reason: str = ""


def advise(name: str, value: str = "") -> Advice | None:
    """Find the option here that another program's option is; None if it is not known.

    Args:
        value: as it is given there; "" if it is given without one.
    """
    if name in _NOT_HERE:
        return Advice(reason=_NOT_HERE[name])
    option, found = OTHER_NAMES.get(name, ""), _VALUES_OF.get(name, {}).get((value or "true").lower())
    if older := OLDER.get(option or name):
        if not (option := older.option):
            return Advice(reason=older.reason)
        with contextlib.suppress(ValueError):
            found = older.value(value)
    if not option:
        return None
    return Advice(reason="that is the default here") if found == "" else Advice(option, found or "")
