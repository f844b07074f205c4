"""The words of --learn: which turns are learned, and which parts of them are only read."""

from collections.abc import Iterable
from typing import NamedTuple

from fsdp_qlora.config.marks import Limit

TURNS = ("assistant", "last", "all", "final")
REASONING = "reasoning"
EMPTY_REASONING = "empty_reasoning"
TOOL_CALLS = "tool_calls"
_PARTS = (REASONING, EMPTY_REASONING, TOOL_CALLS)
_KEEPS_EMPTY = f"+{EMPTY_REASONING}"
_KNOWN = {*TURNS, *(f"-{part}" for part in _PARTS), _KEEPS_EMPTY}
_ALLOWED = "assistant, last, final or all, with -reasoning, -tool_calls, -empty_reasoning"


class Learn(NamedTuple):
    """The meaning of the words of --learn."""

    turns: str = TURNS[0]
    """The turns that are learned, one of TURNS."""
    read_only: tuple[str, ...] = ()
    """The parts of these turns that are only read, in a fixed order."""
    keeps_empty: bool = False
    """Whether an empty block for reasoning is learned that a chat template writes by itself."""

    @property
    def text(self) -> str:
        """The words in a fixed order; the same for all spellings of one choice."""
        words = [self.turns, *(f"-{part}" for part in self.read_only)]
        return " ".join([*words, _KEEPS_EMPTY] if self.keeps_empty else words)

    def resolved(self, *, writes_blocks: bool) -> "Learn":
        """The same with its default: the empty blocks of a chat template are only read.

        Args:
            writes_blocks: whether the chat template has marks of reasoning, so that it may write
                empty blocks by itself.
        """
        # All tokens are all tokens, unless a word says otherwise.
        is_default = not self.keeps_empty and self.turns != "all"
        adds_empty = is_default and writes_blocks and REASONING not in self.read_only
        parts = {*self.read_only, EMPTY_REASONING} if adds_empty else {*self.read_only}
        return Learn(self.turns, tuple(part for part in _PARTS if part in parts))

    def keeping_empty(self) -> "Learn":
        """The same with the empty blocks of a chat template, unless its words say otherwise."""
        is_open = self.turns != "all" and not {REASONING, EMPTY_REASONING} & {*self.read_only}
        return self._replace(keeps_empty=True) if is_open else self


def read_learn(words: str | Iterable[str]) -> Learn:
    """Read the words of --learn, which spaces or commas separate.

    Raises:
        ValueError: a word is unknown, two words say which turns, or two contradict each other.
    """
    joined = words if isinstance(words, str) else " ".join(words)
    given = [_spelled(word) for word in joined.replace(",", " ").split()]
    unknown = [word for word in given if word not in _KNOWN]
    turns = [word for word in given if word in TURNS]
    contradicts = _KEEPS_EMPTY in given and {f"-{REASONING}", f"-{EMPTY_REASONING}"} & {*given}
    if not given or unknown or len(turns) > 1 or contradicts:
        raise ValueError(f"expected {_ALLOWED}, got {joined!r}")
    parts = [part for part in _PARTS if f"-{part}" in given]
    # Reasoning without words is reasoning.
    if REASONING in parts and EMPTY_REASONING in parts:
        parts.remove(EMPTY_REASONING)
    return Learn(turns[0] if turns else TURNS[0], tuple(parts), _KEEPS_EMPTY in given)


def contradiction(words: str | Iterable[str]) -> str:
    """The words of --learn that contradict each other, as text; "" if none do."""
    joined = words if isinstance(words, str) else " ".join(words)
    given = [_spelled(word) for word in joined.replace(",", " ").split()]
    turns = [word for word in given if word in TURNS]
    if len(turns) > 1:
        return " and ".join(turns)
    no_blocks = [word for word in given if word in (f"-{REASONING}", f"-{EMPTY_REASONING}")]
    return f"{no_blocks[0]} and {_KEEPS_EMPTY}" if no_blocks and _KEEPS_EMPTY in given else ""


def _spelled(word: str) -> str:
    """A word as _KNOWN has it."""
    sign = word[:1] if word[:1] in "+-" else ""
    return sign + word[len(sign) :].lower().replace("-", "_")


def _is_learn(words: Iterable[str]) -> bool:
    try:
        read_learn(words)
    except ValueError:
        return False
    return True


LEARN = Limit(_is_learn, _ALLOWED)
