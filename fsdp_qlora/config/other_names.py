"""Names of options that are not ours now.

Those of the 2024 program and of earlier releases are read as what they mean now. Those of other trainers are answered
with the name here; other_programs.yaml has the rows.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_origin

import yaml

from fsdp_qlora.config.options import DEFAULTS, option_types
from fsdp_qlora.config.text import SWITCH, number, value_text

_HINTS = option_types()


class Setting(NamedTuple):
    """One value from the YAML file or the command line, still as text."""

    where: str
    """Its place, for a message: `--lr`, or `run.yaml, line 3: lr`."""
    name: str
    values: list[str]

    @property
    def text(self) -> str:
        return ",".join(self.values)


class Older(NamedTuple):
    """The meaning of an older option now.

    option: the one of now, "" if there is none. words: value then -> value now, "" for the default; if there are none,
    write gives the value now from the value then and the texts of all options. reason: why there is none. unset: values
    that mean the default, as the config.yaml of an earlier release has them; nothing is said then. replaces: whether it
    wins over an option of the new name.
    """

    option: str = ""
    words: Mapping[str, str] = {}
    write: Callable[[str, Mapping[str, str]], str] = lambda value, given: value
    reason: str = ""
    unset: tuple[str, ...] = ("none",)
    replaces: bool = False

    def value(self, text: str, given: Mapping[str, str] = {}) -> str:
        """The value now. Raises ValueError if the older option does not have this value."""
        if not self.words:
            return self.write(text, given)
        word = str(SWITCH.get(text.lower(), text)).lower()
        if word not in self.words:
            raise ValueError(f"expected {' or '.join(self.words)}, got {text!r}")
        return self.words[word]


def translate(settings: Iterable[Setting], errors: list[str], notes: list[str]) -> list[Setting]:
    """The settings with older names replaced by what they mean now; adds to `errors` and, a line each, to `notes`."""
    settings = list(settings)
    found = [one for one in settings if not is_older(one)]
    older = {one.name: one for one in settings if is_older(one)}
    given = {one.name: one.text for one in found}
    translated: dict[str, Setting] = {}
    for name in [name for name in OLDER if name in older]:
        (where, _, _), row, text = older[name], OLDER[name], older[name].text
        if text.lower() in row.unset:
            continue
        if not row.option:
            notes.append(f"--{name} is no longer needed: {row.reason}.")
            continue
        try:
            now = row.value(text, {other: one.text for other, one in older.items()} | given)
        except ValueError as error:
            errors.append(f"{where}: {error}.")
            continue
        if not now:
            continue
        before = given.get(row.option, "")
        adds = get_origin(_HINTS[row.option]) is tuple
        if before not in ("", value_text(getattr(DEFAULTS, row.option))) and not (adds or row.replaces):
            errors.append(f"{where} is the older name of {row.option}, which is given too. Give one.")
        notes.append(f"--{name} is now --{row.option} {now}.")
        values = [before, now] if adds and before else [now]
        translated[row.option] = Setting(f"{where}, now {row.option}", row.option, values)
        given[row.option] = translated[row.option].text
    # Without steps to record, the other words of a profile did nothing.
    return found + [one for one in translated.values() if one.name != "profile" or ":" in one.text]


def is_older(setting: Setting) -> bool:
    """Whether a setting has an older name; --profile was a switch."""
    return setting.name in OLDER and (setting.name != "profile" or setting.text.lower() in SWITCH)


def _hours(value: str, given: Mapping[str, str]) -> str:
    """The hours that cost `value` US dollars, or --max_hours if that is less."""
    if (price := number(float, given.get("price_per_hour", "0"))) <= 0:
        raise ValueError("it is reached at --price_per_hour, which is not given")
    hours = number(float, value) / price
    return f"{min(hours, number(float, given.get('max_hours', str(hours)))):.6g}"


def _pair_of_wandb(name: str) -> Older:
    return Older("wandb", write=lambda value, given: f"{name}={value}")


def _profile_word(word: str) -> Older:
    return Older("profile", {"true": word, "false": ""})


_RANGE = "--profile FIRST:LAST names the steps to record"
# In this order: of two that mean the same option, the later one replaces.
OLDER: dict[str, Older] = {
    "low_memory": Older(reason="weights are always streamed from the files, and no process holds more than its shard"),
    "no_sync": Older(reason="gradients are reduced once per optimizer step where memory allows"),
    "reentrant_checkpointing": Older(reason="activation checkpointing is always non-reentrant"),
    "loading_workers": Older(reason="reading runs ahead of quantizing by loading_buffer_mib"),
    "master_addr": Older(reason="the processes of one machine meet at localhost", unset=("localhost",)),
    "master_port": Older(reason="the processes of one machine meet at a free port", unset=("0",)),
    "quant_storage": Older(reason="packed weights are always stored in the compute dtype", unset=("none", "auto")),
    "use_gradient_checkpointing": Older("recompute", {"true": "all", "false": "none"}),
    "llama_pro_path": Older("model_name", replaces=True),
    "on_bad_row": Older("max_bad_rows", {"skip": "", "error": "0"}, replaces=True),
    "padding": Older("batching", {"true": "padded", "false": ""}),
    "packing": Older("batching", {"true": "packed", "false": ""}),
    "warmup_ratio": Older("warmup", write=lambda value, given: str(number(float, value)), unset=("none", "0.03")),
    "warmup_steps": Older("warmup", unset=("none", "-1"), replaces=True),
    "apply_gradient_clipping": Older("grad_norm", {"true": "", "false": "0"}),
    "max_cost_usd": Older("max_hours", write=_hours, replaces=True),
    "price_per_hour": Older(reason="max_hours limits the run"),
    "project_name": _pair_of_wandb("project")._replace(unset=("none", "fsdp_qlora")),
    "name": _pair_of_wandb("name"),
    "group": _pair_of_wandb("group"),
    "entity": _pair_of_wandb("entity"),
    # A profile of steps that repeats is the first of them now; "profile" itself was a switch.
    "profile": Older("profile", {"true": "9:10", "false": ""}, unset=("false", "none")),
    "with_stack": _profile_word("stack"),
    "with_shapes": _profile_word("shapes"),
    "export_memory_timeline": _profile_word("memory"),
    "export_trace": Older(reason="a trace is always written", unset=("true",)),
    "profiling_output": Older(reason="profiles are written to profiles/ in output_dir", unset=("profiles",)),
    "wait_steps": Older(reason=_RANGE, unset=("0",)),
    "profiling_warmup_steps": Older(reason=_RANGE, unset=("1",)),
    "active_steps": Older(reason=_RANGE, unset=("2",)),
    "repeat": Older(reason=_RANGE, unset=("0",)),
    "profiling_frequency": Older(reason=_RANGE, unset=("10",)),
}


# --- other programs ---

_TABLES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("other_programs.yaml").read_text(encoding="utf-8")
)
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
