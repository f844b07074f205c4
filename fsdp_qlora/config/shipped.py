"""The settings that come with the program: a YAML file each, used by its name in `--config`."""

import os
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent.parent / "configs"


def shipped_configs() -> dict[str, Path]:
    """Name -> file."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.yaml"))}


def find_config(given: str) -> Path:
    """The file that was given, or the one that comes with the program under this name.

    An existing file wins, but a folder does not: demo.sh makes one whose name is also that of its settings.
    """
    path = Path(given)
    is_theirs = os.path.exists(path) and not os.path.isdir(path)
    return path if is_theirs else shipped_configs().get(given, path)


def describe(path: Path) -> str:
    """What a file is for: the first sentence of the comment that it begins with."""
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        comment.append(line[2:].strip())
    return " ".join(comment).partition(". ")[0].partition(":  ")[0]
