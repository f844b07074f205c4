"""Older names of options, of the 2024 program and of earlier releases: read as what they mean now."""

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Older(NamedTuple):
    """meaning: option -> value, from the older option's value. reason: why it is gone; "" where only the name changed.

    unset: values that mean the default, as the config.yaml of an earlier release has them; nothing is said then.
    replaces: whether it wins over an option of the new name.
    """

    meaning: Callable[[str], Mapping[str, str]] = lambda value: {}
    reason: str = ""
    unset: tuple[str, ...] = ("none",)
    replaces: bool = False

    def describe(self, name: str, meaning: Mapping[str, str]) -> str:
        """The line for the user of this name."""
        now = " ".join(f"--{option} {value}" for option, value in meaning.items())
        return f"--{name} is now {now}." if now else f"--{name} is no longer needed: {self.reason}."


def _words(option: str, words: Mapping[str, str]) -> Callable[[str], Mapping[str, str]]:
    """The values of an option that mean these words."""

    def meaning(value: str) -> Mapping[str, str]:
        known = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
        value = known.get(value.lower(), value.lower())
        if value not in words:
            raise ValueError(f"expected {' or '.join(words)}, got {value!r}")
        return {option: words[value]} if words[value] else {}

    return meaning


def _profile_word(word: str) -> Older:
    return Older(_words("profile", {"true": word, "false": ""}), unset=("false",))


_RANGE = "--profile FIRST:LAST names the steps to record"
OLDER: dict[str, Older] = {
    "low_memory": Older(reason="weights are always streamed from the files, and no process holds more than its shard"),
    "no_sync": Older(reason="gradients are reduced once per optimizer step where memory allows"),
    "reentrant_checkpointing": Older(reason="activation checkpointing is always non-reentrant"),
    "loading_workers": Older(reason="reading runs ahead of quantizing by loading_buffer_mib"),
    "quant_storage": Older(reason="packed weights are always stored in the compute dtype", unset=("none", "auto")),
    "use_gradient_checkpointing": Older(_words("recompute", {"true": "all", "false": "none"})),
    "llama_pro_path": Older(lambda value: {"model_name": value}, replaces=True),
    "on_bad_row": Older(_words("max_bad_rows", {"skip": "", "error": "0"}), unset=("skip",), replaces=True),
    # A profile of steps that repeats is the first of them now; "profile" itself was a switch.
    "profile": Older(_words("profile", {"true": "9:10", "false": ""}), unset=("false", "none")),
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
