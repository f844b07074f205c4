"""Names of options that are not ours now.

Names of the 2024 program are read as what they mean now. Names of other trainers are answered with
the name here; other_programs.yaml has the rows.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_origin

import yaml

from fsdp_qlora.config.options import DEFAULTS, option_types
from fsdp_qlora.config.text import SWITCH, value_text

_HINTS = option_types()


class Setting(NamedTuple):
    """One value from the YAML file, the command line or Python, still as text.

    where: its place, for a message: `--lr`, or `run.yaml, line 3: lr`.
    """

    where: str
    name: str
    values: list[str]

    @property
    def text(self) -> str:
        return ",".join(self.values)


class Older(NamedTuple):
    """The meaning of an option of the 2024 program now.

    option: its name now, "" if there is none, for the `reason`. words: value then -> value now, ""
    for the default. prefix: text before the value now. wins: whether it wins over the option's own
    name, if that is given too. unset: values that were the default, which need no message.
    """

    option: str = ""
    words: Mapping[str, str] = {}
    prefix: str = ""
    wins: bool = False
    reason: str = ""
    unset: Sequence[str] = ("none",)

    def now(self, text: str) -> str:
        """The value now. Raises ValueError if the older option does not have this value."""
        if not self.words:
            # behind a prefix the text is one item of a list, which a comma would divide
            return self.prefix + text.replace(",", " ") if self.prefix else text
        word = str(SWITCH.get(text.lower(), text)).lower()
        if word not in self.words:
            raise ValueError(f"expected {' or '.join(self.words)}, got {text!r}")
        return self.words[word]


def translate(settings: Sequence[Setting], errors: list[str], notes: list[str]) -> list[Setting]:
    """Replace older names by what they mean now; adds to `errors` and, a line each, to `notes`.

    A list gets the words of both names. Otherwise an option is given by one name, and a flag wins
    over the file.
    """
    options = {setting.name: setting for setting in settings if not is_older(setting)}
    older = {setting.name: setting for setting in settings if is_older(setting)}
    # in the order of the table, so that notes and lists do not depend on the order of the flags
    for name, row in OLDER.items():
        if name not in older:
            continue
        setting = older[name]
        if setting.text.lower() in row.unset:
            continue
        if not row.option:
            notes.append(f"--{name} is no longer needed: {row.reason}.")
            continue
        try:
            option = row.option
            value = row.now(setting.text)
        except ValueError as error:
            errors.append(f"{setting.where}: {error}.")
            continue
        before = options.get(option)
        if not value or (before and _is_in_file(setting) and not _is_in_file(before)):
            continue
        adds = get_origin(_HINTS[option]) is tuple
        is_free = not before or before.text in ("", value_text(getattr(DEFAULTS, option)))
        if (
            before
            and _is_in_file(before) == _is_in_file(setting)
            and not (adds or row.wins or is_free)
        ):
            errors.append(
                f"{setting.where} is the older name of {option}, which is given too. Give one."
            )
        notes.append(f"--{name} is now --{option} {value}.")
        values = [before.text, value] if before and before.text and adds else [value]
        options[option] = Setting(f"{setting.where}, now {option}", option, values)
    unread = [
        setting
        for setting in settings
        if not is_older(setting) and setting != options.get(setting.name)
    ]
    return [*unread, *options.values()]


def _is_in_file(setting: Setting) -> bool:
    return ", line " in setting.where


def is_older(setting: Setting) -> bool:
    """Whether a setting has an older name."""
    return setting.name in OLDER


# --- tables of other_programs.yaml ---

# A table of names is data: it is read and extended without reading code.
_TABLES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("other_programs.yaml").read_text(encoding="utf-8")
)
OTHER_NAMES: dict[str, str] = {
    other: ours for ours, names in _TABLES["names"].items() for other in names.split()
}
_NOT_HERE = {name: reason for reason, names in _TABLES["reasons"].items() for name in names.split()}
_VALUES_OF: dict[str, dict[str, str]] = {
    name: rows for names, rows in _TABLES["values"].items() for name in names.split()
}
OLDER = {name: Older(**row) for name, row in _TABLES["older"].items()}
OLDER |= {
    name: Older(reason=reason)
    for reason, names in _TABLES["needless"].items()
    for name in names.split()
}


class Advice(NamedTuple):
    """The option here in place of another program's option.

    option: the one here. value: its value, "" if it is the same as there. reason: why there is no
    such option.
    """

    option: str = ""
    value: str = ""
    reason: str = ""


def advise(name: str, value: str = "") -> Advice | None:
    """Find the option here that another program's option is; None if it is not known.

    Args:
        value: as it is given there; "" if it is given without one, which switches something on.
    """
    if name in _NOT_HERE:
        return Advice(reason=_NOT_HERE[name])
    option = OTHER_NAMES.get(name, name if name in OLDER else "")
    here = _VALUES_OF.get(name, {}).get((value or "true").lower())
    if option in OLDER:
        if OLDER[option].reason:
            return Advice(reason=OLDER[option].reason)
        with contextlib.suppress(ValueError):
            here = OLDER[option].now(here or value)
            option = OLDER[option].option
    if not option:
        return None
    return Advice(reason="that is the default here") if here == "" else Advice(option, here or "")
