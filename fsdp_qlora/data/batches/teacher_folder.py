"""teacher.json in a folder that `fsdp-qlora teach` has written: the settings of the files there."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import read_named, staged_file
from fsdp_qlora.utils.text import printable

TEACHER = "teacher.json"
# More of the file is not read: it may be a stranger's.
_MOST_BYTES = 2**20
# All that a teacher's probabilities depend on besides the rows, in the order of the key.
_SETTINGS = ("weights", "adapter", "quantization", "precision", "temperature", "vocabulary")
_HASHES = ("weights", "adapter")


def key_of(settings: Mapping[str, Any]) -> str:
    """The settings of a teacher as text, of which the names of its files are made."""
    return json.dumps([settings[name] for name in _SETTINGS])


class TeacherFolder(NamedTuple):
    """The settings of a folder's files."""

    key: str
    """The text that `key_of` gives."""
    k: int
    """Top tokens for each target."""
    teacher: str | None = None
    """The teacher's name, for messages."""

    @classmethod
    def read(cls, folder: Path, option: str) -> "TeacherFolder | None":
        """Read a folder's teacher.json; None if it has none.

        Raises:
            UserError: it is there and cannot be used. The message names the folder, and the option
                that names it.
        """
        try:
            content = json.loads(read_named(folder / TEACHER, _MOST_BYTES))
            found = cls(*_checked(content))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            # Shortened and without control characters: it may quote the file.
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"--{option} {folder}: {TEACHER} cannot be used ({printable(str(reason)[:200])}). "
                "Copy the folder once more, or write another one with `fsdp-qlora teach`."
            ) from error
        return found

    def write(self, folder: Path) -> None:
        """Write teacher.json atomically."""
        with staged_file(folder / TEACHER) as partial:
            partial.write_text(
                json.dumps({"key": self.key, "top_k": self.k, "teacher": self.teacher})
            )

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the key is made of, and the number of tokens."""
        return dict(zip(_SETTINGS, json.loads(self.key), strict=True)) | {"top_k": self.k}

    def differences(self, wanted: Mapping[str, Any]) -> Iterator[str]:
        """Each of these settings that is another one here, in words."""
        settings = self.settings
        for name, value in wanted.items():
            if settings[name] == value:
                continue
            # A hash says nothing to people.
            if name in _HASHES:
                yield f"other {name}"
            else:
                yield f"{name} {settings[name]}, not {value}"


def _checked(content: Any) -> tuple[str, int, str | None]:
    """The fields of a `TeacherFolder`, from JSON.

    Raises ValueError if one is missing or of another type.
    """
    if not isinstance(content, dict):
        raise ValueError("it is no object of JSON")
    key, k, teacher = (content.get(name) for name in ("key", "top_k", "teacher"))
    if not isinstance(key, str):
        raise ValueError("it has no key, which is a text")
    values = json.loads(key)
    if not isinstance(values, list) or len(values) != len(_SETTINGS):
        raise ValueError(f"its key is not a list of {', '.join(_SETTINGS)}")
    temperature, vocabulary = values[-2:]
    # `type`, not isinstance: bool is an int in Python, and JSON has true.
    if type(temperature) not in (int, float) or not 0 < temperature < math.inf:
        raise ValueError(f"its temperature is {temperature!r:.40}, not a finite number above 0")
    if type(vocabulary) is not int or vocabulary < 1:
        raise ValueError(f"its vocabulary is {vocabulary!r:.40}, not a number of 1 or more")
    if type(k) is not int or not 1 <= k <= vocabulary:
        raise ValueError(
            f"its top_k is {k!r:.40}, not a number from 1 to its vocabulary of {vocabulary!r:.40}"
        )
    return key, k, teacher if isinstance(teacher, str) else None
