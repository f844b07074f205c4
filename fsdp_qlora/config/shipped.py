"""The settings that come with the program: a YAML file each, used by its name in `--config`."""

import os
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent.parent / "configs"


def shipped_configs() -> dict[str, Path]:
    """Name -> file."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.yaml"))}


def find_config(given: str) -> Path:
    """The file that was given, or the one that comes with the program under this name. An existing file wins."""
    path = Path(given)
    return path if os.path.exists(path) else shipped_configs().get(given, path)


def describe(path: Path) -> str:
    """What a file is for: the first sentence of the comment that it begins with."""
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        comment.append(line[2:].strip())
    return " ".join(comment).partition(". ")[0].partition(":  ")[0]
