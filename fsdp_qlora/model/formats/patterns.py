"""Names of modules matched by the patterns of a quantization_config.

A pattern is a stranger's program: a regular expression can take years. Patterns are matched in a
process of their own with a time limit, unless they are plain names.
"""

import functools
import json
import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from fsdp_qlora.distributed.supervision.clock import Worker, limit_memory
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import shown

# The patterns of published models take a thousandth of this.
_SECONDS = 30.0
_MEMORY_BYTES = 2**30
# A name. Also as a regular expression it takes no time, since nothing in it repeats.
_PLAIN = re.compile(r"[\w.]*")
_REGEX = "re:"  # in front of a regular expression, in compressed-tensors
# transformers' `should_convert_module`: a name ends before a dot.
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


def matching(
    paths: Sequence[str], patterns: Sequence[str], *, by_transformers: bool = False
) -> set[str]:
    """The paths of modules that one of the patterns names.

    by_transformers: whether all patterns are regular expressions, as in a quantization_config of
    bitsandbytes.

    Raises:
        UserError: a pattern is no regular expression, or takes too long; the same on every rank.
    """
    plain = [pattern for pattern in patterns if is_plain(pattern)]
    matched = {path for path in paths if _any_matches(path, plain, by_transformers)}
    programs = [pattern for pattern in patterns if not is_plain(pattern)]
    return matched.union(*matches_of_each(paths, programs, by_transformers).values())


def is_plain(pattern: str) -> bool:
    """Whether a pattern is a name."""
    return _PLAIN.fullmatch(pattern) is not None


def matches_of_each(
    paths: Sequence[str], patterns: Sequence[str], by_transformers: bool = False
) -> Mapping[str, frozenset[str]]:
    """Pattern -> the paths that it matches. Raises UserError as `matching`."""
    if not patterns:
        return {}
    # Tuples, for the cache: starting a process is slow.
    return _matched_apart(tuple(paths), tuple(dict.fromkeys(patterns)), by_transformers)


def _any_matches(path: str, patterns: Iterable[str], by_transformers: bool) -> bool:
    return any(_matches(pattern, path, by_transformers) for pattern in patterns)


def _matches(pattern: str, path: str, by_transformers: bool) -> bool:
    if by_transformers:
        return path.endswith(pattern) or re.match(rf"(?:{pattern}){_BOUNDARY}", path) is not None
    if pattern.startswith(_REGEX):
        return re.match(pattern.removeprefix(_REGEX), path) is not None
    if "*" in pattern:
        return fnmatch(path, pattern)
    # Whole parts of the path: "lm" does not match "lm_head".
    return f".{pattern}." in f".{path}."


@functools.lru_cache(maxsize=8)
def _matched_apart(
    paths: tuple[str, ...], patterns: tuple[str, ...], by_transformers: bool
) -> Mapping[str, frozenset[str]]:
    # An error is raised on every rank: each one matches the same names with the same limit.
    request = {"paths": paths, "patterns": patterns, "by_transformers": by_transformers}
    matcher = _Matcher(__name__, _SECONDS)
    try:
        reply = matcher.ask(request)
    finally:
        matcher.close()
    advice = "Download it again, or give the model with 16- or 32-bit weights."
    if "pattern" in reply:
        raise UserError(
            f"config.json has the pattern {shown(reply['pattern'])} in quantization_config, which "
            f"is no regular expression: {shown(reply['reason'])}. {advice}"
        )
    if "found" not in reply:
        raise UserError(
            "config.json has patterns in quantization_config, such as "
            f"{shown(max(patterns, key=len))}, that cannot be matched with {len(paths)} names of "
            f"modules within {_SECONDS:g} s. {advice}"
        )
    return {pattern: frozenset(found) for pattern, found in reply["found"].items()}


class _Matcher(Worker):
    """The process that matches."""

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply; empty if there is none in time."""
        reply, _ = self._exchange(json.dumps(request))
        return dict(json.loads(reply)) if reply else {}


# --- in the process ---


def work() -> None:
    """Answer a request: a line of JSON on stdin, and on stdout."""
    limit_memory(_MEMORY_BYTES)
    # Python warns of expressions whose meaning may change.
    warnings.simplefilter("ignore")
    request = json.loads(sys.stdin.readline())
    print(json.dumps(_reply(**request)), flush=True)


def _reply(paths: list[str], patterns: list[str], by_transformers: bool) -> dict[str, Any]:
    found: dict[str, list[str]] = {}
    for pattern in patterns:
        try:
            found[pattern] = [path for path in paths if _matches(pattern, path, by_transformers)]
        except (re.error, RecursionError, OverflowError, MemoryError) as error:
            return {"pattern": pattern, "reason": str(error) or type(error).__name__}
    return {"found": found}
