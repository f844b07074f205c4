"""The words of --environment."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fsdp_qlora.utils.errors import UserError

VERIFIERS = "verifiers:"
_WORD = re.compile(r"(?:(?P<name>[\w-]+)=)?(?P<word>.+)", re.DOTALL)
_FILE = re.compile(r".*[^/]\.py:[^\W\d]\w*", re.DOTALL)


class EnvironmentWord(NamedTuple):
    """An environment, and the name by which the rows choose it."""

    name: str | None
    """None for one that all rows have."""
    word: str
    """FILE.py:CLASS, or verifiers:NAME."""

    @property
    def path(self) -> Path | None:
        """The user's file; None for an environment of verifiers."""
        if self.word.startswith(VERIFIERS):
            return None
        return Path(self.word.rpartition(":")[0]).expanduser()

    @property
    def member(self) -> str:
        """The class in the file, or the name of the environment of verifiers."""
        if self.word.startswith(VERIFIERS):
            return self.word.removeprefix(VERIFIERS)
        return self.word.rpartition(":")[2]


def parse_environments(words: Sequence[str]) -> list[EnvironmentWord]:
    """The environments of --environment: FILE.py:CLASS or verifiers:NAME, perhaps with NAME=.

    No file is read.

    Raises:
        UserError: a word has another form, or several have no name of their own.
    """
    environments = [_parse(word) for word in words]
    names = [environment.name for environment in environments]
    if len(names) > 1 and None in names:
        word = environments[names.index(None)].word
        raise UserError(
            f"--environment {word}: with several environments each needs a name, by which the "
            f"column environment chooses it, such as NAME={word}."
        )
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"--environment: two are called {twice[0]}. Rename one.")
    return environments


def _parse(word: str) -> EnvironmentWord:
    match = _WORD.fullmatch(word)
    found = EnvironmentWord(match["name"], match["word"]) if match else None
    is_known = found and (
        _FILE.fullmatch(found.word) or found.word.removeprefix(VERIFIERS) not in ("", found.word)
    )
    if found is None or not is_known:
        raise UserError(
            f"--environment {word}: give FILE.py:CLASS or verifiers:NAME, or several such as "
            "game=FILE.py:CLASS."
        )
    return found
